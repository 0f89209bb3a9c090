"""Reads lines of files that nobody has checked: a line may have no end, and most of a file may be a hole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 16 << 20
"""Longest line that is read, in bytes."""
LONGEST_OWN = 1 << 30
"""Longest line in a file that a logger continues, in bytes: a line may have a large table."""


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file from its position on; an empty line stands for a line of more than :data:`LONGEST` bytes."""
    while line := file.readline(LONGEST):
        yield line if is_whole(line) else _skip_rest(file)


def is_whole(line: bytes, longest: int = LONGEST) -> bool:
    """Whether ``file.readline(longest)`` has reached the end of the line, or of the file."""
    return len(line) < longest or line.endswith(b"\n")


def skip_hole(file: BinaryIO) -> None:
    """Go to the next bytes that were written: holes of a sparse file are zeros, without a line's end."""
    place, underneath = file.tell(), os.lseek(file.fileno(), 0, os.SEEK_CUR)
    try:
        place = os.lseek(file.fileno(), place, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole is left
            place = os.fstat(file.fileno()).st_size
    os.lseek(file.fileno(), underneath, os.SEEK_SET)  # where the file's buffer expects it
    file.seek(place)


def _skip_rest(file: BinaryIO) -> bytes:
    skip_hole(file)
    while not is_whole(file.readline(LONGEST)):
        skip_hole(file)
    return b"\n"
