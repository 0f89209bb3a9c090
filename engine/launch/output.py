"""The ranks' output: each line goes to the terminal with the number of its rank, and everything to one file per rank."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from engine.distributed import failures
from engine.utils.hard_links import separate
from engine.utils.helper_threads import log_failure

TAIL = 64 * 1024
"""Number of last bytes of a rank's standard error that are kept, to search them for a traceback."""
LINE = 64 * 1024
"""Number of bytes after which an unfinished line is shown as a line."""
HOLD_S = 10.0
"""Maximum time (s) for which a traceback is held back. If the rank ends meanwhile, only the launcher's report shows it, or one line of it."""
_LAST_WORDS = ("Traceback (most recent call last):", "fit: error: ", failures.LOST)
"""Starts of lines with which a rank's last output may begin."""
PIPE = 1 << 20
"""Maximum capacity (bytes) of a pipe on Linux without privileges."""


Streams = tuple[int | None, int | None]
"""Descriptors for a rank's standard output and error; ``None``: the rank writes to this process's stream."""


@dataclass(eq=False)
class _Stream:
    """The pipe of a rank's standard output or error."""

    rank: int
    fd: int
    target: TextIO
    is_error: bool
    pending: bytes = b""
    held_lines: list[str] = field(default_factory=list)
    """Lines from the start of a traceback on, which are not shown yet because they may be the rank's last output."""
    held_since: float = 0.0


class Output:
    """Reads the ranks' output from pipes, in one thread, and shows and stores it.

    Args:
        directory: the directory for ``rank=0.log`` and so on; a file has both streams of a rank in the order of arrival.
        show: the ranks whose lines are shown; ``None``: all.
    """

    def __init__(self, directory: Path, show: frozenset[int] | None) -> None:
        self.directory = directory
        self._show = show
        self._streams: dict[int, _Stream] = {}
        self._writing: list[int] = []
        self._files: dict[int, BinaryIO] = {}
        self._tails: dict[int, bytes] = {}
        self._last_words: list[_Stream] = []
        self._prefixed = True
        self._lock = threading.Lock()  # guards streams, files, tails and whole lines on the terminal
        self._selector = selectors.DefaultSelector()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._mute: set[object] = set()  # files and terminals that can no longer be written to

    def path(self, rank: int) -> Path:
        """The file with a rank's output."""
        return self.directory / f"rank={rank}.log"

    def open(self, ranks: Sequence[int], world_size: int) -> list[Streams]:
        """Open pipes for the standard output and error of an attempt's ranks. Call :meth:`started` afterwards."""
        self._prefixed = world_size > 1
        with self._lock:
            for rank in ranks:
                if rank not in self._files:
                    separate(self.path(rank))
                    self._files[rank] = self.path(rank).open("ab", buffering=0)
                self._tails[rank] = b""
                for is_error, target in enumerate((sys.stdout, sys.stderr)):
                    reading, writing = os.pipe()
                    os.set_blocking(reading, False)
                    self._streams[reading] = _Stream(rank, reading, target, bool(is_error))
                    self._selector.register(reading, selectors.EVENT_READ)
                    self._writing.append(writing)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fit-output", daemon=True)
            self._thread.start()
        return list(zip(self._writing[::2], self._writing[1::2], strict=True))

    def started(self) -> None:
        """Close this process's copies of the pipes' writing ends, after the ranks were started."""
        for fd in self._writing:
            os.close(fd)
        self._writing.clear()

    def drain(self) -> None:
        """Read the rest of the output after the ranks have ended; does not wait for processes that they have left behind with an open pipe."""
        self.started()
        with self._lock:
            for stream in list(self._streams.values()):
                bytes_left = PIPE
                while bytes_left > 0 and (count := self._read(stream)) > 0:  # a process left behind may write forever
                    bytes_left -= count
                self._end(stream)

    def close(self) -> None:
        """Read and show the rest of the output, including lines that are held back, and end the thread."""
        self.drain()
        with self._lock:
            for stream in self._last_words:
                self._release(stream)
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def forget_last_words(self) -> None:
        """Drop the tracebacks with which ranks have ended, because the launcher reports how the ranks failed."""
        with self._lock:
            self._last_words.clear()

    def tail(self, rank: int) -> str:
        """The end of a rank's standard error in this attempt."""
        with self._lock:
            return self._tails.get(rank, b"").decode(errors="replace")

    def write_line(self, text: str) -> None:
        """Print a line of the launcher itself, on standard error."""
        with self._lock:
            self._write(sys.stderr, f"fit launch: {text}\n")

    def mark(self, text: str) -> None:
        """Write a line to every rank's file."""
        with self._lock:
            for file in self._files.values():
                self._log(file, f"--- {text} ---\n".encode())

    def _work(self) -> None:
        """Read the pipes until the output is closed; the thread's target."""
        is_told = False
        while not self._over.is_set():
            try:
                self._read_available()
            except BaseException as error:  # a rank whose full pipe nobody reads would wait forever
                if not is_told:
                    is_told = True
                    log_failure("fit-output", "it goes on; some of the ranks' output may be missing", error)
                time.sleep(0.05)

    def _read_available(self) -> None:
        """Read the pipes that have output, waiting a moment for some; show lines that were held back for too long."""
        if not self._streams:
            time.sleep(0.05)
            return
        ready = self._selector.select(0.1)
        with self._lock:
            for key, _ in ready:
                stream = self._streams.get(int(key.fd))
                if stream is not None and self._read(stream) == 0:
                    self._end(stream)
            for stream in self._streams.values():
                if stream.held_lines and time.monotonic() - stream.held_since > HOLD_S:
                    self._release(stream)

    def _read(self, stream: _Stream) -> int:
        """Read the available bytes. Return their number, 0 at the end of the pipe, or -1 if none are available now."""
        try:
            data = os.read(stream.fd, 1 << 16)
        except BlockingIOError:
            return -1
        if not data:
            return 0
        self._log(self._files[stream.rank], data)
        # In a process group torch prefixes a traceback's lines with the rank, which lines on the terminal already have.
        data = data.replace(f"[rank{stream.rank}]: ".encode(), b"")
        if stream.is_error:
            self._tails[stream.rank] = (self._tails[stream.rank] + data)[-TAIL:]
        *lines, stream.pending = (stream.pending + data).split(b"\n")
        if len(stream.pending) > LINE:
            lines.append(stream.pending)
            stream.pending = b""
        self._display(stream, lines)
        return len(data)

    def _end(self, stream: _Stream) -> None:
        """Close a pipe whose output has been read."""
        if stream.pending:
            self._display(stream, [stream.pending])
        if stream.held_lines:
            self._last_words.append(stream)
        self._selector.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)

    def _display(self, stream: _Stream, lines: Iterable[bytes]) -> None:
        """Show lines on the terminal, or hold them back from the start of a traceback on."""
        if self._show is not None and stream.rank not in self._show:
            return
        # A progress bar rewrites itself after each carriage return; only its last state stays visible.
        visible = [re.split(r"\r+", line.decode(errors="replace").rstrip("\r"))[-1] for line in lines]
        if stream.is_error and not stream.held_lines:
            start = next((index for index, line in enumerate(visible) if line.startswith(_LAST_WORDS)), len(visible))
            stream.held_lines, visible, stream.held_since = visible[start:], visible[:start], time.monotonic()
        elif stream.held_lines:
            stream.held_lines, visible = [*stream.held_lines, *visible], []
        self._show_lines(stream, visible)

    def _show_lines(self, stream: _Stream, lines: list[str]) -> None:
        prefix = self._prefix(stream) if self._prefixed else ""
        if lines:
            self._write(stream.target, "".join(f"{prefix}{line}\n" for line in lines))

    def _release(self, stream: _Stream) -> None:
        """Show the lines that are held back."""
        lines, stream.held_lines = stream.held_lines, []
        self._show_lines(stream, lines)

    def _prefix(self, stream: _Stream) -> str:
        prefix = f"[rank {stream.rank}]"
        if stream.target.isatty() and not os.environ.get("NO_COLOR"):
            return f"\x1b[{31 + stream.rank % 6}m{prefix}\x1b[0m "
        return f"{prefix} "

    def _write(self, target: TextIO, text: str) -> None:
        if target in self._mute:
            return
        try:
            target.write(text.encode(target.encoding, "replace").decode(target.encoding))
            target.flush()
        except OSError:  # our reader is gone ("| head"); the ranks continue, and their files have everything
            self._mute.add(target)

    def _log(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:
            if file not in self._mute:
                self._mute.add(file)
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"fit launch: {self.directory}: cannot write the ranks' output ({error})\n")


class Terminal:
    """The output of ranks that write to this process's streams; nothing is read or kept."""

    def path(self, rank: int) -> None:
        """Return ``None``: there is no file."""

    def open(self, ranks: Sequence[int], world_size: int) -> list[Streams]:
        """Let the ranks use this process's streams."""
        return [(None, None) for _ in ranks]

    def started(self) -> None:
        """Do nothing: there are no pipes to close."""

    def drain(self) -> None:
        """Do nothing: there is nothing to read."""

    def forget_last_words(self) -> None:
        """Do nothing: all lines were shown when they were written."""

    def tail(self, rank: int) -> str:
        """Return nothing: no output is kept."""
        return ""

    def write_line(self, text: str) -> None:
        """Print a line on standard error."""
        print(text, file=sys.stderr, flush=True)

    def mark(self, text: str) -> None:
        """Do nothing: there are no files."""


@contextlib.contextmanager
def torch_log(path: Path) -> Iterator[None]:
    """Send the log of torch's rendezvous to a file inside the block; the terminal is for the ranks and for our messages."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)
        handler.close()
