"""Stochastic weight averaging: the mean of the weights at the ends of the last epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from engine import Run

from .weight_averaging import Average, WeightAveraging


class SWA(WeightAveraging):
    """Averages the weights at the ends of the last epochs, in which the learning rate is annealed to ``swa_lrs`` and stays there.

    Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization" (2018). :class:`callbacks.WeightAveraging` says where the
    mean is used and how it is saved. The learning rate is that of ``torch.optim.swa_utils.SWALR``, one step an epoch, and replaces the
    schedulers' rate. The mean includes the weights after the last epoch.

    Args:
        swa_lrs: the learning rate to anneal to, or one for each parameter group (of all optimizers, in their order); ``None``: schedulers continue.
        swa_epoch_start: the first epoch that is averaged, counted from 1, or its share of ``max_epochs`` (``0.8``).
        annealing_epochs: epochs until the learning rate reaches ``swa_lrs``.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn, use_buffers, name: as in :class:`callbacks.WeightAveraging`.

    Raises:
        ValueError, TypeError: an argument is not valid. At the start of the training: a share without ``max_epochs``, a start after the last epoch,
            different numbers of learning rates and parameter groups.
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float] | None = None,
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Average | None = None,
        *,
        use_buffers: bool = True,
        name: str = "swa",
    ) -> None:
        self._rate_per_group = isinstance(swa_lrs, Sequence) and not isinstance(swa_lrs, bytes)
        rates: list[Any] = [] if swa_lrs is None else list(swa_lrs) if self._rate_per_group else [swa_lrs]  # type: ignore[arg-type]
        numbers = all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in rates)
        if not numbers or not all(0 < rate < math.inf for rate in rates) or (swa_lrs is not None and not rates):
            raise ValueError(f"SWA(swa_lrs={swa_lrs!r}): it must be a positive number, a list of them, or None")
        whole = isinstance(swa_epoch_start, int) and not isinstance(swa_epoch_start, bool) and swa_epoch_start >= 1
        if not whole and not (isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1):
            raise ValueError(
                f"SWA(swa_epoch_start={swa_epoch_start!r}): it must be an epoch, counted from 1, or a share from 0.0 to 1.0"
            )
        if isinstance(annealing_epochs, bool) or not isinstance(annealing_epochs, int) or annealing_epochs < 0:
            raise ValueError(f"SWA(annealing_epochs={annealing_epochs!r}): it must be a number of epochs")
        if annealing_strategy not in ("cos", "linear"):
            raise ValueError(f"SWA(annealing_strategy={annealing_strategy!r}): it must be 'cos' or 'linear'")
        super().__init__(avg_fn=avg_fn, use_buffers=use_buffers, name=name)
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self._rates = rates
        self._start = 0
        self._annealing_start: int | None = None
        self._rates_before: list[float] = []
        self._current_rates: list[float] = []
        self._every_step = False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        super().setup(run, module, stage)
        if stage == "fit":
            self._start = self._first_epoch(run.max_epochs)
            self._annealing_start, self._rates_before, self._current_rates = None, [], []

    def _first_epoch(self, max_epochs: int | None) -> int:
        """The first epoch that is averaged, from 0."""
        first = self.swa_epoch_start
        if isinstance(first, float):
            if max_epochs is None:
                raise ValueError(
                    f"SWA(swa_epoch_start={first}) is a share of max_epochs, which is not set: set it, or give an epoch"
                )
            first = int(max_epochs * first)
        if max_epochs is not None and first > max_epochs:
            raise ValueError(
                f"SWA(swa_epoch_start={first}) is after the last epoch, max_epochs={max_epochs}: give an earlier one"
            )
        return max(first - 1, 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self._start

    # -- the learning rate ------------------------------------------------------------------------------------------------------

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        super().on_train_start(run, module)
        groups = _parameter_groups(run)
        if self._rate_per_group and len(self._rates) != len(groups):
            raise ValueError(
                f"SWA(swa_lrs=...) has {len(self._rates)} learning rates, and the optimizers have {len(groups)} parameter groups: "
                "give a rate for each group, or one number for all"
            )
        self._every_step = any(schedule.interval == "step" for schedule in run.schedulers) or not getattr(
            module, "automatic_optimization", True
        )

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        if not self._rates or run.epoch < self._start:
            self._current_rates = []
            return
        groups = _parameter_groups(run)
        if self._annealing_start is None:
            self._annealing_start = run.epoch
        self._rates_before += [float(group["lr"]) for group in groups[len(self._rates_before) :]]
        share = self._new_rate_share(run.epoch - self._annealing_start)
        rates = self._rates if self._rate_per_group else self._rates * len(groups)
        self._current_rates = [
            rate * share + old * (1 - share) for rate, old in zip(rates, self._rates_before, strict=True)
        ]
        self._set_rates(groups)

    def _new_rate_share(self, epochs: int) -> float:
        """Share of the new learning rate in the mixture with the old one, ``epochs`` after the start."""
        part = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return (1 - math.cos(math.pi * part)) / 2 if self.annealing_strategy == "cos" else part

    def _set_rates(self, groups: list[dict[str, Any]]) -> None:
        for group, rate in zip(groups, self._current_rates, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._every_step and self._current_rates:
            self._set_rates(_parameter_groups(run))  # a scheduler has stepped
        super().on_train_batch_end(run, module, outputs, batch, batch_idx)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "from": self._annealing_start, "before": list(self._rates_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._annealing_start, self._rates_before = state["from"], [float(rate) for rate in state["before"]]


def _parameter_groups(run: Run) -> list[dict[str, Any]]:
    """The parameter groups of all optimizers."""
    return [group for optimizer in run.optimizers for group in optimizer.param_groups]
