"""Traces of torch's profiler, a window of micro-batches at a time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from engine import Callback, Device, Run, separate

_log = logging.getLogger("engine")

SORT_KEYS = tuple(
    f"{prefix}{device}_{quantity}"
    for prefix in ("", "self_")
    for device in ("cpu", "cuda", "device", "xpu")  # as torch's columns are called
    for quantity in ("time_total", "memory_usage", "time")
    if (prefix, quantity) != ("self_", "time")
)


class Profiler(Callback):
    """Profiles windows of micro-batches with ``torch.profiler``, on every rank::

        wait, warmup, active | wait, warmup, active | ...          ``repeat`` times

    All numbers count micro-batches (calls of ``training_step``); with ``accumulate_grad_batches=4``, ``active=8`` shows two optimizer steps. In
    ``validate``, ``test`` and ``predict`` they count evaluation batches. At the end of a window each rank writes, in ``profiler`` of
    the run's folder,

    - ``rank=0_step=00000016.pt.trace.json.gz``: for ui.perfetto.dev, chrome://tracing and TensorBoard's profiler plugin;
    - ``rank=0_step=00000016.txt``: the operations that took the most time; rank 0's is also logged.

    The trace has the run's phases as ranges: ``data``, ``forward``, ``backward``, ``optimizer``, ``validation``, ``checkpoint`` (under a pipeline
    ``forward_backward``, in manual optimization ``training_step``). Outside the windows a micro-batch costs one call. If the run ends or
    fails within a window, the part that was recorded is written. A resumed run continues to count; a window in which the run was
    killed starts again with its ``warmup``.
    """

    critical = False

    def __init__(
        self,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 4,
        repeat: int = 1,
        activities: Sequence[ProfilerActivity] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        sort_by: str | None = None,
        row_limit: int = 15,
        dirpath: str | Path | None = None,
        memory_snapshot: bool = False,
    ) -> None:
        """
        Args:
            wait, warmup, active: micro-batches before a window, in which the profiler warms up, and which it records.
            repeat: the number of windows; 0: windows until the end of the run.
            activities, record_shapes, profile_memory, with_stack, with_flops, with_modules: as in ``torch.profiler.profile``.
            sort_by: the column by which the table is sorted; ``None``: time on the device, or on the CPU if there is no other device.
            row_limit: rows of the table.
            dirpath: the folder of the files; ``None``: ``profiler`` in the run's folder.
            memory_snapshot: record the allocations of device memory (a few microseconds each), and write them as
                ``rank=0_out_of_memory.pickle``, for pytorch.org/memory_viz, when the memory is exhausted.

        Raises:
            ValueError: a number is negative, ``active`` or ``row_limit`` is 0, or ``sort_by`` is unknown.
        """
        numbers = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "row_limit": row_limit}
        for name, value in numbers.items():
            minimum = 1 if name in ("active", "row_limit") else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"Profiler({name}={value!r}): it must be an int of at least {minimum}")
        if sort_by is not None and sort_by not in SORT_KEYS:
            raise ValueError(f"Profiler(sort_by={sort_by!r}): possible: {', '.join(SORT_KEYS)}")
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.sort_by, self.row_limit, self.dirpath, self.memory_snapshot = sort_by, row_limit, dirpath, memory_snapshot
        self._options: dict[str, Any] = {
            "activities": activities,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
            "with_modules": with_modules,
        }
        self._profile: profile | None = None
        self._memory_recorder: Any = None
        self._done = self._waited = self._windows = 0

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._profile, self._done, self._waited, self._windows = None, 0, 0, 0
        if autograd_profiler._is_profiler_enabled:
            raise ValueError(
                "Profiler(): another torch profiler is running in this process, and only one can: end it before the run, or leave this "
                "callback out; a profiler around fit.run(...) sees the run's phases by itself"
            )
        if self.memory_snapshot:
            self._memory_recorder = Device(run.device).allocations
            if self._memory_recorder is None:
                raise ValueError(
                    f"Profiler(memory_snapshot=True) needs a device that records its allocations, as CUDA does, and this run is on {run.device}: "
                    "set it to False"
                )
            self._memory_recorder._record_memory_history(max_entries=200_000)

    # -- counting -------------------------------------------------------------------------------------------------------------------

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._begin_if_due(run)

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count_batch(run)

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        if run.stage == "validate":
            self._begin_if_due(run)

    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if run.stage == "validate":
            self._count_batch(run)

    def on_test_start(self, run: Run, module: nn.Module) -> None:
        self._begin_if_due(run)

    def on_test_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count_batch(run)

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        self._begin_if_due(run)

    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count_batch(run)

    def _begin_if_due(self, run: Run) -> None:
        if self._waited >= self.wait and self._has_more:
            self._begin_window()

    def _count_batch(self, run: Run) -> None:
        """Count a finished micro-batch, and start, continue or end a window."""
        if self._profile is not None:
            self._done += 1
            if self._done == self.warmup + self.active:
                self._finish_window(run)
            else:
                self._profile.step()
        elif self._has_more:
            self._waited += 1
            if self._waited >= self.wait:
                self._begin_window()

    @property
    def _has_more(self) -> bool:
        return not self.repeat or self._windows < self.repeat

    # -- a window -------------------------------------------------------------------------------------------------------------------

    def _begin_window(self) -> None:
        self._done = 0
        self._profile = profile(schedule=self._action, acc_events=True, **self._options)
        self._profile.start()

    def _action(self, number: int) -> ProfilerAction:
        return ProfilerAction.WARMUP if number < self.warmup else ProfilerAction.RECORD

    def _finish_window(self, run: Run) -> None:
        """End the window, and write its trace and table."""
        assert self._profile is not None
        profiler, self._profile = self._profile, None
        profiler.stop()
        recorded = self._done - self.warmup
        if recorded <= 0:
            _log.warning("Profiler: the run ended while the profiler warmed up: nothing was recorded")
            return
        if recorded < self.active:
            _log.warning("Profiler: the run ended after %d of the window's %d micro-batches", recorded, self.active)
        self._windows += 1
        self._waited = 0
        path = self._folder(run) / f"rank={run.rank}_step={run.step:08d}"
        for file in (f"{path}.pt.trace.json.gz", path.with_suffix(".txt")):
            separate(file)
        profiler.export_chrome_trace(f"{path}.pt.trace.json.gz")
        sort_by = self.sort_by or f"self_{'cpu' if run.device.type == 'cpu' else 'device'}_time_total"
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=self.row_limit)
        path.with_suffix(".txt").write_text(table)
        if run.is_main_process:
            _log.info("Profiler: %d micro-batches until step %d, in %s\n%s", recorded, run.step, path.parent, table)

    def _folder(self, run: Run) -> Path:
        folder = run.folder / "profiler" if self.dirpath is None else Path(self.dirpath).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # -- the end --------------------------------------------------------------------------------------------------------------------

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        if self._memory_recorder is not None and isinstance(exception, torch.OutOfMemoryError):
            path = self._folder(run) / f"rank={run.rank}_out_of_memory.pickle"
            self._memory_recorder._dump_snapshot(str(path))
            _log.error("Profiler: the allocations before the memory was exhausted are in %s", path)

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if self._memory_recorder is not None:
            self._memory_recorder._record_memory_history(enabled=None)
            self._memory_recorder = None
        if self._profile is not None:
            self._finish_window(run)
        elif not self._windows and self._waited:
            _log.warning(
                "Profiler: nothing was profiled: the run ended after %d micro-batches, wait=%d", self._waited, self.wait
            )

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows, self._waited = state["windows"], state["waited"]
