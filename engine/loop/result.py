"""A run in numbers: its counters, where its seconds went, and what is left of it at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class TrainState:
    """The counters of a training. They say everything about where it stands."""

    epoch: int = 0
    """Index of the epoch under way, or of the next one."""
    step: int = 0
    """Optimizer steps that happened."""
    batch_idx: int = 0
    """Micro-batches of this rank in this epoch."""
    batches: int = 0
    """Micro-batches of this rank in all."""
    position: int = 0
    """How far the epoch's data is used up, in samples; in batches, those of all ranks, where the data gives ready batches."""
    whole_batches: int = 0
    """``batch_idx`` at the last window's end: where a run that goes on from here begins."""
    epoch_done: bool = False
    """The epoch is over, its schedulers have stepped; only the counter has not moved on yet."""
    validated_step: int = -1
    """The step at which validation ran last."""


@dataclass(slots=True)
class Times:
    """Where a run's seconds went, on this rank."""

    data: float = 0.0
    """Waiting for the loader."""
    compute: float = 0.0
    """Training steps, optimizer steps and callbacks."""
    validation: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0
    """Setting up and tearing down."""

    @property
    def apart(self) -> float:
        """What is measured by itself inside the training loop."""
        return self.data + self.validation + self.checkpoint


@dataclass(slots=True)
class Result:
    """How a run ended."""

    status: str
    """``"completed"`` (``max_epochs`` or ``max_steps`` reached), ``"stopped"`` (asked to, or ``max_time``), ``"interrupted"`` (Ctrl-C)."""
    stop_reason: str
    epoch: int
    """Finished epochs."""
    step: int
    """Optimizer steps."""
    metrics: dict[str, float]
    """The newest value of everything logged."""
    best_checkpoint: Path | str | None = None
    last_checkpoint: Path | str | None = None
    times: Times = field(default_factory=Times)
    folder: Path | None = None
    """The run's own, in ``root_dir``. It is there if something was written."""
