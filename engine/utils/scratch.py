"""Temporary directories of a job; those of killed processes are removed when the next one is created."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "holder"
"""The file in each directory that its process locks."""
_locks: dict[Path, int] = {}
"""By directory, the descriptor that holds its lock."""


def make_directory(prefix: str) -> Path:
    """Create a directory that this process locks until it ends; remove directories that dead processes of the same user left behind."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (leftover / _LOCK).stat().st_uid == os.getuid() and (
                descriptor := _lock(leftover / _LOCK, os.O_RDWR)
            ) is not None:
                remove(leftover)
                os.close(descriptor)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    descriptor = _lock(directory / "new", os.O_RDWR | os.O_CREAT)
    # Renamed once it is locked, so that another process that looks for leftovers never finds it unlocked.
    (directory / "new").rename(directory / _LOCK)
    if descriptor is not None:
        _locks[directory] = descriptor
    return directory


def remove(directory: Path) -> None:
    """Remove a directory with its content; repeated calls do nothing."""
    shutil.rmtree(directory, ignore_errors=True)
    if (descriptor := _locks.pop(directory, None)) is not None:
        os.close(descriptor)


def _lock(path: Path, flags: int) -> int | None:
    """Lock a file; return the descriptor that holds the lock until it is closed, or ``None`` if another process has the lock."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
