"""FSDP on real processes: what each rank holds, optimizers made before and after, verdicts that all ranks share, errors."""

from __future__ import annotations

import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.drawing import Noisy
from support.ranks import ranks_of_file
from support.stateful import Keeping
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from callbacks import ModelCheckpoint
from engine import FSDP, Engine, Fit, Loss, TrainModule
from engine.distributed.collectives import gather_json
from engine.strategies import unreached


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


class Net(TrainModule):
    """Regression; parameters from seed 11 plus what ``shift`` says."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 2)
        self.seen: list[Any] = []
        self.lrs: list[float] = []
        with torch.no_grad():
            for p in self.parameters():
                p += shift

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self(batch) - 1).square().mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([str(self.layers[0].linear.weight.dtype), tuple(self.head.weight.shape)])
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"},
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lrs.append(self.lr_schedulers().get_last_lr()[0])


def data(count: int = 8) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(5))


def flat(model: nn.Module) -> Tensor:
    return torch.cat(
        [(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in model.parameters()]
    )


def bare(steps: int = 3, before: int = 0) -> Tensor:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(before + steps):
        (model(data()) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def bytes_of(tensors: Any) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def steps(engine: Engine, model: Any, optimizer: Any, count: int = 3) -> None:
    mine = data()[engine.process_index :: engine.num_processes]
    for _ in range(count):
        engine.backward((model(mine) - 1).square().mean())
        engine.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def fit(module: TrainModule, batches: Any, **settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as root:
        resume = settings.pop("resume", None)
        return Fit(
            **{"accelerator": "cpu", "strategy": "fsdp", "max_epochs": 1, "seed": 1, "root_dir": root, **settings}
        ).run(module, batches, resume=resume)


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_sharded() -> Any:
    """Bytes of parameters, gradients and optimizer state that this rank holds, and those of the whole."""
    engine = Engine(accelerator="cpu", strategy="fsdp")
    model = engine.prepare(Net(shift=engine.process_index))
    optimizer = engine.prepare(torch.optim.Adam(model.parameters()))
    engine.backward(model(data()).mean())
    gradients = bytes_of(p.grad for p in model.parameters())
    optimizer.step()
    state = bytes_of(s for entry in optimizer.state.values() for name, s in entry.items() if name != "step")
    return [bytes_of(model.parameters()), gradients, state, bytes_of(Net().parameters()), type(model).__name__]


def rank_orders() -> Any:
    found = {}
    for name in ("together", "optimizer first", "model first", "later"):
        engine = Engine(accelerator="cpu", strategy="fsdp")
        model: Any = Net(shift=0.1 * engine.process_index)
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if name == "together":
            model, optimizer = engine.prepare(model, optimizer)
        elif name == "optimizer first":
            optimizer = engine.prepare(optimizer)
            model = engine.prepare(model)
        elif name == "model first":
            model = engine.prepare(model)
            optimizer = engine.prepare(optimizer)
        else:
            model = engine.prepare(model)
            optimizer = engine.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
        again = engine.prepare(model)
        steps(engine, model, optimizer)
        found[name] = apart(flat(model), bare()) if again is model else -1.0
    return found


def rank_warm_optimizer() -> Any:
    """The optimizer has made two steps before the model is sharded: its state is sharded too."""
    model: Any = Net()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    steps(Engine(accelerator="cpu", strategy="ddp"), DataAll(model), optimizer, 2)
    engine = Engine(accelerator="cpu", strategy="fsdp")
    optimizer, model = engine.prepare(optimizer, model)
    steps(engine, model, optimizer, 3)
    return [apart(flat(model), bare(3, before=2)), bytes_of([optimizer.state[model.head.weight]["exp_avg"]])]


def rank_lists() -> Any:
    """A checkpoint of DDP with ``foreach`` continues under FSDP, which shards a part of the group."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SGD has sharded and whole parameters in one group")
        place = gather_json(Engine(accelerator="cpu", strategy="ddp").group, [folder])[0][0]
        switched = []
        for strategy in ("ddp", FSDP(ignore=("head.bias",))):
            engine = Engine(accelerator="cpu", strategy=strategy)
            model: Any = Net()
            model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
            if strategy == "ddp":
                steps(engine, model, optimizer, 1)
                engine.save_state(f"{place}/here")
            else:
                engine.load_state(f"{place}/here")
                steps(engine, model, optimizer, 1)
            switched.append(optimizer.param_groups[0]["foreach"])
        gather_json(engine.group, None)  # before the folder is removed
    return switched


class DataAll(nn.Module):
    """Looks at all the data, whatever part is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(data())


def rank_two_models() -> Any:
    engine = Engine(accelerator="cpu", strategy="fsdp")
    one, other = Net(), Net()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (one, other)]
    one, other, *optimizers = engine.prepare(one, other, *optimizers)
    mine = data()[engine.process_index :: 2]
    for _ in range(3):
        engine.backward((one(mine) - 1).square().mean())
        engine.backward((other(mine) - 1).square().mean())
        for model, optimizer in zip((one, other), optimizers, strict=True):
            engine.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return [apart(flat(one), bare()), apart(flat(other), bare())]


def rank_accumulation() -> Any:
    """Whether the head's gradient is there and reduced after each micro-batch of a window of 2."""
    found = []
    for each in (False, True):
        engine = Engine(accelerator="cpu", strategy=FSDP(reduce_each_micro_batch=each), accumulate_grad_batches=2)
        model = engine.prepare(Net())
        for i in range(2):
            with engine.accumulate(model):
                engine.backward(model(data()[2 * engine.process_index + i :][:1]).mean())
                found.append(model.head.weight.grad is not None)
    return found


def rank_values() -> Any:
    """Clipping each element, and the infinity norm, over shards."""
    engine = Engine(accelerator="cpu", strategy=FSDP(ignore="head.bias"))
    model = engine.prepare(Net())
    engine.backward((model(data()[engine.process_index :: 2]) - 1).square().mean())
    grads = [p.grad for p in model.parameters()]
    norms = [engine.strategy.norm(grads, kind).item() for kind in (2.0, float("inf"))]
    engine.clip_grad_value_(model.parameters(), 0.01)
    return [
        *norms,
        max(g.abs().max().item() for g in engine.strategy.local([p.grad for p in model.parameters()]) if g.numel()),
    ]


def rank_mixed() -> Any:
    """bf16: parameters are gathered in bf16 and kept in fp32, like gradients; the loss is close to fp32's."""
    module = Net()
    fit(module, [data(4) for _ in range(4)], precision="bf16-mixed")
    kept = sorted({str(p.dtype) for p in module.parameters()})
    outputs = Fit(accelerator="cpu", strategy="fsdp", precision="bf16-mixed").predict(
        module, [data(2), data(3), data(1)]
    )
    expected = Net()
    fit(expected, [data(4) for _ in range(4)], strategy="ddp")
    with pytest.raises(ValueError, match="was sharded with"):
        Fit(accelerator="cpu", strategy="fsdp").predict(module, [data(2)])
    with pytest.raises(ValueError, match="sharded already"):
        fit(module, [data(4) for _ in range(2)], strategy="ddp")
    return [kept, module.seen, [list(out.shape) for out in outputs], apart(flat(module), flat(expected))]


class Spare(Net):
    """Its last block is in use when ``uses`` says so."""

    uses = False

    def __init__(self) -> None:
        super().__init__()
        self.spare = Block()

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(x)
        result: Tensor = self.head(self.spare(out) if self.uses else out)
        return result


def rank_unused() -> Any:
    """Windows of two micro-batches in bf16, first without the spare block, then with it in some: how far from a bare loop, and how far it moved."""
    engine = Engine(
        accelerator="cpu", strategy=FSDP(blocks=["Block"]), precision="bf16-mixed", accumulate_grad_batches=2
    )
    plain, initial = Spare(), flat(Spare().spare)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (*plain.layers, plain.spare):
        fully_shard(block, mp_policy=policy)
    fully_shard(plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain.uses = True
    plain(data(1))  # each block runs once: without that torch fails in the window
    model = engine.prepare(Spare())
    optimizer = engine.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    found: list[Any] = []
    for micro, uses in enumerate([False, False, False, True, True, False]):
        mine = data(16)[4 * (micro % 2) + 2 * engine.process_index :][:2]
        model.uses = plain.uses = uses
        with engine.accumulate(model):
            engine.backward((model(mine) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        plain.set_requires_gradient_sync(micro % 2 == 1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (plain(mine) - 1).square().mean()
        (loss / 2).backward()
        if micro % 2:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            found.append([apart(flat(model), flat(plain)), apart(flat(model.spare), initial) > 0])
    return found


class Experts(nn.Module):
    """A loop over experts, which leaves out those without samples; a sample's expert is the whole part of its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.experts):
            rows = (expert == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, layer(x[rows]))
        return out


class Conditional(nn.Module):
    """Experts in two layers, and at the top two heads, which are both computed; ``plan`` says what a micro-batch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.heads = nn.ModuleList(Block() for _ in range(2))  # run last
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.frozen = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

    def forward(self, x: Tensor, plan: list[int]) -> Tensor:
        expert, dropped, head = plan
        experts = (torch.arange(len(x)) + expert).clamp(max=expert + 1) % 4
        for number, layer in enumerate(self.frozen):
            if number != dropped:
                x = layer(x)
        for number, layer in enumerate(self.layers):
            if number != dropped:
                x = layer(x, experts)
        loss: Tensor = [layer(x) for layer in self.heads][head].square().mean()
        return loss


PLANS = [
    [[0, 2, 0], [2, 2, 1]],
    [[1, 0, 0], [1, 0, 1]],
    [[3, 0, 1], [0, 1, 1]],
    [[2, 1, 1], [2, 1, 1]],
    [[2, 2, 0], [2, 2, 1]],
]
"""For each micro-batch and rank: the first of two experts, a layer to leave out (2: none), the head. Some leave out what the other rank runs,
some what nobody runs."""


def bare_conditional(window: int) -> Tensor:
    model = Conditional()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(5):
        if step == 3:
            model.frozen.requires_grad_(True)
        for micro in range(window):
            for rank in range(2):
                loss = model(data(8)[4 * rank :][:4], PLANS[(step * window + micro) % 5][rank])
                (loss / (2 * window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def conditional(window: int, precision: str = "32-true", **settings: Any) -> Tensor:
    engine = Engine(accelerator="cpu", strategy=FSDP(**settings), accumulate_grad_batches=window, precision=precision)
    model = engine.prepare(Conditional())
    optimizer = engine.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5))
    rank = engine.process_index
    for step in range(5):
        if step == 3:
            model.frozen.requires_grad_(True)
        for micro in range(window):
            with engine.accumulate(model):
                engine.backward(model(data(8)[4 * rank :][:4], PLANS[(step * window + micro) % 5][rank]))
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():  # ranks leave out different blocks in an evaluation, too
        one = model(data(8)[4 * rank :][:4], PLANS[0][rank])
        two = model(data(8)[4 * rank :][:4], PLANS[2][rank])
    weights = flat(model)
    whole = Conditional()
    nn.utils.vector_to_parameters(weights, whole.parameters())
    with torch.no_grad():
        for value, plan in ((one, PLANS[0][rank]), (two, PLANS[2][rank])):
            assert precision != "32-true" or apart(value, whole(data(8)[4 * rank :][:4], plan)) < 1e-6
    return weights


CONDITIONAL: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {}),
    "window": (2, {}),
    "experts are blocks": (2, {"blocks": ["Experts", "Block"]}),
    "kept gathered": (1, {"reshard_after_forward": False}),
    "reduced each time": (2, {"reduce_each_micro_batch": True}),
    "some whole": (1, {"ignore": "layers.*.norm.*"}),
    "frozen ones whole": (1, {"ignore": "frozen.0.*"}),
}


def rank_conditional() -> Any:
    if torch.distributed.get_rank() == 1:  # as if this rank had had a model of its own before
        next(unreached._numbers)
    found = {
        name: apart(conditional(window, **s), bare_conditional(window)) for name, (window, s) in CONDITIONAL.items()
    }
    found["bf16"] = apart(conditional(2, "bf16-mixed"), bare_conditional(2))
    return found


class Programs(nn.Module):
    """Blocks by letters, which each rank runs in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.layers = nn.ModuleDict({letter: Block() for letter in "abcd"})
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, program: str) -> Tensor:
        for letter in program:
            x = self.layers[letter](x)
        loss: Tensor = self.head(x).square().mean()
        return loss


PROGRAMS = {
    "a block twice, then one on one rank": [["aba", "abac"], ["abac", "aba"]],
    "opposite orders": [["ab", "ba"], ["ba", "ab"]],
    "loops of different lengths": [["aaabd", "abd"], ["abd", "aabd"]],
    "a block in a loop, later": [["aad", "aad"], ["acad", "aad"], ["aad", "acacd"]],
    "registered in the opposite order": [["dcba", "dba"], ["dba", "da"]],
}
"""For each step and rank, the blocks that it runs."""


def trained_program(steps: list[list[str]], engine: Engine | None) -> Tensor:
    plain = Programs()
    model = plain if engine is None else engine.prepare(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    for step in steps:
        for rank in range(2) if engine is None else [engine.process_index]:
            loss = model(data(8)[4 * rank :][:4], step[rank])
            (loss / 2).backward() if engine is None else engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def rank_programs() -> Any:
    found = {}
    for name, program in PROGRAMS.items():
        engine = Engine(accelerator="cpu", strategy=FSDP(blocks=["Block"]))
        found[name] = apart(trained_program(program, engine), trained_program(program, None))
    return found


def rank_two_losses() -> Any:
    """Two forward passes with other heads and layers on each rank, then two backward passes."""
    found = []
    for engine in (None, Engine(accelerator="cpu", strategy="fsdp")):
        plain = Conditional()
        model = plain if engine is None else engine.prepare(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for rank in range(2) if engine is None else [engine.process_index]:
                x = data(8)[4 * rank :][:4]
                losses = [model(factor * x, PLANS[step + factor][rank]) for factor in (1, 2)]
                for loss in losses:
                    (loss / 2).backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(model))
    return apart(*found)


class Overflow(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        bad = batch_idx == 1 and self.global_rank == 1
        self.scales = [
            *vars(self).get("scales", []),
            self._context.engine.scaler.get_scale() if self._context.engine.scaler else 0.0,
        ]
        loss = (self(batch).float() - 1).square().mean()
        return loss * (float("inf") if bad else 0.01)  # small: times 65536 its gradients fit fp16


def rank_overflow() -> Any:
    """The gradient of rank 1 alone overflows in the second of three steps."""
    found = []
    for settings in ({"precision": "16-mixed"}, {"on_nonfinite": "skip"}):
        module = Overflow()
        result = fit(module, [data(2) for _ in range(6)], **settings)
        found.append([result.step, module.lrs, module.scales, bool(flat(module).isfinite().all())])
    return found


def rank_verdict() -> Any:
    """Only what rank 1 holds of the gradient is infinite: rank 0 learns it from there alone."""
    engine = Engine(accelerator="cpu", strategy="fsdp", precision="16-mixed")
    model = engine.prepare(Net())
    optimizer = engine.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    before = flat(model)
    engine.backward(model(data()).mean() * 0.01)
    with torch.no_grad():
        model.head.weight.grad.to_local()[0, 0] = float("inf") if engine.process_index else 0.0
    optimizer.step()
    return [optimizer.step_was_skipped, engine.scaler.get_scale(), torch.equal(before, flat(model))]  # type: ignore[union-attr]


def rank_raise() -> Any:
    with pytest.raises(FloatingPointError, match="a gradient is not finite") as caught:
        fit(Overflow(), [data(2) for _ in range(6)], on_nonfinite="raise")
    return "first in: " in str(caught.value)


def rank_refused() -> Any:
    class Silent(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    class Manual(Net):
        automatic_optimization = False

    class Out(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            out = self(batch)
            return Loss(out.sum() * 0, 0) if self.global_rank else Loss((out - 1).square().sum(), out.numel())

    words = []
    for module in (Silent(), Manual()):
        with pytest.raises(ValueError) as caught:
            fit(module, [data(2) for _ in range(2)])
        words.append(str(caught.value)[:60])
    engine = Engine(accelerator="cpu", strategy="fsdp")
    with torch.device("meta"):
        deferred = Net()
    assert bool(flat(engine.prepare(deferred)).isfinite().all())
    return [*words, fit(Out(), [data(2) for _ in range(4)]).step]


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(8, 8, dtype=torch.complex64)
        self.register_buffer("turn", torch.tensor(0.6 + 0.8j))
        for p in self.parameters():
            p.data = p.data.to(dtype)
        self.turn = self.turn.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.turn)
        return out


def rank_complex() -> Any:
    """How far complex parameters, trained, clipped, saved and loaded, are from a bare loop's, and the error where a block has both kinds."""
    found: list[Any] = []
    for precision, dtype in (
        ("bf16-mixed", torch.complex64),
        ("bf16-true", torch.complex64),
        ("64-true", torch.complex128),
    ):
        batch = data().to(dtype)
        expected: Any = Complex(dtype)
        own = torch.optim.Adam(expected.parameters(), lr=0.01)
        engine = Engine(accelerator="cpu", strategy="fsdp", precision=precision)
        model = engine.prepare(Complex())
        optimizer = engine.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
        for step in range(3):
            (expected(batch) - 1j).abs().square().mean().backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            own.step()
            own.zero_grad()
            engine.backward((model(batch[engine.process_index :: 2]) - 1j).abs().square().mean())
            engine.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                place = gather_json(engine.group, tempfile.mkdtemp() if engine.is_main_process else None)[0]
                engine.save_state(f"{place}/saved")
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                engine.load_state(f"{place}/saved")
        found.append(apart(flat(model), flat(expected)))
    model = Net()
    model.head.bias = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError,
        match=r"Net is a block.*several types, torch.complex64, torch.float32.*leave head.bias whole with FSDP\(ignore=",
    ):
        Engine(accelerator="cpu", strategy="fsdp").prepare(model)
    return found


def drawn(strategy: Any, folder: str, steps: int, load: bool = False, width: int = 8) -> Any:
    """Train with an optimizer that draws; return the model's weights, the whole parameters of this rank, and torch's number in each step."""
    engine = Engine(accelerator="cpu", strategy=strategy, seed=4)
    torch.manual_seed(5)  # the same numbers on all ranks, as scripts have them
    layers = nn.Sequential(Block(), Block(), nn.Linear(8, width))
    inner = Noisy(layers.parameters())
    model, optimizer = engine.prepare(layers, inner)
    if load:
        engine.load_state(f"{folder}/half")
    for _ in range(steps):
        engine.backward(model(data()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if steps == 2 and not load:
        engine.save_state(f"{folder}/half")
    whole = [p.flatten().tolist() for p in layers.parameters() if not isinstance(p, DTensor)]
    engine.release()
    return [flat(layers).tolist(), whole, inner.drawn]


def rank_drawn() -> Any:
    with tempfile.TemporaryDirectory() as own_folder:
        group = Engine(accelerator="cpu").group
        folder = gather_json(group, own_folder)[0]
        found: Any = {"whole": drawn("fsdp", folder, 4), "half": drawn("fsdp", folder, 2)}
        found["resumed"] = drawn("fsdp", folder, 2, load=True)
        found["ignored"] = drawn(FSDP(ignore="2.*"), folder, 3)
        with pytest.raises(
            ValueError, match="Noisy draws random numbers in its step, and each rank has whole parameters"
        ):
            drawn(FSDP(ignore="0.*"), folder, 3, width=7)
        group.barrier()
    return found


class Kept(Net):
    """A model with an optimizer that keeps a state of that kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        self.optimizer = Keeping(self.parameters(), self.kind)
        return self.optimizer

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


def rank_states() -> Any:
    """What is said of states of optimizers that a resumed run could not take, after how many steps; and the weights of a resume that can be."""
    found: Any = {}
    for kind in ("codes", "flat", "mean", "whole", "estimate", "object", "sharded_beside"):
        module = Kept(kind)
        with pytest.raises((ValueError, TypeError)) as caught:
            fit(module, [data(4)] * 6, callbacks=[ModelCheckpoint(every="3 steps")])
        found[kind] = [str(caught.value), module.optimizer.steps]
        if (
            kind == "estimate"
        ):  # a hyperparameter that differs between the ranks ends a training without checkpoints, too
            continue
        module = Kept(kind)
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            result = fit(module, [data(4)] * 6)
        found[kind] += [
            result.step,
            [str(w.message) for w in issued if "a checkpoint of this training" in str(w.message)],
        ]
    found["resumed"] = {}
    with tempfile.TemporaryDirectory() as own_folder:
        root = gather_json(Engine(accelerator="cpu").group, own_folder)[0]
        for kind in ("scalar", "nested", "beside"):
            ends = []
            for steps, resume in ((3, None), (1, None), (3, "last")):
                module, own = Kept(kind), {"root_dir": f"{root}/{kind}", "callbacks": [ModelCheckpoint()]}
                fit(module, [data(4)] * 6, max_steps=steps, resume=resume, **own)
                ends.append(flat(module))
            found["resumed"][kind] = [apart(ends[0], ends[2]), apart(ends[0], ends[1])]
        gather_json(Engine(accelerator="cpu").group, None)
    return found


class Int8Params(nn.Parameter):
    """As bitsandbytes names its weights in 8 bits."""


def rank_unshardable() -> Any:
    """What is said of optimizers, layers and passes that do not work on shards."""

    class Mixed(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # as optimizers with states of their own do
            p = self.param_groups[0]["params"][0]
            p.detach().add_(torch.zeros(p.shape))

    def run(model: nn.Module, make: Any = torch.optim.SGD, losses: Any = None) -> str:
        engine = Engine(accelerator="cpu", strategy="fsdp")
        try:
            prepared, optimizer = engine.prepare(model, make(model.parameters(), lr=0.1))
            inputs = data().requires_grad_()
            engine.backward(losses(prepared, inputs) if losses else prepared(inputs).mean())
            optimizer.step()
        except (ValueError, RuntimeError) as error:
            return str(error)
        finally:
            engine.release()
        return "no error"

    def penalty(model: Any, inputs: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return gradient.square().mean()

    def each(model: Any, inputs: Tensor) -> Tensor:
        loss: Tensor = model(inputs).mean()
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss

    class Each(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
            return loss

    quantized = Net()
    quantized.head.weight = Int8Params(quantized.head.weight.detach())
    with pytest.raises(RuntimeError) as in_fit:
        fit(Each(), [data(4)] * 2)
    return {
        "sparse": run(nn.Sequential(nn.Linear(8, 8), nn.Embedding(4, 4, sparse=True))),
        "mixed": run(Net(), lambda parameters, lr: Mixed(parameters, {"lr": lr})),
        "quantized": run(quantized),
        "penalty": run(Net(), losses=penalty),
        "each": run(Net(), losses=each),
        "in fit": str(in_fit.value),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_shards_draw_differently_and_on_after_a_resume(found: Any) -> None:
    one, other = found["drawn"]
    assert one["whole"][0] == one["resumed"][0]
    for rank in (one, other):
        assert rank["half"][2] + rank["resumed"][2] == rank["whole"][2]
    assert not set(one["whole"][2]) & set(other["whole"][2])


def test_what_fsdp_ignores_draws_alike(found: Any) -> None:
    one, other = found["drawn"]
    assert one["ignored"] == other["ignored"]
    assert len(one["ignored"][1]) == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "codes",
            "'codes' of 'layers.0.norm.weight' is each rank's own (ranks 0 and 1 differ), and a checkpoint has it once",
        ),
        (
            "flat",
            "'p0' of 'layers.0.linear.weight' has the shape [64], its parameter [8, 8], so it could not be sharded again",
        ),
        ("mean", "'mean' of 'layers.0.norm.weight' is not summed up over the ranks yet"),
        ("whole", "'m' of 'layers.0.norm.weight' is whole on each rank, and its parameter is sharded"),
        ("estimate", "'d' of parameter group 0 is each rank's own"),
        ("sharded_beside", "'latest.grad' beside those of parameters is sharded, and would be whole when it is loaded"),
        ("object", "Keeping: the state['state']['layers.0.norm.weight']['projector'] is of type builtins.object"),
    ],
)
def test_states_that_cannot_be_resumed_are_refused_after_the_first_step(found: Any, kind: str, words: str) -> None:
    for rank in found["states"]:
        refused, steps, *of_unsaved = rank[kind]
        assert words in refused
        assert steps == 1
        if of_unsaved:
            step, warned = of_unsaved
            assert step == 3  # a training without checkpoints goes on
            assert len(warned) == 1
            assert words in warned[0]


@pytest.mark.parametrize("kind", ["scalar", "nested", "beside"])
def test_states_that_are_equal_on_all_ranks_or_sharded_like_their_parameters_are_resumed(found: Any, kind: str) -> None:
    for resumed, differs in (rank["resumed"][kind] for rank in found["states"]):
        assert resumed == 0.0 < differs


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sparse", "1 has sparse gradients (sparse=True), which cannot be reduced to shards: set sparse=False"),
        ("mixed", "the step of Mixed does not work on sharded parameters"),
        ("quantized", "head.weight (Int8Params): quantized weights of these classes cannot be sharded"),
        (
            "penalty",
            "a backward pass through a backward pass (create_graph=True, a gradient penalty) does not work under FSDP",
        ),
        ("each", "calls torch.autograd.grad with respect to parameters, which are shards outside of the graph"),
        ("in fit", "calls torch.autograd.grad with respect to parameters, which are shards outside of the graph"),
    ],
)
def test_what_does_not_work_on_shards(found: Any, case: str, words: str) -> None:
    assert all(words in rank[case] for rank in found["unshardable"])


def test_complex_parameters(found: Any) -> None:
    for bf16_mixed, bf16_true, double in found["complex"]:
        assert max(bf16_mixed, bf16_true) < 1e-6
        assert double < 1e-14


def test_each_rank_holds_its_part(found: Any) -> None:
    for parameters, gradients, state, whole, name in found["sharded"]:
        # Every tensor here has an even number of rows: no padding.
        assert parameters == gradients == whole / 2
        assert state == whole
        assert name == "FSDPNet"


@pytest.mark.parametrize("order", ["together", "optimizer first", "model first", "later"])
def test_optimizers_before_and_after_sharding(found: Any, order: str) -> None:
    assert all(0 <= rank[order] < 1e-6 for rank in found["orders"])


def test_an_optimizer_with_state(found: Any) -> None:
    for distance, size in found["warm_optimizer"]:
        assert distance < 1e-6
        assert size == 8 * 4  # one row of [2, 8]


def test_lists_of_both_kinds_stay_switched_off_by_a_resume(found: Any) -> None:
    assert found["lists"] == [[True, False]] * 2


def test_two_models(found: Any) -> None:
    assert all(distance < 1e-6 for rank in found["two_models"] for distance in rank)


def test_gradients_are_reduced_when_asked(found: Any) -> None:
    assert found["accumulation"] == [[False, True, True, True]] * 2


def test_norms_and_clipping_of_values(found: Any) -> None:
    model = Net()
    (model(data()) - 1).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    expected = [torch.nn.utils.get_total_norm(grads, kind).item() for kind in (2.0, float("inf"))]
    for *norms, largest in found["values"]:
        assert norms == pytest.approx(expected, rel=1e-6)
        assert largest == pytest.approx(0.01)


def test_bf16(found: Any) -> None:
    for kept, seen, shapes, distance in found["mixed"]:
        assert kept == ["torch.float32"]
        assert seen[0] == ["torch.float32", [2, 8]]  # the block is not gathered yet, the head is
        assert shapes == [[2, 2], [3, 2], [1, 2]]
        assert 1e-6 < distance < 0.05  # two steps of size 0.5; bf16 has 8 bits


def test_a_block_that_the_forward_pass_leaves_out_may_accumulate_in_half_precision(found: Any) -> None:
    assert found["unused"] == [[[0.0, False], [0.0, True], [0.0, True]]] * 2


@pytest.mark.parametrize("case", CONDITIONAL)
def test_ranks_leave_out_different_blocks(found: Any, case: str) -> None:
    assert max(rank[case] for rank in found["conditional"]) < 2e-6


def test_ranks_leave_out_different_blocks_in_bf16(found: Any) -> None:
    assert max(rank["bf16"] for rank in found["conditional"]) < 4e-2


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_run_blocks_in_different_orders_from_the_first_pass_on(found: Any, program: str) -> None:
    assert max(rank[program] for rank in found["programs"]) < 2e-6


def test_ranks_leave_out_different_blocks_of_two_losses(found: Any) -> None:
    assert max(found["two_losses"]) < 1e-6


def test_an_overflow_on_one_rank_is_skipped_by_both(found: Any) -> None:
    scaled, plain = found["overflow"][0]
    assert found["overflow"][1] == found["overflow"][0]
    assert scaled == [2, [0.25, 0.25, 0.125], [65536.0, 65536.0, 32768.0], True]
    assert plain == [2, [0.25, 0.25, 0.125], [0.0] * 3, True]


def test_the_verdict_is_shared(found: Any) -> None:
    assert found["verdict"] == [[True, 32768.0, True]] * 2


def test_a_nonfinite_gradient_on_one_rank_raises_on_both(found: Any) -> None:
    assert any(found["raise"])  # each rank names what its own parts show


def test_refusals(found: Any) -> None:
    for rank, (silent, manual, count) in enumerate(found["refused"]):
        assert silent == f"training_step returned None on rank {rank} under FSDP, whose backward"[:60]
        assert manual.startswith("automatic_optimization=False under FSDP")
        assert count == 2


# -- on one process ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dp_replicate": 0}, r"FSDP\(dp_replicate=0\) must be an int of at least 1, or -1"),
        ({"dp_shard": -2}, r"FSDP\(dp_shard=-2\) must be an int of at least 1, or -1"),
        ({"min_size": True}, r"FSDP\(min_size=True\)"),
        ({"reshard_after_forward": "no"}, r"FSDP\(reshard_after_forward='no'\) must be True, False, None, or a number"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FSDP(**settings)


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 2},
            6,
            r"needs 4 processes, this job has 6: the product of the sizes must equal it",
        ),
        (
            {"dp_replicate": 4},
            6,
            r"FSDP\(dp_replicate=4, dp_shard=-1\) needs a multiple of 4 processes, this job has 6",
        ),
        ({"dp_shard": 2}, 1, r"needs 2 processes, this job has 1"),
        ({"reshard_after_forward": 3}, 4, r"reshard_after_forward=3\) must divide the 4 ranks"),
    ],
)
def test_degrees_that_do_not_fit(settings: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FSDP(**settings).connect(SimpleNamespace(world_size=size))  # type: ignore[arg-type]


def test_alone_nothing_is_sharded() -> None:
    engine = Engine(accelerator="cpu", strategy="fsdp")
    model, optimizer = Net(), torch.optim.Adam(Net().parameters())
    assert engine.prepare(model) is model
    assert not engine.strategy.matched_forward
    assert engine.strategy.sum(2.0) == 2.0
    assert engine.strategy.model_state(model)["head.bias"].shape == (2,)
    assert engine.prepare(optimizer).param_groups is optimizer.param_groups
