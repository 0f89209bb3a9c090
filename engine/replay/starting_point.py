"""The checkpoint of a run from which one of its steps can be reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.user_paths import find


@dataclass(frozen=True)
class StartingPoint:
    """Where a run's step can be repeated from, and what the run was like at that step."""

    checkpoint: str
    """The newest complete checkpoint from before the step."""
    described_by: str
    """The checkpoint whose process ran the step: the first one from the step on, or the newest. A resumed run may have other settings and another
    number of ranks than :attr:`checkpoint`, from which it was resumed."""
    manifest: dict[str, Any]
    """The manifest of :attr:`described_by`."""


def starting_point(run: str | Path, step: int) -> StartingPoint:
    """The checkpoints for a replay of ``step``.

    Args:
        run: a run's folder, its folder of checkpoints, or one of these; a directory or a URL.
        step: the number of the step, from 1.

    Raises:
        ValueError: ``step`` is not above 0.
        FileNotFoundError: the run has no checkpoint from before it.
        DamagedCheckpoint: it has only incomplete ones.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"replay(step={step!r}): steps are numbered from 1")
    location, names = find(run)
    manifests = location.manifests()
    steps = {name: at for name, manifest in manifests.items() if (at := _step(manifest)) is not None}
    before = [name for name, at in steps.items() if name in names and at < step]
    if not before:
        has = ", ".join(str(at) for name, at in steps.items() if name in names) or "none"
        raise FileNotFoundError(
            f"{run} has no checkpoint from before step {step} (it has those of steps: {has}): save more of them with ModelCheckpoint"
        )
    later = [name for name, at in steps.items() if at >= step]
    described_by = min(later, key=steps.__getitem__) if later else max(steps, key=steps.__getitem__)
    checkpoint = max(before, key=steps.__getitem__)
    return StartingPoint(str(location.path(checkpoint)), str(location.path(described_by)), manifests[described_by])


def _step(manifest: dict[str, Any]) -> int | None:
    counters = manifest.get("counters")
    step = counters.get("step") if isinstance(counters, dict) else None
    return step if type(step) is int else None
