"""A file that grows piece by piece, each piece whole or not at all: a full disk or a kill leaves no half piece in the middle."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from engine import separate


class AppendFile:
    """A file open for appending by one writer, created if missing.

    Args:
        path: a file in an existing folder.
        lines: the pieces are lines; a last line without an end, which a kill left, is removed.
    """

    def __init__(self, path: Path, lines: bool = False) -> None:
        separate(path)
        self._file = path.open("ab+", buffering=0)
        self._whole_size: int | None = end_of_lines(self._file.fileno()) if lines else None
        """Size up to which the pieces are whole, while the file may have more; ``None``: all of them are."""

    def write(self, piece: bytes) -> int:
        """Append ``piece``; it is in the file when the call returns.

        Raises:
            OSError: the piece could not be written, and no part of it is in the file. The error names the file.
        """
        descriptor, written = self._file.fileno(), 0
        try:
            if self._whole_size is not None:
                os.ftruncate(descriptor, self._whole_size)
                self._whole_size = None
            while written < len(piece):  # a disk that becomes full, or a signal, cuts a write short
                written += os.write(descriptor, piece[written:] if written else piece)
        except OSError as error:
            with suppress(OSError):  # the next call tries again
                if self._whole_size is None:
                    self._whole_size = os.fstat(descriptor).st_size - written
                os.ftruncate(descriptor, self._whole_size)
            raise OSError(error.errno, error.strerror, self._file.name) from None
        return len(piece)

    def flush(self) -> None:
        """Do nothing: :meth:`write` has written everything."""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file.closed

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        self._file.close()


def end_of_lines(descriptor: int, block: int = 1 << 16) -> int:
    """Position after the last end of a line; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - block)
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a crash or a full disk leaves the old file.

    Raises:
        OSError: the file could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
