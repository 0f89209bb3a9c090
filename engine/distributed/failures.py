"""Failures of a rank: write its traceback where the launcher finds it, and do not outlive rank 0."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from engine.distributed.environment import Environment
from engine.utils.errors import HangError, RankError

# Messages of gloo, NCCL and the store when the other side is gone.
_PEER_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "nccl")

_attached: set[str] = set()


def blames_peer(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank is gone or lags: a collective's error, a :class:`RankError`, another's hang."""
    if isinstance(error, HangError):
        return error.waiting
    if isinstance(error, (RankError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _PEER_GONE)


def attach(environment: Environment) -> None:
    """Set up this process as a rank: call it as soon as the environment is known; repeated calls do nothing.

    With ``error_file`` an uncaught exception is written there (in Torch Elastic's form, which torchrun prints too) before it
    is shown. With ``parent_pid`` the process ends within a second after that parent, however it ended.

    Raises:
        RuntimeError: the variables of a relaunched rank were inherited by a process that is not one.
    """
    if environment.error_file and environment.error_file not in _attached:
        _attached.add(environment.error_file)
        _record_uncaught(Path(environment.error_file))
    if environment.parent_pid and str(environment.parent_pid) not in _attached:
        _attached.add(str(environment.parent_pid))
        _live_with(environment.parent_pid, environment.rank)


def _record_uncaught(path: Path) -> None:
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            record(error, path)
        show(kind, error, trace)

    sys.excepthook = hook


def record(error: BaseException, path: Path) -> None:
    """Write ``error`` with its traceback to ``path`` in Torch Elastic's JSON form; only the first error is written."""
    now = time.time()
    text = "".join(traceback.format_exception(error))
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
            "time": now,
            "blames_peer": blames_peer(error),
        }
    }
    with (
        contextlib.suppress(OSError),
        path.open("x") as file,
    ):  # a full disk must not hide the error itself, which is shown next
        json.dump(content, file)


def read(path: Path) -> tuple[str, float | None, bool]:
    """Read what :func:`record` (or Torch Elastic's ``@record``) wrote: traceback, time (s since 1970), ``blames_peer``.

    An absent or damaged file gives ``("", None, False)``.
    """
    try:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, str):
            return message, None, False
        extra = message["extraInfo"]
        moment = float(message.get("time", extra.get("timestamp", 0)))
        return str(extra["py_callstack"]), moment, bool(message.get("blames_peer", False))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", None, False


def _live_with(parent: int, rank: int) -> None:
    if os.getppid() != parent and _alive(parent):
        raise RuntimeError(
            f"this process inherited the variables of rank {rank} (FIT_PARENT_PID={parent}), but was not started as a rank: its parent is "
            f"{os.getppid()}. Start programs from within a rank without RANK, WORLD_SIZE and FIT_PARENT_PID in their environment."
        )

    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            if os.getppid() != parent:
                with contextlib.suppress(OSError):  # standard error may be closed with the parent
                    os.write(2, f"rank {rank}: rank 0 (process {parent}) is gone; ending\n".encode())
                # The main thread may hang in a collective forever, and no one is left to report to.
                os._exit(1)

    def stop() -> None:
        # A Python thread that wakes up while the interpreter shuts down aborts the process (seen in 20 % of exits).
        done.set()
        thread.join(1.0)

    thread = threading.Thread(target=watch, name="fit-parent-watch", daemon=True)
    thread.start()
    atexit.register(stop)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
