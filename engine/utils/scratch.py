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


def make(prefix: str) -> Path:
    """A new directory, locked by this process until its end; removes those that dead processes of the same user left behind."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (left / _HOLDER).stat().st_uid == os.getuid() and (
                descriptor := _hold(left / _HOLDER, os.O_RDWR)
            ) is not None:
                remove(left)
                os.close(descriptor)
    found = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = _hold(found / "new", os.O_RDWR | os.O_CREAT)
    (found / "new").rename(found / _HOLDER)  # locked already: another process that looks for what is left sees no other
    if descriptor is not None:
        _held[found] = descriptor
    return found


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
