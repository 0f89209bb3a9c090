"""Validation after a number of micro-batches instead of optimizer steps."""

from __future__ import annotations

from fractions import Fraction

from torch import nn

from engine import Callback, Duration, Every, Run

_NEVER = 1 << 62


class BatchValidation(Callback):
    """Validates after every ``interval`` micro-batches. ``Fit(val_every=...)`` counts optimizer steps, epochs or time instead.

    Args:
        interval: micro-batches of one rank; a float is a share of an epoch, rounded down to whole micro-batches.
        epochs: count from the start of each epoch, and validate in every ``epochs``-th one; ``None``: count across epochs.

    A validation that is due between the micro-batches of one optimizer step runs before the first of them: the weights are the same, and several
    of them are one. The first step of a training is not validated before. The callback
    takes the place of ``val_every``, also of ``val_every=None``; under ``fast_dev_run`` it does nothing.

    Raises:
        ValueError: before the first step, if ``interval`` is longer than an epoch.
    """

    def __init__(self, interval: int | float, epochs: int | None = 1) -> None:
        self.interval, self.epochs = interval, epochs

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        if stage == "fit" and not run.settings.fast_dev_run:
            run.val_every = BatchInterval(run, self.interval, self.epochs)


class BatchInterval(Every):
    """The interval of :class:`BatchValidation`, measured with the counters of a run."""

    def __init__(self, run: Run, interval: int | float, epochs: int | None) -> None:
        super().__init__(None)
        self.run, self.interval, self.epochs = run, interval, epochs

    @property
    def is_never(self) -> bool:
        return False

    @property
    def is_at_epoch_ends(self) -> bool:
        return self.batches is None

    @property
    def pace(self) -> Duration | None:
        length, epochs = self.run.num_train_batches, self.epochs or 1
        if self.batches is None or not length:
            return Duration("epochs", epochs)
        return Duration("epochs", epochs * self.batches / length)

    @property
    def batches(self) -> int | None:
        """Micro-batches between two validations; ``None``: one validation an epoch, whose length is not known."""
        length = self.run.num_train_batches
        if isinstance(self.interval, int):
            return self.interval
        return None if length is None else max(1, int(length * self.interval))

    @property
    def batches_done(self) -> int:
        """Micro-batches so far: in this epoch, or in all epochs if the count goes on across them."""
        return self.run.state.batches if self.epochs is None else self.run.state.batch_idx

    def start(self, step: int, epochs: Fraction | None = None) -> None:
        if not self.run.val_loaders:  # such as with limit_val_batches=0
            return
        length, batches = self.run.num_train_batches, self.batches
        if batches is not None and self.epochs is not None and length is not None and batches > length:
            raise ValueError(
                f"val_check_interval={self.interval}: validation every {batches} batches, in epochs of {length}: give at most {length}, "
                "or epochs=None (in Lightning check_val_every_n_epoch=None) to count across epochs"
            )

    def due(self, step: int, epoch_end: int | None, elapsed_s: float, epochs: Fraction | None = None) -> bool:
        if self.epochs is not None and (self.run.state.epoch + 1) % self.epochs:
            return False
        if epoch_end is not None and self.run.num_train_batches is None:
            return True
        if self.batches is None or not self.batches_done:
            return False
        until_due = -self.batches_done % self.batches
        return not until_due or until_due < self._next_window()

    def _next_window(self) -> int:
        """Micro-batches of the next optimizer step; 1 after the last step of an epoch, if each epoch has its own count, and if none follows."""
        length, state, run = self.run.num_train_batches, self.run.state, self.run
        is_last_epoch = run.max_epochs is not None and state.epoch + 1 >= run.max_epochs
        if (run.max_steps is not None and state.step >= run.max_steps) or (is_last_epoch and state.batch_idx == length):
            return 1
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
        return step + max(
            1, (self.batches - self.batches_done % self.batches) // self.run.window_at(self.run.state.epoch)
        )
