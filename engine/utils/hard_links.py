"""Files with several names: a backup made by ``cp -al`` shares its files with the original, and what is written into one is in both."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def separate(path: str | os.PathLike[str]) -> None:
    """Make a file that is about to be changed in place one of its own, if it has other names (hard links): these keep what they have.

    Args:
        path: a file, which need not exist. Symbolic links are followed.

    Raises:
        OSError: the file cannot be copied.
    """
    try:
        status = os.stat(path)
    except OSError:  # opening it reports why
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink < 2:
        return
    target = Path(os.path.realpath(path))
    copy = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(target, copy)
        os.replace(copy, target)
    except OSError:
        with suppress(OSError):
            copy.unlink()
        raise
