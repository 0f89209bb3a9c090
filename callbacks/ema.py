"""An exponential moving average of the weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine import Run

from .weight_averaging import WeightAveraging


class EMA(WeightAveraging):
    """An exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights`` after an optimizer step.

    :class:`callbacks.WeightAveraging` says where it is used and how it is saved. The first update copies the weights.

    Args:
        decay: between 0 and 1.
        update_every_n_steps: update after each step whose index (from 0) is a multiple of this.
        update_starting_at_step: do not update before this step, from 0.
        update_starting_at_epoch: do not update before this epoch, from 0.
        warmup: the decay of update n (from 0) is at most ``(1 + n) / (10 + n)``: the first weights are forgotten sooner.
        use_buffers, name: as in :class:`callbacks.WeightAveraging`.

    Raises:
        ValueError, TypeError: an argument is not valid.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        warmup: bool = False,
        use_buffers: bool = True,
        name: str = "ema",
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"EMA(decay={decay!r}): it must be a number from 0 to 1")
        for argument, value, least in (
            ("update_every_n_steps", update_every_n_steps, 1),
            ("update_starting_at_step", update_starting_at_step, 0),
            ("update_starting_at_epoch", update_starting_at_epoch, 0),
        ):
            if (value is not None or least) and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ValueError(f"EMA({argument}={value!r}): it must be a whole number of at least {least}")
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers, name=name)
        self.decay, self.warmup = decay, warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch
        self._waiting = False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._waiting = run.epoch < (self.update_starting_at_epoch or 0)
        super().on_train_start(run, module)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        self._waiting = run.epoch < (self.update_starting_at_epoch or 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is None or self._waiting:
            return False
        return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0

    def average(self, averages: list[Tensor], currents: list[Tensor]) -> None:
        if self.warmup:
            decay = min(self.decay, (1 + self.n_averaged) / (10 + self.n_averaged))
            get_ema_multi_avg_fn(decay)(averages, currents, self.n_averaged)
        else:
            super().average(averages, currents)
