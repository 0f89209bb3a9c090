"""Stops a run when a metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from engine import Callback

if TYPE_CHECKING:
    from torch import nn

    from engine import Run

NO_VALIDATION = "this run has no validation (no data was given for it, or it is switched off)"
"""The end of an error about a metric that only validation logs."""


class EarlyStopping(Callback):
    """Asks the run to stop when ``monitor`` has not improved for ``patience`` checks in a row.

    The callback checks after each validation. At an epoch's end it waits until the epoch's own values are known; within an epoch, a metric that
    training logs has the value of the latest step. In a run without validation it checks at the end of each epoch. Values are reduced over all
    ranks, so all ranks stop at the same step. They are compared in torch's default dtype (float32), as in Lightning: a smaller difference is
    not an improvement. A request to stop that waits for ``min_epochs`` or ``min_steps`` is withdrawn if the metric has recovered by then, unless it
    had reached ``stopping_threshold``. The sanity check and ``fast_dev_run`` do not count. ``Result.stop_reason`` has the reason. The arguments mean
    the same as in Lightning.
    """

    is_early_stopping = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int | float = 3,
        mode: Literal["min", "max"] = "min",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        strict: bool = True,
    ) -> None:
        """
        Args:
            monitor: the name of a logged metric.
            min_delta: a smaller improvement does not count.
            patience: number of consecutive checks without improvement before the run stops.
            mode: ``"min"``: smaller is better; ``"max"``: larger is better.
            check_finite: stop as soon as the metric is NaN or infinite.
            stopping_threshold: stop as soon as the metric is better than this.
            divergence_threshold: stop as soon as the metric is worse than this.
            strict: a check before the metric was logged is an error; with False the check is skipped.

        Raises:
            ValueError: ``mode``, ``patience`` or ``min_delta`` is not valid.
        """
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping(mode={mode!r}): mode must be 'min' or 'max'")
        if not patience >= 0:
            raise ValueError(f"EarlyStopping(patience={patience}): patience must be 0 or more checks")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping(min_delta={min_delta}): min_delta must be 0 or more")
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = mode
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.strict = strict
        self.wait_count = 0
        """Consecutive checks without improvement."""
        self.best_score = math.inf if mode == "min" else -math.inf
        self.stopped_epoch: int | None = None
        """The epoch (from 0) in which this callback stopped the run."""
        self._training = False
        self._asked: str | None = None
        """The reason of a request to stop that may wait for ``min_epochs`` and ``min_steps``, and does not count once the metric has recovered."""

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._training, self._asked = False, None

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._training = not run.settings.fast_dev_run
        if self._asked is not None and self._asked in run.waiting_stops:
            return
        if self._training and run.step and self.wait_count >= self.patience:  # it stopped the run that is resumed
            self._asked = f"EarlyStopping: {self.monitor} had not improved in the last {self.wait_count} checks (best: {self.best_score})"
            run.stop(self._asked)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._training = False

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        if self._training and not run.val_every.is_at_epoch_ends:
            self._check(run)

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        validates = any(count != 0 for count in run.num_eval_batches) and not run.val_every.is_never
        if self._training and (not validates or (run.val_every.is_at_epoch_ends and run.validated_step == run.step)):
            self._check(run)

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[monitor={self.monitor!r}, mode={self.mode!r}]"

    def state_dict(self) -> dict[str, Any]:
        state = {"wait_count": self.wait_count, "best_score": self.best_score, "stopped_epoch": self.stopped_epoch}
        return state if self._asked is None else {**state, "asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count = state["wait_count"]
        self.best_score = state["best_score"]
        self.stopped_epoch = state["stopped_epoch"]
        self._asked = state.get("asked")

    def _check(self, run: Run) -> None:
        metrics = run.latest_metrics()
        if self.monitor not in metrics:
            if not self.strict:
                return
            logged = ", ".join(sorted(metrics)) or "none"
            where = "validation_step" if run.val_loaders else f"training_step: {NO_VALIDATION}"
            raise ValueError(
                f"EarlyStopping(monitor={self.monitor!r}): this metric was not logged (logged so far: {logged}); "
                f"log it with self.log({self.monitor!r}, value) in {where}"
            )
        reason = self._reason_to_stop(metrics[self.monitor])
        waits = self._asked is not None and self._asked in run.waiting_stops
        if reason is not None:
            self.stopped_epoch = run.epoch
            if not waits:
                has_reached = self.stopping_threshold is not None and self._is_better(
                    metrics[self.monitor], self.stopping_threshold
                )
                self._asked = None if has_reached else reason
                run.stop(reason)
        elif self._asked is not None and waits:
            run.withdraw_stop(self._asked)
            self._asked = self.stopped_epoch = None

    def _reason_to_stop(self, value: float) -> str | None:
        """Check one value; return why to stop, or ``None``."""
        if self.check_finite and not math.isfinite(value):
            return f"EarlyStopping: {self.monitor} = {value} is not finite (best: {self.best_score})"
        if self.stopping_threshold is not None and self._is_better(value, self.stopping_threshold):
            return f"EarlyStopping: {self.monitor} = {value} reached stopping_threshold = {self.stopping_threshold}"
        if self.divergence_threshold is not None and self._is_better(self.divergence_threshold, value):
            return f"EarlyStopping: {self.monitor} = {value} is past divergence_threshold = {self.divergence_threshold}"
        if self._is_better(value, self.best_score, self.min_delta):
            self.best_score = value
            self.wait_count = 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return f"EarlyStopping: {self.monitor} did not improve in the last {self.wait_count} checks (best: {self.best_score})"

    def _is_better(self, value: float, reference: float, margin: float = 0.0) -> bool:
        """Whether ``value`` is better than ``reference`` by more than ``margin``."""
        import torch  # fit migrate looks at this class without it

        # Compared in torch's default dtype (float32), as in Lightning: a smaller difference is rounding, and no improvement.
        first, second = torch.tensor([value, reference])
        return bool(first + margin < second if self.mode == "min" else first - margin > second)
