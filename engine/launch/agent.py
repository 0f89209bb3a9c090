"""The agent: starts the ranks of this machine, monitors them, ends them together, and restarts them. Based on Torch Elastic's.

What differs from torchrun's agent: a failure ends the other ranks within seconds, whereas after SIGTERM, Ctrl-C or when a machine joins,
they get time to save; ranks that ended because they were told to did not fail; the first failure is found and reported last; a
lost machine does not count as a restart; and no rank outlives its agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from engine.distributed import address, scratch, stores
from engine.launch import child, first_failure, rendezvous
from engine.launch.first_failure import Rank
from engine.launch.job import Job, LaunchError
from engine.launch.output import Direct, Output
from engine.launch.signals import HANDLED, handle_signals, signals
from engine.launch.torch_log import torch_log
from engine.utils.errors import TERMINATED
from engine.utils.log import TERMINAL, has_terminal

SETTLE_S = 0.5
"""After a failure: time (s) for ranks that fail of the same cause to write their tracebacks, so that the first can be found."""
FAIL_S = 4.0
"""After a failure: time (s) between SIGTERM and SIGKILL for the others, which may hang in a collective."""
FREE_S = 60.0
"""A lost machine does not count as a restart, unless one was lost less than this long before (s)."""
ELSEWHERE_S = 2.0
"""How long to wait for the cause of a failure from another machine (s)."""


def run(job: Job) -> int:
    """Run this machine's ranks of ``job`` until they end.

    Returns:
        0: all ranks succeeded; 1: one failed, or the machines could not connect; 128 + the number of a signal.
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
    errors = scratch.make("fit-launch-")
    meetings: list[rendezvous.Watched] = []
    status = 1
    with signals(), torch_log(job.log_dir / f"agent-{os.getpid()}.log"):
        try:
            nodes = (
                ""
                if job.max_nodes == 1
                else f" here, {job.min_nodes}{f' to {job.max_nodes}' if job.elastic else ''} machines"
            )
            output.say(f"{job.nproc} process(es){nodes}; their output: {job.log_dir}")
            meetings.append(rendezvous.handler(job, output.say))
            status = _run(job, meetings[0], output, errors)
        except LaunchError as error:
            output.say(str(error))
        except SignalException as error:
            status = 128 + int(error.sigval)
        finally:
            output.close()
            scratch.remove(errors)
    if meetings and not meetings[0].reachable:
        # The interpreter's exit would wait for threads that hang in torch's store.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run(job: Job, meeting: rendezvous.Watched, output: Output, errors: Path) -> int:
    # A dollar sign would be a macro to torch's agent.
    command = tuple(each.replace("$", "$$") for each in ("-I", "-S", child.__file__, str(os.getpid()), *job.command))
    agent = make_agent(job, meeting, output, errors, sys.executable, command)
    try:
        result = agent.run()
    except RendezvousClosedError:
        output.say(agent.told or "the job has ended on the other machines")
        return 1
    except RendezvousTimeoutError:
        output.say(
            f"{agent.told or ''}\nonly some of {job.min_nodes} machines came within {job.join_timeout_s} s (--join-timeout)".strip()
        )
        return 1
    except (RendezvousError, dist.DistError) as error:
        what = "the machine that serves the rendezvous is gone" if meeting.met else "the machines could not meet"
        output.say(f"{agent.told or ''}\n{what}: {error}".strip())
        return 1
    except SignalException:
        raise
    else:
        meeting.shutdown()
    if result is None or result.is_failed() or result.state != WorkerState.SUCCEEDED:
        output.drain()
        output.say(f"{agent.told or 'the job has its machines already'}\n\n{agent.others}".rstrip())
        return 1
    return 0


def make_agent(
    job: Job,
    meeting: rendezvous.Watched,
    output: Output | Direct,
    errors: Path,
    entrypoint: str | Callable[..., Any],
    args: tuple[Any, ...],
    start_method: str = "spawn",
) -> Agent:
    """The agent of this machine for a program, or for a function (``start_method`` passes it to the processes)."""
    spec = WorkerSpec(
        role="rank",
        local_world_size=job.nproc,
        rdzv_handler=meeting,
        entrypoint=entrypoint,
        args=args,
        max_restarts=job.max_restarts,
        local_addr=meeting.local,
    )
    return Agent(
        spec,
        job,
        meeting,
        output,
        RankFiles(
            output,
            errors,
            {**job.variables, **_interface(job, meeting.address), **({TERMINAL: "1"} if has_terminal() else {})},
        ),
        start_method,
    )


def _interface(job: Job, own: str | None) -> dict[str, str]:
    """gloo listens at the address of the host's name, which may be unreachable, or public: ranks on one machine use its loopback interface,
    ranks on several machines the interface that reaches the others."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    if job.max_nodes == 1:
        return stores.loopback_interface()
    found = address.interface(own) if own else None
    return {"GLOO_SOCKET_IFNAME": found} if found else {}


class RankFiles(LogsSpecs):
    """The output files of an attempt's ranks, and further environment variables."""

    def __init__(self, output: Output | Direct, errors: Path, variables: dict[str, str]) -> None:
        super().__init__()
        self.output, self.errors, self.variables = output, errors, variables
        self.attempts = 0

    @property
    def root_log_dir(self) -> str:
        """The directory of the ranks' files."""
        return str(self.output.directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch's agent for each attempt, with the variables of each local rank."""
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        files = {
            local: str(self.errors / f"attempt={self.attempts}-rank={found}.json") for local, found in ranks.items()
        }
        self.attempts += 1
        for local, env in envs.items():
            env.update(self.variables, TORCHELASTIC_ERROR_FILE=files[local])
        stdouts, stderrs = self.output.open(ranks, int(envs[0]["WORLD_SIZE"]))
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=files)


class Agent(LocalElasticAgent):
    """Torch Elastic's agent for one machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        job: Job,
        meeting: rendezvous.Watched,
        output: Output | Direct,
        rank_files: RankFiles,
        start_method: str,
    ) -> None:
        super().__init__(spec=spec, logs_specs=rank_files, start_method=start_method)
        self._meeting = meeting
        self._handled = [number for number in HANDLED if signal.getsignal(number) != signal.SIG_IGN]
        self._job, self._output, self._rank_files = job, output, rank_files
        self._ranks: list[Rank] = []
        self._freed = float("-inf")
        self.told = ""
        """The report of the last failure: the first rank's."""
        self.others = ""
        """A line for each other rank of this machine."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = self._rank_files.attempts
        if before:
            self._output.mark(f"attempt {before + 1}")
        found = super()._start_workers(worker_group)
        handle_signals(self._handled)  # torch's agent has set its own
        self._output.started()
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                for pipe in (
                    handler._stdout,
                    handler._stderr,
                ):  # torch leaves them open as long as it keeps the process
                    if pipe is not None:
                        pipe.close()
        self._ranks = [
            Rank(
                each.local_rank,
                each.global_rank,
                found[each.local_rank],
                self._rank_files.errors / f"attempt={before}-rank={each.global_rank}.json",
                host=socket.gethostname(),
            )
            for each in worker_group.workers
        ]
        if before:
            self._output.say(
                f"started again: {len(self._ranks)} process(es) here, {worker_group.workers[0].world_size} in all"
            )
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        if any(each.code not in (None, 0) for each in self._ranks):
            self._settle()
            if first_failure.interrupted(self._ranks):
                raise SignalException("a rank was interrupted", signal.SIGINT)
            return self._preempted() if first_failure.preempted(self._ranks) else self._failed(worker_group)
        if self._meeting.failed_elsewhere:
            return self._failed(worker_group)
        return super()._monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        # A machine waits to join: the ranks finish their step and save.
        self._end(signal.SIGTERM, self._job.grace_s)
        super()._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if isinstance(sys.exception(), SignalException):
            self._forward(death_sig)
        else:
            self._end(signal.SIGTERM, FAIL_S)
        super()._shutdown(death_sig)
        self._output.drain()

    def _exit_barrier(self) -> None:
        if self._job.max_nodes > 1:
            with contextlib.suppress(RendezvousTimeoutError):
                rendezvous.bounded(
                    super()._exit_barrier,
                    self._exit_barrier_timeout + rendezvous.STORE_S,
                    "waiting for the other machines",
                )

    def _look(self) -> None:
        """Note which ranks have ended."""
        for each in self._ranks:
            if each.code is None and (code := self._exit_code(each.local)) is not None:
                each.code, each.ended = code, time.time()

    def _exit_code(self, local: int) -> int | None:
        if isinstance(self._pcontext, SubprocessContext):
            return self._pcontext.subprocess_handlers[local].proc.poll()
        assert isinstance(self._pcontext, MultiprocessContext)
        assert self._pcontext._pc is not None
        return self._pcontext._pc.processes[local].exitcode

    def _alive(self) -> list[Rank]:
        self._look()
        return [each for each in self._ranks if each.code is None]

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _end(self, number: int, limit_s: float, hurry: threading.Event | None = None) -> None:
        """Signal the ranks to end, wait, and kill the rest, with all processes that they have started."""
        for each in self._alive():
            each.told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, number)  # not its data workers: they would die in the middle of its step
        deadline = time.monotonic() + limit_s
        while self._alive() and time.monotonic() < deadline and not (hurry and hurry.is_set()):
            time.sleep(0.02)
        for each in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
                os.killpg(each.pid, signal.SIGKILL)
        deadline = time.monotonic() + FAIL_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _forward(self, number: signal.Signals) -> None:
        """SIGTERM, or Ctrl-C: pass it to the ranks, and give them time to save."""
        hurry = threading.Event()
        signal.signal(signal.SIGINT, lambda *_: hurry.set())
        for other in HANDLED[1:]:  # a launcher and a scheduler may both send one
            signal.signal(other, lambda *_: None)
        if self._alive():
            interrupted = number == signal.SIGINT
            again = "; press it again to kill them" if interrupted else ""
            self._output.say(f"{'Ctrl-C' if interrupted else number.name}: the ranks finish their step and save{again}")
            self._end(signal.SIGINT if interrupted else signal.SIGTERM, self._job.grace_s, hurry)
        self._output.drain()
        self._output.forget_last_words()
        fine = (0, TERMINATED, -signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)
        for each in self._ranks:
            if each.code not in fine:
                self._output.say(self._story(each))
                break

    def _preempted(self) -> RunResult:
        """All ranks save and end because one received SIGTERM from a scheduler, or from another machine's agent."""
        self._end(signal.SIGTERM, self._job.grace_s)
        deadline = time.monotonic() + ELSEWHERE_S
        while (
            time.monotonic() < deadline and not self._meeting.num_nodes_waiting()
        ):  # this machine may be about to get SIGTERM too
            time.sleep(0.1)
        if not self._job.elastic and not self._meeting.num_nodes_waiting():
            raise SignalException("the ranks were told to end", signal.SIGTERM)
        return self._start_free("the ranks were told to end on another machine")

    def _start_free(self, why: str) -> RunResult:
        self._output.say(f"{why}; starting again with the remaining machines")
        self._restart_workers(self._worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _failed(self, worker_group: WorkerGroup) -> RunResult:
        self._end(signal.SIGTERM, FAIL_S)
        self._output.drain()
        tails = {each.rank: self._output.tail(each.rank) for each in self._ranks}
        found = first_failure.cause(self._ranks, tails)
        self._output.forget_last_words()
        self.others = first_failure.lines_of_others(self._ranks, found[0] if found else None, tails)
        told = self._story(found[0]) if found else ""
        only_saw = found is None or found[1]
        if (worker_group.group_world_size or 1) > 1:
            told = self._exchange(told, only_saw)
        self.told = told
        left = self._remaining_restarts
        if only_saw and self._job.elastic and time.monotonic() - self._freed > FREE_S:
            self._freed = time.monotonic()
            return self._start_free(f"{told.split('; its output')[0]}: a rank of another machine is gone")
        if left:
            self._output.say(
                f"{told}\n\n{self.others}\nrestart {self._job.max_restarts - left + 1} of {self._job.max_restarts}"
            )
        if found is None:  # torch's agent does not consider these ranks failed
            return RunResult(state=WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _story(self, rank: Rank) -> str:
        return first_failure.story(rank, self._output.tail(rank.rank), self._output.path(rank.rank))

    def _exchange(self, told: str, only_saw: bool) -> str:
        """Send the cause to the other machines' agents, or receive it from them."""
        if only_saw and self._meeting.cause:
            return self._meeting.cause
        store, key = self._store, self._meeting.cause_key
        assert store is not None

        def work() -> str:
            if not only_saw:
                store.set(key, told)
                time.sleep(2 * rendezvous.WATCH_S)  # the store may be served here: give the others time to read it
                return told
            deadline = time.monotonic() + ELSEWHERE_S
            while time.monotonic() < deadline:
                if store.check([key]):
                    return store.get(key).decode()
                time.sleep(0.1)
            return f"{told}\n\nThe rank that this one lost was on another machine, which reported no cause: it may be gone."

        try:
            if self._meeting.reachable:
                return rendezvous.bounded(work, 2 * ELSEWHERE_S, "asking the other machines")
        except (RendezvousTimeoutError, dist.DistError):
            pass
        return (
            f"{told}\n\nThe rank that this one lost was on another machine, which cannot be reached."
            if only_saw
            else told
        )
