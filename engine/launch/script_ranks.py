"""``Fit(devices=n)`` in a plain script: rank 0 starts the other ranks by repeating its own command line, and supervises them.

Ranks 1 to n-1 are the same program with torchrun's variables in their environment; they run the script from its first line and connect
to rank 0 where it joins the group. Rank 0's own environment is not changed. While rank 0 trains, a rank that ends for any reason ends all:
the others are terminated and rank 0 raises a ``RankError`` with the first traceback. When rank 0 ends, the others end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.distributed import failures, scratch, stores
from engine.distributed.environment import Environment
from engine.distributed.own_process import StartedRanks, own_process
from engine.distributed.raise_in_thread import Interrupt
from engine.launch import command_line
from engine.launch.first_failure import Rank, cause, lines_of_others, story, summary
from engine.utils.errors import RankError
from engine.utils.log import logger

SETTLE_S = 0.3
"""After a failure: time (s) for ranks that fail of the same cause to write their tracebacks, so that the first can be found."""
KILL_S = 5.0
"""Time between SIGTERM and SIGKILL (s)."""
INTERRUPT_S = 2.5
"""After a failure a ``RankError`` interrupts rank 0's thread after this time (s), unless a collective has raised by then."""
GIVE_UP_S = 5.0
"""After a failure rank 0's process is ended after this time (s), if its thread has not reacted: it hangs in native code."""

_BESIDE = {"PYTHONBREAKPOINT": f"{__name__}.pass_breakpoint"}
"""Environment variables of the other ranks, unless they are set."""


@dataclass(eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    end: Rank


class ScriptRanks(StartedRanks):
    """The ranks that this process, rank 0, has started. Created by :func:`start`.

    ``environment`` describes rank 0 and ``store`` is the store of the rendezvous:
    ``join(started.environment, device, timeout=..., store=started.store, check=started.check)``.
    """

    def __init__(self, environment: Environment, store: dist.Store, children: list[_Child], directory: Path) -> None:
        self.environment = environment
        self.store = store
        self._children = children
        self._directory = directory
        self._pid = os.getpid()
        self._deaths: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failed = threading.Event()  # _story is set, once and for all
        self._story = ""
        self._reported = False
        self._interrupt = Interrupt(
            RankError
        )  # withdrawn: rank 0's thread no longer needs the others, or has seen the failure
        self._broken = False  # the last training ended with an error: the others may wait forever
        self._terminated = self._preempted = False
        self._threads: list[threading.Thread] = []
        for child in children:
            self._run_beside(functools.partial(self._wait, child), f"fit-rank-{child.end.rank}")
        self._run_beside(self._monitor, "fit-ranks")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context for everything that needs all ranks (joining, ``Fit.run``): inside, any exit of another rank is a failure.

        From :func:`start` to the first use the ranks also count as needed. Raises as :meth:`check`, at the start and instead of a
        collective's error.
        """
        self._interrupt.arm()
        self._judge()
        self.check()
        self._broken = True
        try:
            yield
            self._broken = False
        except BaseException as error:
            self._preempted = isinstance(error, SystemExit)
            self._broken = not isinstance(error, KeyboardInterrupt)
            self.check(error)
            raise
        finally:
            self._interrupt.withdraw()

    def check(self, error: BaseException | None = None, wait_s: float = 3.0) -> None:
        """Raise if another rank has failed.

        Args:
            error: rank 0's own exception, if any. If it only says that others are gone (``failures.blames_peer``), wait up to
                ``wait_s`` seconds for the cause. Any other error is rank 0's own: nothing is raised.

        Raises:
            RankError: from ``error``; names the rank that failed first, its exit code or signal, and its traceback.
        """
        if error is not None and (not failures.blames_peer(error) or (isinstance(error, RankError) and str(error))):
            self._interrupt.withdraw()
            return
        if self._failed.wait(wait_s if error is not None else 0.0):
            self._interrupt.withdraw()
            self._reported = True
            raise RankError(self._story) from (error if error is not None and str(error) else None)
        if error is not None:
            self._interrupt.withdraw()

    def demand(self, world_size: int) -> None:
        """Raise ``RuntimeError`` if a run needs a different number of ranks."""
        if self.environment.world_size != world_size:
            raise RuntimeError(
                f"{world_size} ranks were requested, but this process has started {self.environment.world_size} before and keeps them until "
                "it ends. Use the same number of devices for every run of one script."
            )

    def _run_beside(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self, child: _Child) -> None:
        child.end.code = child.process.wait()
        child.end.ended = time.time()
        self._deaths.put(child)

    def _monitor(self) -> None:
        for _ in self._children:
            child = self._deaths.get()
            if child.end.code == 0 and self._interrupt.withdrawn.is_set():
                continue
            time.sleep(SETTLE_S)
            if self._judge():
                break
        if self._failed.is_set() and not self._interrupt.withdrawn.is_set():
            self._end_all()

    def _judge(self) -> bool:
        """Whether a rank has failed; the first time, its report is stored."""
        with self._lock:
            if not self._failed.is_set() and not self._terminated:
                fine = (
                    (0, 128 + signal.SIGTERM) if self._preempted else (0,)
                )  # all ranks exit like this after a SIGTERM
                needed = not self._interrupt.withdrawn.is_set()
                ends = [child.end for child in self._children if child.end.ended]
                dead = [end for end in ends if needed or end.code not in fine]
                if dead:
                    found = cause(dead)
                    first = found[0] if found else min(dead, key=lambda end: end.ended)
                    others = lines_of_others(
                        (child.end for child in self._children if needed or child.end in dead), first
                    )
                    ended = "rank 0: was ended because of it" if needed else ""
                    self._story = "\n".join([story(first), "", *filter(None, (ended, others))]).rstrip()
                    self._failed.set()
        return self._failed.is_set()

    def _end_all(self) -> None:
        self._run_beside(functools.partial(self._terminate, KILL_S), "fit-terminate")
        if self._interrupt.withdrawn.wait(INTERRUPT_S):
            return
        self._interrupt.strike()  # for Python code outside collectives; ``check`` adds the message
        if self._interrupt.withdrawn.wait(GIVE_UP_S - INTERRUPT_S):
            return
        self._terminate(0.0)
        self._die(f"RankError: {self._story}\n\nrank 0 did not react within {GIVE_UP_S:g} s and is terminated.")

    def _terminate(self, limit_s: float) -> None:
        """Send SIGTERM to all running ranks, and SIGKILL to those still running ``limit_s`` later."""
        self._terminated = True
        for child in self._children:
            child.end.told = child.end.told or not child.end.ended
            child.process.terminate()
        self._await_all(limit_s)
        for child in self._children:
            child.process.kill()

    def _await_all(self, limit_s: float, until: threading.Event | None = None) -> None:
        begun, told = time.monotonic(), False
        while waiting := [child for child in self._children if not child.end.ended]:
            waited = time.monotonic() - begun
            if waited > limit_s or (until is not None and until.is_set()):
                return
            if waited > 10.0 and not told:
                told = True
                logger.warning(
                    "rank 0 is done and waits for %s",
                    ", ".join(f"rank {c.end.rank} (process {c.end.pid})" for c in waiting),
                )
            time.sleep(0.02)

    def _finish(self) -> None:
        """At the interpreter's exit: wait for the others, or end them if rank 0 ends with an error."""
        if os.getpid() != self._pid:  # a fork of rank 0
            return
        self._interrupt.withdraw()
        # Set by the interpreter when it prints an uncaught exception.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, Exception):
            limit_s = SETTLE_S
        elif self._broken or error is not None:  # the others also got Ctrl-C, and may be saving
            limit_s = KILL_S
        else:
            limit_s = float("inf")
        with contextlib.suppress(KeyboardInterrupt):
            self._await_all(limit_s, until=self._failed)
        failed = not isinstance(error, KeyboardInterrupt) and self._judge()
        self._terminate(KILL_S)
        if isinstance(error, Exception) and not self._reported:  # rank 0's own, which was shown
            print(self._after(error), end="", file=sys.stderr, flush=True)
        elif failed and not self._reported:
            logging.shutdown()
            self._die(f"RankError: {self._story}")
        scratch.remove(self._directory)
        for thread in self._threads:  # one that wakes up while the interpreter shuts down would abort the process
            thread.join(1.0)

    def _after(self, error: Exception) -> str:
        """What follows rank 0's own ``error``: a line for each other rank, and the traceback of one that failed in another way."""
        ends = [child.end for child in self._children]
        said = {end: failures.read(end.error_file) for end in ends}
        own = [
            end
            for end, (text, _, saw) in said.items()
            if text and not saw and summary(text) != failures.last_line(error)
        ]
        parts = [lines_of_others(ends, own[0] if own else None), *map(story, own[:1])]
        return "".join(f"{part}\n" for part in parts if part)

    def _die(self, text: str) -> None:
        # The only way to a non-zero exit code from another thread or from an exit handler.
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr)
            scratch.remove(self._directory)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def current() -> ScriptRanks | None:
    """The result of :func:`start` in this process; ``None`` before it, in the other ranks, and in forks."""
    started = own_process.started
    return started if isinstance(started, ScriptRanks) else None


def start(world_size: int, *, timeout: timedelta = timedelta(minutes=30)) -> ScriptRanks:
    """Start ranks 1 to ``world_size`` - 1 by repeating this process's command line; this process is rank 0.

    They run until this process ends, which waits for them: further calls return the same object. Unless OMP_NUM_THREADS is
    set, the ranks, including this one, share the CPU's threads. ``timeout`` is the store's.

    Raises:
        RuntimeError: the command line cannot be repeated (interactive, notebook, pytest, script from standard input, a worker
            process), another number of ranks was started before, or an earlier run used one process.
        ValueError: ``world_size`` is less than 2.
    """
    if world_size < 2:
        raise ValueError(f"world_size={world_size}: to start other ranks it must be at least 2")
    started = current()
    if started is not None:
        started.demand(world_size)
        return started
    command = command_line.repeatable(world_size)
    if own_process.ran_alone:
        raise RuntimeError(
            f"{world_size} processes were requested, but an earlier Fit or Engine of this script has run in one process. The other ranks repeat the "
            f"script from its first line, and would reach that one first. Use the same number of devices for every run of one script (the first "
            f"may also use devices={world_size}), or write two scripts"
        )
    store = stores.serve(stores.LOCAL, 0, timeout=timeout, world_size=world_size)
    threads = _share_threads(world_size)
    interface = stores.loopback_interface()
    for name, value in interface.items():
        if name not in os.environ:
            os.putenv(name, value)  # for gloo in this process; os.environ belongs to the script
    directory = scratch.make("fit-ranks-")
    children = _spawn(command, world_size, store.port, directory, {**threads, **_BESIDE, **interface})
    environment = Environment("relaunch", 0, world_size, 0, world_size, 1, "127.0.0.1", store.port, agent_store=True)
    ranks = ScriptRanks(environment, store, children, directory)
    own_process.started = ranks
    atexit.register(ranks._finish)
    sys.excepthook = failures.hook(environment)
    return ranks


def _spawn(
    command: Sequence[str], world_size: int, port: int, directory: Path, defaults: Mapping[str, str]
) -> list[_Child]:
    """Start the other ranks. ``defaults``: variables that the environment may replace; ``directory``: for their error files."""
    children: list[_Child] = []
    try:
        for rank in range(1, world_size):
            error_file = directory / f"rank={rank}.json"
            own = {**_variables(rank, world_size, port), "TORCHELASTIC_ERROR_FILE": str(error_file)}
            variables = {**defaults, **os.environ, **own}
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, cwd=command_line.first_directory()
            )
            children.append(_Child(process, Rank(rank, rank, process.pid, error_file)))
    except BaseException:
        for child in children:
            child.process.kill()
            child.process.wait()
        scratch.remove(directory)
        raise
    return children


def _variables(rank: int, world_size: int, port: int) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "FIT_PARENT_PID": str(os.getpid()),
    }


def pass_breakpoint(*args: object, **kwargs: object) -> None:
    """Replaces ``breakpoint()`` in the other ranks, which have no terminal: they continue, with a message."""
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    if where not in _passed:
        _passed.add(where)
        sys.stderr.write(
            f"rank {os.environ.get('RANK')} does not stop at breakpoint() in {where}: only rank 0 has the terminal\n"
        )


_passed: set[str] = set()


def _share_threads(world_size: int) -> dict[str, str]:
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // world_size)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)
    return {"OMP_NUM_THREADS": str(share)}
