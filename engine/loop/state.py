"""A training in numbers: its counters, where its time was spent, how it ended, and sums that stay on their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.utils import accelerator
from engine.utils.extensions import completed
from engine.utils.text import terminal_text


@dataclass(slots=True)
class TrainState:
    """The counters of a training; they fully describe its position."""

    epoch: int = 0
    """Index of the current epoch, or of the next one."""
    step: int = 0
    """Optimizer steps that happened."""
    batch_idx: int = 0
    """Micro-batches of this rank in this epoch."""
    batches: int = 0
    """Micro-batches of this rank in total."""
    position: int = 0
    """How much of the epoch's data is consumed, in samples; for data of ready batches, in batches over all ranks."""
    whole_batches: int = 0
    """``batch_idx`` at the last window's end: where a resumed run starts."""
    epoch_done: bool = False
    """The epoch is over and its schedulers have stepped; only the counter is not increased yet."""
    validated_step: int = -1
    """The step at which validation ran last."""
    samples: int = 0
    """Samples in the windows done, over all ranks and epochs."""

    @property
    def finished_epochs(self) -> int:
        """Epochs that are over."""
        return self.epoch + self.epoch_done

    @property
    def in_window(self) -> bool:
        """True inside a window: its optimizer step is still to come."""
        return self.batch_idx != self.whole_batches

    def resume_point(self) -> tuple[int, int, int, int]:
        """The point at which a run resumes from a checkpoint saved now: step, epoch, batch, validated step. Equal ones need not be saved twice.

        The end of an epoch and the start of the next are one point. Inside a window it is that of the window's start.
        """
        return self.step, self.finished_epochs, 0 if self.epoch_done else self.whole_batches, self.validated_step

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take saved counters, in place; :func:`engine.loop.train.begin_epoch` starts the data at their position.

        A window that was interrupted is run again from its start.

        Raises:
            TypeError: one of them is unknown.
        """
        values = TrainState(**saved)
        for counter in fields(self):
            setattr(self, counter.name, getattr(values, counter.name))
        self.batches -= self.batch_idx - self.whole_batches
        self.batch_idx = self.whole_batches

    def next_epoch(self) -> None:
        """Start the next epoch at its first sample."""
        self.epoch += 1
        self.batch_idx = self.whole_batches = self.position = 0
        self.epoch_done = False


@dataclass(slots=True)
class Times:
    """Where a run's time was spent on this rank, in seconds."""

    data: float = 0.0
    """Waiting for the loader."""
    compute: float = 0.0
    """Training steps, optimizer steps and callbacks."""
    validation: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0
    """Setup and teardown."""

    @property
    def apart(self) -> float:
        """The times measured inside the training loop."""
        return self.data + self.validation + self.checkpoint


@completed
@dataclass(slots=True)
class Result:
    """How a run ended."""

    status: str
    """``"completed"`` (``max_epochs`` or ``max_steps`` reached), ``"stopped"`` (asked to, or ``max_time``), ``"interrupted"`` (Ctrl-C)."""
    stop_reason: str
    """Reason for the end of the run, as text: ``"max_epochs=3 reached"``."""
    epoch: int
    """Finished epochs: a count, while epochs are numbered from 0."""
    step: int
    """Optimizer steps."""
    metrics: dict[str, float]
    """The latest value of everything logged."""
    best_checkpoint: Path | str | None = None
    """The best by ``ModelCheckpoint(monitor=)``; a directory or a URL."""
    last_checkpoint: Path | str | None = None
    """The newest."""
    times: Times = field(default_factory=Times)
    """Where the seconds of the training went."""
    folder: Path | None = None
    """The run's own folder, in ``root_dir``. It exists if something was written."""
    best_weights: str | None = None
    """The weights that ``best_checkpoint`` was scored with: ``"trained"``, or those of a callback that validates with others, such as ``"ema"``.
    ``test(module, checkpoint="best")`` and ``load_from_checkpoint`` load them."""

    def __str__(self) -> str:
        """A few lines for people: how the run ended, a line for each metric, and where its checkpoints are."""
        reason = f" ({self.stop_reason})" if self.stop_reason else ""
        counts = (
            f"{count} {unit}{'' if count == 1 else 's'}" for count, unit in ((self.epoch, "epoch"), (self.step, "step"))
        )
        lines = [f"{self.status}{reason}: {', '.join(counts)}"]
        lines += [f"{terminal_text(name, one_line=True)} {value:.6g}" for name, value in self.metrics.items()]
        weights = f" (weights {self.best_weights!r})" if self.best_weights not in (None, "trained") else ""
        best = None if self.best_checkpoint is None else f"{self.best_checkpoint}{weights}"
        checkpoints = {"last checkpoint": self.last_checkpoint, "best checkpoint": best}
        return "\n".join([*lines, *(f"{name}: {path}" for name, path in checkpoints.items() if path is not None)])


def status_of(stop_reason: str) -> str:
    """The :attr:`Result.status` of a run that was not interrupted."""
    planned = stop_reason.startswith(("max_epochs", "max_steps", "limit_train_batches"))
    return "completed" if planned or not stop_reason else "stopped"


MANY = 256
"""Tensors are added up when this many wait."""


class Tally:
    """A running sum; adding to it computes nothing on a device, except once in :data:`MANY` times."""

    __slots__ = ("_sum", "_waiting")

    def __init__(self) -> None:
        self._sum: float | None = None
        self._waiting: list[Tensor] = []

    def restore(self, total: float | None) -> None:
        """Continue with the sum of an earlier run; ``None``: nothing was ever added."""
        self._sum, self._waiting = total, []

    def add(self, number: Tensor | float) -> None:
        """Add a number; a tensor has one element and is not changed afterwards."""
        if isinstance(number, Tensor):
            self._waiting.append(number.detach())
            if len(self._waiting) < MANY:
                return
            self._waiting = [_total(self._waiting)]
        else:
            self._sum = (self._sum or 0) + number

    def total(self) -> float | None:
        """The sum; ``None``: nothing was ever added. Waits for the device if tensors were added since the last call."""
        if self._waiting:
            self._sum = (self._sum or 0) + _total(self._waiting).item()
            self._waiting = []
        return self._sum


def _total(numbers: list[Tensor]) -> Tensor:
    return torch.stack([number.reshape(()).to(accelerator.wide(number.device)) for number in numbers]).sum()
