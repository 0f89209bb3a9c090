"""The callback that writes the report of a run: one page that shows all of it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine import Callback, Device, Run, without_secrets

from .page import write_report
from .record import Record

_SEPARATE_GROUPS = 8
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
_MEMORY = {
    "max_allocated": "device, most allocated",
    "allocated": "device, allocated",
    "reserved": "device, reserved",
}


class Report(Callback):
    """Writes ``report.html`` in the run's folder at the end of a training: one file that needs no network.

    The page has the curves of all metrics, learning rates, throughput and memory, where the time went, the configuration without
    secrets, and the checkpoints. It is written when the run ends, also after an error or Ctrl-C, and again after an evaluation in
    the same folder. A run that was killed, or is still running, has a record too: ``fit report FOLDER`` makes its page, and
    ``fit report FOLDER OTHER`` makes one that compares runs.

    The main process appends to the record (``report.jsonl`` in the run's folder) at log boundaries. A resumed run continues it; the steps that
    it repeats replace the ones that were recorded.
    """

    critical = False

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """
        Args:
            path: the path of the page; ``None``: ``report.html`` in the run's folder.

        Raises:
            ValueError: ``path`` is a folder, or does not end in ``.html``.
        """
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None and (self.path.suffix != ".html" or self.path.is_dir()):
            raise ValueError(f"Report(path={str(path)!r}): it must be the path of a file that ends in .html")
        self._record: Record | None = None
        # Open as long as the record: opening the file takes longer than everything else that a row needs.
        self._statm: FileIO | None = None
        self._optimizers: list[tuple[str, Optimizer]] = []
        self._computed = 0.0
        self._best: Path | str | None = None  # the best checkpoint in the record
        self._stages = 0  # the stages that have begun, in the record

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        """Prepare the record of a run.

        Raises:
            ValueError: the run has a second ``Report``, which would record everything twice.
        """
        if sum(isinstance(callback, Report) for callback in run.callbacks) > 1:
            raise ValueError("a run can have one Report: remove the others, or copy the page afterwards")
        self._optimizers, self._computed, self._best, self._stages = [], 0.0, None, 0

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        if run.is_main_process:
            self._open_record(run)
            self._optimizers = _with_unique_names(run.optimizers)

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if not run.is_main_process:
            return
        if self._record is None:
            self._open_record(run)
        assert self._record is not None
        if run.stage == "fit":
            self._record_stages(run, self._record)
            if run.times.compute != self._computed:  # an epoch has ended, and its times were added
                self._computed = run.times.compute
                self._record.add("times", times=asdict(run.times))
            rates, memory = _learning_rates(self._optimizers), self._memory(run.device)
            apart = run.times.validation + run.times.checkpoint
            self._record.row(step, run.epoch, metrics, rates, memory, apart, run.samples)
        else:
            self._record.row(step, run.epoch, metrics, {}, {})

    def on_checkpoint_saved(self, run: Run, module: nn.Module, path: Path | str, score: float | None) -> None:
        if self._record is not None:
            self._record_stages(run, self._record)
            self._record.add("checkpoint", path=str(path), step=_step_of(path), score=score)
            self._record_best(run, self._record)

    def on_checkpoint_removed(self, run: Run, module: nn.Module, path: Path | str) -> None:
        if self._record is not None:
            self._record.add("removed", path=str(path))
            self._record_best(run, self._record)

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        if self._record is None:
            return
        record, self._record, self._optimizers = self._record, None, []
        self._record_best(run, record)
        self._record_stages(run, record)
        result, error = run.result(), run.exception
        for name, rows in result.tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            record.add(
                "table", name=name, columns=columns, rows=[[row.get(column) for column in columns] for row in rows]
            )
        failed = error is not None and not run.interrupted
        record.add(
            "end",
            stage=stage,
            status="failed" if failed else result.status,
            reason=without_secrets(f"{type(error).__name__}: {error}"[:2000]) if failed else result.stop_reason,
            step=result.step,
            epoch=result.epoch,
            times=asdict(result.times),
        )
        if self._statm is not None:
            self._statm.close()
            self._statm = None
        record.close()
        write_report([run.folder], self.path or run.folder / "report.html", only=True)

    def _record_best(self, run: Run, record: Record) -> None:
        """Record which checkpoint is the best, if that has changed: the run knows it only after a checkpoint is complete."""
        if run.best_checkpoint is not None and run.best_checkpoint != self._best:
            self._best = run.best_checkpoint
            record.add("best", path=str(self._best))

    def _record_stages(self, run: Run, record: Record) -> None:
        """Record the stages of batch size, row length and mixture that have begun since the last time."""
        stages = run.begun_stages
        for stage in stages[self._stages :]:
            record.add("stage", step=stage.step, kind=stage.kind, text=stage.text)
        self._stages = len(stages)

    def _open_record(self, run: Run) -> None:
        self._record = Record(run.folder)
        with contextlib.suppress(OSError):  # where there is no /proc
            self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115
        self._record.add(
            "start",
            id=run.id,
            stage=run.stage,
            step=run.step,
            elapsed=run.elapsed_s,
            config=run.config,
            hyperparameters=run.hyperparameters,
            machine=_machine(run),
        )

    def _memory(self, device: torch.device) -> dict[str, int]:
        """Kind of memory -> bytes that this process holds."""
        sizes = Device(device).memory()
        kinds = "max_allocated" if "max_allocated" in sizes else "allocated", "reserved"
        by_name = {_MEMORY[what]: sizes[what] for what in kinds if what in sizes}
        if self._statm is not None:
            by_name["main process"] = int(os.pread(self._statm.fileno(), 128, 0).split()[1]) * _PAGE_BYTES
        return by_name


def _step_of(path: Path | str) -> int | None:
    """Return the step of a checkpoint, which is noticed some steps after its save. At a URL it comes from the usual name."""
    try:
        step: int = json.loads((Path(path) / "manifest.json").read_bytes())["counters"]["step"]
        return step
    except (OSError, ValueError, LookupError, TypeError):
        match = re.fullmatch(r"step=(\d+)", str(path).rpartition("/")[2])
        return None if match is None else int(match[1])


def _with_unique_names(optimizers: list[Any]) -> list[tuple[str, Optimizer]]:
    """Pairs of a unique name and an optimizer."""
    by_name: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a prepared optimizer wraps the user's
        name = first = type(optimizer).__name__
        number = 1
        while name in by_name:
            number += 1
            name = f"{first} {number}"
        by_name[name] = optimizer
    return list(by_name.items())


def _learning_rates(optimizers: list[tuple[str, Optimizer]]) -> dict[str, float]:
    """Learning rates by optimizer and parameter group; if the groups are many, only the lowest and the highest."""
    by_group = {}
    for name, optimizer in optimizers:
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if len(rates) == 1:
            by_group[name] = rates[0]
        elif len(rates) > _SEPARATE_GROUPS:
            by_group |= {f"{name} lowest": min(rates), f"{name} highest": max(rates)}
        else:
            by_group |= {f"{name} group {number}": rate for number, rate in enumerate(rates, start=1)}
    return by_group


def _machine(run: Run) -> dict[str, str]:
    return {
        "host": platform.node(),
        "device": Device(run.device).name,
        "processes": str(run.world_size),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
