"""A plan traces a step with no data in memory, and leaves the module and the process as they were."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from engine import Callback, DeepSpeed, Fit, Loss, MeshParallel, TrainModule
from engine.planning.plan import RankTrace

WIDTH, ROWS = 6, 4


class Net(TrainModule):
    """Two layers, 6 -> 8 -> 5: 56 + 45 = 101 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def data(samples: int = 16) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, WIDTH, generator=numbers), torch.arange(samples) % 5
    return DataLoader(TensorDataset(x, y), batch_size=ROWS, shuffle=True)


def planned(module: TrainModule, loader: Any = None, world_size: int = 1, **settings: Any) -> RankTrace:
    return (
        Fit(**{"max_steps": 2, **settings})
        .plan(module, data() if loader is None else loader, world_size=world_size)
        .traces[0]
    )


def totals(trace: RankTrace) -> tuple[list[int], list[int]]:
    """Bytes of all storages after each event of the first step, and of a further one."""
    sizes: dict[int, int] = {}
    found: tuple[list[int], list[int]] = [], []
    for events, each in zip((trace.allocations.first, trace.allocations.again), found, strict=True):
        for storage, size in zip(events[::2], events[1::2], strict=True):
            sizes[storage] = size
            each.append(sum(sizes.values()))
    return found


def bytes_sent(trace: RankTrace, kind: str) -> int:
    return sum(each.bytes for each in trace.collectives if each.kind == kind)


# -- what it finds ----------------------------------------------------------------------------------------------------------------


def test_one_process_by_hand() -> None:
    trace = planned(Net())
    start = trace.timeline[0].memory
    assert start.parameters == 101 * 4
    assert start.optimizer_state == 2 * 101 * 4 + 4 * 4  # two moments, and a step for each of four parameters
    assert start.inputs == ROWS * WIDTH * 4 + ROWS * 8
    assert start.gradients == 0
    assert max(moment.memory.gradients for moment in trace.timeline) == 101 * 4
    # Forward: two products. Backward: the second layer's two, and the first one's weight alone.
    assert trace.flops == 2 * ROWS * (WIDTH * 8 + 8 * 5) + 2 * ROWS * (2 * 8 * 5 + WIDTH * 8)
    assert trace.collectives == ()
    assert trace.missing == ()
    assert (trace.samples, trace.micro_batches) == (ROWS, 1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_allocations_repeat_the_step_and_the_first_one_makes_the_optimizers_state(
    strategy: str, accumulate: int
) -> None:
    ranks = 1 if strategy == "single" else 2
    trace = planned(Net(), data(16 * accumulate), ranks, strategy=strategy, accumulate_grad_batches=accumulate)
    first, again = totals(trace)
    start = trace.timeline[0].memory
    assert first[-1] == again[-1] == start.total
    assert max(again) == trace.peak.memory.total
    begin = start.parameters + start.communication + start.inputs
    assert max(first[: first.index(begin) + 1]) == begin
    events = trace.allocations.first
    stays = {storage for storage, size in dict(zip(events[::2], events[1::2], strict=True)).items() if size}
    state = next(n for n, storage in enumerate(events[::2]) if storage in stays and n > first.index(begin))
    assert max(first[:state]) > begin + start.parameters  # the backward pass has made gradients before
    assert max(first) <= max(again)


def test_a_stream_of_its_own_has_what_fsdp_reduces() -> None:
    """Nothing else can take its place: the streams are those of ``FSDPCommContext``."""
    assert set(planned(Net(), world_size=2, strategy="ddp").allocations.streams) == {0}
    found = planned(Net(), world_size=2, strategy="fsdp").allocations
    assert set(found.streams) == {0, 1, 2}
    pairs = zip(found.again[::2], found.again[1::2], strict=True)
    reduced = sorted(size for storage, size in pairs if size and found.streams[storage] == 2)
    assert reduced == [(3 * 8 + 3) * 4, (4 * 6 + 4) * 4]  # rank 0's rows of each layer's weight and bias


def test_ddp_reduces_each_gradient_once() -> None:
    trace = planned(Net(), world_size=64, strategy="ddp")
    (found,) = trace.collectives
    assert (found.kind, found.count, found.bytes, found.phase) == ("all_reduce", 1, 101 * 4, "backward")
    assert found.ranks == tuple(range(64))


def test_fsdp_holds_a_shard() -> None:
    trace = planned(Net(), world_size=4, strategy={"name": "fsdp", "min_size": 10**9})
    # Of the weights [8, 6] and [5, 8] and the biases [8] and [5] a rank has 2, 2, 2 and 2 of the rows; padded, so rank 0 has the most.
    shard = 2 * 6 + 2 * 8 + 2 + 2
    assert trace.timeline[0].memory.parameters == shard * 4
    assert bytes_sent(trace, "reduce_scatter") == 4 * shard * 4


def test_a_window_is_one_step() -> None:
    one, four = planned(Net()), planned(Net(), accumulate_grad_batches=4)
    assert (four.samples, four.micro_batches) == (4 * ROWS, 4)
    assert four.flops == 4 * one.flops


def test_clipping_and_its_check_need_no_values() -> None:
    trace = planned(Net(), world_size=4, strategy="ddp", gradient_clip_val=1.0, on_nonfinite="raise")
    assert trace.missing == ()
    assert any(each.phase == "optimizer step" for each in trace.operations)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_precisions(precision: str) -> None:
    trace = planned(Net(), world_size=2, strategy="ddp", precision=precision)
    size = {"bf16-true": 2, "64-true": 8}.get(precision, 4)
    assert trace.timeline[0].memory.parameters == 101 * size
    products = {each.dtype for each in trace.operations if "mm" in each.name}
    assert products == {{"64-true": "float64", "16-mixed": "float16"}.get(precision, "bfloat16")}


# -- modules of all kinds ---------------------------------------------------------------------------------------------------------


class Built(Net):
    """As large as no machine: 16 TiB."""

    def __init__(self) -> None:
        TrainModule.__init__(self)

    def configure_model(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 1 << 21), nn.Linear(1 << 21, 1 << 21, bias=False), nn.Linear(1 << 21, 5)
        )


class OnMeta(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(5))
        self.to("meta")

    def init_weights(self, module: nn.Module) -> None:
        """A training initializes what is on the meta device."""


class KeepsExample(Net):
    """An example of a shape, kept from step to step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.example = torch.empty(1000, device="meta")
        return super().training_step(batch, batch_idx)


def test_a_tensor_on_meta_needs_no_memory() -> None:
    assert planned(KeepsExample()).timeline == planned(Net()).timeline


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, 1.0, "norm")
        optimizer.step()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("scale", torch.ones(5))
        self.lock = threading.Lock()
        self.net.extend([self.first, self.second, self.frozen])


class Counts(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        x, y = batch
        chosen = y > 0  # three of the first four labels
        return Loss(F.cross_entropy(self.net(x)[chosen], y[chosen], reduction="sum"), chosen.sum())


class Hooked(Net):
    ready = False

    def setup(self, stage: str) -> None:
        self.last = nn.Linear(5, 5)

    def on_train_start(self) -> None:
        self.ready = True

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return 2 * batch[0], batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.ready
        assert self.trainer.world_size == 2
        return F.cross_entropy(self.last(self.net(batch[0])), batch[1])


@pytest.mark.parametrize(("module", "parameters"), [(OnMeta, 101), (ByHand, 101), (Tied, 101 + 25 + 30), (Hooked, 131)])
def test_modules(module: type[TrainModule], parameters: int) -> None:
    trace = planned(module(), world_size=2, strategy="ddp")
    assert trace.timeline[0].memory.parameters == parameters * 4
    assert trace.missing == ()
    assert bytes_sent(trace, "all_reduce") >= 101 * 4


def test_a_model_that_no_machine_holds() -> None:
    trace = planned(Built(), world_size=1024, strategy="fsdp")
    # The first rows of each: 2**11 of the first two layers' 2**21, and one of the last layer's five.
    shard = (1 << 11) * 7 + (1 << 11) * (1 << 21) + (1 << 21) + 1
    assert trace.timeline[0].memory.parameters == shard * 4


def test_counts_are_those_of_the_batch() -> None:
    trace = planned(Counts(), world_size=2, strategy="ddp")
    assert trace.missing == ()
    backward = [each for each in trace.operations if each.name == "aten.nll_loss_backward"]
    assert len(backward) == 1
    assert backward[0].bytes == 2 * 3 * 5 * 4 + 3 * 8 + 2 * 4  # scores and their gradients, three labels, two scalars


# -- values that are not there ----------------------------------------------------------------------------------------------------


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("copy", loss.item())
        if loss > 3:
            loss = 2 * loss
        return loss


class Wrong(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0][:, 1:]), batch[1])


class Stuck(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + torch.histogram(out.detach().flatten(), 3)[0].sum() + out.data_ptr()


def test_the_last_stage_of_a_pipeline_knows_the_kind_of_its_loss() -> None:
    class Staged(Net):
        def pipeline_stages(self) -> list[nn.Module]:
            return list(self.net)

        def training_step(self, batch: Any, batch_idx: int) -> Loss:
            x, y = batch
            return Loss(F.cross_entropy(self(x), y, reduction="sum"), len(y))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    plan = Fit(strategy="pp", max_steps=2).plan(Staged(), data(), world_size=2, device="cpu")
    assert [trace.missing for trace in plan.traces] == [(), ()]
    assert sum(trace.flops for trace in plan.traces) > 0


def test_values_that_are_read_are_named() -> None:
    trace = planned(Reads(), world_size=2, strategy="ddp")
    assert bytes_sent(trace, "all_reduce") == 101 * 4
    item, branch = trace.missing
    assert item.startswith(__file__)
    assert 'self.log("copy", loss.item())' in item
    assert item.endswith("continues with 1.0")
    assert "if loss > 3:" in branch
    assert branch.endswith("continues with False")


def test_what_cannot_be_traced_ends_the_plan() -> None:
    trace = planned(Stuck())
    assert trace.missing[-1].startswith(f"the plan ends at {__file__}")
    assert "out.data_ptr()" in trace.missing[-1]
    assert trace.flops  # the forward pass is there


class Sparse(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch[0].argmax(-1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_reduction_that_needs_values_ends_the_plan() -> None:
    assert not planned(Sparse()).missing
    (sentence,) = planned(Sparse(), world_size=2, strategy="ddp").missing
    assert (
        sentence
        == "the plan ends at an operation of torch's own: UnsupportedOperatorException: c10d.allreduce_.default"
    )


def test_what_deepspeed_would_write_to_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"offload_optimizer=.nvme. .*cannot be planned: .*Plan it with offload_optimizer=.cpu."
    ):
        Fit(strategy=DeepSpeed(offload_optimizer="nvme", nvme_path=tmp_path), accelerator="cpu").plan(
            Net(), data(), world_size=2, device="cpu"
        )


def test_the_users_own_errors_are_errors() -> None:
    with pytest.raises(RuntimeError, match=r"\[4, 5\] X \[6, 8\]"):
        planned(Wrong())
    assert not dist.is_initialized()


# -- everything as it was ---------------------------------------------------------------------------------------------------------


def state(module: nn.Module) -> list[Any]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(name, id(t), t.device, t.requires_grad, t._version, t.detach().clone().tolist()) for name, t in tensors]


def process() -> list[Any]:
    numbers = np.random.get_state()
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if hasattr(part, "tolist") else part for part in numbers],
        # torch sets this one itself when its compiler is first imported.
        {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"},
        dist.is_initialized(),
        torch.are_deterministic_algorithms_enabled(),
        torch.UntypedStorage.__dict__.get("resize_"),
        torch.utils.swap_tensors,
        torch.is_grad_enabled(),
        sys.excepthook,
    ]


class Meddles(Callback):
    """Changes its own state and the model's."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.calls += 1


@pytest.mark.parametrize(("kind", "strategy"), [(Tied, "ddp"), (Net, "fsdp"), (Wrong, "fsdp")])
def test_nothing_changes(kind: type[TrainModule], strategy: str, tmp_path: Path) -> None:
    module, loader, callback = kind(), data(), Meddles()
    module.net[0].weight.register_hook(lambda grad: grad)
    before, numbers, attributes = state(module), process(), {name: id(value) for name, value in vars(module).items()}
    fit = Fit(strategy=strategy, callbacks=[callback], root_dir=tmp_path / "run", seed=7, deterministic=True)
    if kind is Wrong:
        with pytest.raises(RuntimeError):
            fit.plan(module, loader, world_size=4)
    else:
        fit.plan(module, loader, world_size=4)
    assert state(module) == before
    assert {name: id(value) for name, value in vars(module).items()} == attributes
    assert process() == numbers
    assert not module.attached
    assert callback.calls == 0
    assert not (tmp_path / "run").exists()


def test_torch_keeps_nothing_of_a_simulated_mesh() -> None:
    module = Net()
    plan = {"net.0": "colwise", "net.3": "rowwise"}
    trace = planned(module, world_size=4, strategy={"name": "mesh", "tp": 4, "dp_shard": 1, "plan": plan})
    assert {each.axis for each in trace.collectives} == {"tp"}
    kept: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding  # type: ignore[attr-defined]
    assert kept.cache.cache_info().currsize == 0


def test_a_torch_without_these_parts_is_one_clear_error() -> None:
    code = """
import sys
sys.modules["torch.utils.flop_counter"] = None
import engine.planning.torch_private
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: planning needs parts of torch that torch")


def test_the_module_trains_afterwards_as_without_a_plan(tmp_path: Path) -> None:
    weights = []
    for plans in (False, True):
        torch.manual_seed(3)
        module, fit = Net(), Fit(strategy="single", max_steps=3, seed=5, root_dir=tmp_path)
        if plans:
            fit.plan(module, data(), world_size=1)
        fit.run(module, data())
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


# -- data -------------------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(8):
            yield torch.full((WIDTH,), 1.0), torch.tensor(index % 5)


def test_data_of_all_kinds() -> None:
    whole = planned(Net()).timeline[0].memory.inputs
    assert (
        planned(Net(), [(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long))]).timeline[0].memory.inputs
        == whole
    )
    assert planned(Net(), DataLoader(Stream(), batch_size=ROWS)).timeline[0].memory.inputs == whole
    # Fewer samples than one global batch: the plan is of a full one.
    assert planned(Net(), data(8), world_size=64, strategy="ddp").samples == ROWS


def test_data_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(ValueError, match="can be read only once"):
        planned(Net(), (batch for batch in data()))


def test_a_process_in_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process has joined a job"):
            planned(Net(), world_size=2, strategy="ddp")
    finally:
        dist.destroy_process_group()


# -- the device that is planned for -----------------------------------------------------------------------------------------------


def test_optimizers_work_as_on_the_device() -> None:
    """On CUDA AdamW takes the square roots of all parameters' second moments at once, on the CPU of one after the other."""
    found = {}
    for device in ("cpu", "h100"):
        trace = Fit(max_steps=2).plan(Net(), data(), world_size=1, device=device).traces[0]
        found[device] = max(m.memory.temporaries for m in trace.timeline if m.phase == "optimizer step")
    assert found == {"cpu": 2 * 48 * 4, "h100": 101 * 4}


def test_what_is_offloaded_is_not_on_the_device() -> None:
    fit = Fit(max_steps=2, strategy={"name": "fsdp", "cpu_offload": True})
    start = fit.plan(Net(), data(), world_size=4, device="h100").traces[0].timeline[0].memory
    assert (start.parameters, start.optimizer_state) == (0, 0)


def test_a_compiled_step_is_planned_as_an_eager_one() -> None:
    compiled, eager = planned(Net(), compile=True), planned(Net())
    assert compiled.operations == eager.operations
    assert "torch.compile is left out" in compiled.missing[0]


def test_every_stage_knows_the_kind_of_the_loss(tmp_path: Path) -> None:
    """Sums and counts are added over the ranks, 16 bytes a step: by those without the loss too."""
    settings: Any = {"accelerator": "cpu", "log_every_n_steps": 0, "num_sanity_val_steps": 0, "check": False}
    table = jobs.parity()
    for weighted, size in ((True, 16), (False, 0)):
        fit = Fit(strategy=MeshParallel(pp=2), root_dir=tmp_path, **settings)
        loader = DataLoader(jobs.sentences(64), batch_size=16)
        traces = fit.plan(table.Transformer(weighted), loader, world_size=2, device="cpu").traces
        sent = [sum(c.bytes for c in t.collectives if c.phase == "optimizer step") for t in traces]
        assert sent == [size, size]
