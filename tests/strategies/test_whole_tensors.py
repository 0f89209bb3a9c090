"""Optimizers that need whole tensors, on real processes: the bits of one process, what is sent, states that any strategy continues, errors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of, ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from callbacks import ModelCheckpoint
from engine import DDP, FSDP, Engine, Fit, MeshParallel, Strategy, TrainModule, optim
from engine.strategies import whole_tensors


class Rows(Optimizer):
    """Momentum, divided by the norm of the whole gradient and by the largest value of each row. Counts its steps in its groups, in its state and in
    itself."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.state["counts"] = {"number": self.state.get("counts", {"number": 0})["number"] + 1}
        self.state.setdefault("k", torch.zeros(1)).add_(1)
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["largest"] = torch.zeros_like(p), torch.zeros(p.shape[:1])
                update = p.grad / (p.grad.norm() + 1)
                state["momentum"].mul_(0.9).add_(update)
                state["largest"] += p.grad.reshape(p.shape[0], -1).abs().amax(1)
                rows = state["largest"].view(-1, *[1] * (p.ndim - 1))
                counts = group["count"] * self.state["counts"]["number"] * self.state["k"]
                p.sub_(state["momentum"] / (1 + rows) * group["lr"] / counts.item())


class Noisy(Rows):
    """Draws a random number for each tensor in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(torch.rand(()))
        super().step()


class Prodigy(Optimizer):
    """Has the name of a class that estimates one value over all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Net(TrainModule):
    """A residual network whose hidden matrices Muon trains, beside AdamW."""

    lends = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 8)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - 1).square().mean()
        return loss * float("inf") if bool((batch == 7).all()) else loss

    def configure_optimizers(self) -> Any:
        matrices, rest = optim.split(self)
        muon = torch.optim.Muon(matrices, lr=0.02)
        if self.lends == "divided":
            optim.whole(muon, divide_work=True)
        schedule = torch.optim.lr_scheduler.LinearLR(muon, 0.5, total_iters=4)
        return [muon, torch.optim.AdamW(rest, lr=0.01)], [{"scheduler": schedule, "interval": "step"}]


class Divided(Net):
    lends = "divided"


class Odd(nn.Module):
    """Vectors, tensors of 3 and 4 dims, one row on several ranks, no element, tied, frozen and complexly named parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        self.vector, self.one = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(1))
        self.row, self.cube = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(3, 5, 2))
        self.conv = nn.Conv2d(4, 3, 2)
        self.embed, self.tied = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.0": "colwise", "layers.1": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def made(name: str, module: nn.Module) -> Optimizer:
    """An optimizer of several groups for a module; ``name`` may end in ``/divided``."""
    kind, _, divided = name.partition("/")
    trained = [p for p in module.parameters() if p.requires_grad]
    if kind == "Muon":
        trained = [p for p in trained if p.ndim == 2]
    groups = [{"params": trained[:2], "lr": 0.05}, {"params": trained[2:]}, {"params": [], "lr": 1.0}]
    if kind == "AdamMini":
        return AdamMini([group for group in groups if group["params"]])
    if kind == "Noisy":
        return optim.whole(Noisy(trained), divide_work=bool(divided))
    cls: Any = Rows if kind == "Rows" else getattr(torch.optim, kind)
    optimizer: Optimizer = cls([group for group in groups if group["params"] or kind == "Rows"], lr=0.1)
    return optim.whole(optimizer, divide_work=bool(divided)) if divided or kind == "Rows" else optimizer


def shard_of(full: Tensor, like: Any) -> Tensor:
    """This rank's shard of a tensor, in the layout of another."""
    mesh, placements, shard = like.device_mesh, like.placements, full
    axes = list(enumerate(placements))
    if any("Strided" in type(placement).__name__ for placement in placements):
        axes.reverse()  # the inner axis has cut it first
    for axis, placement in axes:
        if not placement.is_replicate():
            chunks, index = shard.chunk(mesh.size(axis), placement.dim), mesh.get_local_rank(axis)
            shard = chunks[index] if index < len(chunks) else shard.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        shard.contiguous(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def in_common(value: str) -> str:
    """Rank 0's value; a barrier, too."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    first: str = values[0]
    return first


def set_gradients(module: nn.Module, step: int) -> None:
    """Give each trained parameter, or each shard of one, its part of the same gradient on all ranks."""
    generator = torch.Generator().manual_seed(step)
    for p in module.parameters():
        full = torch.randn(p.shape, generator=generator)
        if p.requires_grad:
            p.grad = shard_of(full, p) if isinstance(p, DTensor) else full


def stepped(module: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(module, step)
        optimizer.step()
        optimizer.zero_grad()


def bare(name: str, kind: type[nn.Module] = Odd, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after steps of the plain class in one process."""
    module = kind()
    stepped(module, made(name.partition("/")[0], module), 0, steps)
    return dict(module.state_dict())


STRATEGIES: dict[str, Any] = {
    "ddp": DDP,
    "fsdp": FSDP,
    "tp": lambda: MeshParallel(tp=2, dp_shard=1),
    "whole embedding": lambda: FSDP(ignore="embed.*"),
}


def under(strategy: Any, name: str, kind: type[nn.Module] = Odd) -> tuple[Engine, Any, Any]:
    engine = Engine(accelerator="cpu", strategy=strategy)
    module = kind()
    optimizer = made(name, module)
    return engine, *engine.prepare(module, optimizer)


def differing(engine: Engine, module: Any, expected: dict[str, Tensor]) -> list[str]:
    """On rank 0 the names of parameters with other bits than expected."""
    state = engine.strategy.model_state(engine.unwrap_model(module))
    return [name for name, value in state.items() if not torch.equal(value, expected[name])]


@contextmanager
def exchanges() -> Iterator[list[int]]:
    """The bytes that this rank sends to others in each exchange of the block."""
    sizes: list[int] = []
    original = torch.distributed.all_to_all_single

    def counted(received: Tensor, sent: Tensor, of_received: Any, of_sent: Any, **kwargs: Any) -> Any:
        sizes.append(sum(of_sent))
        return original(received, sent, of_received, of_sent, **kwargs)

    torch.distributed.all_to_all_single = counted
    try:
        yield sizes
    finally:
        torch.distributed.all_to_all_single = original


def fit(module: TrainModule, batches: Any, **settings: Any) -> Any:
    resume = settings.pop("resume", None)
    return Fit(**{"accelerator": "cpu", "max_epochs": 1, "seed": 1, **settings}).run(module, batches, resume=resume)


def data(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 32, generator=generator) for _ in range(count)]


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------

CASES = [
    *(("fsdp", name) for name in ("Muon", "Adafactor", "Rprop", "Rows", "Rows/divided", "AdamMini")),
    *(("tp", name) for name in ("Muon", "Rows", "Rows/divided")),
    *(("ddp", name) for name in ("Muon/divided", "Rows/divided")),
    ("whole embedding", "Rows"),
]


def rank_steps() -> Any:
    """Three steps with given gradients: where the bits differ from one process's."""
    found = {}
    for strategy, name in CASES:
        engine, module, optimizer = under(STRATEGIES[strategy](), name)
        stepped(module, optimizer.optimizer, 0, 3)
        optimizer.optimizer.state_dict()  # has no state of a parameter that is not the optimizer's
        found[f"{strategy} {name}"] = differing(engine, module, bare(name))
        engine.release()
    return found


def rank_sent() -> Any:
    """Exchanges and bytes of a step, and what one rank holds of the state."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = {}
    for strategy, name in (("fsdp", "Muon"), ("ddp", "Muon/divided"), ("tp", "Muon")):
        engine, module, optimizer = under(STRATEGIES[strategy](), name, Net)
        stepped(module, optimizer.optimizer, 0, 1)
        set_gradients(module, 1)
        with exchanges() as sizes, CommDebugMode() as counted:
            optimizer.optimizer.step()
        held = sum(entry["momentum_buffer"].numel() for entry in optimizer.optimizer.state.values())
        found[strategy] = [sizes, sum(counted.get_comm_counts().values()), held]
        engine.release()
    return found


def rank_buckets() -> Any:
    """One tensor a bucket gives the same bits and counts."""
    whole_tensors.BUCKET_BYTES, before = 1, whole_tensors.BUCKET_BYTES
    try:
        engine, module, optimizer = under(FSDP(), "Rows")
        with exchanges() as sizes:
            stepped(module, optimizer.optimizer, 0, 3)
    finally:
        whole_tensors.BUCKET_BYTES = before
    raw = optimizer.optimizer
    counts = [g["count"] for g in raw.param_groups] + [raw.state["counts"]["number"], raw.state["k"].item()]
    return [differing(engine, module, bare("Rows")), len(sizes), raw.count, counts]


def rank_trained() -> Any:
    """Eight steps of a run without clipping, and one resumed at the fourth: weights as under DDP, to the bit."""
    batches = data(16)
    weights: dict[str, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as own:
        Engine(accelerator="cpu", strategy="ddp")
        root = in_common(own)
        for name, strategy, kind in (("ddp", "ddp", Net), ("fsdp", "fsdp", Net), ("divided", "ddp", Divided)):
            module = kind()
            fit(
                module,
                batches,
                strategy=strategy,
                root_dir=f"{root}/{name}",
                callbacks=[ModelCheckpoint(every="4 steps", save_top_k=-1)],
            )
            weights[name] = Fit(strategy=strategy, accelerator="cpu").state_dict(module)
        for start, strategy, kind in (("ddp", "fsdp", Net), ("fsdp", "ddp", Divided), ("divided", "ddp", Net)):
            module = kind()
            path = next(Path(root, start).rglob("step=00000004"))
            fit(module, batches, strategy=strategy, root_dir=f"{root}/from {start}", resume=str(path))
            weights[f"from {start}"] = Fit(strategy=strategy, accelerator="cpu").state_dict(module)
        in_common(own)  # before the folder is removed
    return {
        name: [key for key, value in of_run.items() if not torch.equal(value, weights["ddp"][key])]
        for name, of_run in weights.items()
    }


def orthogonal(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's iteration in the gradient's own format rather than bf16, which turns last bits into 1e-2."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def trained_in_fp32(engine: Engine | None) -> dict[str, Tensor]:
    """Six steps of Muon and AdamW, on this rank's rows of each batch."""
    module: Any = Net()
    optimizers: Any = module.configure_optimizers()[0]
    if engine is not None:
        module, *optimizers = engine.prepare(module, *optimizers)
    for batch in torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(3)):
        group = None if engine is None else engine.data_group
        rows = batch if group is None else batch[group.rank :: group.world_size]
        loss = (module(rows) - 1).square().mean()
        loss.backward() if engine is None else engine.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return dict(module.state_dict()) if engine is None else engine.strategy.model_state(engine.unwrap_model(module))


def rank_in_fp32() -> Any:
    """The largest difference from one process, as a part of the largest weight."""
    import torch.optim._muon as muon

    original, muon._zeropower_via_newtonschulz = muon._zeropower_via_newtonschulz, orthogonal
    found = {}
    try:
        expected = trained_in_fp32(None)
        for name in ("fsdp", "tp"):
            state = trained_in_fp32(Engine(accelerator="cpu", strategy=STRATEGIES[name]()))
            differences = [(v - expected[k]).abs().max() / expected[k].abs().max() for k, v in state.items()]
            found[name] = max(map(float, differences), default=0.0)
    finally:
        muon._zeropower_via_newtonschulz = original
    return found


def rank_skipped() -> Any:
    """The second of three steps is not finite."""
    batches = [data(1)[0], data(1)[0], *[torch.full((2, 32), 7.0)] * 2, data(1)[0], data(1)[0]]
    with exchanges() as sizes, tempfile.TemporaryDirectory() as root:
        result = fit(Net(), batches, strategy="fsdp", on_nonfinite="skip", root_dir=root)
    return [result.step, len(sizes)]


def saved_and_loaded(name: str, kind: str, root: str) -> dict[str, Any]:
    """Load what single wrote and two steps of each strategy; save two steps of each."""
    found: dict[str, Any] = {}
    expected = bare(name)
    for start in ("ddp", "fsdp", "tp"):
        engine, module, optimizer = under(STRATEGIES[start](), kind if start == "ddp" else name)
        stepped(module, optimizer.optimizer, 0, 2)
        engine.save_state(f"{root}/{name}-{start}")
        engine.release()
    for start in ("single", "ddp", "fsdp", "tp"):
        for end in ("ddp", "fsdp", "tp"):
            engine, module, optimizer = under(STRATEGIES[end](), kind if end == "ddp" else name)
            engine.load_state(f"{root}/{name}-{start}")
            stepped(module, optimizer.optimizer, 2, 3)
            found[f"{start} to {end}"] = differing(engine, module, expected)
            engine.release()
    return found


def rank_resumed() -> Any:
    root = os.environ["WHOLE_ROOT"]
    return {
        name: saved_and_loaded(name, kind, root) for name, kind in (("Muon", "Muon/divided"), ("Rows", "Rows/divided"))
    }


def rank_warm() -> Any:
    """Steps before the model is sharded, an added group, and a second engine for the same optimizer."""
    module = Odd()
    optimizer: Any = made("Rows", module)
    extra = nn.Parameter(torch.zeros(2, 2))
    stepped(module, optimizer, 0, 1)
    engine = Engine(accelerator="cpu", strategy=FSDP())
    model, _ = engine.prepare(module, optimizer)
    stepped(model, optimizer, 1, 2)
    optimizer.add_param_group({"params": [extra]})  # whole on each rank
    extra.grad = torch.ones(2, 2)
    stepped(model, optimizer, 2, 3)
    held = [name for name, p in model.named_parameters() if p in optimizer.state]
    added = optimizer.state[extra]["momentum"].sum().item()
    return [differing(engine, model, bare("Rows")), added, optimizer.count, held]


def rank_hooks() -> Any:
    """Hooks see the parameters themselves, once a step, and a scheduler finds that the step was called."""
    engine, module, optimizer = under(FSDP(), "Rows")
    raw, seen = optimizer.optimizer, []
    raw.register_step_pre_hook(lambda o, *_: seen.append(len(o.param_groups[1]["params"])))
    raw.register_step_post_hook(lambda o, *_: seen.append(len(o.state)))
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, 0.5)
    stepped(module, raw, 0, 1)
    scheduler.step()  # warns otherwise
    rates = [group["lr"] for group in raw.param_groups]
    replaced = "step" in vars(raw)
    engine.release()
    return [seen[0], len(seen), seen[1] < 11, rates, replaced]


class Absent(Net):
    """Loses a gradient on rank 1 before the second step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1 and self.global_rank == 1:
            self.layers[1].up.weight.grad = None


def rank_errors() -> Any:
    found = {}
    with tempfile.TemporaryDirectory() as root, pytest.raises(ValueError) as caught:
        fit(Absent(), data(8), strategy="fsdp", root_dir=root)
    found["absent"] = str(caught.value)
    engine, module, optimizer = under(FSDP(), "Rows")
    set_gradients(module, 0)
    with pytest.raises(ValueError) as caught:
        optimizer.optimizer.step(lambda: torch.zeros(()))
    found["closure"] = str(caught.value)
    engine.release()
    for divides in (False, True):
        engine, module, noisy = under(STRATEGIES["tp"](), "Noisy/divided" if divides else "Noisy")
        set_gradients(module, 0)
        try:
            noisy.optimizer.step()
            found[f"draws, divided={divides}"] = ""
        except ValueError as error:
            found[f"draws, divided={divides}"] = str(error)
        engine.release()
    own = Engine(accelerator="cpu", strategy=Own())
    with pytest.raises(ValueError) as caught:
        own.prepare(made("Rows/divided", Odd()))
    found["own strategy"] = str(caught.value)
    return found


class Own(Strategy):
    """A strategy that cannot divide an optimizer's work."""


def rank_sharded_before() -> Any:
    """A checkpoint in which Muon's states are sharded, as earlier versions wrote it: the largest difference of what is loaded."""
    with tempfile.TemporaryDirectory() as own:
        known, optim._OF_TORCH = optim._OF_TORCH, {}
        try:
            engine, module, optimizer = under(FSDP(), "Muon", Net)
            root = in_common(own)
            stepped(module, optimizer.optimizer, 0, 1)
            engine.save_state(f"{root}/before")
            sharded = {
                name: optimizer.optimizer.state[p]["momentum_buffer"].full_tensor()
                for name, p in module.named_parameters()
                if p in optimizer.optimizer.state
            }
            engine.release()
        finally:
            optim._OF_TORCH = known
        engine, module, optimizer = under(FSDP(), "Muon", Net)
        engine.load_state(f"{root}/before")
        loaded = {
            name: optimizer.optimizer.state[p]["momentum_buffer"]
            for name, p in module.named_parameters()
            if p in optimizer.optimizer.state
        }
        in_common(own)
    return [len(sharded), sorted(loaded), all(torch.equal(value, sharded[name]) for name, value in loaded.items())]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of checkpoints, with those of one process."""
    path: Path = tmp_path_factory.mktemp("whole")
    for name in ("Muon", "Rows"):
        engine, module, optimizer = under("single", name)
        stepped(module, optimizer.optimizer, 0, 2)
        engine.save_state(f"{path}/{name}-single")
        engine.release()
    return path


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, WHOLE_ROOT=str(root))


# -- two ranks --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_given_equal_gradients_a_step_has_the_bits_of_one_process(found: Any, case: tuple[str, str]) -> None:
    assert found["steps"][0][" ".join(case)] == []


def test_a_step_takes_two_exchanges_and_three_times_the_values(found: Any) -> None:
    hidden, head, ranks = 6 * 32 * 64, 8 * 32, 2
    for strategy, count, elements in (
        ("fsdp", 2, 3 * (hidden + head)),
        ("tp", 2, 3 * hidden),  # the head is whole on each rank
        ("ddp", 1, ranks * (hidden + head)),
    ):
        rows = [rank[strategy] for rank in found["sent"]]
        assert [(len(sizes), collectives) for sizes, collectives, _ in rows] == [(count, count)] * ranks
        sent = sum(sum(sizes) for sizes, _, _ in rows)  # 4 bytes an element, (N-1)/N of them to other ranks
        assert sent == pytest.approx(4 * elements * (ranks - 1) / ranks, rel=0.01)
        states = [elements_of_state for _, _, elements_of_state in rows]
        assert sum(states) == hidden + head * (ranks if strategy == "tp" else 1)
        assert max(states) <= hidden / ranks + head


def test_buckets_change_nothing_but_the_number_of_exchanges(found: Any) -> None:
    differing_names, count, steps, counts = found["buckets"][0]
    assert differing_names == []
    assert count == 3 * 2 * 11  # eleven trained tensors; the one without rows is exchanged, too
    assert (steps, counts) == (3, [3] * 5)


def test_a_run_under_fsdp_or_divided_has_the_bits_of_ddp(found: Any) -> None:
    assert set(found["trained"][0]) == {"ddp", "fsdp", "divided", "from ddp", "from fsdp", "from divided"}
    assert all(names == [] for names in found["trained"][0].values()), found["trained"][0]


def test_with_an_iteration_in_fp32_weights_are_those_of_one_process(found: Any) -> None:
    differences = found["in_fp32"][0]
    assert 0 < max(differences.values()) < 5e-6, differences


def test_a_skipped_step_sends_nothing(found: Any) -> None:
    assert found["skipped"] == [[2, 2 * 2]] * 2


@pytest.mark.parametrize("name", ["Muon", "Rows"])
def test_each_strategy_continues_each_checkpoint_to_the_bit(found: Any, name: str, root: Path) -> None:
    assert len(found["resumed"][0][name]) == 12
    assert all(names == [] for names in found["resumed"][0][name].values()), found["resumed"][0][name]
    for start in ("ddp", "fsdp", "tp"):
        engine, module, optimizer = under("single", name)
        engine.load_state(f"{root}/{name}-{start}")
        stepped(module, optimizer.optimizer, 2, 3)
        assert differing(engine, module, bare(name)) == [], start
        engine.release()


def test_warm_optimizers_and_added_groups(found: Any) -> None:
    for rank, (names, added, count, _) in enumerate(found["warm"]):
        assert rank or names == []
        assert added == pytest.approx(4 / 3)  # ones divided by a norm of 2, plus 1
        assert count == 3
    of_one, of_other = (set(held) for *_, held in found["warm"])
    assert (
        not of_one & of_other
    )  # what another rank owns is gone here, although it was there before the model was sharded
    assert len(of_one | of_other) == 11


def test_hooks_and_schedulers_see_one_step_of_the_parameters(found: Any) -> None:
    for parameters, calls, divides_state, rates, replaced in found["hooks"]:
        assert parameters == 9
        assert calls == 2
        assert divides_state
        assert rates == [0.025, 0.05, 0.5]
        assert replaced


def test_errors_name_the_parameter_and_the_optimizer(found: Any) -> None:
    for rank in found["errors"]:
        assert "Muon: 'layers.1.up.weight': the gradient is None on some ranks and not on others" in rank["absent"]
        assert "Rows steps whole tensors, which are lent for one step: a closure" in rank["closure"]
        assert (
            "draws random numbers in its step, and each rank steps the tensors that it owns"
            in rank["draws, divided=False"]
        )
        assert rank["draws, divided=True"] == ""
        assert (
            "whole(Rows, divide_work=True) under Own, which cannot divide an optimizer's work" in rank["own strategy"]
        )


def test_sharded_states_of_earlier_versions_are_continued(found: Any) -> None:
    (count, of_one, equal), (_, of_other, also_equal) = found["sharded_before"]
    assert len({*of_one, *of_other}) == len(of_one) + len(of_other) == count
    assert equal
    assert also_equal


# -- more ranks -------------------------------------------------------------------------------------------------------------------

MESHES: dict[str, Any] = {
    "hybrid": lambda: FSDP(dp_replicate=2),
    "fsdp": FSDP,
    "tp x fsdp": lambda: MeshParallel(tp=2, dp_shard=2),
    "tp x ddp": lambda: MeshParallel(tp=2, dp_replicate=2, dp_shard=1),
}


def on_four_ranks() -> Any:
    found = {}
    for mesh, make in MESHES.items():
        for name in ("Muon", "Rows", "Rows/divided"):
            engine, module, optimizer = under(make(), name)
            with exchanges() as sizes:
                stepped(module, optimizer.optimizer, 0, 3)
            found[f"{mesh} {name}"] = [differing(engine, module, bare(name)), len(sizes)]
            engine.release()
    with tempfile.TemporaryDirectory() as own:
        Engine(accelerator="cpu", strategy="ddp")
        root = in_common(own)
        weights = []
        for steps, resume in ((4, None), (2, None), (4, "last")):
            module = Net()
            strategy = MeshParallel(pp=2, dp_shard=2)
            folder = f"{root}/{'part' if steps == 2 or resume else 'all'}"
            callbacks = [ModelCheckpoint(every="2 steps")]
            fit(
                module, data(8), strategy=strategy, max_steps=steps, root_dir=folder, callbacks=callbacks, resume=resume
            )
            weights.append(Fit(strategy=strategy, accelerator="cpu").state_dict(module))
        in_common(own)
    return found | {"pp": [[k for k in weights[0] if not torch.equal(weights[0][k], weights[2][k])], len(weights[0])]}


@pytest.mark.slow
def test_meshes_of_four_ranks() -> None:
    ranks = ranks_of(on_four_ranks, 4)
    for case, (names, count) in ranks[0].items():
        assert names == [], case
        assert count == (14 if case == "pp" else 6), case


class Large(nn.Module):
    """Layers that are large enough to be quantized in blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


QUANTIZED = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def on_two_ranks() -> Any:
    """Quantized optimizers: where the bits differ from one process's after three steps, and resumed after two."""
    from torchao import optim as low_bit

    found = {}
    with tempfile.TemporaryDirectory() as own, torch.compiler.set_stance("force_eager"):
        Engine(accelerator="cpu", strategy="ddp")
        root = in_common(own)
        for name in QUANTIZED:
            expected = Large()
            stepped(expected, getattr(low_bit, name)(expected.parameters(), lr=0.1), 0, 3)
            for start, end in (("fsdp", "ddp"), ("fsdp", "fsdp"), ("ddp", "fsdp")):
                for strategy, first, last in ((start, 0, 2), (end, 2, 3)):
                    engine = Engine(accelerator="cpu", strategy=strategy)
                    module: Any = Large()
                    module, optimizer = engine.prepare(module, getattr(low_bit, name)(module.parameters(), lr=0.1))
                    if first:
                        engine.load_state(f"{root}/{name} {start} {end}")
                    stepped(module, optimizer.optimizer, first, last)
                    if not first:
                        engine.save_state(f"{root}/{name} {start} {end}")
                    else:
                        found[f"{name} {start} {end}"] = differing(engine, module, dict(expected.state_dict()))
                    engine.release()
        in_common(own)
    return found


@pytest.mark.slow
def test_quantized_states_are_whole_under_fsdp() -> None:
    pytest.importorskip("torchao.optim")
    ranks = ranks_of(on_two_ranks, 2)
    assert len(ranks[0]) == 9
    assert all(names == [] for names in ranks[0].values()), ranks[0]


# -- one process ------------------------------------------------------------------------------------------------------------------


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(2, 2))]


class Exchanging(torch.optim.SGD):
    """Reduces by itself, as some optimizers called Muon do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.distributed.all_reduce(self.param_groups[0]["params"][0])
        return super().step(closure)


class AdamMini(Exchanging):
    """Exchanges only if it is told that there are several ranks, and makes a state for parameters without a gradient, too."""

    def __init__(self, parameters: Any, world_size: int = 1) -> None:
        super().__init__(parameters, lr=0.1)
        self.world_size = world_size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("mean", torch.zeros(()))
                if p.grad is not None:
                    self.state[p]["mean"] += p.grad.square().mean()
                    p.sub_(p.grad / self.state[p]["mean"].sqrt() * group["lr"])


class Wrapping(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        super().__init__(parameters(), {})
        self.base = inner


class Switching(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (Prodigy(parameters()), "it estimates one value over all parameters"),
        (torch.optim.LBFGS(parameters()), "its step evaluates the loss"),
        (Exchanging(parameters(), lr=0.1), r"its step exchanges tensors between the ranks by itself \(all_reduce\)"),
        (Wrapping(torch.optim.SGD(parameters(), lr=0.1)), r"it wraps another optimizer \(base\)"),
        (Switching(parameters(), lr=0.1), "it keeps two sets of weights"),
        (
            AdamMini(parameters(), 2),
            "its step exchanges tensors.*otherwise set optimizer.world_size = 1, or strategy='ddp'",
        ),
    ],
)
def test_steps_that_cannot_be_lent_are_refused(optimizer: Optimizer, words: str) -> None:
    with pytest.raises(ValueError, match=rf"engine\.optim\.whole\({type(optimizer).__name__}\): {words}"):
        optim.whole(optimizer)


def test_an_exchange_that_is_switched_off_is_no_obstacle() -> None:
    assert optim.treatment(AdamMini(parameters())) == optim.Treatment(is_matrixwise=False)
    with pytest.raises(
        ValueError, match=r"AdamMini needs whole tensors, and parameters are sharded: its step exchanges"
    ):
        optim.treatment(AdamMini(parameters(), 2))


def test_classes_with_a_value_over_all_parameters_are_refused_where_these_are_sharded() -> None:
    with pytest.raises(ValueError, match=r"Prodigy needs whole tensors.*estimates one value over all.*strategy='ddp'"):
        optim.treatment(Prodigy(parameters()))


def test_only_optimizers_can_be_whole() -> None:
    with pytest.raises(TypeError, match=r"whole\(\) got Linear: give a torch\.optim\.Optimizer"):
        optim.whole(nn.Linear(2, 2))  # type: ignore[type-var]


def test_known_classes_and_those_derived_from_them() -> None:
    class Mine(torch.optim.Muon):
        pass

    assert optim.treatment(Mine(parameters())) == optim.Treatment()
    assert optim.treatment(torch.optim.Adafactor(parameters())) == optim.Treatment(is_matrixwise=False)
    assert optim.treatment(torch.optim.AdamW(parameters())) is None
    assert not optim.divides_work(torch.optim.Muon(parameters()))
    assert optim.divides_work(optim.whole(torch.optim.AdamW(parameters()), divide_work=True))
