"""``Timer``: ends a training after a time, and tells how long its stages took."""

from __future__ import annotations

import time
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal

from engine.compat.checked_arguments import checking_arguments
from engine.compat.lightning.callback import Callback
from engine.compat.lightning.events import RunningStage
from engine.config.duration import parse
from engine.utils.log import logger


class Interval(StrEnum):
    """The interval at which a :class:`Timer` looks at the time."""

    step, epoch = "step", "epoch"


class Timer(Callback):
    """Asks a training to end once it has taken ``duration``, also over several runs that resume; ``Fit(max_time=...)`` counts alike.

    Args:
        duration: ``"DD:HH:MM:SS"``, a ``timedelta`` or a dict of its arguments; ``None``: only measure.
        interval: look at the time after each micro-batch (``"step"``) or each epoch.
        verbose: log that the time is over.
    """

    @checking_arguments()
    def __init__(
        self, duration: str | timedelta | dict[str, int] | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:  # fmt: skip
        if isinstance(duration, dict):
            duration = timedelta(**duration)
        if isinstance(duration, str):
            length = parse(duration)
            if length.unit != "seconds":
                raise ValueError(
                    f"Timer(duration={duration!r}): give a time, such as '00:12:00:00' (days, hours, minutes, seconds)"
                )
            duration = timedelta(seconds=float(length.value))
        self._duration = None if duration is None else duration.total_seconds()
        self._interval, self._verbose, self._offset = interval, verbose, 0.0
        self._starts: dict[RunningStage, float] = {}
        self._ends: dict[RunningStage, float] = {}

    def start_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """The start of the stage, in seconds of ``time.monotonic()``; ``None`` before it."""
        return self._starts.get(RunningStage(stage))

    def end_time(self, stage: str = RunningStage.TRAINING) -> float | None:
        """The end of the stage, in seconds of ``time.monotonic()``; ``None`` while it runs and before it."""
        return self._ends.get(RunningStage(stage))

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """The seconds that the stage has taken; of the training, with those of the runs that it resumes."""
        stage = RunningStage(stage)
        offset = self._offset if stage == RunningStage.TRAINING else 0.0
        return (
            offset
            if stage not in self._starts
            else self._ends.get(stage, time.monotonic()) - self._starts[stage] + offset
        )

    def time_remaining(self, stage: str = RunningStage.TRAINING) -> float | None:
        """The seconds that are left of the duration; ``None``: there is none."""
        return None if self._duration is None else self._duration - self.time_elapsed(stage)

    def _begin(self, stage: RunningStage) -> None:
        self._starts[stage] = time.monotonic()
        self._ends.pop(stage, None)  # of an earlier run, or the validation before

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(RunningStage.TRAINING)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._ends[RunningStage.TRAINING] = time.monotonic()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(RunningStage.VALIDATING)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._ends[RunningStage.VALIDATING] = time.monotonic()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(RunningStage.TESTING)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._ends[RunningStage.TESTING] = time.monotonic()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)  # a run that is resumed may have used up the time

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._interval == "epoch":
            self._check(trainer)

    def _check(self, trainer: Any) -> None:
        if self._duration is None or trainer.run.stopping or self.time_elapsed() < self._duration:
            return
        trainer.run.stop(f"Timer: {timedelta(seconds=self._duration)} are over")
        if self._verbose and trainer.is_global_zero:
            logger.info("Timer: the training has taken %s and ends", timedelta(seconds=int(self.time_elapsed())))

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage.value: self.time_elapsed(stage) for stage in RunningStage}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._offset = float(state.get("time_elapsed", {}).get(RunningStage.TRAINING.value, 0.0))
