"""The ranks that this process has started, and the supervisor that watches them until one fails or all have ended."""

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

from engine.distributed import failures
from engine.utils.helper_threads import log_failure

SETTLE_S = 0.5
"""Time (s) after a failure in which ranks that fail for the same reason can write their tracebacks, so that the first can be found."""
ENDING_S = 10.0
"""Time (s) in which a rank that has recorded its error may end. It can take seconds on a busy machine; other ranks lose it meanwhile."""
FAIL_S = 4.0
"""Time (s) between SIGTERM and SIGKILL for the other ranks after a failure; they may hang in a collective."""


@dataclass(eq=False)
class Rank(ABC):
    """A rank that this process has started. A supervisor waits for its end, and records that here."""

    local_rank: int
    rank: int
    pid: int
    error_file: Path
    """The file in which the rank leaves its traceback, in Torch Elastic's JSON form."""
    host: str = ""
    """The rank's machine, if the job's ranks may be on several."""
    log: Path | None = None
    """The file of the rank's output, if there is one."""
    exit_code: int | None = None
    """Exit code of the process; the negative number of the signal that ended it, if one did; ``None`` while it runs."""
    ended_at: float = 0.0
    """Time at which the process ended, in seconds since 1970."""
    ended_by_launcher: bool = False
    """Whether the launcher has told the rank to end, so that its end is not a failure."""

    @property
    def failed(self) -> bool:
        """Whether the rank has failed on its own."""
        return not self.ended_by_launcher and self.exit_code not in (None, 0)

    @property
    def is_ending(self) -> bool:
        """Whether the rank still runs, but has recorded an error of its own: one that is not the loss of another rank."""
        text, _, is_consequence = failures.read(self.error_file)
        return self.exit_code is None and bool(text) and not is_consequence

    @abstractmethod
    def wait(self) -> int:
        """Block until the process ends, and return its exit code. Only the supervisor calls this.

        Implemented by :class:`CommandRank` and ``FunctionRank`` (``notebook()``).
        """

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, but not to its data workers, which would die in the middle of its step."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_with_descendants(self) -> None:
        """Send SIGKILL to this process, and to its whole process group if it leads one."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class CommandRank(Rank):
    """A rank that runs a command: that of ``fit launch``, or this process's own command line once more."""

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
    """torchrun's environment variables for a rank that connects to the others through its launcher's store."""
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
    """Watches the ranks of one attempt on this machine, and ends them together; ``first_failure`` finds which failed first.

    Used by ``Agent`` (``fit launch``, ``notebook``, ``debug``), which waits for its ranks, and by ``ScriptRanks`` (``Fit(devices=n)``), whose
    process trains as rank 0 meanwhile. A thread for each rank blocks until that rank ends, so nothing is polled while a training runs.

    Args:
        ranks: all ranks. They must have been started before, because a fork beside a waiting thread might inherit a lock that is held.
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

    def has_ending_rank(self) -> bool:
        """Whether a rank has recorded its error, but not ended yet."""
        return any(rank.is_ending for rank in self.ranks)

    def await_other_failures(self) -> None:
        """Give other ranks time to fail for the same reason, because the first failure to be seen need not be the first that happened.

        A rank that lost another one may end sooner than that one, which has recorded its error before it closed its connections.
        """
        self.await_end(SETTLE_S)
        deadline = time.monotonic() + ENDING_S
        while self.has_ending_rank() and time.monotonic() < deadline:
            time.sleep(0.02)

    def end(self, number: signal.Signals, grace_s: float, hurry: threading.Event | None = None) -> None:
        """Send the ranks a signal. After ``grace_s`` seconds kill the ranks that still run, with all processes that they have started.

        Args:
            hurry: when this is set (by a second Ctrl-C), kill the ranks at once.
        """
        for rank in self.running():
            rank.ended_by_launcher = True
            rank.send(number)
        self.await_end(grace_s, hurry)
        for rank in self.running():
            rank.kill_with_descendants()
        self.await_end(FAIL_S)

    def await_end(self, limit_s: float, until: threading.Event | None = None) -> bool:
        """Wait until all ranks have ended, ``limit_s`` seconds have passed or ``until`` is set; return whether all have ended."""
        deadline = time.monotonic() + limit_s
        while self.running() and time.monotonic() < deadline and not (until is not None and until.is_set()):
            time.sleep(0.02)
        return not self.running()

    def close(self) -> None:
        """End the threads after the ranks have ended, because a thread that wakes up while the interpreter shuts down aborts the process."""
        for thread in self._waiting:
            thread.join(1.0)

    def _wait_for(self, rank: Rank) -> None:
        try:
            code = rank.wait()
        except BaseException as error:
            log_failure(
                f"fit-rank-{rank.rank}", f"rank {rank.rank} counts as failed, since its end would not be seen", error
            )
            code = 1
        rank.ended_at, rank.exit_code = time.time(), code  # in this order: the code is the sign that a rank has ended
        self.changed.set()
