"""Screens for progress bars: the bottom rows of a terminal, a notebook's cell, or only lines, for a file or a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from ..text import element

if TYPE_CHECKING:
    from rich.console import Console


class Screen(Protocol):
    """A place for bars and lines: :class:`Terminal`, :class:`Notebook` or :class:`Lines`."""

    live: bool
    """Whether this screen has bars, which are drawn again and again."""
    color: bool
    """Whether lines may have ANSI colors."""
    ascii: bool
    """Whether lines may have ASCII characters only."""

    @property
    def width(self) -> int:
        """Columns of a bar."""

    @property
    def height(self) -> int:
        """Rows for bars and metrics."""

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the bars by ``lines``, each at most ``width`` columns wide."""

    def write(self, text: str) -> None:
        """Write lines that stay."""

    def close(self) -> None:
        """Remove the bars."""


class Terminal:
    """The bottom rows of a terminal; the rest of the terminal scrolls above them.

    The terminal itself keeps bars and text apart, with its scroll region (DECSTBM), as ``apt`` does. So nothing that this process, its libraries, a
    debugger's prompt or another rank on this terminal prints can damage the bars, or be damaged: no stream is replaced. Each drawing is
    a single ``write``, and leaves the cursor where it was.
    """

    live = True

    def __init__(self, console: Console) -> None:
        self._console, self._rows, self._size = console, 0, (0, 0)
        self.color = console.color_system is not None and not console.no_color
        self.ascii = not console.encoding.startswith("utf")

    def _terminal_size(self) -> tuple[int, int]:
        """Columns and rows of the terminal now. Rich believes the variable COLUMNS, which does not change with the window."""
        try:
            columns, rows = os.get_terminal_size(self._console.file.fileno())
        except (OSError, ValueError, AttributeError):
            columns, rows = self._console.size
        return columns or 80, rows or 24

    @property
    def width(self) -> int:
        return self._terminal_size()[0]

    @property
    def height(self) -> int:
        return max(1, self._terminal_size()[1] // 2)

    def draw(self, lines: Sequence[str]) -> None:
        size = self._terminal_size()
        height = size[1]
        lines = lines[: max(0, height - 2)]
        out = []
        if self._rows and size != self._size:
            out.append(_FORGET)
            self._rows = 0
        out.append(self._reserve(len(lines), height))
        self._size = size
        out.append("\x1b7")
        out += [f"\x1b[{height - len(lines) + 1 + row};1H{line}\x1b[0m\x1b[K" for row, line in enumerate(lines)]
        out.append("\x1b8")
        _write_encoded(self._console.file, "".join(out))

    def _reserve(self, rows: int, height: int) -> str:
        """Return the control sequence that reserves ``rows`` rows for bars."""
        before, self._rows = self._rows, rows
        if rows > before:  # down and up again: scrolls if the cursor is at the bottom, and keeps its column
            more = rows - before
            return "\x1bD" * more + f"\x1b[{more}A" + f"\x1b7\x1b[1;{height - rows}r\x1b8"
        if rows < before:
            return f"\x1b7\x1b[{height - before + 1};1H\x1b[J\x1b[1;{height - rows}r\x1b8"
        return ""

    def write(self, text: str) -> None:
        _write_encoded(self._console.file, text + "\n")

    def close(self) -> None:
        if self._rows:
            unchanged = self._terminal_size() == self._size
            erase = f"\x1b7\x1b[r\x1b[{self._size[1] - self._rows + 1};1H\x1b[J\x1b8"
            _write_encoded(self._console.file, erase if unchanged else _FORGET)
            self._rows = 0


_FORGET = "\x1b7\x1b[r\x1b8\x1b7\x1b[C\x1b[J\x1b8"
"""Control sequence that erases the bars after a change of the window.

The terminal has wrapped its lines again, but below the cursor there are only bars. The erasing begins a column to the right of the cursor: erasing
the whole screen would move it into tmux's history.
"""


class Notebook:
    """The output of a notebook's cell: one element that is updated, and lines below it. The cell keeps its last state."""

    live, color, ascii, width, height = True, False, False, 100, 20

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, lines: Sequence[str]) -> None:
        from IPython.display import HTML, display

        html = HTML(element("pre", "\n".join(lines), style="white-space: pre-wrap"))
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)

    def write(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        self._handle = None


class Lines:
    """Lines without bars: for a file, a pipe, a log of continuous integration, a process forked from a notebook."""

    live, color, ascii, width, height = False, False, False, 1 << 16, 0

    def __init__(self, console: Console) -> None:
        self._console = console

    def draw(self, lines: Sequence[str]) -> None: ...

    def write(self, text: str) -> None:
        _write_encoded(self._console.file, text + "\n")

    def close(self) -> None: ...


def _write_encoded(file: IO[str], text: str) -> None:
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    # In "python train.py | head" the reader ends first: nobody sees the progress.
    with contextlib.suppress(BrokenPipeError):
        file.write(text)
        file.flush()


_ASCII = str.maketrans({"━": "#", "─": "-", "█": "#", "…": "."})
"""Replacements of the bars' characters, for streams whose encoding lacks them."""


def screen_of(console: Console, is_users_console: bool) -> Screen:
    """Return the screen for a console.

    Args:
        is_users_console: the user made the console, so that its ``force_terminal=True`` counts; otherwise only a real terminal does.
    """
    if console.is_jupyter:
        # The messages that update an output come from the kernel's own process; prints reach it from forks too.
        return Notebook() if multiprocessing.parent_process() is None else Lines(console)
    forced = is_users_console and console.is_terminal
    try:
        real = console.file.isatty()
    except (AttributeError, ValueError):
        real = False
    # Some services of continuous integration give their jobs a terminal, and record every byte.
    automated = os.environ.get("CI", "").lower() not in ("", "0", "false")
    dumb = os.name != "nt" and os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    drawable = not automated and not dumb if real else forced
    return Terminal(console) if drawable and not console.legacy_windows else Lines(console)
