"""A checkpoint as one file, for those who move files: a zip archive of its folder, without compression. Opening it runs no code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from engine.checkpoint.files import DamagedCheckpoint, inside
from engine.checkpoint.manifest import MANIFEST


def is_one_file(path: str | Path) -> bool:
    """Whether there is such a file at a local path."""
    if "://" in str(path) or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return MANIFEST in archive.namelist()


def pack(folder: Path, file: Path) -> None:
    """Write the checkpoint in ``folder`` as ``file``, which is replaced when it is complete."""
    written = file.with_name(f".{file.name}.partial")
    with zipfile.ZipFile(written, "w") as archive:
        for each in sorted(folder.rglob("*")):
            archive.write(each, each.relative_to(folder))
    os.replace(written, file)


def unpack(file: Path, folder: Path) -> None:
    """Write the files of ``file`` into a new ``folder``.

    Raises:
        DamagedCheckpoint: it is damaged, or a name in it leads out of the folder.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                inside(folder, name.rstrip("/"))
            archive.extractall(folder)
    except zipfile.BadZipFile as error:
        raise DamagedCheckpoint(f"{file}: {error}") from error
