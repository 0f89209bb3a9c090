"""A training in numbers: its counters, begun stages, where its time was spent, how it ended, and a sum of values that stay on their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.utils import accelerator
from engine.utils.extensions import with_advice
from engine.utils.text import terminal_text


@dataclass(slots=True)
class TrainState:
    """The counters of a training; they fully describe its position."""

    epoch: int = 0
    """The index of the current epoch, or between epochs of the next one."""
    step: int = 0
    """The number of optimizer steps that were applied."""
    batch_idx: int = 0
    """The number of micro-batches that this rank has done in this epoch."""
    batches: int = 0
    """The number of micro-batches that this rank has done in all epochs."""
    position: int = 0
    """How much of the epoch's data was used, over all ranks: in samples; for data of ready batches, in batches."""
    whole_batches: int = 0
    """``batch_idx`` at the end of the last complete window, where a resumed run starts."""
    epoch_done: bool = False
    """Whether the epoch is over and its schedulers have stepped, while :attr:`epoch` still has its index."""
    validated_step: int = -1
    """The step at which validation ran last; -1: it has not run."""
    samples: int = 0
    """The number of samples in complete windows, over all ranks and epochs."""
    clock_tokens: int | float = 0
    """The tokens that :class:`engine.loop.clock.TrainingClock` has counted; 0 where nothing says or asks how many there are."""
    clock_step: int = 0
    """The step at which the counts of losses were read last as tokens of the clock."""

    @property
    def finished_epochs(self) -> int:
        """The number of finished epochs."""
        return self.epoch + self.epoch_done

    @property
    def in_window(self) -> bool:
        """Whether an accumulation window has begun and its optimizer step has not been done."""
        return self.batch_idx != self.whole_batches

    def resume_point(self) -> tuple[int, int, int, int]:
        """The position from which a checkpoint saved now would resume: step, epoch, batch, validated step. Equal positions need only one checkpoint.

        The end of an epoch is the same position as the start of the next. Inside a window, the position is the window's start.
        """
        return self.step, self.finished_epochs, 0 if self.epoch_done else self.whole_batches, self.validated_step

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over saved counters; :func:`engine.loop.train.begin_epoch` sets the data to their position.

        A window that was interrupted will run again from its start.

        Raises:
            TypeError: ``saved`` has an unknown counter.
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
    """The seconds that a run has spent on this rank, by activity."""

    data: float = 0.0
    """Time spent waiting for the loader."""
    compute: float = 0.0
    """Time of training steps, optimizer steps and callbacks."""
    validation: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0
    """Time of setup and teardown."""

    @property
    def apart(self) -> float:
        """Time that does not count as :attr:`compute` although it passes within epochs: data, validation and checkpoints."""
        return self.data + self.validation + self.checkpoint


@with_advice
@dataclass(slots=True)
class Result:
    """The outcome of a run."""

    status: str
    """``"completed"`` (a limit other than of time was reached), ``"stopped"`` (by a request or a limit of time) or ``"interrupted"`` (Ctrl-C)."""
    stop_reason: str
    """The reason why the run ended, as text: ``"max_epochs=3 reached"``."""
    epoch: int
    """The number of finished epochs."""
    step: int
    """The number of optimizer steps."""
    metrics: dict[str, float]
    """The latest value of every logged name."""
    best_checkpoint: Path | str | None = None
    """The best checkpoint by ``ModelCheckpoint(monitor=)``: a path or a URL."""
    last_checkpoint: Path | str | None = None
    """The newest checkpoint: a path or a URL."""
    times: Times = field(default_factory=Times)
    """Where the time of the run was spent."""
    folder: Path | None = None
    """The run's folder, in ``root_dir``. It exists if something was written."""
    best_weights: str | None = None
    """The name of the weights that ``best_checkpoint`` was scored with: ``"trained"``, or that of a callback's weights such as ``"ema"``.
    ``test(module, checkpoint="best")`` and ``load_from_checkpoint`` load these weights."""
    skipped_steps: int = 0
    """The number of steps that were skipped because a gradient was not finite (fp16, ``on_nonfinite="skip"``)."""
    nonfinite: tuple[str, ...] = ()
    """Names of trained parameters, and of buffers, that were NaN (parameters: or infinite) at the training's end, on any rank; at most 5."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By name, tables that callbacks made with :meth:`engine.Run.set_table`, row by row; ``MixtureMonitor`` makes ``"mixture"``."""

    def __str__(self) -> str:
        """The result as text: how the run ended, a line for each metric, and the paths of its checkpoints."""
        reason = f" ({self.stop_reason})" if self.stop_reason else ""
        counts = (
            f"{count} {unit}{'' if count == 1 else 's'}" for count, unit in ((self.epoch, "epoch"), (self.step, "step"))
        )
        lines = [f"{self.status}{reason}: {', '.join(counts)}"]
        if self.nonfinite:
            lines.append(f"not finite: {', '.join(self.nonfinite)}")
        if self.skipped_steps:
            lines.append(f"skipped steps: {self.skipped_steps}")
        lines += [f"{terminal_text(name, one_line=True)} {value:.6g}" for name, value in self.metrics.items()]
        weights = f" (weights {self.best_weights!r})" if self.best_weights not in (None, "trained") else ""
        best = None if self.best_checkpoint is None else f"{self.best_checkpoint}{weights}"
        checkpoints = {"last checkpoint": self.last_checkpoint, "best checkpoint": best}
        return "\n".join([*lines, *(f"{name}: {path}" for name, path in checkpoints.items() if path is not None)])


def status_of(stop_reason: str) -> str:
    """The :attr:`Result.status` of a run that was not interrupted and ended for this reason."""
    is_limit = stop_reason.startswith(("max_epochs", "max_steps", "max_duration", "limit_train_batches"))
    return "completed" if is_limit or not stop_reason else "stopped"


MANY = 256
"""How many tensors a :class:`Tally` collects before it adds them up."""


class Tally:
    """A running sum of numbers and tensors. Tensors are collected; only every :data:`MANY`-th call of :meth:`add` computes on the device."""

    __slots__ = ("_sum", "_waiting")

    def __init__(self) -> None:
        self._sum: float | None = None
        self._waiting: list[Tensor] = []

    @property
    def has_some(self) -> bool:
        """Whether something was added."""
        return self._sum is not None or bool(self._waiting)

    def restore(self, total: float | None) -> None:
        """Continue from the sum ``total`` of an earlier run; ``None``: nothing was added there."""
        self._sum, self._waiting = total, []

    def add(self, number: Tensor | float) -> None:
        """Add a number, or a tensor with one element, which must not be changed afterwards."""
        if isinstance(number, Tensor):
            self._waiting.append(number.detach())
            if len(self._waiting) < MANY:
                return
            self._waiting = [_total(self._waiting)]
        else:
            self._sum = (self._sum or 0) + number

    def total(self) -> float | None:
        """The sum; ``None``: nothing was added. Waits for the device if tensors were added since the last call."""
        if self._waiting:
            self._sum = (self._sum or 0) + _total(self._waiting).item()
            self._waiting = []
        return self._sum


def _total(numbers: list[Tensor]) -> Tensor:
    return torch.stack([number.reshape(()).to(accelerator.wide(number.device)) for number in numbers]).sum()


@dataclass(frozen=True)
class BegunStage:
    """A stage that has begun in a training, or in which a resumed training continues."""

    step: int
    """The number of optimizer steps before its first one; where a training resumes within a stage, those before the resume."""
    kind: str
    """``"batch size"``, ``"row length"`` or ``"mixture"``."""
    text: str
    """The value from here on: ``"512"``, ``"524288 tokens"``, ``"web 40 %, code 60 %"``."""


class StageLog:
    """Collects the stages of a run as they begin. The first stages of a training are not among them: they begin with it."""

    def __init__(self) -> None:
        self.begun: list[BegunStage] = []
        """The stages that have begun in this run, in the order of their steps."""
        self._latest: dict[str, str] = {}

    def note(self, kind: str, text: str, step: int, first: bool = False) -> None:
        """Take note that the next step belongs to this stage. ``first``: whether the training begins with the stage."""
        if self._latest.get(kind) != text:
            self._latest[kind] = text
            if not first:
                self.begun.append(BegunStage(step, kind, text))
