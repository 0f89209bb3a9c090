"""A file that grows piece by piece, each piece whole or not at all: a full disk or a kill leaves no half of one in the middle."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class AppendFile:
    """A file open for appending by one writer, created when missing.

    Args:
        path: in an existing folder.
        lines: its pieces are lines; a last one without an end, which a kill left, is removed.
    """

    def __init__(self, path: Path, lines: bool = False) -> None:
        self._file = path.open("ab+", buffering=0)
        self._whole: int | None = end_of_lines(self._file.fileno()) if lines else None
        """The size up to which the pieces are whole, while there may be more."""

    def write(self, piece: bytes) -> int:
        """Append ``piece``; it is in the file when this returns.

        Raises:
            OSError: it could not be written, and nothing of it is in the file. The error names the file.
        """
        descriptor = self._file.fileno()
        try:
            if self._whole is not None:
                os.ftruncate(descriptor, self._whole)
            self._whole = os.fstat(descriptor).st_size
            rest = memoryview(piece)
            while rest:  # a disk that becomes full, or a signal, cuts a write short
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            if self._whole is not None:
                with suppress(OSError):  # the next call tries again
                    os.ftruncate(descriptor, self._whole)
            raise OSError(error.errno, error.strerror, self._file.name) from None
        self._whole = None
        return len(piece)

    def flush(self) -> None:
        """Nothing: :meth:`write` does not wait."""

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file.closed

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        self._file.close()


def end_of_lines(descriptor: int, block: int = 1 << 16) -> int:
    """The position behind the last end of a line."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - block)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole: a crash or a full disk leaves the old one.

    Raises:
        OSError: it could not be written.
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
