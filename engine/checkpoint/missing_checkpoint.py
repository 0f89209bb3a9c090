"""Reasons why no checkpoint is at a path, for errors."""

from __future__ import annotations

import os
from pathlib import Path

from engine.checkpoint.manifest import FOLDERS, MANIFEST
from engine.utils.extensions import advice
from engine.utils.text import terminal_text

_SHOWN = 5
"""Names of a folder's entries that are shown."""
PLACE = "checkpoint's folder"
"""The place for which :func:`engine.utils.extensions.advice` is asked about files of other libraries."""


def reason(directory: Path) -> str:
    """Why there is no checkpoint at ``directory``, and what to do: the path is wrong, a copy is incomplete, or another library has written it."""
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return _reason_for_absence(directory)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {terminal_text(error)}"
    if not names:
        return "it is an empty folder"
    if any(next(directory.glob(pattern), None) for pattern in ("rank=*", *(f"{folder}/rank=*" for folder in FOLDERS))):
        return f"its other files are there, so a copy or a save, which writes {MANIFEST} last, was cut off: copy it again, or give another one"
    for sentence in filter(None, (advice(PLACE, name) for name in names)):
        return sentence
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return terminal_text(f"it has {', '.join(names[:_SHOWN])}{more}")


def _reason_for_absence(directory: Path) -> str:
    """The reason where nothing is at ``directory``."""
    if directory.is_symlink():
        return f"it is a link to {terminal_text(os.readlink(directory))}, which does not exist"
    first = directory
    while not first.parent.exists():
        first = first.parent
    if first.parent.is_file():
        return f"{terminal_text(first.parent)} is a file"
    return f"{terminal_text(first)} does not exist; if it was moved or renamed, give its new path"
