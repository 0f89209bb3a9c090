"""``run.json``: which run owns a folder. Its content is not trusted."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from typing import Any

RUN = "run.json"
Mark = dict[str, Any]
"""The content of ``run.json``: ``id``, ``stage``, ``job`` (list of text), ``host``, ``pid``, ``process``, ``since``, ``status``."""
RUNNING, ENDED, FAILED = "running", "ended", "failed"
LONGEST = 1 << 16
"""The maximum bytes that are read of a ``run.json``."""


def new_mark(name: str, stage: str, job: list[str]) -> Mark:
    """The mark of a run of this process."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    own = {"host": socket.gethostname(), "pid": os.getpid(), "process": _process(os.getpid())}
    return {"id": name, "stage": stage, "job": job, **own, "since": since, "status": RUNNING}


def continued(before: Mark, mark: Mark) -> Mark:
    """The mark of a process that continues a run, or evaluates it: id and stage stay."""
    kept = ("id",) if mark["stage"] == "fit" else ("id", "stage", "job")
    return {**mark, **{name: before[name] for name in kept if type(before.get(name)) is type(mark[name])}}


def packed(mark: Mark) -> bytes:
    return json.dumps(mark, separators=(",\n ", ": ")).encode()  # as with indent=1, which Python's slow encoder does


def parsed(text: bytes) -> Mark:
    try:
        found = json.loads(text[:LONGEST])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def who(mark: Mark) -> str:
    host, pid, since = (ascii(mark.get(name, "unknown")).strip("'")[:80] for name in ("host", "pid", "since"))
    return f"process {pid} on {host} (since {since})"


def runs_here(mark: Mark) -> bool:
    """Whether the process in the mark is on this host and still running."""
    pid = mark.get("pid")
    if (
        mark.get("status") != RUNNING
        or mark.get("host") != socket.gethostname()
        or type(pid) is not int
        or not 0 < pid < 1 << 31
    ):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return _process(pid) == mark.get("process")


def _process(pid: int) -> str | None:
    """A process's start, in ticks since boot; ``None`` where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


def read(descriptor: int) -> Mark:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return {}
    return parsed(os.pread(descriptor, LONGEST, 0))


def in_use(folder: str, mark: Mark) -> str:
    """An error's text."""
    return (
        f"{folder} is in use by {who(mark)}: two runs cannot write into one folder. Wait for that run or end it; a new run (without resume=) gets "
        "its own folder, and so does one with another root_dir"
    )
