"""A process of the job tells the campaign what it is doing, and waits at the moment at which somebody is to be killed.

Nothing of torch or of the library is imported: the watch begins with the process.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

ADDRESS, ROOT = "CAMPAIGN_ADDRESS", "CAMPAIGN_ROOT"
"""Variables of the job: where the campaign listens, and the job's ``root_dir``."""
PHASES = ("start", "steps", "draft", "commit", "validation", "removal", "end")
"""Start: to the first step; draft: files of a checkpoint that is not complete; commit: its manifest and its name; end: after the last step."""


def complete(root: Path) -> int:
    """The newest step whose checkpoint is whole in ``root``, by its files alone; 0: none."""
    found = [0]
    # One that is saved again stands under another name until the new one has its own: a kill in between leaves it to the next start.
    for path in [path for name in ("step=*", ".step=*.replaced") for path in (root / "checkpoints").glob(name)]:
        try:
            files = json.loads((path / "manifest.json").read_bytes())["files"]
            if all((path / name).stat().st_size == known["bytes"] for name, known in files.items()):
                found.append(int(path.name.removeprefix(".").removesuffix(".replaced")[5:]))
        except (OSError, ValueError):
            continue  # it is being removed
    return max(found)


class Watch:
    """Of this process. ``newest``: the checkpoint that was complete when the process began."""

    def __init__(self) -> None:
        self.root = Path(os.environ[ROOT])
        self.rank, self.attempt = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
        self.newest = complete(self.root)
        self._pid, self._lock, self._inside = os.getpid(), threading.Lock(), threading.local()
        self._counts = {phase: itertools.count(1) for phase in PHASES}
        self._over = "start"  # the phase of files outside checkpoints: the start, the end, or none
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + os.environ[ADDRESS])
        self._lines = self._socket.makefile("r")
        self._say({"hello": True, "pid": self._pid})
        self._kill: dict[str, Any] = json.loads(self._lines.readline())
        atexit.register(self._goodbye)
        sys.addaudithook(self._audit)
        self.event("start", "script")

    def begun(self) -> None:
        """The training starts."""
        self.event("start", "train start")
        if self._kill.get("phase") == "start":
            self._ask("train start, the last moment")
        self._say({"begun": True})
        self._over = ""

    def ending(self) -> None:
        """The last step is done."""
        self._over = "end"
        self.event("end", "train end")

    def event(self, phase: str, what: str) -> None:
        """One of the moments at which the campaign may kill somebody."""
        if os.getpid() != self._pid:  # a worker of a loader
            return
        number = next(self._counts[phase])
        if self._kill.get("phase") == phase and self._kill["number"] <= number:
            self._ask(what)

    def _ask(self, what: str) -> None:
        with self._lock:
            kill, self._kill = self._kill, {}
            if kill:
                self._say({"kill": what})
                if kill["error"]:
                    raise RuntimeError(f"planted at {what}")
                if not kill["delay"]:
                    self._lines.readline()

    def _say(self, what: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps({"rank": self.rank, "attempt": self.attempt, **what}).encode() + b"\n")

    def _goodbye(self) -> None:
        if os.getpid() == self._pid:
            self._say({"counts": {phase: next(count) - 1 for phase, count in self._counts.items()}})

    def _audit(self, name: str, args: tuple[Any, ...]) -> None:
        if not name.startswith(("os.", "open", "fcntl.", "shutil.", "socket.", "subprocess.")) or getattr(
            self._inside, "now", False
        ):
            return
        self._inside.now = True
        try:
            phase, what = self._place(name, args)
            if phase:
                self.event(phase, what)
        finally:
            self._inside.now = False

    def _place(self, name: str, args: tuple[Any, ...]) -> tuple[str, str]:
        """The phase that a system call belongs to (``""``: none), and how it is shown."""
        if name in ("socket.connect", "socket.bind", "subprocess.Popen"):
            return self._over, name
        paths = _paths(name, args)
        if not any(path.startswith(str(self.root)) for path in paths):
            return "", ""
        what = f"{name} {' '.join(os.path.relpath(path, self.root) for path in paths)}"
        if any(".removed" in path for path in paths) or name in ("os.remove", "os.rmdir", "shutil.rmtree"):
            return self._over if paths[0].endswith("run.json") else "removal", what
        if any(".partial" in path for path in paths):
            sealed = name == "os.rename" or (paths[0].endswith(("/manifest.json", "/.", ".partial")) and name == "open")
            return "commit" if sealed else "draft", what
        if (
            name == "open" and "/step=" in paths[0] and args[2] & (os.O_WRONLY | os.O_RDWR)
        ):  # nothing should be written there
            return "commit", what
        return self._over, what


def _paths(name: str, args: tuple[Any, ...]) -> list[str]:
    """The files that an event of the interpreter is about; names relative to a directory's descriptor are made whole."""
    count = 2 if name in ("os.rename", "os.link", "os.symlink") else 1
    found: list[str] = []
    for index, path in enumerate(args[:count]):
        at = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2 + index}.get(name)
        if isinstance(path, int):
            path = _of_descriptor(path)
        elif not isinstance(path, str | bytes | os.PathLike):
            continue
        elif at is not None and len(args) > at and isinstance(args[at], int) and args[at] >= 0:
            path = os.path.join(_of_descriptor(args[at]), os.fsdecode(path))
        found.append(os.path.join(os.getcwd(), os.fsdecode(path)))
    return found


def _of_descriptor(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""
