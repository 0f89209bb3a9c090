"""``global_batch_size`` as the windows of a training's stages: from samples or tokens of a step to micro-batches of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from engine.config.duration import Duration, parse
from engine.data.loader import PreparedLoader
from engine.loop.state import TrainState

_MOST_COUNTED = 1_000_000
"""The most steps that are counted one by one before a training."""


@dataclass(frozen=True)
class Stage:
    """A part of the training in which all steps have equally many samples."""

    start: Duration
    """When the stage begins: at the first window at or after this."""
    window: int
    """Micro-batches in a window."""
    size: int | str = ""
    """The samples or tokens of a step, as they were set."""


class BatchSizes:
    """The stages of ``global_batch_size`` for one training loader.

    Args:
        stages: in the order of their starts, which have one unit.
        loader: the training loader.
    """

    def __init__(self, stages: Sequence[Stage], loader: PreparedLoader) -> None:
        self.stages, self._loader = stages, loader
        self.unit = stages[-1].start.unit
        """The unit of the stages' starts."""

    @property
    def changes(self) -> bool:
        """True if there are several stages."""
        return len(self.stages) > 1

    def index_at(self, state: TrainState) -> int:
        """The number of the stage to which the next window belongs."""
        if not self.changes:
            return 0
        at = reached(state, self.unit, self._loader)
        return max(index for index, stage in enumerate(self.stages) if not index or stage.start.value <= at)

    @property
    def largest_window(self) -> int:
        """The micro-batches in a window of the largest stage."""
        return max(stage.window for stage in self.stages)

    def steps(self, epochs: int | None, samples: int | None = None, tokens: int | None = None) -> int | None:
        """The optimizer steps of a training that ends after ``epochs``, or once it has ``samples`` or ``tokens``; ``None``: not known before."""
        steps = self.steps_by_stage(epochs, samples, tokens=tokens)
        return None if steps is None else sum(steps)

    def steps_by_stage(
        self,
        epochs: int | None,
        samples: int | None = None,
        max_steps: int | None = None,
        tokens: int | None = None,
    ) -> list[int] | None:
        """The optimizer steps in each stage of a training with these limits; ``None``: not known before.

        A start in steps counts as many windows here: none is skipped.

        Args:
            tokens: a limit in tokens, of data that tells the tokens of its batches.
        """
        size, per_window = self._loader.samples_of_pass, self._loader.samples_of_round
        if not size or not per_window:
            return self._steps_by_window(epochs, samples, max_steps, tokens)
        if epochs is samples is max_steps is None:
            return None
        starts = [self._as_samples(stage.start, size) for stage in self.stages]
        counts, done, epoch, position = [0] * len(starts), 0, 0, 0
        while (
            (epochs is None or epoch < epochs)
            and (samples is None or done < samples)
            and (max_steps is None or sum(counts) < max_steps)
        ):
            at = sum(counts) if self.unit == "steps" else done
            index = max(number for number, start in enumerate(starts) if not number or start <= at)
            full, is_last = per_window * self.stages[index].window, index == len(starts) - 1
            if is_last and not position:  # whole epochs at once
                by_limit = [] if epochs is None else [epochs - epoch]
                by_limit += [] if samples is None else [(samples - done) // size]
                by_limit += [] if max_steps is None else [(max_steps - sum(counts)) // -(-size // full)]
                if whole := min(by_limit):
                    counts[index] += whole * -(-size // full)
                    done, epoch = done + whole * size, epoch + whole
                    continue
            windows = -(-(size - position) // full)
            if not is_last:
                distance = starts[index + 1] - at
                windows = min(windows, distance if self.unit == "steps" else -(-distance // full))
            if samples is not None:
                windows = min(windows, -(-(samples - done) // full))
            if max_steps is not None:
                windows = min(windows, max_steps - sum(counts))
            read = min(windows * full, size - position)
            counts[index], done, position = counts[index] + windows, done + read, position + read
            if position == size:
                epoch, position = epoch + 1, 0
        return counts

    def _steps_by_window(
        self, epochs: int | None, samples: int | None, max_steps: int | None, tokens: int | None
    ) -> list[int] | None:
        """The optimizer steps in each stage, counted window by window, of batches with different numbers of samples; ``None``: not known before."""
        loader, positions = self._loader, self._loader.positions_of_pass
        if not positions or epochs is samples is max_steps is tokens is None:
            return None
        needs_counts = self.unit in ("samples", "tokens") or samples is not None or tokens is not None
        if needs_counts and not loader.tells_tokens:
            return None
        counts, state = [0] * len(self.stages), TrainState()
        while (
            (epochs is None or state.epoch < epochs)
            and (samples is None or state.samples < samples)
            and (max_steps is None or state.step < max_steps)
            and (tokens is None or state.clock_tokens < tokens)
        ):
            if state.step == _MOST_COUNTED:
                return None
            index, start = self.index_at(state), state.position
            full = loader.positions_of_round * self.stages[index].window
            if index == len(counts) - 1 and not start and samples is tokens is None:  # whole epochs at once
                by_limit = [] if epochs is None else [epochs - state.epoch]
                by_limit += [] if max_steps is None else [(max_steps - state.step) // -(-positions // full)]
                if whole := min(by_limit):
                    steps = whole * -(-positions // full)
                    counts[index], state.epoch, state.step = (
                        counts[index] + steps,
                        state.epoch + whole,
                        state.step + steps,
                    )
                    continue
            state.position += full
            if needs_counts:
                state.samples += loader.samples_between(state.epoch, start, state.position)
                state.clock_tokens += loader.tokens_between(state.epoch, start, state.position)
            counts[index], state.step = counts[index] + 1, state.step + 1
            if state.position >= positions:
                state.next_epoch()
        return counts

    def _as_samples(self, start: Duration, size: int) -> int:
        if self.unit == "epochs":
            return ceil(start.exact * size)
        return ceil(start.value / (self._loader.tokens_per_sample or 1)) if self.unit == "tokens" else int(start.value)


def reached(state: TrainState, unit: str, loader: PreparedLoader) -> int | float | Fraction:
    """How far a training is in the unit in which stages start, before its next window."""
    if unit == "samples":
        return state.samples
    if unit == "tokens":
        return state.clock_tokens
    if unit == "steps":
        return state.step
    positions = loader.positions_of_pass
    if state.epoch_done or not positions:
        return state.finished_epochs
    return state.epoch + Fraction(min(state.position, positions), positions)


def batch_sizes(setting: int | str | Mapping[Any, Any], loader: PreparedLoader, ranks: int) -> BatchSizes:
    """Read ``global_batch_size`` for a training loader and a number of ranks.

    Raises:
        ValueError: a step cannot be divided into the loader's batches; the message names sizes that can.
    """
    if not isinstance(setting, Mapping):
        return BatchSizes([Stage(Duration("samples", 0), _window(setting, "", loader, ranks))], loader)
    starts = [(Duration("samples", 0) if key in (0, "0") else parse(key), key) for key in setting]
    later = [start.unit for start, key in starts if start.value]
    stages = [
        Stage(
            Duration(later[0] if later else "samples", start.value),
            _window(setting[key], f" from {start}", loader, ranks),
            setting[key],
        )
        for start, key in starts
    ]
    if isinstance(stages[-1].start.value, float) and not loader.positions_of_pass:
        raise ValueError(
            f"global_batch_size has a stage from {stages[-1].start}, and {type(loader.loader).__name__} has no length: give its start in samples"
        )
    return BatchSizes(stages, loader)


def _window(size: int | str, when: str, loader: PreparedLoader, ranks: int) -> int:
    """The micro-batches in a window of ``size`` samples, or of a text such as ``"524288 tokens"``."""
    text = f"global_batch_size={size}{when}"
    budget = loader.tokens_per_batch
    if budget is not None and isinstance(size, str):
        return _window_of_budget(text, int(parse(size).value), budget, ranks)
    batch = getattr(loader.loader, "batch_size", None)
    if not isinstance(batch, int):
        if budget is not None:
            raise ValueError(
                f"{text}: batches of {type(loader.loader.batch_sampler).__name__} have different numbers of samples: give the tokens of a step, "
                f"global_batch_size='{budget * ranks} tokens'"
            )
        raise ValueError(f"{text} needs a loader with a batch_size; {type(loader.loader).__name__} has none")
    length, unit = 1, "samples"
    if isinstance(size, str):
        row, unit = loader.tokens_per_sample, "tokens"
        if row is None:
            data = type(getattr(loader.loader, "dataset", loader.loader)).__name__
            raise ValueError(
                f"{text}: {data} has no tokens_per_sample, so how many of its rows have as many tokens is not known: give the number of samples, or "
                "a dataset whose rows all have one length with this attribute (Packed has it)"
            )
        length, size = row, int(parse(size).value)
        if size % length:
            below = size // length * length
            raise ValueError(
                f"{text} cannot be divided into rows of {length} tokens; nearest possible: "
                f"{', '.join(f'{tokens} tokens' for tokens in (below, below + length) if tokens)}"
            )
        size //= length
    micro_batch = batch * ranks
    window, remainder = divmod(size, micro_batch)
    if not remainder and window:
        return window
    sizes = sorted({max(1, window) * micro_batch * length, (window + 1) * micro_batch * length})
    divisors = [number for number in range(1, size // ranks + 1) if size % (number * ranks) == 0]
    nearest_sizes = sorted(sorted(divisors, key=lambda number: abs(number - batch))[:4])
    raise ValueError(
        f"{text} cannot be divided into batches of {batch} on {ranks} rank(s) ({micro_batch * length} {unit} per micro-batch); "
        f"nearest possible: {', '.join(map(str, sizes))}{'' if unit == 'samples' else f' {unit}'}, or "
        + (
            f"batch_size={', '.join(map(str, nearest_sizes))} in the loader"
            if nearest_sizes
            else f"a multiple of {ranks}, the number of ranks"
        )
    )


def _window_of_budget(text: str, tokens: int, budget: int, ranks: int) -> int:
    """The micro-batches in a window of ``tokens``, of batches that have at most ``budget`` tokens each."""
    micro_batch = budget * ranks
    window, remainder = divmod(tokens, micro_batch)
    if not remainder and window:
        return window
    sizes = sorted({max(1, window) * micro_batch, (window + 1) * micro_batch})
    raise ValueError(
        f"{text} cannot be divided into batches of at most {budget} tokens on {ranks} rank(s) ({micro_batch} tokens per micro-batch); nearest "
        f"possible: {', '.join(f'{size} tokens' for size in sizes)}"
    )
