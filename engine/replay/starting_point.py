"""The checkpoint of a run from which one of its steps can be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.user_paths import find


def starting_point(run: str | Path, step: int) -> tuple[str, dict[str, Any]]:
    """The newest complete checkpoint from before ``step``, and its manifest.

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
    manifests = {name: manifest for name, manifest in location.manifests().items() if name in names}
    steps = {name: _step(manifest) for name, manifest in manifests.items()}
    before = {name: at for name, at in steps.items() if at is not None and at < step}
    if not before:
        has = ", ".join(str(at) for at in steps.values() if at is not None) or "none"
        raise FileNotFoundError(
            f"{run} has no checkpoint from before step {step} (it has those of steps: {has}): save more of them with ModelCheckpoint"
        )
    name = max(before, key=lambda each: before[each])
    return str(location.path(name)), manifests[name]


def _step(manifest: dict[str, Any]) -> int | None:
    counters = manifest.get("counters")
    step = counters.get("step") if isinstance(counters, dict) else None
    return step if type(step) is int else None
