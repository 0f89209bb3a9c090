"""Handle a rank's failures: record its traceback for the launcher, interrupt a thread that hangs, and end together with rank 0."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from engine.distributed.environments import Environment
from engine.utils import garbage, tracebacks
from engine.utils.errors import INTERRUPTED, TERMINATED, HangError, RankError
from engine.utils.helper_threads import HelperThread

# Texts in errors of gloo, NCCL and the store when the other side of a connection is gone.
_CLOSED = ("connection closed by peer", "connection reset by peer", "broken pipe")
_PEER_GONE = (*_CLOSED, "gloo", "nccl")

LOST = "lost another rank"
"""The start of the line that is shown for an error that only says that another rank is gone."""
_GONE = f"{LOST}: its process, its machine or the network to it is gone"

_attached: set[str] = set()


def blames_peer(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank is gone or lags: a collective's error, a :class:`RankError`, or another rank's hang."""
    if isinstance(error, HangError):
        return error.waiting
    if isinstance(error, (RankError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _PEER_GONE)


def attach(environment: Environment) -> None:
    """Set up this process as a rank, as soon as its environment is known. Repeated calls do nothing.

    With ``error_file`` an uncaught exception is written to that file (in Torch Elastic's form, which torchrun prints too) before
    :class:`Uncaught` shows it, and the exit collects no garbage. With ``parent_pid`` this process ends within a second after that parent,
    however the parent ended.

    Raises:
        RuntimeError: the variables of a relaunched rank were inherited by a process that is not a rank.
    """
    if environment.error_file and environment.error_file not in _attached:
        _attached.add(environment.error_file)
        sys.excepthook = hook(environment)
        atexit.register(garbage.collect_none_at_exit)  # the launcher waits for this process
    if environment.parent_pid and str(environment.parent_pid) not in _attached and not _is_importing_script():
        _attached.add(str(environment.parent_pid))
        _end_with_parent(environment.parent_pid, environment.rank)


def refuse_imported_script() -> None:
    """Refuse to train or to join other ranks while a process spawned by multiprocessing is re-importing the main script.

    Raises:
        RuntimeError: this is such a process.
    """
    if _is_importing_script():
        raise RuntimeError(
            "a DataLoader worker, or another process that multiprocessing has started with 'spawn' or 'forkserver', imports this script and would "
            "train as well: put what the script does, this call too, under \"if __name__ == '__main__':\"; or use multiprocessing_context='fork'"
        )


def _is_importing_script() -> bool:
    # CPython checks the same attribute before it starts a process.
    return getattr(multiprocessing.current_process(), "_inheriting", False)


class Uncaught:
    """A rank's hook for uncaught exceptions, which shows each failure of a job once.

    An exception is shown without our frames, each line with the rank in front; an error that only says that another rank is gone is one line.
    A rank that rank 0 has started (``Fit(devices=n)``) shows nothing, because rank 0 does. After Ctrl-C rank 0 prints the line that the run has
    put into its ``KeyboardInterrupt``, the other ranks print nothing, and the process exits with status 130.

    Args:
        before: the hook that this one replaces. It shows a Ctrl-C outside of a run.
    """

    def __init__(self, environment: Environment, before: Callable[..., object]) -> None:
        self._environment, self.before = environment, before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        environment = self._environment
        if isinstance(error, KeyboardInterrupt):
            if error.args and environment.rank == 0:
                print(error, file=sys.stderr, flush=True)
            elif environment.rank == 0:  # outside of a run: the program handles it
                self.before(kind, error, trace)
                return
            if not hasattr(sys, "ps1"):  # not at a prompt
                # SystemExit runs exit handlers, and nobody can catch it in this hook.
                raise SystemExit(INTERRUPTED)
            return
        error = error.with_traceback(trace)
        if environment.world_size > 1:
            tracebacks.trim(error)
        if environment.error_file and isinstance(error, Exception):
            record(error, Path(environment.error_file))
        if environment.world_size == 1:
            self.before(kind, error, error.__traceback__)
            return
        if is_shown_by_rank_0(environment):
            return
        if isinstance(error, (RankError, HangError)) and blames_peer(error):
            text = f"{kind.__name__}: {error}"  # its message already names the other rank and its position
        elif blames_peer(error):
            text = _GONE if _is_closed_connection(error) else f"{LOST}: {last_line(error)}"
        else:
            text = "".join(traceback.format_exception(error))
        prefix = "" if isinstance(error, RankError) else f"[rank{environment.rank}]: "  # torch's mark
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
        sys.stderr.flush()
        if isinstance(error, HangError) and error.terminated and not hasattr(sys, "ps1"):
            raise SystemExit(TERMINATED)  # as after Ctrl-C above


def hook(environment: Environment) -> Uncaught:
    """Return this rank's hook for uncaught exceptions: the installed hook if it is an :class:`Uncaught`, else a new one."""
    current = sys.excepthook
    return current if isinstance(current, Uncaught) else Uncaught(environment, current)


def show_interrupts(environment: Environment) -> None:
    """Let :class:`Uncaught` show an uncaught Ctrl-C from now on, even in a single process."""
    sys.excepthook = hook(environment)


def show_interrupts_no_longer(environment: Environment) -> None:
    """Undo :func:`show_interrupts` in a single process, after the program has caught the Ctrl-C itself."""
    current = sys.excepthook
    if isinstance(current, Uncaught) and environment.world_size == 1 and environment.error_file not in _attached:
        sys.excepthook = current.before


def is_shown_by_rank_0(environment: Environment) -> bool:
    """Whether rank 0 has started this rank and is still running, so that rank 0 shows this rank's failure."""
    return environment.parent_pid is not None and os.getppid() == environment.parent_pid


def end_of_message(error: BaseException) -> str:
    """An error as the end of a message: its type and text. gloo says in three sentences that another rank is gone; that is one here."""
    return _GONE if _is_closed_connection(error) else f"{type(error).__name__}: {error}"


def _is_closed_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _CLOSED)


def last_line(error: BaseException) -> str:
    """An exception's type and the first line of its message, which a short traceback ends with."""
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]


def record(error: BaseException, path: Path) -> None:
    """Write ``error`` with its traceback to ``path`` in Torch Elastic's JSON form, unless the file exists: only the first error is kept."""
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
    # A full disk must not hide the error itself, which is shown next.
    with (
        contextlib.suppress(OSError),
        path.open("x") as file,
    ):
        json.dump(content, file)


def read(path: Path) -> tuple[str, float | None, bool]:
    """Read what :func:`record` (or Torch Elastic's ``@record``) wrote: traceback, time (s since 1970), ``blames_peer``.

    For an absent or damaged file the result is ``("", None, False)``.
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


class Interrupt:
    """Raises an exception in the thread that created this object (or called :meth:`allow` last), at most once and never after :meth:`forbid`.

    Args:
        kind: the exception's class, called without arguments.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.forbidden = threading.Event()
        """Set while nothing may be raised in the thread."""
        self._lock = threading.Lock()
        self._is_used = False
        self.allow()

    def allow(self) -> None:
        """Allow interruptions of the calling thread from now on."""
        with self._lock:
            self._thread, self._open = threading.get_ident(), True
        self.forbidden.clear()

    def interrupt(self) -> bool:
        """Raise the exception, without a message, at the thread's current position. False: the thread forbids it, or was interrupted before."""
        with self._lock:
            if not self._open or self._is_used:
                return False
            self._is_used = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(self.kind))
            return True

    def forbid(self) -> None:
        """Forbid interruptions of the calling thread. An exception that is pending already is raised and caught here."""
        while True:
            try:
                with self._lock:
                    self._open = False
                # The interpreter delivers a pending exception within a few jumps. Clearing it, PyThreadState_SetAsyncExc(thread, None), would
                # leave Python 3.11's evaluation loop with a flag that is never cleared: it hangs under a debugger or a profiler.
                for _ in range(100):
                    pass
                break
            except self.kind:
                continue
        self.forbidden.set()


def _end_with_parent(parent: int, rank: int) -> None:
    """Start a thread that ends this process when its parent, rank 0, is gone."""
    if os.getppid() != parent and _is_alive(parent):
        raise RuntimeError(
            f"this process inherited the variables of rank {rank} (FIT_PARENT_PID={parent}), but was not started as a rank: its parent is "
            f"{os.getppid()}. Start programs from within a rank without RANK, WORLD_SIZE and FIT_PARENT_PID in their environment."
        )

    stopping = threading.Event()

    def watch() -> None:
        while not stopping.wait(0.5):
            if os.getppid() != parent:
                with contextlib.suppress(OSError):  # standard error may be closed with the parent
                    os.write(2, f"rank {rank}: rank 0 (process {parent}) is gone; ending\n".encode())
                # At once: the main thread may hang in a collective forever, and nobody is left to report to.
                os._exit(1)

    def stop() -> None:
        # Stop the thread first: one that wakes up while the interpreter shuts down aborts the process (seen in 20 % of exits).
        stopping.set()
        thread.join(1.0)
        garbage.collect_none_at_exit()

    thread = HelperThread(watch, "fit-parent-watch", "this rank does not end by itself if rank 0 is gone")
    thread.start()
    atexit.register(stop)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
