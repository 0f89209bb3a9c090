"""Failures of a rank: write its traceback where the launcher finds it, interrupt a thread that hangs, and do not outlive rank 0."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
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
from engine.utils import tracebacks
from engine.utils.errors import INTERRUPTED, HangError, RankError

# Messages of gloo, NCCL and the store when the other side is gone.
_PEER_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "gloo", "nccl")

LOST = "lost another rank"
"""The start of the line about an error that only says that another rank is gone."""

_attached: set[str] = set()


def blames_peer(error: BaseException) -> bool:
    """Check whether ``error`` only says that another rank is gone or lags: a collective's error, a :class:`RankError`, another's hang."""
    if isinstance(error, HangError):
        return error.waiting
    if isinstance(error, (RankError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _PEER_GONE)


def attach(environment: Environment) -> None:
    """Set up this process as a rank: call it as soon as the environment is known; repeated calls do nothing.

    With ``error_file`` an uncaught exception is written there (in Torch Elastic's form, which torchrun prints too) before
    :class:`Uncaught` shows it. With ``parent_pid`` the process ends within a second after that parent, however it ended.

    Raises:
        RuntimeError: the variables of a relaunched rank were inherited by a process that is not a rank.
    """
    if environment.error_file and environment.error_file not in _attached:
        _attached.add(environment.error_file)
        sys.excepthook = hook(environment)
    if environment.parent_pid and str(environment.parent_pid) not in _attached and not _imports_script():
        _attached.add(str(environment.parent_pid))
        _live_with(environment.parent_pid, environment.rank)


def refuse_imported_script() -> None:
    """Refuse to train or meet other ranks while multiprocessing imports the script in a process of its own.

    Raises:
        RuntimeError: this is such a process.
    """
    if _imports_script():
        raise RuntimeError(
            "a DataLoader worker, or another process that multiprocessing has started with 'spawn' or 'forkserver', imports this script and would "
            "train as well: put what the script does, this call too, under \"if __name__ == '__main__':\"; or use multiprocessing_context='fork'"
        )


def _imports_script() -> bool:
    return getattr(
        multiprocessing.current_process(), "_inheriting", False
    )  # as CPython checks it before it starts a process


class Uncaught:
    """The hook for uncaught exceptions of a rank: each failure is shown once.

    An exception is shown without our frames, each line marked with the rank; one that only says that another rank is gone is shown as one line.
    A rank that rank 0 has started (``Fit(devices=n)``) shows nothing, because rank 0 does. After Ctrl-C rank 0 prints the line that the run has
    given to its ``KeyboardInterrupt``, the other ranks print nothing, and the process exits with status 130.

    Args:
        before: the hook that this one replaces; it shows a Ctrl-C that no run has noticed.
    """

    def __init__(self, environment: Environment, before: Callable[..., object]) -> None:
        self._environment, self.before = environment, before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        environment = self._environment
        if isinstance(error, KeyboardInterrupt):
            if error.args and environment.rank == 0:
                print(error, file=sys.stderr, flush=True)
            elif environment.rank == 0:  # outside of a run: the program's own
                self.before(kind, error, trace)
                return
            if not hasattr(sys, "ps1"):  # not at a prompt
                raise SystemExit(
                    INTERRUPTED
                )  # exit handlers run; in a hook for uncaught exceptions nobody can catch it
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
            text = f"{kind.__name__}: {error}"  # its message is complete: the other rank, and where it is
        elif blames_peer(error):
            text = f"{LOST}: {last_line(error)}"
        else:
            text = "".join(traceback.format_exception(error))
        mark = "" if isinstance(error, RankError) else f"[rank{environment.rank}]: "  # torch's mark
        sys.stderr.write("".join(f"{mark}{line}\n" for line in text.splitlines()))
        sys.stderr.flush()


def hook(environment: Environment) -> Uncaught:
    """Return the hook for uncaught exceptions of this rank: the present hook if it is one, or a new one."""
    current = sys.excepthook
    return current if isinstance(current, Uncaught) else Uncaught(environment, current)


def show_interrupts(environment: Environment) -> None:
    """Let :class:`Uncaught` show an uncaught Ctrl-C from now on, in a single process too."""
    sys.excepthook = hook(environment)


def show_interrupts_no_longer(environment: Environment) -> None:
    """Take back :func:`show_interrupts` in a single process: the program has caught its Ctrl-C."""
    current = sys.excepthook
    if isinstance(current, Uncaught) and environment.world_size == 1 and environment.error_file not in _attached:
        sys.excepthook = current.before


def is_shown_by_rank_0(environment: Environment) -> bool:
    """Check whether rank 0 has started this rank itself and still runs, so that it shows this rank's failure."""
    return environment.parent_pid is not None and os.getppid() == environment.parent_pid


def last_line(error: BaseException) -> str:
    """An exception's type, and the first line of its message."""
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]


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


class Interrupt:
    """Raises an exception in the thread that created this object (or called :meth:`allow` last): at most once, never after :meth:`forbid`.

    Args:
        kind: the exception's class, called without arguments.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.forbidden = threading.Event()
        """Set as long as nothing may be raised in the thread."""
        self._lock = threading.Lock()
        self._struck = False
        self.allow()

    def allow(self) -> None:
        """Allow interruptions of the calling thread from now on."""
        with self._lock:
            self._thread, self._open = threading.get_ident(), True
        self.forbidden.clear()

    def interrupt(self) -> bool:
        """Raise the exception, without a message, wherever the thread is now. False: the thread forbids it, or was interrupted before."""
        with self._lock:
            if not self._open or self._struck:
                return False
            self._struck = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(self.kind))
            return True

    def forbid(self) -> None:
        """Forbid interruptions of the calling thread. A pending exception ends here."""
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
        _shorten_exit()

    thread = threading.Thread(target=watch, name="fit-parent-watch", daemon=True)
    thread.start()
    atexit.register(stop)


def _shorten_exit() -> None:
    """Let the interpreter end without collecting garbage, which takes 0.3 s and more after ``import torch``, and for which rank 0 waits.

    Everything else happens as ever: exit handlers, the end of modules and of what they hold, and the exit status (which ``os._exit`` here would
    have to guess). Files in cycles of objects are not closed: what is still in their buffers is written now.
    """
    for item in gc.get_objects():
        if type(item) in _BUFFERED:
            with contextlib.suppress(OSError, ValueError):  # as in a destructor; it is closed
                item.flush()
    gc.disable()
    gc.freeze()


_BUFFERED = {io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
