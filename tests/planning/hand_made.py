"""Traces and jobs with round numbers, for tests of what is estimated from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.planning.device_table import Hardware, Link, Reached
from engine.planning.job import Job
from engine.planning.rank_trace import Allocations, Collective, Memory, Moment, Operation, RankTrace

GIB = 2**30
# 1e12 operations and 1e9 bytes a second, all reached; links of 1e9 and 1e8 bytes a second.
DEVICE = Hardware(
    name="round",
    memory=8 * GIB,
    peaks={"float32": 1e12, "bfloat16": 4e12},
    bandwidth=1e9,
    within=Link(1e9, 1e-6),
    between=Link(1e8, 1e-5),
    per_node=4,
    caching=False,
    reserved=0,
    dispatch=1e-6,
    reached=Reached(1.0, 1.0, 1.0),
    source="made up",
)
PEAK = Memory(parameters=4 * GIB, optimizer_state=2 * GIB, activations=GIB)
OPERATIONS = (
    Operation("aten.mm", "float32", flops=10**12, bytes=10**6, count=1, phase="forward"),
    Operation("aten.mm", "float32", flops=10**12, bytes=10**6, count=2, phase="backward"),
    Operation("aten.add", "float32", flops=0, bytes=10**9, count=1, phase="optimizer step"),
)


def collective(kind: str = "all_reduce", size: int = 10**9, count: int = 1, **other: Any) -> Collective:
    made = Collective(kind, "dp_replicate", (0, 1), count, size, "backward")
    return replace(made, **other)


def rank_trace(**other: Any) -> RankTrace:
    """A rank that computes 1 s forward, 2 s backward, and moves memory for 1 s in the optimizer's step."""
    made = RankTrace(
        rank=0,
        role="",
        samples=8,
        micro_batches=2,
        peak=Moment("backward", "layers.1", PEAK),
        held_at_peak={"layers.1": 3 * GIB, "layers.0": GIB},
        timeline=(
            Moment("start", "", Memory(parameters=4 * GIB, optimizer_state=2 * GIB)),
            Moment("forward", "layers.0", Memory(parameters=4 * GIB, optimizer_state=2 * GIB, activations=GIB // 2)),
            Moment("backward", "layers.1", PEAK),
            Moment("end", "", Memory(parameters=4 * GIB, optimizer_state=2 * GIB)),
        ),
        collectives=(),
        operations=OPERATIONS,
        allocations=Allocations((0, 4 * GIB, 1, GIB, 1, 0, 2, 2 * GIB), (1, GIB, 1, 0), (0, 0, 0)),
    )
    return replace(made, **other)


def job(**other: Any) -> Job:
    facts = {"world_size": 2, "strategy": "DDP", "axes": {"dp_replicate": 2}, "data_ranks": 2, "parameters": 10**9}
    return Job(**{**facts, "trainable": 10**9, "parameter_bytes": 4 * GIB, **other})
