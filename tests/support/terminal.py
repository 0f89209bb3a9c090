"""A real terminal for tests: a pane of tmux. What is written to its device is drawn by tmux, and read back as a person would see it."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PATIENCE_S = 120.0


class Pane:
    """A pane of ``width`` columns and ``height`` rows in a tmux server of its own; ``command`` runs in it, or nothing."""

    def __init__(self, width: int, height: int, command: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory()
        place = Path(self._folder.name)
        self._socket = str(place / "tmux")
        self._opened: list[IO[str]] = []
        start = f"tty > {place}/tty.part; mv {place}/tty.part {place}/tty; exec sleep 1000"
        (place / "tmux.conf").write_text("set -g status off\nset -g remain-on-exit on\n")
        self._tmux(
            "-f", str(place / "tmux.conf"), "new-session", "-d", "-x", str(width), "-y", str(height), command or start
        )
        if command is None:
            wait_for(lambda: (place / "tty").exists(), lambda: "tmux did not start its command")
            self.tty = (place / "tty").read_text().strip()

    def __enter__(self) -> Pane:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._opened:
            file.close()
        self._tmux("kill-server")
        self._folder.cleanup()

    def open(self) -> IO[str]:
        """The terminal as a stream."""
        self._opened.append(open(self.tty, "w", encoding="utf-8"))  # noqa: SIM115
        return self._opened[-1]

    def resize(self, width: int, height: int) -> None:
        """Change the window, and wait until its programs can see it."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))
        terminal = self.open()
        wait_for(lambda: os.get_terminal_size(terminal.fileno()) == (width, height), lambda: "the size did not change")

    def type(self, *keys: str) -> None:
        """Press these keys, in tmux's names."""
        self._tmux("send-keys", *keys)

    def flush(self) -> None:
        """Write what streams have kept."""
        for file in self._opened:
            file.flush()

    def screen(self, history: bool = False) -> list[str]:
        """The rows, without spaces at their ends; with ``history`` also those that have scrolled out at the top."""
        return [
            row.rstrip() for row in self._tmux("capture-pane", "-p", *(["-S", "-"] if history else [])).split("\n")[:-1]
        ]

    def colored(self) -> str:
        """The screen, with its colors as ANSI codes."""
        return self._tmux("capture-pane", "-p", "-e")

    def shows(self, *parts: str) -> None:
        """Wait until all of these are on the screen."""
        wait_for(
            lambda: all(part in "\n".join(self.screen()) for part in parts),
            lambda: f"{parts} not in:\n" + "\n".join(self.screen()),
        )

    def looks(self, expected: list[str]) -> None:
        """Wait until the screen is exactly this."""
        wait_for(
            lambda: self.screen() == expected, lambda: "the screen is:\n" + "\n".join(f"{r}|" for r in self.screen())
        )

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def wait_for(holds: Callable[[], bool], problem: Callable[[], str]) -> None:
    """Wait until ``holds()``, for as long as a loaded machine may need."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, problem()
        time.sleep(0.02)
