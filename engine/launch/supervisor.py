"""The processes of a job that this process has started, and the supervisor that watches them until one fails or all have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 0.5
"""After a failure: time (s) for ranks that fail of the same cause to write their tracebacks, so that the first can be found."""
FAIL_S = 4.0
"""After a failure: time (s) between SIGTERM and SIGKILL for the other ranks, which may hang in a collective."""


@dataclass(eq=False)
class Rank(ABC):
    """A process of the job that this process has started. A supervisor waits for it, and notes its end in it."""

    local_rank: int
    rank: int
    pid: int
    error_file: Path
    """The file in which the rank leaves its traceback, in Torch Elastic's JSON form."""
    host: str = ""
    """The machine of the rank, if the job's ranks may be on several."""
    log: Path | None = None
    """The file of the rank's output, if there is one."""
    exit_code: int | None = None
    """Exit code of the process; minus the signal's number if a signal has ended it, ``None`` while it runs."""
    ended_at: float = 0.0
    """Time of the end, in seconds since 1970."""
    ended_by_launcher: bool = False
    """Whether the launcher has told the rank to end: then it has not failed."""

    @property
    def failed(self) -> bool:
        """Check whether the rank has failed on its own."""
        return not self.ended_by_launcher and self.exit_code not in (None, 0)

    @abstractmethod
    def wait(self) -> int:
        """Block until the process ends, and return its exit code. Only the supervisor waits.

        Implemented by :class:`CommandRank` and ``FunctionRank`` (``notebook()``).
        """

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone: its data workers would die in the middle of its step."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_with_descendants(self) -> None:
        """Send SIGKILL to this process, and to all of its process group if it leads one."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class CommandRank(Rank):
    """A rank that runs a command: one of ``fit launch``, or this process's own once more."""

    def __init__(self, local_rank: int, rank: int, process: subprocess.Popen[bytes], error_file: Path) -> None:
        super().__init__(local_rank, rank, process.pid, error_file)
        self._process = process

    def wait(self) -> int:
        return self._process.wait()


def variables_of(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    machine: int,
    machines: int,
    master: tuple[str, int],
    attempt: int,
) -> dict[str, str]:
    """torchrun's variables for a rank that meets the job's ranks in a store of its launcher."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(machine),
        "GROUP_WORLD_SIZE": str(machines),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


class Supervisor:
    """Watches the ranks of one attempt on this machine, and ends them together; ``first_failure`` says which was the cause.

    Used by ``Agent`` (``fit launch``, ``notebook``, ``debug``), which waits for its ranks, and by ``ScriptRanks`` (``Fit(devices=n)``), whose
    process trains as rank 0 meanwhile. A thread for each rank blocks until that rank ends, so nothing is polled while a training runs.

    Args:
        ranks: all ranks, started already: a fork beside a waiting thread might inherit a lock that is held.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.changed = threading.Event()
        """Set whenever a rank has ended; ``Agent._watch`` and ``ScriptRanks._monitor`` wait for it."""
        self._waiting = [
            threading.Thread(target=self._wait_for, args=(rank,), name=f"fit-rank-{rank.rank}", daemon=True)
            for rank in ranks
        ]
        for thread in self._waiting:
            thread.start()

    def running(self) -> list[Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.exit_code is None]

    def await_other_failures(self) -> None:
        """Give ranks that fail of one cause time to do so: the first failure that is seen need not be the first that happened."""
        self.await_end(SETTLE_S)

    def end(self, number: signal.Signals, grace_s: float, hurry: threading.Event | None = None) -> None:
        """Send the ranks a signal. After ``grace_s`` seconds kill the ranks that still run, with all processes that they have started.

        Args:
            hurry: kill at once when this is set (a second Ctrl-C).
        """
        for rank in self.running():
            rank.ended_by_launcher = True
            rank.send(number)
        self.await_end(grace_s, hurry)
        for rank in self.running():
            rank.kill_with_descendants()
        self.await_end(FAIL_S)

    def await_end(self, limit_s: float, until: threading.Event | None = None) -> bool:
        """Wait until all ranks have ended, at most ``limit_s`` seconds or until the event is set; returns whether they have ended."""
        deadline = time.monotonic() + limit_s
        while self.running() and time.monotonic() < deadline and not (until is not None and until.is_set()):
            time.sleep(0.02)
        return not self.running()

    def close(self) -> None:
        """End the threads, after the ranks: one that wakes up while the interpreter shuts down would abort the process."""
        for thread in self._waiting:
            thread.join(1.0)

    def _wait_for(self, rank: Rank) -> None:
        code = rank.wait()
        rank.ended_at, rank.exit_code = time.time(), code  # in this order: the code says that the rank has ended
        self.changed.set()
