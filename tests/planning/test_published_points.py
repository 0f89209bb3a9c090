"""Plans of Llama 3.1 beside published measurements: memory within 15 %, tokens a second within a factor of 1.5."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from llama import SHAPES, Llama, tokens
from published import BANDWIDTH, MEMORY, POINTS, SEQUENCE, Point

from engine import FSDP, Fit, MeshParallel
from engine.planning.devices import hardware
from engine.planning.plan import Plan

SPEED_WITHIN = 1.5
PLANNED = [point for point in POINTS if "pp" not in point.axes]
"""Plans of the pipelines of 512 ranks take minutes."""


@cache
def planned(model: str, ranks: int, rows: int, recompute: str, tp: int) -> Plan:
    """A plan on torchtitan's hardware; points that differ in what a plan does not see share it."""
    strategy: Any = (
        MeshParallel(tp=tp, dp_shard=ranks // tp, sequence_parallel=True, loss_parallel=True) if tp > 1 else FSDP()
    )
    fit = Fit(
        strategy=strategy,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        activation_checkpointing="full" if recompute == "full" else None,
    )
    module = Llama(SHAPES[model], every_second=recompute == "every second")
    device = replace(hardware("h100"), memory=MEMORY, bandwidth=BANDWIDTH)
    return fit.plan(module, tokens(rows, SEQUENCE), world_size=ranks, nodes=ranks // 8, device=device)


def of(point: Point) -> Plan:
    plan = planned(point.model, point.ranks, point.rows, point.recompute, point.axes.get("tp", 1))
    return replace(plan, job=replace(plan.job, compiled=point.compiled))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    published = {"8B": 8.03e9, "70B": 70.6e9, "405B": 405.9e9}
    if name in published:
        assert SHAPES[name].parameters == pytest.approx(published[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in PLANNED if p.gib], ids=lambda p: p.name)
def test_memory(point: Point) -> None:
    plan = of(point)
    reserved = (plan.need.segments + plan.need.fragmentation) / 2**30
    assert point.gib is not None
    assert reserved == pytest.approx(point.gib, rel=point.within)
    assert plan.fits, "it was measured, so it fits"


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in PLANNED if p.tokens_per_s and not p.fp8], ids=lambda p: p.name)
def test_tokens_per_second(point: Point) -> None:
    plan = of(point)
    each = plan.samples_per_second * SEQUENCE / point.ranks
    assert point.tokens_per_s is not None
    assert 1 / SPEED_WITHIN <= each / point.tokens_per_s <= SPEED_WITHIN


@pytest.mark.slow
def test_what_is_known_not_to_fit() -> None:
    # DDP holds 8 billion parameters, their gradients and AdamW's two moments in float32: 128 GB, on a device of 96.
    fit = Fit(strategy="ddp", precision="bf16-mixed")
    plan = fit.plan(Llama(SHAPES["8B"]), tokens(1, 512), world_size=8, device=replace(hardware("h100"), memory=MEMORY))
    assert not plan.fits
    assert plan.peak_bytes > 16 * SHAPES["8B"].parameters
