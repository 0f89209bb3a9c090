"""Temporary directories of a job that do not outlive it, even when its process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_HOLDER = "holder"
_held: dict[Path, int] = {}


def make_directory(prefix: str) -> Path:
    """A new directory, locked by this process until its end; removes those that dead processes of the same user left behind."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (leftover / _HOLDER).stat().st_uid == os.getuid() and (
                descriptor := _hold(leftover / _HOLDER, os.O_RDWR)
            ) is not None:
                remove(leftover)
                os.close(descriptor)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = _hold(directory / "new", os.O_RDWR | os.O_CREAT)
    (directory / "new").rename(
        directory / _HOLDER
    )  # locked already: another process that looks for what is left sees no other
    if descriptor is not None:
        _held[directory] = descriptor
    return directory


def remove(directory: Path) -> None:
    """Remove it with its content; repeated calls do nothing."""
    shutil.rmtree(directory, ignore_errors=True)
    if (descriptor := _held.pop(directory, None)) is not None:
        os.close(descriptor)


def _hold(path: Path, flags: int) -> int | None:
    """A descriptor that locks the file until it is closed or the process ends; ``None``: another process holds it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
