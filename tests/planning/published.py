"""Published measurements of training Llama 3.1, to hold plans against.

Source: github.com/pytorch/torchtitan at b5bcd76, ``benchmarks/llama3_h100_202412_torchtitan.md`` (tables 1, 3, 4, 5) and
``benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md``; the paper is arXiv 2410.06511. What those pages leave out comes from torchtitan at 9dec370,
with which the tables were measured:

- ``train_configs/llama3_*.toml``: sequences of 8,192 tokens, AdamW, gradients clipped to norm 1; parameters and optimizer state in float32, gathered
  in bfloat16, gradients reduced in float32.
- ``torchtitan/metrics.py``: memory is ``reserved_bytes.all.peak``, what the allocator has taken, in GiB; over all ranks the largest.
- ``parallelisms/parallelize_llama.py``: "selective" keeps attention and every second product of a layer; tensor parallel cuts the residual path
  along the sequence and the logits along the vocabulary; in a pipeline gathered parameters are kept between forward and backward passes.
- ``parallelisms/pipelining_utils.py``: as many micro-batches in the pipeline as it has ranks.

Hardware: nodes of 8 H100 (96 GB HBM2e, 2.4 TB/s, limited to 500 W) with NVLink, 400 Gb/s a GPU between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from llama import SHAPES, Llama, tokens

from engine import FSDP, Fit, MeshParallel
from engine.planning.device_memory import replay
from engine.planning.devices import hardware
from engine.planning.plan import Plan

MEMORY, BANDWIDTH = int(96e9), 2.4e12
"""Of a device: bytes, and bytes a second. Its operations a second are those of NVIDIA's data sheet of the H100 SXM: the pages state none."""
SEQUENCE = 8192


@dataclass(frozen=True)
class Point:
    """A row of a table."""

    name: str
    model: str
    ranks: int
    rows: int
    """Sequences of a rank's (or, under tensor and pipeline parallel, its group's) micro-batch: torchtitan's local batch size."""
    recompute: str
    """``"every second"`` or ``"full"``."""
    axes: dict[str, Any] = field(default_factory=dict)
    """Fields of ``MeshParallel``; none: ``FSDP()``."""
    gib: float | None = None
    """Reserved memory."""
    tokens_per_s: float | None = None
    """Of one GPU."""
    compiled: bool = False
    fp8: bool = False
    """Measured with float8 products, which change the memory by 0.2 of 77 GiB in table 1."""

    @property
    def node_count(self) -> int:
        return self.ranks // 8


_TP = {"tp": 8, "sequence_parallel": True, "loss_parallel": True}
_PP = {**_TP, "pp": 8, "dp_shard": 8, "reshard_after_forward": False, "num_microbatches": 8}

POINTS = (
    Point("8B, 8 ranks", "8B", 8, 2, "every second", {}, 82.4, 5762),
    Point("8B, 8 ranks, compiled", "8B", 8, 2, "every second", {}, 77.0, 6667, compiled=True),
    Point("8B, 128 ranks", "8B", 128, 2, "every second", {}, 67.0, 5605),
    Point("8B, 128 ranks, compiled", "8B", 128, 2, "every second", {}, 62.0, 6514, compiled=True),
    Point("8B, 8 x 8 ranks, compiled", "8B", 64, 12, "every second", {**_TP, "dp_shard": 8}, None, 4378, compiled=True),
    Point("70B, 32 x 8 ranks, compiled, fp8", "70B", 256, 16, "full", {**_TP, "dp_shard": 32}, 71.9, 829, True, fp8=True),
    Point("70B, 32 x 8 ranks, compiled", "70B", 256, 16, "full", {**_TP, "dp_shard": 32}, None, 597.3, compiled=True),
    Point("405B, 8 x 8 x 8 ranks, 1F1B", "405B", 512, 32, "full", {**_PP, "schedule": "1f1b"}, 82.5, 100, True, fp8=True),
    Point(
        "405B, 8 x 8 x 8 ranks, interleaved", "405B", 512, 32, "full", {**_PP, "schedule": "interleaved"}, 72.7, 128, True, fp8=True
    ),
)  # fmt: skip


def planned(point: Point) -> Plan:
    """The plan of a point on torchtitan's hardware."""
    plan = _planned(point.model, point.ranks, point.rows, point.recompute, tuple(point.axes.items()))
    return replace(plan, job=replace(plan.job, compiled=point.compiled))


@cache
def _planned(model: str, ranks: int, rows: int, recompute: str, axes: tuple[tuple[str, Any], ...]) -> Plan:
    """Points that differ in what a trace does not see share it."""
    fit = Fit(
        strategy=MeshParallel(**{"dp_shard": ranks // 8, **dict(axes)}) if axes else FSDP(),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        activation_checkpointing="full" if recompute == "full" else None,
    )
    module = Llama(SHAPES[model], every_second=recompute == "every second")
    device = replace(hardware("h100"), memory=MEMORY, bandwidth=BANDWIDTH)
    return fit.plan(module, tokens(rows, SEQUENCE), world_size=ranks, nodes=ranks // 8, device=device)


def reserved_gib(plan: Plan) -> float:
    """What the allocator takes on that device, as torchtitan reports it."""
    room = MEMORY - plan.device.reserved
    return max(replay(trace.allocations, room).reserved for trace in plan.traces) / 2**30


def tokens_per_second(plan: Plan) -> float:
    """Of one GPU."""
    return plan.samples_per_second * SEQUENCE / plan.job.world_size
