"""The agent of a machine: it starts the machine's ranks, ends them together, restarts them, and meets the agents of other machines.

A failure ends the other ranks within seconds; after SIGTERM or Ctrl-C, or when a machine joins, all ranks get time to save. A rank that
ends because it was told to has not failed. The first failure is found, and reported last. The loss of a machine does not count as a
restart. No rank outlives its agent.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from engine.distributed import addresses, stores
from engine.launch import child, rendezvous
from engine.launch.first_failure import first_failure, lines_of_others, report, was_interrupted, was_preempted
from engine.launch.job import Job, LaunchError
from engine.launch.output import Output, Streams, Terminal, torch_log
from engine.launch.rendezvous import Meeting, Round
from engine.launch.supervisor import FAIL_S, CommandRank, Rank, Supervisor, variables_of
from engine.utils import scratch
from engine.utils.errors import INTERRUPTED, TERMINATED
from engine.utils.log import TERMINAL, has_terminal

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that reach the ranks through the agent."""
POLL_S = 0.1
"""Interval (s) at which the agent looks for reports of other machines."""
FREE_S = 60.0
"""The loss of a machine does not count as a restart, unless another one was lost less than this time (s) before."""


def run(job: Job) -> int:
    """Run this machine's ranks of ``job`` until they end.

    Returns:
        0: all ranks succeeded; 1: a rank failed, or the machines could not connect; 128 + n: signal n ended the job.
    """
    try:
        job.log_dir.mkdir(parents=True)
    except OSError as error:
        print(
            f"fit launch: cannot create a directory for the ranks' output: {error}; choose one with --log-dir",
            file=sys.stderr,
        )
        return 1
    output = Output(job.log_dir, job.show)
    errors = scratch.make_directory("fit-launch-")
    meeting: Meeting | None = None
    status = 1
    with signals_raised(process_ends=True) as signals, torch_log(job.log_dir / f"agent-{os.getpid()}.log"):
        try:
            nodes = (
                ""
                if job.max_nodes == 1
                else f" here, {job.min_nodes}{f' to {job.max_nodes}' if job.elastic else ''} machines"
            )
            output.write_line(f"{job.nproc} process(es){nodes}; their output: {job.log_dir}")
            meeting = rendezvous.meeting_of(job, output)
            agent = Agent(job, meeting, output, errors, Command(job.command), signals)
            status = _run(agent, job, meeting, output)
        except LaunchError as error:
            output.write_line(str(error))
        except SignalReceived as error:
            signals.job_ends = True
            status = 128 + error.number
        finally:
            output.close()
            scratch.remove(errors)
    if meeting is not None and not meeting.reachable:
        # A normal exit of the interpreter would wait for threads that hang in torch's store.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(agent: Agent, job: Job, meeting: Meeting, output: Output) -> int:
    try:
        succeeded = agent.run()
    except RendezvousGracefulExitError:
        output.write_line(agent.report or "the job has its machines already")
        return 1
    except RendezvousClosedError:
        output.write_line(agent.report or "the job has ended on the other machines")
        return 1
    except RendezvousTimeoutError:
        reason = f"only some of {job.min_nodes} machines came within {job.join_timeout_s} s (--join-timeout)"
        output.write_line(f"{agent.report}\n{reason}".strip())
        return 1
    except (RendezvousError, dist.DistError) as error:
        problem = "the machine that serves the rendezvous is gone" if meeting.has_met else "the machines could not meet"
        output.write_line(f"{agent.report}\n{problem}: {error}".strip())
        return 1
    meeting.close()
    if not succeeded:
        output.write_line(f"{agent.report}\n\n{agent.other_failures}".rstrip())
    return 0 if succeeded else 1


class SignalReceived(Exception):
    """Raised when this process gets a signal that is to end the job."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


class Signals:
    """The signals of this process that end the job: each raises :class:`SignalReceived` in the main thread."""

    def __init__(self) -> None:
        self.job_ends = False
        """Whether the job ends because of one: later ones are ignored, for a launcher and a scheduler may both send one, but not Ctrl-C."""
        self._postpones = False
        self._postponed: int | None = None

    def handle(self, number: int, frame: object) -> None:
        """The handler of each of them."""
        if self.job_ends and number != signal.SIGINT:
            return
        if self._postpones:
            self._postponed = number
        else:
            raise SignalReceived(number)

    @contextlib.contextmanager
    def raise_at_end(self) -> Iterator[None]:
        """Raise a signal that comes inside the block at its end, when a rank that is being started is known and can be told to end."""
        self._postpones = True
        try:
            yield
        finally:
            self._postpones = False
        if self._postponed is not None:
            raise SignalReceived(self._postponed)


@contextlib.contextmanager
def signals_raised(process_ends: bool = False) -> Iterator[Signals]:
    """Let signals raise :class:`SignalReceived` inside the block; restore the previous handlers afterwards.

    Args:
        process_ends: this process ends after the block. If a signal has ended the job, its handlers stay, so that the exit status tells of
            that signal even if another one comes meanwhile.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # other threads do not get signals
        yield signals
        return
    previous_handlers = {number: signal.getsignal(number) for number in HANDLED}
    for number in HANDLED:
        # Under nohup SIGHUP stays ignored. A script's background jobs ignore SIGINT, too, but one that is sent to them is meant for them.
        if number != signal.SIGHUP or previous_handlers[number] != signal.SIG_IGN:
            signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number, handler in previous_handlers.items():
            if number == signal.SIGINT or not (process_ends and signals.job_ends):
                signal.signal(number, handler)


class Program(ABC):
    """A program that each rank runs: a :class:`Command`, or the function of ``notebook()`` and ``debug()``."""

    @abstractmethod
    def start(
        self, local_rank: int, rank: int, variables: Mapping[str, str], error_file: Path, streams: Streams
    ) -> Rank:
        """Start one rank, with ``variables`` besides this process's environment."""


class Command(Program):
    """A command that each rank runs, in a process without a terminal, which the kernel kills when this process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command)

    def start(
        self, local_rank: int, rank: int, variables: Mapping[str, str], error_file: Path, streams: Streams
    ) -> CommandRank:
        out, err = streams
        process = subprocess.Popen(
            self._command, env={**os.environ, **variables}, stdout=out, stderr=err, start_new_session=True
        )
        return CommandRank(local_rank, rank, process, error_file)


class _Outcome(enum.Enum):
    """How an attempt ended; ``AGAIN``: another attempt follows."""

    SUCCEEDED = enum.auto()
    FAILED = enum.auto()
    AGAIN = enum.auto()


class Agent:
    """Runs the ranks of a job on this machine, in one attempt after another.

    Args:
        errors: the directory for the ranks' tracebacks.
        signals: those that end the job.
    """

    def __init__(
        self, job: Job, meeting: Meeting, output: Output | Terminal, errors: Path, program: Program, signals: Signals
    ) -> None:
        self._job, self._meeting, self._output, self._errors, self._program = job, meeting, output, errors, program
        self._signals = signals
        self._variables = {
            **job.variables,
            **_interface(job, meeting.address),
            **({TERMINAL: "1"} if has_terminal() else {}),
        }
        self._supervisor = Supervisor([])
        self._attempts = self._restarts = 0  # restarts are attempts that count towards the job's maximum
        self._freed = float("-inf")
        self.report = ""
        """The report on the rank that failed first in the last failure."""
        self.other_failures = ""
        """A line for each other rank of this machine that failed, or was ended."""

    def run(self) -> bool:
        """Run the ranks until they end, and return whether all succeeded. No rank is left when this returns or raises.

        Raises:
            SignalReceived: this process got a signal; the ranks were given time to save.
            RendezvousError, torch.distributed.DistError: the machines did not meet.
        """
        outcome = _Outcome.AGAIN
        try:
            while outcome is _Outcome.AGAIN:
                next_round = self._meeting.next_round(self._job.nproc, self._restarts)
                with self._signals.raise_at_end():
                    self._start(next_round)
                outcome = self._watch()
                self._output.drain()
        except SignalReceived as received:
            self._pass_on(received.number)
            raise
        finally:
            self._supervisor.end(signal.SIGTERM, FAIL_S)
            self._supervisor.close()
            self._output.drain()
        return outcome is _Outcome.SUCCEEDED

    def _start(self, met: Round) -> None:
        """Start this machine's ranks for a new attempt, as the machines have agreed in a round."""
        self._attempts += 1
        self._restarts = met.restarts
        if self._attempts > 1:
            self._output.mark(f"attempt {self._attempts}")
        numbers = range(met.first_rank, met.first_rank + self._job.nproc)
        ranks: list[Rank] = []
        try:
            for local_rank, (rank, streams) in enumerate(
                zip(numbers, self._output.open(numbers, met.world_size), strict=True)
            ):
                error_file = self._errors / f"attempt={self._attempts}-rank={rank}.json"
                variables = {**self._variables_of(met, local_rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}
                ranks.append(self._program.start(local_rank, rank, variables, error_file, streams))
                ranks[-1].host, ranks[-1].log = socket.gethostname(), self._output.path(rank)
        finally:
            self._supervisor = Supervisor(ranks)
            self._output.started()
        if self._attempts > 1:
            self._output.write_line(f"started again: {len(ranks)} process(es) here, {met.world_size} in all")

    def _variables_of(self, met: Round, local_rank: int) -> dict[str, str]:
        """A rank's environment variables: torchrun's, and those of the job."""
        rank, nproc = met.first_rank + local_rank, self._job.nproc
        return {
            **variables_of(
                rank, met.world_size, local_rank, nproc, met.machine, met.machines, met.master, met.restarts
            ),
            "ROLE_NAME": "rank",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(met.world_size),
            "TORCHELASTIC_MAX_RESTARTS": str(self._job.max_restarts),
            "TORCHELASTIC_RUN_ID": self._meeting.run_id,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **self._variables,
        }

    def _watch(self) -> _Outcome:
        """Wait until this attempt is over; end its ranks if one fails, or if a machine waits to join."""
        ranks, alone = self._supervisor.ranks, self._job.max_nodes == 1
        while True:
            self._supervisor.changed.wait(None if alone else POLL_S)
            self._supervisor.changed.clear()
            if any(rank.exit_code not in (None, 0) for rank in ranks):
                self._supervisor.await_other_failures()
                if was_interrupted(ranks):
                    raise SignalReceived(signal.SIGINT)
                return self._preempted() if was_preempted(ranks) else self._failed()
            if self._meeting.failed_elsewhere:
                return self._failed()
            if not self._supervisor.running():
                self._meeting.await_others()
                return _Outcome.SUCCEEDED
            if self._meeting.machines_waiting:
                self._supervisor.end(signal.SIGTERM, self._job.grace_s)  # they finish their step and save
                return _Outcome.AGAIN

    def _pass_on(self, number: signal.Signals) -> None:
        """Pass SIGTERM or Ctrl-C on to the ranks, and give them time to save."""
        self._signals.job_ends = True
        hurry = threading.Event()
        if threading.current_thread() is threading.main_thread():  # other threads do not get signals
            signal.signal(signal.SIGINT, lambda *_: hurry.set())
        if self._supervisor.running():
            interrupted = number == signal.SIGINT
            hint = "; press it again to kill them" if interrupted else ""
            self._output.write_line(
                f"{'Ctrl-C' if interrupted else number.name}: the ranks finish their step and save{hint}"
            )
            self._supervisor.end(signal.SIGINT if interrupted else signal.SIGTERM, self._job.grace_s, hurry)
        self._output.drain()
        self._output.forget_last_words()
        fine = (0, TERMINATED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)
        for rank in self._supervisor.ranks:
            if rank.exit_code not in fine:
                self._output.write_line(report(rank, self._output.tail(rank.rank)))
                break

    def _preempted(self) -> _Outcome:
        """Let all ranks save and end, because one of them got SIGTERM from a scheduler or from another machine's agent."""
        self._supervisor.end(signal.SIGTERM, self._job.grace_s)
        deadline = time.monotonic() + rendezvous.ELSEWHERE_S
        # Meanwhile this machine may get SIGTERM, too.
        while time.monotonic() < deadline and not self._meeting.machines_waiting:
            time.sleep(POLL_S)
        if not self._job.elastic and not self._meeting.machines_waiting:
            raise SignalReceived(signal.SIGTERM)
        return self._start_uncounted("the ranks were told to end on another machine")

    def _start_uncounted(self, reason: str) -> _Outcome:
        """Start again without counting a restart."""
        self._output.write_line(f"{reason}; starting again with the remaining machines")
        return _Outcome.AGAIN

    def _failed(self) -> _Outcome:
        """End all ranks after a failure, find the first one, and decide whether to start again."""
        ranks = self._supervisor.ranks
        self._supervisor.end(signal.SIGTERM, FAIL_S)
        self._output.drain()
        tails = {rank.rank: self._output.tail(rank.rank) for rank in ranks}
        failure = first_failure(ranks, tails)
        self._output.forget_last_words()
        is_consequence = failure is None or failure.is_consequence
        self.other_failures = failure.other_failures if failure else lines_of_others(ranks, None, tails)
        self.report = self._meeting.agree_on_cause(failure.report if failure else "", is_consequence)
        if is_consequence and self._job.elastic and time.monotonic() - self._freed > FREE_S:
            self._freed = time.monotonic()
            return self._start_uncounted(f"{self.report.split('; its output')[0]}: a rank of another machine is gone")
        if self._restarts >= self._job.max_restarts:
            return _Outcome.FAILED
        self._restarts += 1
        self._output.write_line(
            f"{self.report}\n\n{self.other_failures}\nrestart {self._restarts} of {self._job.max_restarts}"
        )
        return _Outcome.AGAIN


def _interface(job: Job, outward: str | None) -> dict[str, str]:
    """The environment variable that names gloo's network interface, or nothing if that is set or unknown.

    By default gloo listens at the address of the host's name, which may be unreachable, or public. So the ranks of one machine use its
    loopback interface, and the ranks of several machines the interface that reaches the others."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    if job.max_nodes == 1:
        return stores.loopback_interface()
    interface = addresses.interface(outward) if outward else None
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}
