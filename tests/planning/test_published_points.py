"""Plans of Llama 3.1 beside published measurements: memory within 10 %, tokens a second within a factor of 1.5."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llama import SHAPES, Llama, tokens
from published import MEMORY, POINTS, Point, planned, reserved_gib, tokens_per_second

from engine import Fit
from engine.planning.devices import hardware

MEMORY_WITHIN, SPEED_WITHIN = 0.10, 1.5
PLANNED = [point for point in POINTS if point.model == "8B" and point.ranks == 8]
"""Plans of more ranks and of larger models take longer than all others together: ``python tests/benchmarks/planning.py --published`` has them."""


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    published = {"8B": 8.03e9, "70B": 70.6e9, "405B": 405.9e9}
    if name in published:
        assert SHAPES[name].parameters == pytest.approx(published[name], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in PLANNED if p.gib], ids=lambda p: p.name)
def test_memory(point: Point) -> None:
    plan = planned(point)
    assert point.gib is not None
    assert reserved_gib(plan) == pytest.approx(point.gib, rel=MEMORY_WITHIN)
    assert plan.fits, "it was measured, so it fits"


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in PLANNED if p.tokens_per_s and not p.fp8], ids=lambda p: p.name)
def test_tokens_per_second(point: Point) -> None:
    each = tokens_per_second(planned(point))
    assert point.tokens_per_s is not None
    assert 1 / SPEED_WITHIN <= each / point.tokens_per_s <= SPEED_WITHIN


@pytest.mark.slow
def test_what_is_known_not_to_fit() -> None:
    # DDP holds 8 billion parameters, their gradients and AdamW's two moments in float32: 128 GB, on a device of 96.
    fit = Fit(strategy="ddp", precision="bf16-mixed")
    plan = fit.plan(Llama(SHAPES["8B"]), tokens(1, 512), world_size=8, device=replace(hardware("h100"), memory=MEMORY))
    assert not plan.fits
    assert plan.peak_bytes > 16 * SHAPES["8B"].parameters
