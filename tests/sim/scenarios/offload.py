"""Activation offload on the simulated accelerator: the bits of a training without it, no race, no wait of the host, and less memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import simulated as sim
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainings import Watch, folder

import engine.transforms.offload as source
from engine import Engine, Fit, TrainModule

ROWS, WIDTH, BLOCKS = 4096, 64, 6
MIB = 2**20
assert ROWS * WIDTH * 4 == MIB


class Block(nn.Module):
    """It saves its input and four results for the backward pass, a MiB each in fp32: those of ``up``, ``tanh``, ``sin`` and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + self.down(torch.sin(torch.tanh(F.gelu(y))) * y)


class Stack(TrainModule):
    """Equal blocks behind a layer that makes their wide inputs of narrow ones."""

    def __init__(self, blocks: int = BLOCKS, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(2, WIDTH), nn.ModuleList(kind() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trained(NamedTuple):
    """What some steps leave behind."""

    numbers: list[Tensor | str]
    """Losses and errors of each step, the weights at the end."""
    peak: int
    """The most memory of a step, beyond what was there before the first (bytes)."""
    sent: int
    """Bytes that left for the host in the last step."""
    returned: int
    host: int
    """Pinned memory (bytes)."""


Loop = Callable[[nn.Module, Tensor], Tensor]


def _batches(rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 2, generator=generator) for _ in range(4)]


def _loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _trained(
    model: nn.Module, loop: Loop = _loss_of, rows: int = ROWS, races: bool = False, **settings: Any
) -> Trained:
    """Some steps with ``Engine``; the host waits nowhere, and unless ``races``, nothing races."""
    engine = Engine(accelerator="sim", **settings)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data, numbers = [batch.to("sim") for batch in _batches(rows)], []
    gc.collect()
    before, pinned = torch.sim.memory_allocated(), sim.pinned_bytes()
    torch.sim.reset_peak_memory_stats()
    torch.sim.manual_seed(2)
    sim.clear()
    copies = None if engine.activation_offload is None else engine.activation_offload.copies
    counted = (0, 0)
    for batch in data:
        counted = (0, 0) if copies is None else (copies.sent_bytes, copies.returned_bytes)
        with engine.accumulate(model):
            try:
                loss = loop(model, batch)
                engine.backward(loss)
                numbers.append(loss.detach())
                del loss
            except Exception as error:
                numbers.append(f"{type(error).__name__}: {str(error)[:80]}")
            optimizer.step()
            optimizer.zero_grad()
    # The bare DistributedDataParallel waits there too: it agrees on its buckets once, at the second forward.
    assert [wait for wait in sim.training_waits() if "_pre_forward" not in wait] == []
    assert races or sim.races() == [], sim.races()
    moved = (0, 0, 0) if copies is None else (copies.sent_bytes, copies.returned_bytes, copies.host_bytes)
    result = Trained(
        [
            _whole(value).detach().cpu() if isinstance(value, Tensor) else value
            for value in (*numbers, *model.parameters())
        ],
        torch.sim.max_memory_allocated() - before,
        moved[0] - counted[0],
        moved[1] - counted[1],
        moved[2],
    )
    assert copies is None or sim.pinned_bytes() - pinned == copies.host_bytes
    engine.release()
    return result


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _same(first: Trained, second: Trained) -> bool:
    """Whether two trainings have the same bits."""
    return len(first.numbers) == len(second.numbers) and all(
        torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
        for one, other in zip(first.numbers, second.numbers, strict=True)
    )


def _compared(make: Callable[[], nn.Module], loop: Loop = _loss_of, **settings: Any) -> Trained:
    """The training with offload, which has the bits of the one without."""
    plain, offloaded = _trained(make(), loop, **settings), _trained(make(), loop, activation_offload=True, **settings)
    assert _same(plain, offloaded), (plain.numbers[:1], offloaded.numbers[:1])
    assert offloaded.sent > 0, offloaded.numbers[:2]
    return offloaded


# -- what leaves --------------------------------------------------------------------------------------------------------------------------


def blocks_leave_and_come_back() -> None:
    plain = _trained(Stack())
    # Of the first five blocks five tensors each leave. The fifth block's are still there when the backward pass wants them.
    whole = _trained(Stack(), activation_offload=True)
    assert _same(plain, whole)
    assert (whole.sent, whole.returned, whole.host) == (25 * MIB, 20 * MIB, 25 * MIB)
    assert whole.peak < 0.5 * plain.peak, (whole.peak / MIB, plain.peak / MIB)
    two = _trained(Stack(), activation_offload=2)
    assert _same(plain, two)
    assert (two.sent, two.returned) == (10 * MIB, 10 * MIB)
    assert two.peak < plain.peak - 8 * MIB


class _Manual(Stack):
    """It steps its optimizer itself."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__(blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


class _Sent(Watch):
    """It reads, too, how many bytes have left."""

    def on_train_end(self, run: Any, module: nn.Module) -> None:
        super().on_train_end(run, module)
        offload = run.engine.activation_offload
        self.bytes = 0 if offload is None else offload.copies.sent_bytes


def _run(module: Stack, sent: int, **settings: Any) -> list[Tensor]:
    """The weights after a run, in which ``sent`` bytes have left, and after which neither hooks nor pinned memory are left."""
    watch, pinned = _Sent(), sim.pinned_bytes()
    Fit(accelerator="sim", devices=1, callbacks=[watch], root_dir=folder(), **settings).run(module, _batches())
    watch.quiet()
    assert watch.bytes == sent
    gc.collect()
    assert sim.pinned_bytes() == pinned
    assert not any(inner._forward_pre_hooks for inner in module.modules())
    return [p.detach().cpu() for p in module.parameters()]


def a_run_has_the_same_weights() -> None:
    plain, offloaded = _run(Stack(3), 0), _run(Stack(3), 4 * 10 * MIB, activation_offload=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))


def slow_manual_optimization() -> None:
    plain, offloaded = _run(_Manual(3), 0), _run(_Manual(3), 4 * 10 * MIB, activation_offload=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))


class _Between(Stack):
    """What is saved between its blocks is wide, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(torch.sin(x)))
        return x


def slow_blocks_only() -> None:
    plain = _trained(_Between(4))
    everything, blocks = (_trained(_Between(4), activation_offload=setting) for setting in (True, "blocks"))
    assert _same(plain, everything)
    assert _same(plain, blocks)
    # The input of the first sine, and tanh's results, which the next sine saves too: before the last block there are three of these.
    assert (everything.sent, blocks.sent) == ((15 + 4) * MIB, 15 * MIB)


class Big(nn.Module):
    """Its weights have a MiB each, and so has its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x.view(-1, 512)))).view(x.shape)


def slow_parameters_stay() -> None:
    # Input and tanh's result of three blocks; linear layers save their weights, too.
    assert _compared(lambda: Stack(4, Big), rows=ROWS).sent == 6 * MIB
    assert _compared(lambda: Stack(4, Big), rows=2 * ROWS, precision="bf16-mixed").sent >= 6 * MIB


# -- with other settings ------------------------------------------------------------------------------------------------------------------

COMPILED = {"blocks": True, "backend": "aot_eager", "fullgraph": True}


def slow_recomputation_compilation_accumulation_and_bf16() -> None:
    for more in ({}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed", "rows": 2 * ROWS}):
        plain = _trained(Stack(), **more)
        for transforms in (
            {},
            {"activation_checkpointing": "full"},
            {"activation_checkpointing": "selective"},
            {"compile": COMPILED},
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.compile's own
                offloaded = _compared(Stack, **transforms, **more)
            assert offloaded.peak <= 0.65 * plain.peak, (transforms, more, offloaded.peak / plain.peak)


def slow_plans() -> None:
    """A plan has the bytes on the host, over the link and on the device."""
    for settings in (
        {},
        {"activation_offload": True},
        {"activation_offload": 3},
        {"activation_offload": True, "activation_checkpointing": "full"},
        {"activation_offload": True, "accumulate_grad_batches": 2},
    ):
        found = _trained(Stack(), **settings)
        plan = Fit(**settings).plan(Stack(), _batches(), world_size=1, device="h100")
        (rank,) = plan.traces
        assert plan.missing == ()
        held = rank.timeline[0].memory
        device = rank.peak.memory.total - held.parameters - held.inputs
        assert abs(device - found.peak) <= 0.05 * found.peak, (settings, device / MIB, found.peak / MIB)
        if "activation_offload" in settings:
            window = settings.get("accumulate_grad_batches", 1)
            assert rank.offloaded is not None
            planned = (rank.offloaded.host_bytes, rank.offloaded.sent_bytes, rank.offloaded.returned_bytes)
            assert planned == (found.host, window * found.sent, window * found.returned), (settings, planned, found[2:])


# -- what users do ------------------------------------------------------------------------------------------------------------------------


def slow_several_passes() -> None:
    def two_views(model: nn.Module, batch: Tensor) -> Tensor:
        return _loss_of(model, batch) + model(batch.neg()).sin().mean()

    def discarded(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch.neg())
        return _loss_of(model, batch)

    def validated(model: nn.Module, batch: Tensor) -> Tensor:
        loss = _loss_of(model, batch)
        with torch.no_grad():
            return loss + model(batch.neg()).mean()

    def older_first(model: nn.Module, batch: Tensor) -> Tensor:
        older = _loss_of(model, batch.neg())
        newer = _loss_of(model, batch)
        older.backward()
        return newer

    def twice(model: nn.Module, batch: Tensor) -> Tensor:
        loss = _loss_of(model, batch)
        loss.backward(retain_graph=True)
        return loss * 2

    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        loss = _loss_of(model, batch)
        (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + gradient.square().sum()

    for loop in (two_views, discarded, validated, older_first, twice, penalty):
        _compared(lambda: Stack(4), loop)


class _Raising(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Raising.calls += 1
        if _Raising.calls == 2:
            raise ValueError("planted in backward")
        return gradient * ctx.saved_tensors[0]


class _Fails(Block):
    """It fails in the first step's forward pass, and in a later step's backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = _Raising.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = _Raising.apply(super().forward(x))
        if self.calls == 1:
            raise ValueError("planted in forward")
        return out


def _stack(*kinds: Callable[[], nn.Module]) -> Stack:
    stack = Stack(0)
    stack.layers.extend(kind() for kind in kinds)
    return stack


def slow_errors_leave_it_usable() -> None:
    found = _compared(lambda: _stack(Block, Block, _Fails, Block, Block))
    assert [value for value in found.numbers if isinstance(value, str)] == [
        "ValueError: planted in forward",
        "ValueError: planted in backward",
    ]


class _Changes(Block):
    """A saved result is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.up(x))
        z = self.down(y * y)
        y.add_(1)
        return z


class _InPlace(Block):
    """Changes in place, and views, that autograd allows."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(x), inplace=True)
        pairs = torch.sigmoid(y.view(-1, 2, WIDTH).transpose(0, 1))
        parts = torch.cat([x, torch.sin(x), y], 1).split(WIDTH, 1)
        return (
            x + self.down(pairs.transpose(0, 1).reshape(x.shape).mul_(2)) + parts[0] * parts[1] + torch.tanh(parts[2])
        )


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ weight
        ctx.save_for_backward(x, y, weight.t())
        return y, y * 2

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y, transposed = ctx.saved_tensors
        gradient = (first + 2 * second) * torch.cos(y)
        return gradient @ transposed, x.t() @ gradient


class _CustomBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        first, second = _Custom.apply(x, self.up.weight)
        return torch.sin(first) + F.dropout(torch.tanh(second), 0.3)


class _Hooked(Block):
    """With hooks of the user's own, and torch's recomputation, inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.neg(), lambda tensor: tensor.neg()):
            x = torch.tanh(torch.sin(x))
        return checkpoint(super().forward, x, use_reentrant=False) + checkpoint(super().forward, x, use_reentrant=True)


class _OnAnotherStream(Block):
    """A part runs on a stream of the user's."""

    side: torch.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        side = _OnAnotherStream.side = _OnAnotherStream.side or torch.Stream("sim")
        main = torch.accelerator.current_stream()
        side.wait_stream(main)
        with side:
            y = torch.sin(torch.tanh(x * 2))
        out = super().forward(x)
        main.wait_stream(side)
        y.record_stream(main)
        x.record_stream(side)
        return out + y


def slow_tensors_of_every_kind() -> None:
    for kind in (_InPlace, _CustomBlock, _Hooked, _OnAnotherStream):
        _compared(lambda kind=kind: Stack(4, kind))
    for blocks in ((Block, _Changes, Block, Block), (Block, Block, Block, _Changes)):
        found = _compared(lambda blocks=blocks: _stack(*blocks))
        assert "variables needed for gradient computation has been modified" in str(found.numbers[0])

    def frozen() -> Stack:
        stack = Stack()
        for layer in (stack.first, *stack.layers[:2]):
            layer.requires_grad_(False)
        return stack

    def tied() -> Stack:
        stack = Stack()
        for layer in stack.layers[1:]:
            layer.up.weight = stack.layers[0].up.weight
        return stack

    assert _compared(frozen).sent == 15 * MIB
    assert _compared(tied).sent == 25 * MIB


# -- planted faults -----------------------------------------------------------------------------------------------------------------------

_BEFORE_COPY = "        out.wait_stream(accelerator.current_stream(self.device))\n"
_BUFFER_FREE = "        out.wait_stream(back)  # what a buffer held before has left it\n"
_COPY_DONE = "            back.wait_event(storage.departure.event)\n"
_MEMORY_FREE = "        back.wait_stream(now)  # until then that memory may be in use\n"
_GIVEN_BACK = "            self.copies.wait(now, departure)\n"
_ARRIVED = "        self.copies.wait(now, self.arrival)\n"
_DISCARDED = "                tensor.record_stream(crossing.stream)\n"
_ALIVE = "earlier.alive() is storage"
_WEAK = "= WeakValueDictionary()"

_FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "a copy does not wait for what it copies": ({_BEFORE_COPY: ""}, "read after write: copy D2H"),
    "a buffer is used again while it is read": ({_BUFFER_FREE: ""}, "of pinned memory"),
    "a copy back does not wait for the copy out": (
        {_COPY_DONE: "", _GIVEN_BACK: "            pass\n"},
        "read after write: copy H2D",
    ),
    "memory is given back before its copy is done": (
        {_GIVEN_BACK: "            pass\n"},
        "is not ordered after copy D2H",
    ),
    "a copy back takes memory that is in use": ({_MEMORY_FREE: ""}, "copy H2D"),
    "a tensor is used before it is back": ({_ARRIVED: ""}, "is not ordered after copy H2D"),
    "a discarded pass frees what is on its way": (
        {_DISCARDED: "                pass\n"},
        "is not ordered after copy D2H",
    ),
    "an address is taken for a tensor": ({_ALIVE: "True", _WEAK: "= {}"}, ""),
}
"""What is wrong -> lines of the source and what stands in their place, and words of the race; empty: wrong numbers."""


def slow_planted_faults_are_found() -> None:
    path = str(source.__file__)
    text = Path(path).read_text()

    def loop(model: nn.Module, batch: Tensor) -> Tensor:
        # A pass without a backward pass, whose memory is taken at once, and one whose backward pass ends before it uses what has come back for it.
        model(batch.neg())
        [torch.zeros(MIB // 4, device="sim") for _ in range(50)]
        torch.autograd.grad(_loss_of(model, batch), list(model.layers[3].parameters()))
        return _loss_of(model, batch)

    plain = _trained(Stack(), loop)
    for name, (changes, words) in _FAULTS.items():
        changed = text
        for line, other in changes.items():
            assert changed.count(line) == 1, (name, line)
            changed = changed.replace(line, other)
        exec(compile(changed, path, "exec"), vars(source))
        found = _trained(Stack(), loop, races=True, activation_offload=True)
        races = [race for race in sim.races() if words and words in race]
        assert races if words else not _same(plain, found), (name, sim.races()[:3])
        torch.sim.synchronize()
        sim.clear()
    exec(compile(text, path, "exec"), vars(source))
    assert _same(plain, _trained(Stack(), loop, activation_offload=True))
