"""Durations of the run's phases and of every hook."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import Callback, separate, terminal_text

if TYPE_CHECKING:
    from torch import nn

    from engine import Run

_log = logging.getLogger("engine")


class SimpleProfiler(Callback):
    """Measures the time of each phase of the run and of each hook of the callbacks and the module, and shows a table at the end.

    Phases are ``data``, ``forward``, ``backward``, ``optimizer``, ``validation``, ``checkpoint``, ``test``, ``predict`` (under a pipeline
    ``forward_backward``; in manual optimization ``training_step``, which contains ``backward`` and ``optimizer``). Hooks are named as by
    Lightning's profiler: ``[Callback]EarlyStopping.on_validation_end``, ``[TrainModule]Net.on_train_start``. The hooks of an evaluation
    are part of its phase, too. Times are measured on the host: on CUDA, a phase that only queues kernels is short, and the one that waits
    for them is long; use :class:`callbacks.Profiler` there. Each measurement adds about 1 us.

    Every rank measures; the log shows rank 0's table, or standard error if logging is not configured. A resumed run continues rank 0's sums.
    """

    critical = False

    def __init__(
        self, dirpath: str | Path | None = None, filename: str | None = None, *, extended: bool = True
    ) -> None:
        """
        Args:
            dirpath: the folder of the file; ``None``: the run's folder.
            filename: every rank also writes its table, as ``<stage>-<filename>-<rank>.txt``.
            extended: ``False``: only the mean and the total duration, as in Lightning.

        Raises:
            ValueError: ``dirpath`` without ``filename``: nothing would be written.
        """
        if dirpath is not None and filename is None:
            raise ValueError(f"SimpleProfiler(dirpath={str(dirpath)!r}) writes no file without filename=: give both")
        self.dirpath, self.filename, self.extended = dirpath, filename, extended
        self.durations: dict[str, tuple[int, float]] = {}
        """Phase or hook -> how often it ran, and how long in total (s)."""
        self._began = self._before = 0.0

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self.durations, self._began, self._before = {}, time.perf_counter(), 0.0
        run.phases.timers += (self._add_duration,)
        run.hooks.wrap(self._timed)

    def _add_duration(self, name: str, seconds: float) -> None:
        count, total = self.durations.get(name, (0, 0.0))
        self.durations[name] = (count + 1, total + seconds)

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        if name.startswith(f"[Callback]{self.state_key}."):
            return hook
        add, clock = self._add_duration, time.perf_counter

        def measured(*args: Any) -> Any:
            began = clock()
            try:
                return hook(*args)
            finally:
                add(name, clock() - began)

        return measured

    def summary(self) -> str:
        """Return the table of durations, the longest first."""
        total = self._before + time.perf_counter() - self._began
        rows = sorted(self.durations.items(), key=lambda item: item[1][1], reverse=True)
        names = [terminal_text(name, one_line=True) for name, _ in rows]
        cells = [[f"{seconds / count:.5g}", f"{seconds:.5g}"] for _, (count, seconds) in rows]
        heads = ["Action", "Mean duration (s)", "Total time (s)"]
        if self.extended:
            heads = ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
            for cell, (_, (count, seconds)) in zip(cells, rows, strict=True):
                cell.insert(1, str(count))
                cell.append(f"{100 * seconds / total:.4g}")
        table = [heads, *([name, *cell] for name, cell in zip(names, cells, strict=True))]
        widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
        lines = [
            " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        return "\n".join([f"{total:.5g} s in all", *lines])

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        summary = self.summary()
        if run.is_main_process:
            if _log.hasHandlers():
                _log.info("SimpleProfiler (%s): %s", stage, summary)
            else:  # nobody has configured logging, and the table was asked for
                print(f"SimpleProfiler ({stage}): {summary}", file=sys.stderr, flush=True)
        if self.filename is not None:
            folder = run.folder if self.dirpath is None else Path(self.dirpath).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{stage}-{self.filename}-{run.rank}.txt"
            separate(file)
            file.write_text(summary + "\n")

    def state_dict(self) -> dict[str, Any]:
        return {
            "durations": {name: list(values) for name, values in self.durations.items()},
            "seconds": self._before + time.perf_counter() - self._began,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, (count, seconds) in state["durations"].items():
            more = self.durations.get(name, (0, 0.0))
            self.durations[name] = (more[0] + count, more[1] + seconds)
        self._before = state["seconds"]
