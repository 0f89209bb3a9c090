"""Adds learning rates to the logged metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

from engine import Callback

if TYPE_CHECKING:
    import torch
    from torch import nn

    from engine import Run


class LearningRateMonitor(Callback):
    """Adds each optimizer's learning rate to the metrics that are logged in training.

    Names are Lightning's: ``lr-AdamW``; ``lr-AdamW/pg1``, ``lr-AdamW/pg2`` with several parameter groups (or the groups' own
    ``name``); a second optimizer of the same class is ``lr-AdamW-1``; a scheduler's ``name`` takes the place of its optimizer's. As in
    Lightning, the value at step n is the one that step n + 1 will use. A learning rate that is a tensor is read at the log boundary.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        """
        Args:
            logging_interval: ``"step"``: with all metrics logged in training; ``"epoch"``: once per epoch, the value at the start
                of the epoch; ``None``: each optimizer at the ``interval`` of its scheduler, without a scheduler at ``"step"``.
            log_momentum: log the momentum too (the first of ``betas``), as ``lr-SGD-momentum``; 0 if there is none.
            log_weight_decay: log the weight decay too, as ``lr-SGD-weight_decay``; 0 if there is none.

        Raises:
            ValueError: ``logging_interval`` is unknown.
        """
        if logging_interval not in (None, "step", "epoch"):
            raise ValueError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): it must be 'step', 'epoch' or None"
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self._sources: list[tuple[torch.optim.Optimizer, str, str]] = []
        self._epoch_values: dict[str, float] = {}
        self._step = -1
        self._training = False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._training = False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._sources = _sources(run)
        self._step = -1
        self._training = True

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        self._epoch_values = self._values("epoch")

    # The learning rate is not a result of an evaluation, whose metrics are logged between these two hooks.
    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._training = False

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._training = bool(self._sources)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        self._training = False
        self._sources = []

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self._training:
            metrics.update(self._epoch_values)
            self._epoch_values = {}
            if step != self._step:  # at an epoch's end the step may have been logged already
                self._step = step
                metrics.update(self._values("step"))

    def _values(self, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for optimizer, name, own_interval in self._sources:
            if (self.logging_interval or own_interval) == interval:
                for suffix, group in zip(_group_suffixes(optimizer, name), optimizer.param_groups, strict=True):
                    values.update(self._values_of_group(name + suffix, group))
        return values

    def _values_of_group(self, name: str, group: dict[str, Any]) -> dict[str, float]:
        values = {name: float(group["lr"])}
        if self.log_momentum:
            values[f"{name}-momentum"] = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
        if self.log_weight_decay:
            values[f"{name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return values


def _sources(run: Run) -> list[tuple[torch.optim.Optimizer, str, str]]:
    """Each optimizer once, with its unique name and its interval; optimizers with a scheduler come first."""
    candidates: list[tuple[torch.optim.Optimizer, str | None, str]] = []
    for record in run.schedulers:
        candidates.append((record.scheduler.optimizer, record.name, record.interval))
    candidates += [(optimizer, None, "step") for optimizer in run.optimizers]
    sources: list[tuple[torch.optim.Optimizer, str, str]] = []
    count: Counter[str] = Counter()
    for optimizer, scheduler_name, interval in candidates:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # a prepared optimizer wraps the user's
        if any(optimizer is seen for seen, _, _ in sources):
            continue
        name = scheduler_name or f"lr-{type(optimizer).__name__}"
        number = count[name]
        count[name] += 1
        sources.append((optimizer, f"{name}-{number}" if number else name, interval))
        _group_suffixes(optimizer, name)
    return sources


def _group_suffixes(optimizer: torch.optim.Optimizer, name: str) -> list[str]:
    """Return the suffix of ``name`` for each parameter group.

    Raises:
        ValueError: two groups of the optimizer have the same ``name``.
    """
    groups = optimizer.param_groups
    if len(groups) == 1:
        group_name = groups[0].get("name")
        return [f"/{group_name}" if group_name else ""]
    names = [str(group.get("name", f"pg{number}")) for number, group in enumerate(groups, start=1)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"LearningRateMonitor: the parameter groups of {name} must have different names; they are {names}"
        )
    return [f"/{group_name}" for group_name in names]
