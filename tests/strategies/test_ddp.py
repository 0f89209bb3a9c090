"""DDP on two real processes: every setting trains as a bare loop over the whole global batch does."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.drawing import Noisy
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import DDP, Engine, Fit, Loss, TrainModule
from engine.distributed.collectives import gather_json


class Net(nn.Module):
    """Two layers, and one that the forward pass leaves out."""

    def __init__(self, width: int = 4, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 1)
        self.never = nn.Linear(1, 1) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)


def bare(batch: int, epochs: int = 3, **options: Any) -> Tensor:
    """The parameters after training on global batches of that size, in one process, in plain PyTorch."""
    model, (x, y) = Net(**options), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for low in range(0, 16, batch):
            loss = (model(x[low : low + batch]) - y[low : low + batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def ours(strategy: Any, window: int = 2, epochs: int = 3, **options: Any) -> Tensor:
    engine = Engine(accelerator="cpu", strategy=strategy, accumulate_grad_batches=window)
    model = Net(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(TensorDataset(*data()), batch_size=2))
    for _ in range(epochs):
        for x, y in loader:
            with engine.accumulate(model):
                engine.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return flat(model)


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_settings() -> Any:
    expected, steps = bare(8), bare(4)
    return {
        "default": apart(ours("ddp"), expected),
        "window 1": apart(ours("ddp", window=1), steps),
        "unused": apart(ours(DDP(find_unused_parameters=True), unused=True), bare(8, unused=True)),
        "static": apart(ours(DDP(static_graph=True)), expected),
        "static view": apart(ours(DDP(static_graph=True, gradient_as_bucket_view=True)), expected),
        "view": apart(ours(DDP(gradient_as_bucket_view=True)), expected),
        "small buckets": apart(ours(DDP(bucket_cap_mb=0.00005)), expected),
        "late powersgd": apart(ours(DDP(comm_hook="powersgd")), expected),
    }


def rank_compressed() -> Any:
    expected = bare(8, width=8)
    return {
        "fp16": apart(ours(DDP(comm_hook="fp16"), width=8), expected),
        "bf16": apart(ours(DDP(comm_hook="bf16"), width=8), expected),
        "powersgd": apart(ours(DDP(comm_hook="powersgd", powersgd_start=2), width=8), expected),
    }


def rank_sync() -> Any:
    """The first weight's gradient after each micro-batch of windows of 2: rank r's micro-batch i is ``10 * i + r``."""
    engine = Engine(accelerator="cpu", accumulate_grad_batches=2)
    plain = nn.Linear(1, 1, bias=False)
    model, optimizer = engine.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.0))
    rank, found = engine.process_index, []
    for i in range(4):
        with engine.accumulate(model):
            engine.backward(model(torch.full((1, 1), 10.0 * i + rank)).mean())
            assert plain.weight.grad is not None
            found.append(plain.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    with engine.no_sync(model):
        engine.backward(model(torch.full((1, 1), float(rank))).mean())
    assert plain.weight.grad is not None
    found.append(plain.weight.grad.item())
    engine.backward(model(torch.full((1, 1), float(rank))).mean())
    return [*found, plain.weight.grad.item()]


def rank_setup() -> Any:
    engine = Engine(accelerator="cpu")
    torch.manual_seed(engine.process_index)
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain[1].running_mean += engine.process_index
    model = engine.prepare(plain)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    prepared = engine.prepare(frozen)
    same = engine.gather(torch.cat([flat(plain), flat(frozen), plain[1].running_mean])).view(2, -1)
    again = engine.prepare(model, plain)
    return [
        isinstance(model, DistributedDataParallel),
        engine.unwrap_model(model) is plain,
        prepared is frozen,
        torch.equal(same[0], same[1]),
        again[0] is model and again[1] is model,
    ]


def rank_wrapped() -> Any:
    """What is wrapped already is refused before anything is done with it."""
    engine, found = Engine(accelerator="cpu"), []
    wrapped = DistributedDataParallel(Net())
    half = Half(lambda module, out, i, batch: out.mean())
    half.inner = DistributedDataParallel(Net())
    manual = Half(lambda module, out, i, batch: out.mean())
    manual.inner, manual.automatic_optimization = DistributedDataParallel(Net()), False
    for call in (
        lambda: engine.prepare(wrapped),
        lambda: engine.prepare(nn.Sequential(nn.Linear(3, 3), wrapped)),
        lambda: engine.prepare(torch.compile(wrapped, backend="eager")),
        lambda: Engine(accelerator="cpu").prepare(engine.prepare(Net())),
        lambda: fit(half, [torch.ones(2, 1)] * 2),
        lambda: fit(manual, [torch.ones(2, 1)] * 2),
    ):
        try:
            call()
            found.append("no error")
        except ValueError as error:
            found.append(str(error))
    return found


def rank_average() -> Any:
    """Manual optimization: a gradient that one rank lacks counts as zero, one that all lack stays away."""
    engine = Engine(accelerator="cpu")
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad = torch.full((2,), float(engine.process_index))
    if engine.process_index:
        b.grad = torch.full((2,), 3.0)
    engine.average_gradients(torch.optim.SGD([a, b, c], lr=1.0))
    return [None if p.grad is None else p.grad.tolist() for p in (a, b, c)]


def rank_overflow() -> Any:
    """fp16, one weight at 0 with momentum: in step 1 the gradient of rank 1 alone overflows."""
    engine = Engine(accelerator="cpu", precision="16-mixed")
    plain = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(plain.weight)
    inner = torch.optim.SGD(plain.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.prepare(plain, inner, torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5))
    assert engine.scaler is not None
    found = []
    for i in range(3):
        bad = i == 1 and engine.process_index == 1
        engine.backward(model(torch.full((2, 1), float("inf") if bad else 0.5)).mean())
        engine.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(
            [plain.weight.item(), scheduler.get_last_lr()[0], optimizer.step_was_skipped, engine.scaler.get_scale()]
        )
    return found


class Half(TrainModule):
    """``w * x``; what comes back for each batch is up to ``returns``."""

    def __init__(self, returns: Callable[[Half, Tensor, int, Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.returns = returns
        self.lrs: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.returns(self, self.w * batch, batch_idx, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lrs.append(self.lr_schedulers().get_last_lr()[0])


def fit(module: TrainModule, batches: list[Tensor], **settings: Any) -> Any:
    return Fit(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, seed=1, **settings).run(module, batches)


def rank_overflow_in_fit() -> Any:
    def returns(module: Half, out: Tensor, i: int, batch: Tensor) -> Tensor:
        return out.mean() * (float("inf") if i == 1 and module.global_rank == 1 else 1.0)

    module = Half(returns)
    result = fit(module, [torch.full((2, 1), 0.5) for _ in range(6)], precision="16-mixed")
    return [result.step, module.w.item(), module.lrs]


def rank_none() -> Any:
    """Rank 1 returns no loss in step 1; batches are ones, so that each loss has gradient 1."""

    def scalar(module: Half, out: Tensor, i: int, batch: Tensor) -> Any:
        return None if i == 1 and module.global_rank == 1 else out.mean()

    def weighted(module: Half, out: Tensor, i: int, batch: Tensor) -> Any:
        return None if i == 1 and module.global_rank == 1 else Loss(out.sum(), len(out))

    cases = [(scalar, "ddp", "32-true"), (weighted, "ddp", "32-true"), (weighted, "ddp", "16-mixed")]
    cases.append((scalar, DDP(find_unused_parameters=True), "32-true"))  # type: ignore[arg-type]
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training_step returned None with several ranks")
        for returns, strategy, precision in cases:
            module = Half(returns)
            result = fit(module, [torch.ones(2, 1) for _ in range(6)], precision=precision, strategy=strategy)
            found.append([result.step, module.w.item()])
    return found


class Untrained(TrainModule):
    """Nothing is trained, so there are no gradients to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen += len(batch)

    def configure_optimizers(self) -> Any:
        return []


def rank_untrained() -> Any:
    module = Untrained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no optimizer
        fit(module, [torch.ones(2, 1) for _ in range(4)], strategy="ddp")
    return module.seen


def rank_reuse() -> Any:
    strategy = DDP(static_graph=True)
    return apart(ours(strategy), ours(strategy))


def two_views(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return model(x).square().mean(), (model(2 * x) - 1).square().mean()


def bare_two_views(window: int = 1) -> Tensor:
    """The parameters after 3 steps on the sum of both views' losses, in one process, in plain PyTorch."""
    model, (x, _) = Net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for low in range(0, 8 * window, 8):
            (sum(two_views(model, x[low : low + 8])) / window).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def backwards(kind: str, engine: Engine, model: nn.Module, x: Tensor) -> None:
    """Run the backward passes of both views in this order; the results are the same."""
    if kind == "forward, forward, backward, backward":
        one, two = two_views(model, x)
        engine.backward(one)
        engine.backward(two)
    elif kind == "forward, backward, backward":
        out = model(torch.cat([x, 2 * x]))
        engine.backward(out[: len(x)].square().mean(), retain_graph=True)
        engine.backward((out[len(x) :] - 1).square().mean())
    elif kind == "forward, backward, forward, backward":
        engine.backward(model(x).square().mean())
        engine.backward((model(2 * x) - 1).square().mean())
    elif kind == "backward_by":
        one, two = two_views(model, x)
        weight = 1.0 / engine.accumulate_grad_batches
        engine.backward_by(one, lambda root: (root.backward(), (two * weight).backward()))
    else:
        engine.backward(sum(two_views(model, x)))


def later_passes(kind: str, window: int, **settings: Any) -> list[float]:
    """The distance from one process, between the ranks, and how often gradients were averaged outside of backward passes."""
    engine = Engine(accelerator="cpu", strategy=DDP(**settings), accumulate_grad_batches=window)
    model, optimizer = engine.prepare(plain := Net(), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    x, rank, averaged = data()[0], engine.process_index, 0
    for _ in range(3):
        for low in range(0, 8 * window, 8):
            with engine.accumulate(model):
                backwards(kind, engine, model, x[low : low + 8][rank::2])
                averaged += engine.strategy.unreduced
                optimizer.step()
                optimizer.zero_grad()
    parts = engine.gather(flat(plain)).view(2, -1)
    return [apart(parts[0], bare_two_views(window)), apart(parts[0], parts[1]), averaged]


ORDERS = [
    "forward, forward, backward, backward",
    "forward, backward, backward",
    "backward_by",
    "forward, backward, forward, backward",
    "one backward",
]


def rank_later_passes() -> Any:
    found = {f"{kind}, {window}": later_passes(kind, window) for kind in ORDERS for window in (1, 2)}
    found["view"] = later_passes(ORDERS[0], 1, gradient_as_bucket_view=True)
    found["unused"] = later_passes(ORDERS[1], 2, find_unused_parameters=True)
    found["static"] = later_passes(ORDERS[1], 2, static_graph=True)
    return found


class InTurns(nn.Module):
    """A layer, and an expert that some forward passes run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.trunk, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, is_routed: bool) -> Tensor:
        out: Tensor = torch.tanh(self.trunk(x))
        return out + self.expert(out) if is_routed else out


ROUTED = [(True, False), (False, False), (False, True), (False, False)]
"""Whether the ranks run the expert, by step."""


def bare_turns() -> Tensor:
    """The parameters after these steps in one process: a step whose samples do not reach the expert leaves its momentum and weight decay out."""
    model, x = InTurns(), data()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for routed in ROUTED:
        for rank in range(2):
            out = model(x[rank::2], routed[rank])
            ((out.square().mean() + (out - 1).square().mean()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def rank_turns() -> Any:
    """By order of the passes, the distance from one process."""
    found = {}
    for order in ("forward, backward, backward", "forward, forward, backward, backward"):
        engine = Engine(accelerator="cpu", strategy=DDP(find_unused_parameters=True))
        plain, x, rank = InTurns(), data()[0], engine.process_index
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        model, optimizer = engine.prepare(plain, torch.optim.SGD(plain.parameters(), **settings))
        for routed in ROUTED:
            with engine.accumulate(model):
                out = model(x[rank::2], routed[rank])
                other = model(x[rank::2], routed[rank]) if order.startswith("forward, forward") else out
                engine.backward(out.square().mean(), retain_graph=True)
                engine.backward((other - 1).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        found[order] = apart(flat(plain), bare_turns())
    return found


def rank_adversaries() -> Any:
    """A generator's forward pass comes before the critic's backward pass, which does not reach it: DDP reduces all passes."""
    engine = Engine(accelerator="cpu")
    torch.manual_seed(3)
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    generator, for_generator = engine.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))
    critic, for_critic = engine.prepare(two, torch.optim.SGD(two.parameters(), lr=0.1))
    averaged = []
    for step in range(3):
        made = generator(torch.full((2, 2), 1.0 + step + engine.process_index))
        engine.backward(critic(made.detach()).square().mean())
        for_critic.step()
        for_critic.zero_grad()
        engine.backward(-critic(made).mean(), retain_graph=step == 2)
        averaged.append(engine.strategy.unreduced)
        if step == 2:  # both models once more, from the same forward passes
            loss = critic(made).square().mean()
            engine.backward(loss, retain_graph=True)
            engine.backward(loss * 2)
            averaged.append(engine.strategy.unreduced)
        for_generator.step()
        for optimizer in (for_generator, for_critic):
            optimizer.zero_grad()
    weights = engine.gather(torch.cat([flat(one), flat(two)])).view(2, -1)
    return [averaged, apart(weights[0], weights[1])]


class OwnBackward(Half):
    """Its backward pass is two."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def rank_own_backward() -> Any:
    module = OwnBackward(lambda module, out, i, batch: out.mean())
    fit(module, [torch.full((2, 1), 1.0 + 2 * i) for i in range(4)])
    return module.w.item()


class Dropped(TrainModule):
    """A model with dropout and an optimizer that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = Net(), nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = (self.net(self.dropout(batch[0])) - batch[1]).square().mean()
        return out

    def configure_optimizers(self) -> Any:
        optimizer = Noisy(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def one_folder() -> str:
    """A new folder, the same one on all ranks."""
    engine = Engine(accelerator="cpu")
    folder: str = gather_json(engine.group, tempfile.mkdtemp() if engine.is_main_process else None)[0]
    return folder


def rank_draws_in_fit() -> Any:
    """Weights of ranks, and of a run that is resumed in the middle of an epoch."""
    folder = one_folder()

    def run(steps: int, resume: str | None = None) -> Tensor:
        torch.rand(1)  # other numbers before the run
        module = Dropped()
        saves = ModelCheckpoint(every="3 steps")
        fit = Fit(accelerator="cpu", max_steps=steps, seed=1, root_dir=folder, callbacks=[saves], strategy="ddp")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit.run(module, DataLoader(TensorDataset(*data()), batch_size=2, shuffle=True), resume=resume)
        return flat(module)

    whole, half = run(6), run(3)
    resumed = run(6, resume="last")
    return [apart(whole, resumed), apart(whole, half), whole.tolist()]


class NoisyHooks(Dropped):
    """Adds noise to reduced gradients, and to weights before the step."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad += torch.randn_like(p)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p += 0.1 * torch.randn_like(p)


def rank_draws_in_hooks() -> Any:
    """Weights after steps whose hooks draw; those of a run of half as many steps that is resumed; the number that this rank draws next."""
    folder, module = one_folder(), NoisyHooks()
    settings: dict[str, Any] = {"accelerator": "cpu", "seed": 1, "root_dir": folder, "strategy": "ddp"}
    loader = DataLoader(TensorDataset(*data()), batch_size=1)
    Fit(max_steps=4, accumulate_grad_batches=2, **settings).run(module, loader)
    number, resumed = torch.rand(1).item(), NoisyHooks()
    for steps, resume in ((2, None), (4, "last")):
        saves = ModelCheckpoint(every="1 step")
        fit = Fit(max_steps=steps, accumulate_grad_batches=2, callbacks=[saves], **settings)
        fit.run(resumed, loader, resume=resume)
    return [flat(module).tolist(), flat(resumed).tolist(), number]


def rank_draws() -> Any:
    """The same in a loop with ``Engine``."""
    folder = one_folder()

    def loop(steps: int, load: bool = False, **options: Any) -> Any:
        engine = Engine(accelerator="cpu", seed=3, **options)
        torch.manual_seed(engine.process_index)  # each rank has its own numbers
        plain = Net()
        inner = Noisy(plain.parameters())
        model, optimizer = engine.prepare(plain, inner)
        scheduler = engine.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
        if load:
            engine.load_state(f"{folder}/half")
        start, own = torch.get_rng_state(), torch.rand(2).tolist()
        torch.set_rng_state(start)
        for _ in range(steps):
            engine.backward(model(torch.ones(2, 3)).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if steps == 2 and not load:
            engine.save_state(f"{folder}/half")
        facts = {"weights": flat(plain).tolist(), "drawn": inner.drawn, "own": own == torch.rand(2).tolist()}
        engine.release()
        return facts

    whole, half = loop(4), loop(2)
    return {"whole": whole, "half": half, "resumed": loop(2, load=True), "skip": loop(2, on_nonfinite="skip")}


class Private(torch.optim.SGD):
    """Adds noise from a generator of its own."""

    def __init__(self, parameters: Any, seed: int, kind: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.seed, self.kind, self.generator = seed, kind, None
        if kind != "late":
            self.generator = self.new()

    def new(self) -> Any:
        return numpy.random.default_rng(self.seed) if self.kind == "numpy" else torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.generator = generator = self.new() if self.generator is None else self.generator
        for group in self.param_groups:
            for p in group["params"]:
                is_numpy = self.kind == "numpy"
                noise = (
                    torch.tensor(generator.normal(size=p.shape))
                    if is_numpy
                    else torch.randn(p.shape, generator=generator)
                )
                p.add_(noise.to(p.dtype) - p.grad)


def rank_private_generators() -> Any:
    """Weights after steps with generators that are seeded alike, after a resume, and the errors where they are not."""
    folder = one_folder()

    def loop(steps: int, seed: int, kind: str, load: str = "") -> Any:
        engine = Engine(accelerator="cpu", seed=3)
        plain = Net()
        model, optimizer = engine.prepare(plain, Private(plain.parameters(), seed, kind))
        if load:
            engine.load_state(load)
        for _ in range(steps):
            engine.backward(model(torch.ones(2, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if steps == 2 and not load:
            engine.save_state(f"{folder}/{kind}")
        engine.release()
        return flat(plain).tolist()

    rank, facts = int(os.environ["RANK"]), dict[str, Any]()
    for kind in ("torch", "numpy"):
        facts[kind] = [loop(4, 5, kind), loop(2, 5, kind), loop(2, 5, kind, load=f"{folder}/{kind}")]
    for kind in ("torch", "numpy", "late"):
        try:
            loop(1, rank, kind)
        except ValueError as error:
            facts[f"unlike {kind}"] = str(error)
    return facts


def rank_closure() -> Any:
    """The numbers that the closure and the step draw, and the class of torch's own, which is left alone."""
    engine = Engine(accelerator="cpu", seed=3)
    torch.manual_seed(engine.process_index)
    expected = torch.rand(2).tolist()
    torch.manual_seed(engine.process_index)
    plain, inside = Net(), []
    inner, own = Noisy(plain.parameters()), torch.optim.AdamW(plain.parameters())
    hooked = torch.optim.AdamW(plain.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    model, optimizer, _, _ = engine.prepare(plain, inner, own, hooked)
    torch.manual_seed(engine.process_index)

    def closure() -> Tensor:
        optimizer.zero_grad()
        inside.append(torch.rand(1).item())
        loss: Tensor = model(torch.ones(2, 3)).square().mean()
        engine.backward(loss)
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    return [inside == expected, inner.drawn, "step" in vars(own), "step" in vars(hooked)]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize(
    "name", ["default", "window 1", "unused", "static", "static view", "view", "small buckets", "late powersgd"]
)
def test_settings_train_like_one_process(found: Any, name: str) -> None:
    assert max(rank[name] for rank in found["settings"]) < 1e-6


@pytest.mark.parametrize(
    ("name", "least", "most"), [("fp16", 1e-7, 2e-3), ("bf16", 1e-6, 1e-2), ("powersgd", 1e-4, 1.0)]
)
def test_hooks_compress(found: Any, name: str, least: float, most: float) -> None:
    assert found["compressed"][0][name] == found["compressed"][1][name]
    assert least < found["compressed"][0][name] < most


def test_gradients_are_reduced_in_the_last_micro_batch_only(found: Any) -> None:
    # Window 1: micro-batches r and 10 + r, halved. Window 2: 20 + r and 30 + r. Then no_sync with r, and a synchronised r on top.
    assert found["sync"] == [[0.0, 5.5, 10.0, 25.5, 0.0, 1.0], [0.5, 5.5, 10.5, 25.5, 1.0, 1.0]]


def test_setup_makes_ranks_equal(found: Any) -> None:
    assert found["setup"] == [[True] * 5] * 2


def test_a_model_that_is_wrapped_already_is_refused(found: Any) -> None:
    for alone, member, compiled, ours_before, in_fit, in_manual in found["wrapped"]:
        assert "it is wrapped in DistributedDataParallel already; give the plain module (module)" in alone
        assert "its part '1' is wrapped in DistributedDataParallel already" in member
        assert "its part '_orig_mod' is wrapped" in compiled
        assert "it is wrapped in DistributedDataParallel already" in ours_before
        assert "its part 'module.inner' is wrapped" in in_fit
        assert "its part 'inner' is wrapped" in in_manual


def test_average_gradients(found: Any) -> None:
    assert found["average"] == [[[0.5, 0.5], [1.5, 1.5], None]] * 2


def test_an_overflow_on_one_rank_is_skipped_by_both(found: Any) -> None:
    expected = [[-0.5, 0.5, False, 65536.0], [-0.5, 0.5, True, 32768.0], [-0.75, 0.25, False, 32768.0]]
    assert found["overflow"] == [expected] * 2


def test_an_overflow_in_fit_leaves_counters_and_scheduler(found: Any) -> None:
    assert found["overflow_in_fit"] == [[2, -0.75, [0.5, 0.5, 0.25]]] * 2


def test_no_loss_on_one_rank_keeps_the_ranks_equal(found: Any) -> None:
    # Learning rates 1, 0.5, 0.25. The scalar's second gradient is (1 + 0) / 2, the weighted one's 2 / 2.
    assert found["none"] == [[[3, -1.5], [3, -1.75], [3, -1.75], [3, -1.5]]] * 2


def test_a_module_with_nothing_to_train_runs(found: Any) -> None:
    assert found["untrained"] == [4, 4]


def test_a_strategy_object_can_be_used_again(found: Any) -> None:
    assert found["reuse"] == [0.0, 0.0]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_each_backward_pass_is_reduced(found: Any, order: str, window: int) -> None:
    for expected, other, averaged in (rank[f"{order}, {window}"] for rank in found["later_passes"]):
        assert expected < 1e-6
        assert other == 0.0
        assert averaged == (3 if order in ORDERS[:3] else 0)


@pytest.mark.parametrize("setting", ["view", "unused", "static"])
def test_each_backward_pass_is_reduced_with_settings_of_ddp(found: Any, setting: str) -> None:
    for expected, other, averaged in (rank[setting] for rank in found["later_passes"]):
        assert expected < 1e-6
        assert other == 0.0
        # With a static graph torch reduces in the first micro-batch of all, too.
        assert averaged == (4 if setting == "static" else 3)


def test_a_second_backward_pass_does_not_make_a_later_step_reach_the_same_parameters(found: Any) -> None:
    for orders in found["turns"]:
        assert len(orders) == 2
        assert max(orders.values()) < 1e-6


def test_passes_of_two_models_are_told_apart(found: Any) -> None:
    assert found["adversaries"] == [[[False, False, False, True], 0.0]] * 2


def test_a_backward_pass_of_the_module_may_be_two(found: Any) -> None:
    # Batches 1 and 3, then 5 and 7: the gradients are 2 * 2 and 2 * 6, the rates 1 and 0.5.
    assert found["own_backward"] == [-10.0, -10.0]


def test_replicas_draw_alike_in_a_step_and_on_after_a_resume(found: Any) -> None:
    (resumed, half, weights), other = found["draws_in_fit"]
    assert weights == other[-1]
    assert [resumed, other[0]] == [0.0, 0.0]
    assert half > 1e-3


def test_replicas_draw_alike_in_hooks_around_the_step(found: Any) -> None:
    (weights, resumed, number), other = found["draws_in_hooks"]
    assert weights == resumed == other[0] == other[1]
    assert number != other[2]


def test_replicas_draw_alike_in_a_loop_of_ones_own(found: Any) -> None:
    one, other = found["draws"]
    assert one == other  # weights, and torch's numbers in each step
    assert one["resumed"]["weights"] == one["whole"]["weights"]
    assert one["half"]["drawn"] + one["resumed"]["drawn"] == one["whole"]["drawn"]
    assert len(set(one["whole"]["drawn"])) == 4
    assert one["skip"]["weights"] == one["half"]["weights"]
    assert all(one[name]["own"] for name in one)  # the ranks' own numbers go on as if the step had drawn none


def test_a_closure_draws_the_ranks_own_numbers(found: Any) -> None:
    (inside, drawn, left_alone, hooked), other = found["closure"]
    assert inside
    assert other[0]
    assert drawn == other[1]
    assert len(set(drawn)) == 2
    assert [left_alone, hooked] == [False, True]


# -- on one process ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"comm_hook": "fp32"}, r"DDP\(comm_hook='fp32'\) is unknown.*possible: fp16, bf16, powersgd, None"),
        ({"bucket_cap_mb": 0}, r"DDP\(bucket_cap_mb=0\) must be positive"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DDP(**settings)


def test_buckets_for_which_torch_compiles_no_replica() -> None:
    settings = Fit(compile=True).settings
    with pytest.raises(ValueError, match=r"DDP\(bucket_cap_mb=0.5\) with compile=True: .* at least 1 MiB"):
        DDP(bucket_cap_mb=0.5).check(settings, {}, 2)
    DDP(bucket_cap_mb=1).check(settings, {}, 2)
    DDP(bucket_cap_mb=0.5).check(settings, {}, 1)  # one process reduces nothing


def test_data_parallel_and_compiled_modules_are_refused_alone_too() -> None:
    with pytest.raises(
        ValueError, match=r"wrapped in DataParallel already.*strategy='ddp' with a process for each device"
    ):
        Engine(accelerator="cpu").prepare(nn.DataParallel(Net()))
    with pytest.raises(
        TypeError, match=r"wrapped by OptimizedModule: give the module itself; Fit\(compile=True\) compiles"
    ):
        Fit(accelerator="cpu").run(
            torch.compile(Half(lambda module, out, i, batch: out.mean()), backend="eager"), [torch.ones(2, 1)]
        )


def test_alone_nothing_is_wrapped() -> None:
    engine = Engine(accelerator="cpu", strategy="ddp")
    model = nn.Linear(1, 1)
    assert engine.prepare(model) is model
    assert engine.strategy.sum(2.0) == 2.0
    engine.average_gradients(torch.optim.SGD(model.parameters(), lr=1.0))
    assert model.weight.grad is None


def test_an_optimizers_own_generator(found: Any) -> None:
    one, other = found["private_generators"]
    assert one == other
    for kind in ("torch", "numpy"):
        whole, half, resumed = one[kind]
        assert whole == resumed != half
    for kind in ("torch", "numpy", "late"):
        assert one[f"unlike {kind}"].startswith(
            "Private.generator is a random generator whose state on rank 1 is not that on rank 0"
        )
