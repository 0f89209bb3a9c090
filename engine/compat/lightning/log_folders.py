"""The folders ``save_dir/name/version_N`` in which Lightning's loggers of files write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from engine.checkpoint.remote_storage import reach
from engine.checkpoint.runs import run_root_of
from engine.utils.paths import expanded

_PREFIX = "version_"


def next_version(root: str) -> int:
    """The number after the largest ``N`` of the folders ``version_N`` in ``root``, a path or a URL; 0 if there is none."""
    return max(_versions(root), default=-1) + 1


def latest_trained(root: str) -> int | None:
    """The largest ``N`` of the folders ``version_N`` in ``root`` with checkpoints, else the largest with a training; ``None`` if there is none."""
    numbers = sorted(_versions(root), reverse=True)
    runs = {number: run_root_of(version_folder(root, number), "checkpoints") for number in numbers}
    saved = (n for n in numbers if any(runs[n].has_checkpoints(number) for number in runs[n].newest_first()))
    trained = (n for n in numbers if runs[n].record(0).stage == "fit")
    return next(chain(saved, trained), None)


def version_folder(root: str, version: int | str) -> str:
    """The folder of a version in ``root``."""
    return os.path.join(root, version if isinstance(version, str) else f"{_PREFIX}{version}")


def _versions(root: str) -> Iterator[int]:
    names = (Path(name).name for name in _entries(root))
    numbers = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    return (int(number) for number in numbers if number.isdecimal())


def _entries(root: str) -> list[str]:
    try:
        if "://" not in root:
            with os.scandir(expanded(root)) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        files, inner = reach(root)
        return [str(entry).rstrip("/") for entry in files.ls(inner, detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
