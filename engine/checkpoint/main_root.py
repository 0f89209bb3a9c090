"""The choice of the place from which a run resumes, when its callbacks save checkpoints in several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.resume import NAMES, Resume
from engine.checkpoint.run_folder import Trained, newest_checkpoints
from engine.checkpoint.runs import RunRoot, run_root_of
from engine.distributed.collectives import all_or_none
from engine.distributed.group import Group

Root = str | Path | None
"""A directory or URL for checkpoints; ``None``: the run's folder."""


def main_root(
    group: Group,
    root_dir: Path,
    roots: Sequence[Root],
    best: Root,
    checkpoint: str | Path | Resume | None,
    earlier: Trained | None,
    run_name: str = "",
) -> tuple[Root, Trained | None]:
    """The one of ``roots`` in which the ``checkpoint`` is, from which the run resumes or loads weights; all ranks call this together.

    ``"last"`` and ``"auto"`` mean the checkpoint that was written last in any of them, ``"best"`` the best one in ``best``. Without such a checkpoint
    the first root counts. Also return ``earlier`` with the folder under that root.

    Args:
        root_dir: the folder that runs share.
        best: the root of the callback that ranks checkpoints by a metric.
        earlier: the same ``Fit``'s previous training, if any; then the names mean its checkpoints.
        run_name: the run's name; empty: none.
    """
    if checkpoint is None or len(roots) < 2:
        return roots[0] if roots else None, earlier
    name = str(checkpoint.path if isinstance(checkpoint, Resume) else checkpoint)
    runs = run_name or ("" if earlier is None else earlier.name)
    places = [
        run_root_of(root_dir, "checkpoints", runs) if root is None else run_root_of(root, name=runs) for root in roots
    ]

    def find() -> list[Any]:
        index = (
            roots.index(best)
            if name == "best"
            else (_newest(places, earlier) if name in NAMES else _with(places, name))
        )
        number = None if earlier is None else places[index].with_id(earlier.id)
        return [index, None if number is None else places[index].storage(number).root]

    index, folder = all_or_none(group, lambda: find() if group.is_main else None)[0]
    return roots[index], earlier if earlier is None or folder is None else earlier._replace(checkpoints=folder)


def _newest(places: Sequence[RunRoot], earlier: Trained | None) -> int:
    """The index of the place with the checkpoint that was written last."""

    def written_at(place: RunRoot) -> float:
        number = None if earlier is None else place.with_id(earlier.id)
        if earlier is not None and number is None:
            return 0.0
        storage = newest_checkpoints(place) if number is None else place.storage(number)
        manifests: list[dict[str, Any]] = list(storage.manifests().values())
        return float(manifests[-1].get("saved_at", 0.0)) if manifests else 0.0

    times = [written_at(place) for place in places]
    return times.index(max(times))


def _with(places: Sequence[RunRoot], path: str) -> int:
    """The index of the place that has the checkpoint, or the checkpoints of the run, at ``path``; 0 if none has."""
    return next(
        (
            index
            for index, place in enumerate(places)
            if place.number_of_run(path) is not None or place.name_of_run(path)
        ),
        0,
    )
