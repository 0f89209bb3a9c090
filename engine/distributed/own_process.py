"""The part of this process in its job, as far as it has arranged that itself rather than a launcher."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

import torch.distributed as dist

from engine.distributed.environment import Environment


class StartedRanks(ABC):
    """The ranks that this process, rank 0, has started. Implemented by ``launch.script_ranks.ScriptRanks``."""

    environment: Environment
    """Rank 0's place among them."""
    store: dist.Store
    """The store in which they meet."""

    @abstractmethod
    def check(self, error: BaseException | None = None, wait_s: float = 3.0) -> None:
        """Raise ``RankError`` if another rank has failed; with rank 0's own ``error`` only if that is a consequence."""


class OwnProcess:
    """This process: the ranks that it has started, and whether it has run alone. There is one object, :data:`own_process`."""

    ran_alone = False
    """It has run without other ranks: none can be started any more, because they would reach that run first."""
    _started: StartedRanks | None = None
    _pid = 0

    @property
    def started(self) -> StartedRanks | None:
        """The ranks that it has started; ``None`` before, in the other ranks, and in forks."""
        return self._started if self._pid == os.getpid() else None

    @started.setter
    def started(self, ranks: StartedRanks) -> None:
        self._started, self._pid = ranks, os.getpid()


own_process = OwnProcess()
