"""The clock of a training: how many samples and tokens it has read, for intervals, limits, batch sizes and learning rates in these units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from engine.config.duration import NEVER, Unit
from engine.data.feed import MicroBatch
from engine.data.loader import PreparedLoader
from engine.engine import Engine
from engine.loop.state import Tally, TrainState
from engine.utils.log import logger
from engine.utils.sample_count import SingleTensors, counted


class TrainingClock:
    """Counts the samples and tokens of a training, over all ranks, in complete windows; a step that was skipped counts, because its data was read.

    Samples are exact after each step. Tokens are, too, where the rows of the data have one length (``tokens_per_sample``): every place of a row
    counts, padding as well. With a :class:`engine.TokenBudget` they are the lengths of the samples, without padding. For other data they are the
    counts of the :class:`engine.Loss` objects, which the device has: these are read at log boundaries only, so what is due by them is due at the
    first log boundary after. Nothing is estimated.

    Args:
        state: the run's counters, which have the count.
        items: the sum of the counts of ``Loss`` objects.
        log_every_n_steps: steps between two log boundaries; 0: there are none.
    """

    def __init__(self, engine: Engine, state: TrainState, items: Tally, log_every_n_steps: int) -> None:
        self._engine, self._state, self._items, self._boundary = engine, state, items, log_every_n_steps
        self.tokens_per_sample = 0
        """The tokens of a row of the training data; 0: not known."""
        self.counts_batches = False
        """Whether the training loader tells the tokens of its batches, because a :class:`engine.TokenBudget` makes them."""
        self._loader: PreparedLoader | None = None
        self._data = "the data"
        self.users: dict[str, str] = {}
        """By unit, the first of the settings that the clock is asked for."""

    @property
    def samples(self) -> int:
        """The samples so far."""
        return self._state.samples

    @property
    def tokens(self) -> int | float | None:
        """The tokens so far, or at the last log boundary if losses count them; ``None``: nobody has asked for tokens that are not known."""
        return None if self.counts_losses and "tokens" not in self.users else self._state.clock_tokens

    @property
    def counts_losses(self) -> bool:
        """Whether the tokens are those that losses count."""
        return not (self.tokens_per_sample or self.counts_batches)

    def measure(self, loader: PreparedLoader) -> None:
        """Take over from a training loader how many tokens its rows have, before its first pass.

        Raises:
            ValueError: something counts in tokens, and the loader does not know them as others before it have.
        """
        self._data = type(getattr(loader.loader, "dataset", loader.loader)).__name__
        were_known = not self.counts_losses
        self._loader, self.counts_batches = loader, loader.tells_tokens
        self.tokens_per_sample = 0 if loader.tells_tokens else loader.tokens_per_sample or 0
        if were_known and self.counts_losses and "tokens" in self.users:
            raise ValueError(
                f"{self.users['tokens']}: the tokens of the training's data were known, and those of {self._data}, loaded after it, are not: "
                "give all of the data rows of one length with the attribute tokens_per_sample, or a TokenBudget"
            )

    def begin(self) -> None:
        """Begin to count known tokens; a training that resumes from a checkpoint without a count begins with what that has."""
        if not self.counts_losses:
            self._take_up()

    def follow(self, what: str, unit: str, before_steps: bool = False) -> None:
        """Count in ``unit`` from now on.

        Args:
            what: the setting that needs the count, for errors: ``"max_duration='2e9 tokens'"``.
            before_steps: whether it needs the count before each step, so that counts of losses are no use.

        Raises:
            ValueError: the tokens are not known.
        """
        if unit == "tokens" and self.counts_losses:
            advice = (
                "give a dataset whose rows all have one length, with the attribute tokens_per_sample (Packed, PackedStream have it), batches of a "
                "TokenBudget, or the length in samples"
            )
            if before_steps:
                raise ValueError(
                    f"{what}: the tokens must be known before each step, and {self._data} has no tokens_per_sample: {advice}"
                )
            if not self._boundary:
                raise ValueError(
                    f"{what}: {self._data} has no tokens_per_sample, so losses count the tokens, which are read at log boundaries, and "
                    f"log_every_n_steps=0 has none: set it, or {advice}"
                )
            if "tokens" not in self.users and not self._items.has_some:
                self._engine.before_step(self._check_loss)
        if unit == "tokens" and unit not in self.users:
            self._take_up()
        self.users.setdefault(unit, what)

    def count(self, unit: Unit, step: int) -> int | float:
        """Implements :meth:`engine.config.duration.Clock.count`."""
        state = self._state
        if unit == "samples":
            return state.samples
        if self.counts_losses and step // self._boundary > state.clock_step // self._boundary:
            state.clock_tokens, state.clock_step = as_int(self._items.total() or 0), step
        return state.clock_tokens

    def next_step(self, unit: Unit, step: int) -> int:
        """Implements :meth:`engine.config.duration.Clock.next_step`."""
        return (step // self._boundary + 1) * self._boundary if unit == "tokens" and self.counts_losses else NEVER

    def is_exact(self, unit: Unit) -> bool:
        """Implements :meth:`engine.config.duration.Clock.is_exact`."""
        return unit == "samples" or not self.counts_losses

    def add_window(self, positions: int) -> None:
        """Count the tokens of the window that ends at the training's position, and is ``positions`` long, where :attr:`counts_batches`."""
        assert self._loader is not None
        state = self._state
        state.clock_tokens += self._loader.tokens_between(state.epoch, state.position - positions, state.position)

    def checked(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, and refuse one whose samples are guessed, or whose rows have another length than the data says.

        Raises:
            ValueError: such a batch has come.
        """
        single_tensors = SingleTensors()
        what, tokens = next(iter(self.users.values())), self.tokens_per_sample if "tokens" in self.users else 0
        for batch, share in micro_batches:
            guess = share.guess
            if share.samples < 0:  # the loop counts the batch's own
                guess = counted(batch)[1] or (single_tensors.doubt(batch) if type(batch) is Tensor else "")
            if guess and (tokens or "samples" in self.users):
                raise ValueError(
                    f"{what}: how many samples a batch has is not certain: {guess}. Say it: count_samples(batch) of the module, the data "
                    "module, the loader or its dataset returns the number; or give the batch an attribute batch_size"
                )
            rows = batch.get("input_ids") if tokens and isinstance(batch, Mapping) else None
            if isinstance(rows, Tensor) and rows.dim() > 1 and rows.size(1) != tokens:
                raise ValueError(
                    f"{what}: {self._data} has tokens_per_sample={tokens}, and a batch has input_ids of shape {list(rows.shape)}: let the collate "
                    f"function keep the rows, or give the dataset's attribute the length that they have"
                )
            yield batch, share
            del batch

    def _take_up(self) -> None:
        """Begin to count tokens; in a training that resumes from a checkpoint without a count, from what that has."""
        state = self._state
        losses_counted = bool(state.clock_step) and not self.counts_losses
        if not state.samples or (state.clock_tokens and not losses_counted):
            return
        if losses_counted:  # up to a log boundary; from here on each step counts
            state.clock_tokens, state.clock_step = as_int(self._items.total() or state.clock_tokens), 0
            if self._engine.is_main_process:
                logger.info(
                    "losses have counted %s tokens; from here on the data tells those of each step", state.clock_tokens
                )
            return
        if self.tokens_per_sample:
            state.clock_tokens = state.samples * self.tokens_per_sample
            how = f"{state.samples} samples count as {self.tokens_per_sample} tokens each, as in the data of this run"
        elif self.counts_batches and self._loader is not None:
            epochs = [(epoch, NEVER) for epoch in range(state.finished_epochs)]
            places = epochs if state.epoch_done else [*epochs, (state.epoch, state.position)]
            state.clock_tokens = sum(self._loader.tokens_between(epoch, 0, position) for epoch, position in places)
            how = f"{state.samples} samples count as {state.clock_tokens} tokens, as in the batches of this run"
        else:
            state.clock_tokens, state.clock_step = as_int(self._items.total() or 0), state.step
            how = f"losses have counted {state.clock_tokens} tokens"
        if self._engine.is_main_process:
            logger.info("the training before this run counted no tokens: its %s", how)

    def _check_loss(self) -> None:
        """Refuse, before the first optimizer step, scalar losses, which count no tokens."""
        weights = self._engine.window.weights
        if weights.fed and weights.states[0].count is None and weights.states[0].scalars:
            raise ValueError(
                f"{self.users['tokens']}: the tokens of the training are not known: {self._data} has no tokens_per_sample, and "
                "training_step returned a scalar. Return Loss(sum, count), whose counts are added up, or give a dataset whose rows have one length "
                "the attribute tokens_per_sample"
            )


def as_int(number: float) -> int | float:
    return int(number) if number == int(number) else number
