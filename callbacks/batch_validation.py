"""Validation after a number of micro-batches, for those who do not count in optimizer steps."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine import Callback, Every, Run

_NEVER = 1 << 62


class BatchValidation(Callback):
    """Validates every so many micro-batches, instead of ``Fit(val_every=...)``, which counts optimizer steps, epochs or time.

    Args:
        interval: micro-batches of one rank, or a float: a share of an epoch's, rounded down to whole ones.
        epochs: count within each epoch from its start, and validate in every ``epochs``-th one; ``None``: count over epochs.

    A validation that falls within the micro-batches of an optimizer step comes before them: the weights are the same.

    Raises:
        ValueError: before the first step: more than an epoch has, or fewer than an optimizer step.
    """

    def __init__(self, interval: int | float, epochs: int | None = 1) -> None:
        self.interval, self.epochs = interval, epochs

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage == "fit":
            run.val_every = _InBatches(run, self.interval, self.epochs)


class _InBatches(Every):
    """The arguments of :class:`BatchValidation`, in a run."""

    def __init__(self, run: Run, interval: int | float, epochs: int | None) -> None:
        super().__init__(None)
        self.run, self.interval, self.epochs = run, interval, epochs

    @property
    def batches(self) -> int | None:
        """Between two validations; ``None``: the epoch's, whose number is not known."""
        length = self.run.num_train_batches
        if isinstance(self.interval, int):
            return self.interval
        return None if length is None else max(1, int(length * self.interval))

    @property
    def done(self) -> int:
        """Micro-batches so far."""
        return self.run.state.batches if self.epochs is None else self.run.state.batch_idx

    def start(self, step: int, epochs: Any = None) -> None:
        length, window, batches = self.run.num_train_batches, self.run.window_at(self.run.epoch), self.batches
        if batches is not None and batches not in (0, length) and batches < window:
            raise ValueError(
                f"val_check_interval={self.interval}: validation every {batches} batches, with {window} in an optimizer step: give at least {window}"
            )
        if batches is not None and self.epochs is not None and length is not None and batches > length:
            raise ValueError(
                f"val_check_interval={self.interval}: validation every {batches} batches, in epochs of {length}: give a number that an epoch has, "
                "or no epochs (in Lightning check_val_every_n_epoch=None) to count over all"
            )

    def due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Any = None) -> bool:
        if self.epochs is not None and (self.run.state.epoch + 1) % self.epochs:
            return False
        if epoch_end is not None and self.run.num_train_batches is None:
            return True
        if self.batches is None or not self.done:
            return False
        left = -self.done % self.batches  # micro-batches until the validation is due
        return not left or left < self._next_window()

    def _next_window(self) -> int:
        """Micro-batches of the next optimizer step; 1 after the last step of an epoch, if each epoch has its own count."""
        length, state = self.run.num_train_batches, self.run.state
        if not self.run.module.automatic_optimization:
            return 1
        window = self.run.window_at(state.epoch)
        if length is None or state.batch_idx + window <= length:
            return window
        if state.batch_idx < length:
            return length - state.batch_idx
        return 1 if self.epochs is not None else min(window, length)

    def next_step(self, step: int) -> int:
        if self.batches is None:
            return _NEVER
        if not self.run.module.automatic_optimization:
            return step  # the module's steps are not counted in batches
        return step + max(1, (self.batches - self.done % self.batches) // self.run.window_at(self.run.state.epoch))
