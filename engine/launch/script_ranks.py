"""The processes that a run needs: those that a launcher has started, or for ``Fit(devices=n)`` in a plain script those that rank 0 starts itself.

It does so by repeating its own command line, and supervises them.

Ranks 1 to n-1 are the same program with torchrun's variables in their environment; they run the script from its first line and connect
to rank 0 where it joins the group. Rank 0's own environment is not changed. While rank 0 trains, a rank that ends for any reason ends all:
the others are terminated and rank 0 raises a ``RankError`` with the first traceback. When rank 0 ends, the others end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine import strategies
from engine.config.settings import Settings
from engine.distributed import failures, stores
from engine.distributed.addresses import LOOPBACK
from engine.distributed.environments import Environment, detect
from engine.distributed.environments.environment import as_text
from engine.distributed.failures import Interrupt
from engine.distributed.group import Group
from engine.distributed.join import join
from engine.distributed.own_process import StartedRanks, own_process
from engine.launch.first_failure import first_failure, lines_of_others, report, summary
from engine.launch.supervisor import FAIL_S, CommandRank, Rank, Supervisor, variables_of
from engine.utils import accelerator, scratch
from engine.utils.errors import TERMINATED, RankError
from engine.utils.log import logger, warn_once

PATIENCE_S = 10.0
"""Time (s) after which rank 0, when it is done, logs that it waits for other ranks."""
INTERRUPT_S = 2.5
"""After a failure a ``RankError`` interrupts rank 0's thread after this time (s), unless a collective has raised by then."""
GIVE_UP_S = 5.0
"""After a failure rank 0's process is ended after this time (s), if its thread has not reacted: it hangs in native code."""

TOOLS = (
    "pdb",
    "cProfile",
    "profile",
    "trace",
    "coverage",
    "debugpy",
    "kernprof",
    "line_profiler",
    "memory_profiler",
    "pyinstrument",
    "scalene",
    "viztracer",
)
"""Programs that run another one, for rank 0 only: they need a terminal, serve a port or write one file."""
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


_BESIDE = {"PYTHONBREAKPOINT": f"{__name__}.pass_breakpoint"}
"""Environment variables of the started ranks, unless the environment sets them already."""


@contextlib.contextmanager
def joined(settings: Settings, environment: Environment | None = None) -> Iterator[Group]:
    """Join all processes of this job within the block. An error that only says that another rank is gone is replaced by that rank's error.

    ``environment``: this process's, if the caller has read it.
    """
    kind = accelerator.device_type(settings.accelerator)
    timeout = timedelta(seconds=settings.start_timeout.value)
    environment = environment or detect(os.environ)
    started: ScriptRanks | None = None
    if environment.world_size == 1 and environment.name == "single":
        strategies.get(settings.strategy, 1)  # an unknown name is said before processes are started
        started = _start_for(kind, settings)
        environment = started.environment if started else environment
    else:
        _check_started(environment, settings)
    index = (
        environment.local_rank if not isinstance(settings.devices, tuple) else settings.devices[environment.local_rank]
    )
    device = accelerator.device(kind, index, binds_devices=environment.binds_devices)
    if started is None:
        yield join(environment, device, timeout=timeout, debug=settings.debug)
        return
    with started.training():
        yield join(environment, device, timeout=timeout, store=started.store, check=started.check, debug=settings.debug)


def _start_for(kind: str, settings: Settings) -> ScriptRanks | None:
    devices = settings.devices
    count = len(devices) if isinstance(devices, tuple) else accelerator.count(kind, devices)
    if settings.num_nodes > 1:
        raise ValueError(
            f"num_nodes={settings.num_nodes}: several machines need a launcher; on each of them run "
            f"fit launch --nnodes {settings.num_nodes} --nproc {count} --rdzv HOST:29500 script.py (or torchrun --nnodes {settings.num_nodes} "
            f"--nproc-per-node {count} --rdzv-backend c10d --rdzv-endpoint HOST:29500 script.py), or start it with srun or mpirun"
        )
    if count == 1:
        if (started := current()) is not None:
            started.require_world_size(1)
        return None
    if settings.strategy == "single":
        raise ValueError(
            f"strategy='single' and devices={devices!r}: one process cannot use {count} devices; use strategy='ddp' or 'auto'"
        )
    if current() is None:
        failures.refuse_imported_script()
        logger.info("this script runs as %d processes (%s): starting %d more", count, kind, count - 1)
    try:
        return start(count, timeout=timedelta(seconds=settings.start_timeout.value))
    except RuntimeError as error:
        if devices != "auto":
            raise
        warn_once(f"one of {count} devices is used, because other processes cannot be started from here: {error}")
        return None


def _check_started(environment: Environment, settings: Settings) -> None:
    devices = len(settings.devices) if isinstance(settings.devices, tuple) else settings.devices
    if devices not in ("auto", -1, environment.local_world_size):
        raise ValueError(
            f"devices={settings.devices!r} was asked for, but {_launcher(environment)} has started {environment.local_world_size} process(es) on "
            f"this machine{_read_from(environment)}; leave devices out, or start as many"
        )
    if settings.num_nodes not in (1, environment.num_nodes):
        raise ValueError(
            f"num_nodes={settings.num_nodes} was asked for, but {_launcher(environment)} has started {environment.num_nodes} node(s)"
            f"{_read_from(environment)}; leave it out"
        )


def _read_from(environment: Environment) -> str:
    """The variables that tell how many ranks there are, or all if none has such a name."""
    variables = environment.variables
    counts = {name: value for name, value in variables.items() if re.search("SIZE|TASKS|NODES", name)} or variables
    return f" (read: {as_text(counts)})" if counts else ""


def _launcher(environment: Environment) -> str:
    """How messages name the launcher: ``fit launch`` sets the variables of ``torchrun``."""
    return "fit launch or torchrun" if environment.name == "torchrun" else environment.name


class ScriptRanks(StartedRanks):
    """The ranks that this process, rank 0, has started. Created by :func:`start`.

    ``environment`` describes rank 0 and ``store`` is the store of the rendezvous:
    ``join(started.environment, device, timeout=..., store=started.store, check=started.check)``.
    """

    def __init__(self, environment: Environment, store: dist.Store, ranks: Sequence[Rank], directory: Path) -> None:
        self.environment = environment
        self.store = store
        self._directory = directory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._failed = threading.Event()  # _report is set, once and for all
        self._report = ""
        self._reported = False
        self._interrupt = Interrupt(
            RankError
        )  # forbidden: rank 0's thread no longer needs the others, or has seen the failure
        self._broken = False  # the last training ended with an error: the others may wait forever
        self._preempted = False
        self._supervisor = Supervisor(ranks)
        self._threads: list[threading.Thread] = []
        self._run_beside(self._monitor, "fit-ranks")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context for everything that needs all ranks (joining, ``Fit.run``): inside, any exit of another rank is a failure.

        From :func:`start` to the first use the ranks also count as needed. Raises the errors of :meth:`check`, at the start and instead of a
        collective's error.
        """
        self._interrupt.allow()
        self._has_failure()
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
            self._interrupt.forbid()

    def check(self, error: BaseException | None = None, wait_s: float = 3.0) -> None:
        """Raise if another rank has failed.

        Args:
            error: rank 0's own exception, if any. If it only says that others are gone (``failures.blames_peer``), wait up to
                ``wait_s`` seconds for the cause. Any other error is rank 0's own: nothing is raised.

        Raises:
            RankError: from ``error``; names the rank that failed first, its exit code or signal, and its traceback.
        """
        if error is not None and (not failures.blames_peer(error) or (isinstance(error, RankError) and str(error))):
            self._interrupt.forbid()
            return
        if self._failed.wait(wait_s if error is not None else 0.0):
            self._interrupt.forbid()
            self._reported = True
            raise RankError(self._report) from (error if error is not None and str(error) else None)
        if error is not None:
            self._interrupt.forbid()

    def require_world_size(self, world_size: int) -> None:
        """Raise ``RuntimeError`` if a run needs a different number of ranks."""
        if self.environment.world_size != world_size:
            raise RuntimeError(
                f"{world_size} ranks were requested, but this process has started {self.environment.world_size} before and keeps them until "
                "it ends. Use the same number of devices for every run of one script."
            )

    def end_with_process(self) -> None:
        """Wait for the other ranks, or end them if rank 0 ends with an error. Called by the interpreter's exit."""
        if os.getpid() != self._pid:  # a fork of rank 0
            return
        self._interrupt.forbid()
        # Set by the interpreter when it prints an uncaught exception.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(error, Exception):
                self._supervisor.await_other_failures()
            elif self._broken or error is not None:  # the others also got Ctrl-C, and may be saving
                self._supervisor.await_end(FAIL_S, until=self._failed)
            else:
                self._await_others()
        failed = not isinstance(error, KeyboardInterrupt) and self._has_failure()
        self._supervisor.end(signal.SIGTERM, FAIL_S)
        if isinstance(error, Exception) and not self._reported:  # rank 0's own, which was shown
            print(self._after(error), end="", file=sys.stderr, flush=True)
        elif failed and not self._reported:
            logging.shutdown()
            self._exit_with(f"RankError: {self._report}")
        scratch.remove(self._directory)
        self._supervisor.close()
        for thread in self._threads:  # as the supervisor's
            thread.join(1.0)

    def _run_beside(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _monitor(self) -> None:
        running = True
        while running:
            self._supervisor.changed.wait()
            self._supervisor.changed.clear()
            running = bool(self._supervisor.running())
            if self._lost(self._needed()):
                self._supervisor.await_other_failures()
                if self._has_failure():
                    break
        if self._failed.is_set() and self._needed():
            self._end_all()

    def _needed(self) -> bool:
        """Check whether rank 0 needs the other ranks now: before the first training, and in each training."""
        return not self._interrupt.forbidden.is_set()

    def _lost(self, needed: bool) -> list[Rank]:
        """The ranks whose end is a failure: any as long as they are needed."""
        fine = (0, TERMINATED) if self._preempted else (0,)  # all ranks exit like this after a SIGTERM
        return [
            rank
            for rank in self._supervisor.ranks
            if rank.exit_code is not None and not rank.ended_by_launcher and (needed or rank.exit_code not in fine)
        ]

    def _has_failure(self) -> bool:
        """Check whether a rank has failed; the first time, store its report."""
        with self._lock:
            needed = self._needed()
            if not self._failed.is_set() and (lost := self._lost(needed)):
                failure = first_failure(self._supervisor.ranks if needed else lost, still_needed=needed)
                assert failure is not None
                ended = "rank 0: was ended because of it" if needed else ""
                self._report = "\n".join([failure.report, "", *filter(None, (ended, failure.other_failures))]).rstrip()
                self._failed.set()
        return self._failed.is_set()

    def _end_all(self) -> None:
        self._run_beside(functools.partial(self._supervisor.end, signal.SIGTERM, FAIL_S), "fit-terminate")
        if self._interrupt.forbidden.wait(INTERRUPT_S):
            return
        self._interrupt.interrupt()  # for Python code outside collectives; ``check`` adds the message
        if self._interrupt.forbidden.wait(GIVE_UP_S - INTERRUPT_S):
            return
        self._supervisor.end(signal.SIGTERM, 0.0)
        self._exit_with(f"RankError: {self._report}\n\nrank 0 did not react within {GIVE_UP_S:g} s and is terminated.")

    def _await_others(self) -> None:
        if not self._supervisor.await_end(PATIENCE_S, until=self._failed) and not self._failed.is_set():
            waiting = (f"rank {rank.rank} (process {rank.pid})" for rank in self._supervisor.running())
            logger.warning("rank 0 is done and waits for %s", ", ".join(waiting))
            self._supervisor.await_end(float("inf"), until=self._failed)

    def _after(self, error: Exception) -> str:
        """The lines after rank 0's own ``error``: a line for each other rank, and the traceback of one that failed in another way."""
        ranks = self._supervisor.ranks
        texts = {rank: failures.read(rank.error_file) for rank in ranks}
        unrelated = [
            rank
            for rank, (text, _, is_consequence) in texts.items()
            if text and not is_consequence and summary(text) != failures.last_line(error)
        ]
        parts = [lines_of_others(ranks, unrelated[0] if unrelated else None), *map(report, unrelated[:1])]
        return "".join(f"{part}\n" for part in parts if part)

    def _exit_with(self, text: str) -> None:
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
        started.require_world_size(world_size)
        return started
    command = repeatable(world_size)
    if own_process.ran_alone:
        raise RuntimeError(
            f"{world_size} processes were requested, but an earlier Fit or Engine of this script has run in one process. The other ranks repeat the "
            f"script from its first line, and would reach that one first. Use the same number of devices for every run of one script (the first "
            f"may also use devices={world_size}), or write two scripts"
        )
    store = stores.serve(LOOPBACK, 0, timeout=timeout, world_size=world_size)
    threads = _share_threads(world_size)
    interface = stores.loopback_interface()
    for name, value in interface.items():
        if name not in os.environ:
            os.putenv(name, value)  # for gloo in this process; os.environ belongs to the script
    directory = scratch.make_directory("fit-ranks-")
    other_ranks = _start_others(command, world_size, store.port, directory, {**threads, **_BESIDE, **interface})
    environment = Environment("relaunch", 0, world_size, 0, world_size, 1, "127.0.0.1", store.port, agent_store=True)
    ranks = ScriptRanks(environment, store, other_ranks, directory)
    own_process.started = ranks
    atexit.register(ranks.end_with_process)
    sys.excepthook = failures.hook(environment)
    return ranks


def _start_others(
    command: Sequence[str], world_size: int, port: int, directory: Path, defaults: Mapping[str, str]
) -> list[CommandRank]:
    """Start the other ranks. ``defaults``: variables that the environment may replace; ``directory``: for their error files."""
    ranks: list[CommandRank] = []
    try:
        for rank in range(1, world_size):
            error_file = directory / f"rank={rank}.json"
            variables = {
                **variables_of(rank, world_size, rank, world_size, 0, 1, (LOOPBACK, port), attempt=0),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                "FIT_PARENT_PID": str(os.getpid()),
            }
            process = subprocess.Popen(
                command,
                env={**defaults, **os.environ, **variables},
                stdin=subprocess.DEVNULL,
                cwd=_first_directory(),
            )
            ranks.append(CommandRank(rank, rank, process, error_file))
    except BaseException:
        for started in ranks:
            started.send(signal.SIGKILL)
            started.wait()
        scratch.remove(directory)
        raise
    return ranks


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


def repeatable(world_size: int) -> list[str]:
    """The command that starts this program again: its interpreter with its options, its script or module, its arguments.

    A debugger or profiler that runs the program (one of ``TOOLS``) is left out.

    Raises:
        RuntimeError: it cannot be repeated (interactive, notebook, pytest, script from standard input, a worker process).
    """
    main = sys.modules.get("__main__")
    ipython = sys.modules.get("IPython")
    if "ipykernel" in sys.modules:
        reason = "it is a Jupyter kernel"
    elif hasattr(sys, "ps1") or sys.flags.interactive or (ipython is not None and ipython.get_ipython() is not None):
        reason = "it is an interactive interpreter"
    elif "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        reason = "it is a pytest session"
    elif multiprocessing.parent_process() is not None:
        reason = "it is a worker of the multiprocessing module"
    elif getattr(main, "__file__", None) == "<stdin>" or (sys.orig_argv[1:] in ([], ["-"])):
        reason = "the script was read from standard input"
    elif not sys.executable or getattr(sys, "frozen", False):
        reason = "it is an embedded or frozen interpreter"
    elif (repeated := without_tool(sys.orig_argv[1:], sys.argv)) is None:
        reason = f"it is unclear which of {sys.orig_argv} are the script and its arguments"
    else:
        return [sys.executable, *repeated]
    raise RuntimeError(
        f"{world_size} processes were requested, but the other ranks are started by repeating the command line of this one, and {reason}. "
        f"Write a script and start it with: torchrun --nproc-per-node {world_size} script.py"
    )


def without_tool(arguments: Sequence[str], script: Sequence[str]) -> list[str] | None:
    """The interpreter's arguments without a tool that runs the script.

    Args:
        arguments: all those of the interpreter: ``["-m", "pdb", "train.py", "--lr", "1"]``.
        script: ``sys.argv`` as the tool leaves it to the script: its file and its arguments.

    Returns:
        ``["train.py", "--lr", "1"]``; ``None`` when a tool's arguments cannot be distinguished from the script's.
    """
    first = 0
    while first < len(arguments) and arguments[first].startswith("-") and not arguments[first].startswith(("-m", "-c")):
        first += 2 if arguments[first] in _WITH_VALUE else 1
    options, command = list(arguments[:first]), list(arguments[first:])
    if _program(command) not in TOOLS:
        return list(arguments)
    start = len(command) - len(script)
    if start < 1 or command[start + 1 :] != list(script[1:]):
        return None
    if command[start - 1] in ("-m", "--module"):
        return [*options, "-m", *command[start:]]
    return [*options, *command[start:]] if os.path.realpath(command[start]) == os.path.realpath(script[0]) else None


def _program(command: Sequence[str]) -> str:
    """The module or the command that the interpreter runs; ``""`` for a script, whatever its name."""
    if not command or command[0].endswith(".py"):
        return ""
    if command[0].startswith("-m"):
        return (command[0][2:] or "".join(command[1:2])).split(".")[0]
    return Path(command[0]).name


def _first_directory() -> str | None:
    """The directory of the command line, if it names the script by a relative path: the script may have changed directory since."""
    file = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    for argument in sys.orig_argv[1:]:
        if argument and not os.path.isabs(argument) and file.endswith(os.sep + argument):
            return file[: -len(argument)]
    return None
