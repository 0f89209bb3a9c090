"""The processes of a run: a launcher has started them, or for ``Fit(devices=n)`` in a plain script rank 0 starts the others itself.

Rank 0 starts ranks 1 to n-1 by repeating its own command line with torchrun's variables in their environment, and supervises them. They run
the script from its first line, and connect to rank 0 where it joins the group. Rank 0's own environment is not changed. While rank 0 trains, a
rank that ends for any reason ends all: the other ranks are terminated, and rank 0 raises a ``RankError`` with the first traceback. When rank 0
ends, all ranks end.

A thread of rank 0 (``_monitor``) notices that a rank has failed and writes the report. How rank 0 learns of it depends on where rank 0 is:

==========================================  ============================================================================
rank 0                                      way out
==========================================  ============================================================================
waits for other ranks to join               ``check`` raises, once the report is written
waits in a gloo collective                  the collective raises, at once; ``fail`` replaces its error by the ``RankError``:
                                            inside a run in ``engine.loop.lifecycle``, before callbacks get it; outside of a
                                            run in ``training``
runs Python code                            after ``INTERRUPT_S`` an empty ``RankError`` interrupts it, which ``fail`` replaces
                                            in the same way
is in native code and does not react        after ``GIVE_UP_S`` the process prints the report and ends
                                            (``_end_ranks_and_interrupt``)
is done with training                       it goes on, and another training raises at its start; at its exit
                                            ``end_with_process`` prints the report and exits with status 1
==========================================  ============================================================================
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
from enum import Enum
from pathlib import Path

import torch

from engine.config.settings import Settings
from engine.distributed import failures, stores
from engine.distributed.addresses import LOOPBACK
from engine.distributed.environments import Environment, detect
from engine.distributed.environments.environment import as_text
from engine.distributed.failures import Interrupt
from engine.distributed.group import Group
from engine.distributed.join import join
from engine.distributed.own_process import StartedJob, own_process
from engine.launch.first_failure import first_failure, lines_of_others, report, summary
from engine.launch.supervisor import ENDING_S, FAIL_S, CommandRank, Rank, Supervisor, variables_of
from engine.utils import accelerator, scratch
from engine.utils.errors import TERMINATED, RankError
from engine.utils.helper_threads import HelperThread, log_failure
from engine.utils.log import logger, warn_once

CAUSE_S = 3.0
"""Time (s) that rank 0, after an error that only says that another rank is gone, waits for that rank's failure."""
PATIENCE_S = 10.0
"""Time (s) after which rank 0, once it is done, logs that it waits for other ranks."""
INTERRUPT_S = 2.5
"""Time (s) after a failure at which a ``RankError`` interrupts rank 0's thread, unless a collective has raised by then."""
GIVE_UP_S = 5.0
"""Time (s) after a failure at which rank 0's process is ended if its thread has not reacted, because it hangs in native code."""

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
"""Programs that run a script and are left out for other ranks than 0, because they need a terminal, serve a port or write one file."""
_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""The interpreter's options that take a value."""


_DEFAULTS = {"PYTHONBREAKPOINT": f"{__name__}.pass_breakpoint"}
"""Environment variables of the started ranks, unless the environment sets them already."""


@contextlib.contextmanager
def joined_group(settings: Settings, environment: Environment | None = None) -> Iterator[Group]:
    """Join the processes of this job for the block. An error that only says that another rank is gone is replaced by that rank's error.

    ``environment``: this process's environment, if the caller has read it already.
    """
    kind = accelerator.device_type(settings.accelerator)
    timeout = timedelta(seconds=settings.start_timeout.value)
    environment = environment or detect(os.environ)
    started: ScriptRanks | None = None
    if environment.world_size == 1 and environment.name == "single":
        started = _start_for(kind, settings)
        environment = started.job.environment if started else environment
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
        yield join(
            environment, device, timeout=timeout, store=started.job.store, check=started.check, debug=settings.debug
        )


def _start_for(kind: str, settings: Settings) -> ScriptRanks | None:
    """Start the other ranks that ``settings`` ask for; ``None`` if this process is the only one."""
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
    """Check that a launcher has started as many processes as ``settings`` ask for."""
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
    """The end of an error: the launcher's variables that say how many ranks there are, or all of its variables if no name among them tells that."""
    variables = environment.variables
    counts = {name: value for name, value in variables.items() if re.search("SIZE|TASKS|NODES", name)} or variables
    return f" (read: {as_text(counts)})" if counts else ""


def _launcher(environment: Environment) -> str:
    """How messages name the launcher: ``fit launch`` sets the variables of ``torchrun``."""
    return "fit launch or torchrun" if environment.name == "torchrun" else environment.name


class Phase(Enum):
    """A phase of rank 0's script. While rank 0 needs the other ranks, any end of one of them is a failure."""

    STARTING = "has not trained yet"
    TRAINING = "joins the other ranks and trains"
    FAILED = "has an error that ends, or has ended, its training"
    DONE = "has trained, or Ctrl-C has ended its training"

    @property
    def needs_ranks(self) -> bool:
        """Whether rank 0 needs the other ranks."""
        return self in (Phase.STARTING, Phase.TRAINING)


class ScriptRanks:
    """The other ranks, which this process, rank 0, has started. Created by :func:`start`.

    Args:
        job: rank 0's environment and the store of the rendezvous:
            ``join(ranks.job.environment, device, timeout=..., store=ranks.job.store, check=ranks.check)``.
        directory: the folder of the ranks' error files.
    """

    def __init__(self, job: StartedJob, ranks: Sequence[Rank], directory: Path) -> None:
        self.job = job
        self._directory = directory
        self._phase = Phase.STARTING
        self._interrupt = Interrupt(RankError)  # allowed while rank 0 needs the other ranks
        self._lock = threading.Lock()
        self._failed = threading.Event()  # set once _report is final
        self._report = ""
        self._reported = False  # whether the caller got the report
        self._preempted = False  # whether SIGTERM has ended the last training that did not end well
        self._supervisor = Supervisor(ranks)
        self._threads: list[threading.Thread] = []
        self._run_in_thread(self._monitor, "fit-ranks")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A context for all that needs the other ranks (joining, ``Fit.run``): inside the block any end of another rank is a failure.

        The ranks are needed between :func:`start` and the first such block, too. Raises the errors of :meth:`check` at the block's start, and
        those of :meth:`fail` in place of the block's own.
        """
        self._enter(Phase.TRAINING)
        try:
            self._note_failure()  # of a rank that has ended meanwhile
            self.check()
            yield
            self._enter(Phase.DONE)
        except BaseException as error:
            self.fail(error)
            raise

    def check(self) -> None:
        """Raise ``RankError`` if another rank has failed. Its message has the first failure's rank, exit code or signal, and traceback."""
        if self._failed.is_set():
            self._raise_report(None)

    def fail(self, error: BaseException) -> None:
        """End rank 0's training because of ``error``: other ranks are no longer needed, and rank 0 is not interrupted. Repeated calls are fine.

        An error that only says that other ranks are gone (``failures.blames_peer``) has its cause in one of them, which may be noticed
        up to ``CAUSE_S`` seconds later, or ``ENDING_S`` more if a rank has recorded its error; any other error is rank 0's own.

        Raises:
            RankError: another rank has failed, and ``error`` is a consequence.
        """
        self._interrupt.forbid()  # rank 0 has reacted; it still needs the ranks until the cause is known
        is_consequence = failures.blames_peer(error) and not (isinstance(error, RankError) and str(error))
        if is_consequence and not self._failed.wait(CAUSE_S) and self._supervisor.has_ending_rank():
            self._failed.wait(ENDING_S)
        self._preempted = isinstance(error, SystemExit) and error.code == TERMINATED
        self._enter(Phase.DONE if isinstance(error, KeyboardInterrupt) else Phase.FAILED)
        if is_consequence and self._failed.is_set():
            self._raise_report(error if str(error) else None)

    def _raise_report(self, consequence: BaseException | None) -> None:
        """Raise the failure that was noted. ``consequence``: rank 0's error, to show below it."""
        self._reported = True
        raise RankError(self._report) from consequence

    def require_world_size(self, world_size: int) -> None:
        """Raise ``RuntimeError`` if a run needs a different number of ranks."""
        started = self.job.environment.world_size
        if started != world_size:
            raise RuntimeError(
                f"{world_size} ranks were requested, but this process has started {started} before and keeps them until "
                "it ends. Use the same number of devices for every run of one script."
            )

    def end_with_process(self) -> None:
        """Wait for the other ranks, or end them if rank 0 ends with an error. The interpreter calls this at its exit."""
        if os.getpid() != self.job.pid:  # a fork of rank 0
            return
        if self._phase is Phase.STARTING:
            self._enter(Phase.DONE)
        elif self._phase is Phase.TRAINING:  # in a daemon thread
            self._enter(Phase.FAILED)
        # The interpreter sets these when it prints an uncaught exception.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with contextlib.suppress(KeyboardInterrupt):
            if isinstance(error, Exception):
                self._supervisor.await_other_failures()
            elif (
                self._phase is Phase.FAILED or error is not None
            ):  # after Ctrl-C, which other ranks got, too, they may be saving
                self._supervisor.await_end(FAIL_S, until=self._failed)
            else:
                self._await_others()
        interrupted = isinstance(error, KeyboardInterrupt)
        if not interrupted:
            self._note_failure()
        failed = self._failed.is_set() and not interrupted
        self._supervisor.end(signal.SIGTERM, FAIL_S)
        if isinstance(error, Exception) and not self._reported:  # rank 0's own error, whose traceback was printed
            print(self._after(error), end="", file=sys.stderr, flush=True)
        elif failed and not self._reported:
            logging.shutdown()
            self._exit_with(f"RankError: {self._report}")
        scratch.remove(self._directory)
        self._supervisor.close()
        for thread in self._threads:  # for the reason given in Supervisor.close
            thread.join(1.0)

    def _run_in_thread(self, target: Callable[[], None], name: str) -> None:
        thread = HelperThread(target, name, "the other ranks may have to be ended by hand")
        self._threads.append(thread)
        thread.start()

    def _monitor(self) -> None:
        """Wait, as a thread's target, until all other ranks have ended or one has failed.

        While rank 0 needs them, because it starts or trains, a failure ends them and interrupts rank 0; later it is only noted.
        """
        try:
            self._await_failure()
        except BaseException as error:  # a failure of a rank would not be seen: rank 0 would wait for it
            log_failure("fit-ranks", "nothing watches the other ranks now, so the job ends", error)
            with self._lock:
                self._report = (
                    self._report or f"the thread that watches the ranks has failed: {failures.last_line(error)}"
                )
                self._failed.set()
        if self._failed.is_set() and self._phase.needs_ranks:
            self._end_ranks_and_interrupt()

    def _await_failure(self) -> None:
        """Wait until all other ranks have ended or one has failed, and note the failure."""
        running = True
        while running:
            self._supervisor.changed.wait()
            self._supervisor.changed.clear()
            running = bool(self._supervisor.running())
            if self._failed_ranks(self._phase.needs_ranks):
                self._supervisor.await_other_failures()
                self._note_failure()
                if self._failed.is_set():  # not if rank 0 has finished its training meanwhile
                    break

    def _enter(self, phase: Phase) -> None:
        """Change what rank 0, the calling thread, is doing. Only while it needs the other ranks may their failure interrupt it."""
        if phase.needs_ranks:
            self._interrupt.allow()
        else:
            self._interrupt.forbid()
        self._phase = phase

    def _failed_ranks(self, still_needed: bool) -> list[Rank]:
        """The ended ranks whose end is a failure; while rank 0 still needs them, any end is one."""
        fine = (0, TERMINATED) if self._preempted else (0,)  # after a SIGTERM all ranks end with this exit code
        return [
            rank
            for rank in self._supervisor.ranks
            if rank.exit_code is not None
            and not rank.ended_by_launcher
            and (still_needed or rank.exit_code not in fine)
        ]

    def _note_failure(self) -> None:
        """Write the report of the first failure, if a rank has failed and there is no report yet."""
        with self._lock:
            needed = self._phase.needs_ranks
            if self._failed.is_set() or not (lost := self._failed_ranks(needed)):
                return
            failure = first_failure(self._supervisor.ranks if needed else lost, still_needed=needed)
            assert failure is not None
            ended = "rank 0: was ended because of it" if needed else ""
            self._report = "\n".join([failure.report, "", *filter(None, (ended, failure.other_failures))]).rstrip()
            self._failed.set()

    def _end_ranks_and_interrupt(self) -> None:
        """End the other ranks after a failure, interrupt rank 0, and end rank 0's process if it does not react."""
        self._run_in_thread(functools.partial(self._supervisor.end, signal.SIGTERM, FAIL_S), "fit-terminate")
        if self._interrupt.forbidden.wait(INTERRUPT_S):
            return
        self._interrupt.interrupt()  # reaches Python code outside collectives; ``fail`` adds the message
        if self._interrupt.forbidden.wait(GIVE_UP_S - INTERRUPT_S):
            return
        self._supervisor.end(signal.SIGTERM, 0.0)
        self._exit_with(f"RankError: {self._report}\n\nrank 0 did not react within {GIVE_UP_S:g} s and is terminated.")

    def _await_others(self) -> None:
        """Wait until all other ranks have ended or one has failed; log it if that takes long."""
        if not self._supervisor.await_end(PATIENCE_S, until=self._failed) and not self._failed.is_set():
            waiting = (f"rank {rank.rank} (process {rank.pid})" for rank in self._supervisor.running())
            logger.warning("rank 0 is done and waits for %s", ", ".join(waiting))
            self._supervisor.await_end(float("inf"), until=self._failed)

    def _after(self, error: Exception) -> str:
        """The text to print after rank 0's own ``error``: a line for each other rank, and the report on one that failed in another way."""
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
        """Print ``text`` and end the process with exit code 1."""
        # os._exit is the only way to a non-zero exit code from another thread, or from an exit handler.
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr)
            scratch.remove(self._directory)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


_current: ScriptRanks | None = None


def current() -> ScriptRanks | None:
    """The ranks that :func:`start` has started in this process; ``None`` if it was not called, in the other ranks, and in forks."""
    return _current if _current is not None and _current.job.pid == os.getpid() else None


def start(world_size: int, *, timeout: timedelta = timedelta(minutes=30)) -> ScriptRanks:
    """Start ranks 1 to ``world_size`` - 1 by repeating this process's command line; this process is rank 0.

    The ranks run until this process ends, which waits for them; further calls return the same object. Unless OMP_NUM_THREADS is
    set, all ranks, including this one, share the CPU's cores. ``timeout``: of the store through which the ranks connect.

    Raises:
        RuntimeError: the command line cannot be repeated (see :func:`repeatable`), another number of ranks was started before, or an
            earlier run used one process.
        ValueError: ``world_size`` is less than 2.
    """
    global _current
    if world_size < 2:
        raise ValueError(f"world_size={world_size}: to start other ranks it must be at least 2")
    started = current()
    if started is not None:
        started.require_world_size(world_size)
        return started
    command = repeatable(world_size)
    if own_process.ran_alone:
        raise RuntimeError(
            f"{world_size} processes were requested, but an earlier Fit or Engine of this script has run in one process. The other ranks "
            f"repeat the script from its first line, and would reach that earlier run first. Use the same number of devices for every run of one "
            f"script (the first may also use devices={world_size}), or write two scripts"
        )
    store = stores.serve(LOOPBACK, 0, timeout=timeout, world_size=world_size)
    threads = _share_threads(world_size)
    interface = stores.loopback_interface()
    for name, value in interface.items():
        if name not in os.environ:
            os.putenv(name, value)  # for gloo in this process; os.environ belongs to the script
    directory = scratch.make_directory("fit-ranks-")
    other_ranks = _start_others(command, world_size, store.port, directory, {**threads, **_DEFAULTS, **interface})
    environment = Environment("relaunch", 0, world_size, 0, world_size, 1, "127.0.0.1", store.port, agent_store=True)
    job = StartedJob(environment, store)
    own_process.started, _current = job, ScriptRanks(job, other_ranks, directory)
    atexit.register(_current.end_with_process)
    sys.excepthook = failures.hook(environment)
    return _current


def _start_others(
    command: Sequence[str], world_size: int, port: int, directory: Path, defaults: Mapping[str, str]
) -> list[CommandRank]:
    """Start the other ranks. ``defaults``: variables that the environment may override; ``directory``: the place of the error files."""
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
    """Stand in for ``breakpoint()`` in the other ranks, which have no terminal: print a message and continue."""
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    if where not in _reported_places:
        _reported_places.add(where)
        sys.stderr.write(
            f"rank {os.environ.get('RANK')} does not stop at breakpoint() in {where}: only rank 0 has the terminal\n"
        )


_reported_places: set[str] = set()


def _share_threads(world_size: int) -> dict[str, str]:
    """Limit this process to its share of the cores; return the variable that limits the other ranks."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // world_size)
    if torch.get_num_threads() > share:
        torch.set_num_threads(share)
    return {"OMP_NUM_THREADS": str(share)}


def repeatable(world_size: int) -> list[str]:
    """The command that starts this program again: the interpreter with its options, the script or module, and its arguments.

    A debugger or profiler that runs the program (one of ``TOOLS``) is left out.

    Raises:
        RuntimeError: the command cannot be repeated (interactive, notebook, pytest, script from standard input, a worker process).
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
    """The interpreter's arguments, without a tool of ``TOOLS`` that runs the script.

    Args:
        arguments: all arguments of the interpreter: ``["-m", "pdb", "train.py", "--lr", "1"]``.
        script: ``sys.argv`` as the script sees it: its file and its arguments.

    Returns:
        ``["train.py", "--lr", "1"]``; ``None`` if a tool's arguments cannot be distinguished from the script's.
    """
    option_count = 0
    while (
        option_count < len(arguments)
        and arguments[option_count].startswith("-")
        and not arguments[option_count].startswith(("-m", "-c"))
    ):
        option_count += 2 if arguments[option_count] in _OPTIONS_WITH_VALUE else 1
    options, command = list(arguments[:option_count]), list(arguments[option_count:])
    if _program(command) not in TOOLS:
        return list(arguments)
    start = len(command) - len(script)
    if start < 1 or command[start + 1 :] != list(script[1:]):
        return None
    if command[start - 1] in ("-m", "--module"):
        return [*options, "-m", *command[start:]]
    return [*options, *command[start:]] if os.path.realpath(command[start]) == os.path.realpath(script[0]) else None


def _program(command: Sequence[str]) -> str:
    """The name of the module or command that the interpreter runs; ``""`` for a script."""
    if not command or command[0].endswith(".py"):
        return ""
    if command[0].startswith("-m"):
        return (command[0][2:] or "".join(command[1:2])).split(".")[0]
    return Path(command[0]).name


def _first_directory() -> str | None:
    """The directory in which this program was started, if its script has a relative path: the script may have changed directory since."""
    file = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    for argument in sys.orig_argv[1:]:
        if argument and not os.path.isabs(argument) and file.endswith(os.sep + argument):
            return file[: -len(argument)]
    return None
