"""Finds a slow rank, for which all ranks wait."""

from __future__ import annotations

import logging
import platform
from collections import defaultdict
from statistics import median_low
from typing import Any

import torch
from torch import nn

from engine import Callback, Run

_log = logging.getLogger("engine")

PHASES = {
    "data": ("data",),
    "forward": ("forward", "training_step"),
    "backward": ("backward", "forward_backward"),
    "optimizer": ("optimizer",),
}
"""Compared parts of a step -> the run's phases that each consists of."""
_WARM_UP = 2
"""Steps that are not measured: they contain compilation, and DDP makes its buckets again in the second forward pass, where ranks wait."""


class StragglerMonitor(Callback):
    """Compares the ranks' times in each phase of a step, every ``every_n_steps`` steps, and names a rank that is slow.

    In one collective the ranks share how long they spent in ``data``, ``forward``, ``backward`` and ``optimizer`` since the last comparison. A rank
    is slow if a phase in which ranks do not wait for each other took more than ``threshold`` times the median (of an even number of ranks: the
    lower of the two in the middle), and more than ``min_seconds`` a step longer. These phases are ``data``, and ``forward`` if the strategy
    has no collectives in it (FSDP and tensor parallelism have). In ``backward`` a fast rank waits for a slow one, so it is only
    logged. Times are measured on the host: on CUDA a slow device shows where the host waits for it.

    The callback logs ``straggler/data``, ``straggler/forward``, ..., the longest time of all ranks in seconds a step, and
    ``straggler/slowest_rank``, the rank with the longest time in the compared phases. On one process it logs the same values, and compares
    nothing. Each micro-batch costs about 4 us. The first two steps of a run, resumed or not, are not measured.
    """

    def __init__(self, every_n_steps: int = 50, threshold: float = 2.0, min_seconds: float = 0.01) -> None:
        """
        Args:
            every_n_steps: optimizer steps between two comparisons.
            threshold: how many times the median a slow rank's time is.
            min_seconds: how much longer than the median a slow rank's time is at least (s a step).

        Raises:
            ValueError: ``every_n_steps`` is below 1, ``threshold`` is at most 1, or ``min_seconds`` is negative.
        """
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"StragglerMonitor(every_n_steps={every_n_steps!r}): it must be an int of at least 1")
        if not threshold > 1:
            raise ValueError(f"StragglerMonitor(threshold={threshold!r}): it must be more than 1")
        if not min_seconds >= 0:
            raise ValueError(f"StragglerMonitor(min_seconds={min_seconds!r}): it must be at least 0")
        self.every_n_steps, self.threshold, self.min_seconds = every_n_steps, threshold, min_seconds
        self.slow: dict[int, str] = {}
        """Ranks that were slow at the latest comparison -> a text with phase and times."""
        self._seconds: dict[str, float] = defaultdict(float)  # by phase
        self._latest: dict[str, float] = {}
        self._host_names: list[str] = []
        self._compared: tuple[str, ...] = ("data",)
        self._next = self._last = 0

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        strategy = run.engine.strategy
        waits = strategy.matched_forward or strategy.pipelined or not run.module.automatic_optimization
        self._compared = ("data",) if waits else ("data", "forward")
        host = platform.node().encode()[:64].ljust(64)
        rows = run.all_gather(torch.frombuffer(bytearray(host), dtype=torch.uint8)).reshape(-1, 64)
        self._host_names = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
        self._latest, self.slow = {}, {}
        self._seconds.clear()
        self._last, self._next = -1, run.step + _WARM_UP
        run.phases.timers += (self._add_duration,)

    def _add_duration(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step >= self._next:
            self._compare(run)

    def _compare(self, run: Run) -> None:
        before, self._last, self._next = self._last, run.step, run.step + self.every_n_steps
        phase_seconds = [sum(self._seconds[name] for name in names) for names in PHASES.values()]
        self._seconds.clear()
        if before < 0:
            return
        rows = [[0.0] * len(PHASES)] * run.world_size
        rows[run.rank] = [seconds / (run.step - before) for seconds in phase_seconds]
        table: list[list[float]] = run.engine.reduce(torch.tensor(rows, dtype=torch.float64), "sum").tolist()
        compared = [sum(row[: len(self._compared)]) for row in table]
        self._latest = {f"straggler/{name}": max(row[i] for row in table) for i, name in enumerate(PHASES)}
        self._latest["straggler/slowest_rank"] = float(compared.index(max(compared)))
        self.slow = self._slow_ranks(table)
        for rank, description in self.slow.items() if run.is_main_process else ():
            _log.warning(
                "StragglerMonitor: rank %d (%s) is slow at step %d: %s",
                rank,
                self._host_names[rank],
                run.step,
                description,
            )

    def _slow_ranks(self, table: list[list[float]]) -> dict[int, str]:
        """Slow rank -> a text with phase and times. ``table``: seconds a step, ``[rank][phase]``."""
        slow: dict[int, str] = {}
        for index, name in enumerate(self._compared):
            times = [row[index] for row in table]
            middle = median_low(times)
            for rank, seconds in enumerate(times):
                if seconds > self.threshold * middle and seconds > middle + self.min_seconds:
                    text = f"{name} takes {1000 * seconds:.4g} ms a step, {1000 * middle:.4g} ms on the median rank"
                    slow[rank] = f"{slow[rank]}; {text}" if rank in slow else text
        return slow

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        metrics.update(self._latest)
        self._latest = {}

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        run.phases.timers = tuple(timer for timer in run.phases.timers if timer != self._add_duration)
