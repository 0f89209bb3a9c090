"""Jobs started with ``fit launch``, as a user's shell does it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.ranks import PATIENCE_S, clean_environment

COMMAND = (sys.executable, "-W", "error", "-m", "engine.cli.main", "launch")


class Launched:
    """A running ``fit launch``. Its output goes to files in ``place``; it is killed at the end of the ``with`` block."""

    def __init__(self, place: Path, *args: object, name: str = "agent", prefix: Sequence[str] = (), **env: str) -> None:
        self.place = place
        self.out, self.err = place / f"{name}.out", place / f"{name}.err"
        variables = clean_environment(**env)
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*prefix, *COMMAND, "--log-dir", str(place / f"{name}-logs"), *map(str, args)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=place,
            )
        self.begun = time.monotonic()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self.text}") from None

    @property
    def text(self) -> str:
        """What it has written, to the end of both streams."""
        return f"--- stdout\n{self.out.read_text()[-3000:]}\n--- stderr\n{self.err.read_text()[-6000:]}"

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    def log(self, rank: int) -> str:
        """The file of a rank."""
        (found,) = self.place.glob(f"*-logs/*/rank={rank}.log")
        return found.read_text()

    def until(self, condition: Callable[[], object], timeout: float = PATIENCE_S) -> None:
        """Wait for something to become true while it runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout:g} s\n{self.text}"
            if self.process.poll() is not None:
                assert condition(), f"it has ended with {self.process.returncode}\n{self.text}"
            time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pids(place: Path, count: int) -> list[int]:
    """The process ids that ranks have written to ``pid.<rank>``, or [] while some are missing."""
    found = [path.read_text() for path in sorted(place.glob("pid.[0-9]"))]
    return [int(text) for text in found] if len(found) == count and all(found) else []


def cores() -> int:
    return len(os.sched_getaffinity(0))
