"""The steps of a schedule of batch sizes, known before the training; ``test_clock.py`` trains with such schedules."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from engine import Duration
from engine.loop.batch_sizes import BatchSizes, Stage


def steps_one_by_one(stages: Any, unit: str, size: int, per_window: int, limits: tuple[Any, Any, Any]) -> list[int]:
    """The steps of each stage, counted window by window; a row has three tokens."""
    epochs, samples, most = limits
    steps = done = epoch = position = 0
    counts = [0] * len(stages)
    while (epochs is None or epoch < epochs) and (samples is None or done < samples) and (most is None or steps < most):
        reached = {"samples": done, "tokens": 3 * done, "steps": steps, "epochs": done / size}[unit]
        stage = max(number for number, (start, _) in enumerate(stages) if start <= reached)
        read = min(stages[stage][1] * per_window, size - position)
        position, done, steps = position + read, done + read, steps + 1
        counts[stage] += 1
        if position == size:
            epoch, position = epoch + 1, 0
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_stages_are_known_before(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        size, per_window = chance.randint(1, 60), chance.randint(1, 4)
        unit = chance.choice(("samples", "tokens", "steps", "epochs"))
        starts = [0, *sorted(chance.sample(range(1, 6 if unit == "epochs" else 200), chance.randint(0, 3)))]
        stages = [(start, chance.randint(1, 4)) for start in starts]
        limits = chance.choice((None, chance.randint(1, 8))), chance.choice((None, chance.randint(1, 300))), 150
        data: Any = SimpleNamespace(samples_of_pass=size, samples_of_round=per_window, tokens_per_sample=3)
        sizes = BatchSizes([Stage(Duration(unit, start), window) for start, window in stages], data)
        assert sizes.steps_by_stage(*limits) == steps_one_by_one(stages, unit, size, per_window, limits)
