"""``TokenBudget``: batches of samples of similar lengths, each with at most a number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy
from torch.utils.data import Sampler

from engine.data.arguments import lengths_array, whole_number
from engine.data.order import mixed, permutation
from engine.data.packing import Numbers, best_fit_decreasing, checksum_of_arrays

_BATCHES_OF_POOL = 64
_LEAST_POOL = 8192
_SEED_OF_BATCHES = 7
"""Mixed into the seed for the order of batches, so that it differs from the order of samples."""
_CLASSES_OF_OCTAVE = 32
"""Without padding, lengths that differ by less than this part are exchanged for one another."""


class BatchesOfEpoch(Sequence[list[int]]):
    """The batches of an epoch: lists of samples, made when they are asked for.

    Args:
        samples: the samples of all batches.
        starts, ends: for each batch, its part of ``samples``.
        lengths: the tokens of each sample of the dataset.
    """

    def __init__(self, samples: Numbers, starts: Numbers, ends: Numbers, lengths: Numbers) -> None:
        self.samples, self.starts, self.ends, self.lengths = samples, starts, ends, lengths

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        batch: list[int] = self.samples[self.starts[index] : self.ends[index]].tolist()
        return batch

    def size_of(self, number: int) -> int:
        """The number of samples in a batch, without making it."""
        return int(self.ends[number] - self.starts[number])

    def samples_between(self, start: int, stop: int) -> int:
        """The number of samples in the batches from number ``start`` to ``stop``."""
        return self._samples_before[stop] - self._samples_before[start]

    @cached_property
    def _samples_before(self) -> list[int]:
        """The number of samples in the batches before each one; at last that of all."""
        before: list[int] = numpy.append(0, (self.ends - self.starts).cumsum(dtype=numpy.int64)).tolist()
        return before

    def tokens_between(self, start: int, stop: int) -> int:
        """The tokens of the samples in the batches from number ``start`` to ``stop``, without padding."""
        return self._tokens_before[stop] - self._tokens_before[start]

    @cached_property
    def _tokens_before(self) -> list[int]:
        """The tokens in the batches before each one; at last those of all."""
        tokens = numpy.append(0, self.lengths[self.samples].cumsum())
        before: list[int] = numpy.append(0, (tokens[self.ends] - tokens[self.starts]).cumsum()).tolist()
        return before


class TokenBudget(Sampler[list[int]]):
    """A batch sampler: each batch has as many samples of similar lengths as ``max_tokens`` allows::

        budget = TokenBudget(lengths, max_tokens=16_384)
        fit.run(module, DataLoader(dataset, batch_sampler=budget, collate_fn=pad))

    Every sample is in one batch of each epoch. The number of batches is the same in all epochs. Batches and their order are a function of the run's
    seed and the epoch, so any number of ranks sees the same batches in a step, and a resume on another number of ranks continues exactly.

    Samples are sorted by length once and cut into spans, each of which fills a few batches. In an epoch the samples of a span are distributed to its
    batches at random, and the batches are shuffled. With ``padded=False`` batches mix lengths, and samples of nearly the same length change places.

    Batches have different numbers of samples and tokens: return ``Loss(sum, count)`` from ``training_step``, so that each token has the same weight.
    A scalar loss weighs by the number of samples.

    The clock of a training counts the lengths of the samples that were read, padding not. So durations in tokens act after the step that reaches
    them, stages of ``global_batch_size`` begin there, and learning rates may follow.

    Args:
        lengths: the number of tokens in each sample of the dataset.
        max_tokens: the most tokens in a batch.
        padded: count each sample as long as the longest of its batch, as a padded batch has it. ``False``: count its own tokens, for batches
            that are joined into one row.
        pool: the number of samples among which those of similar lengths are found. Larger pools pad less, and are less random: with one pool
            for all samples each epoch has the same batches in another order. ``None``: 64 times the samples of a batch and at least 8,192, but at
            most half of all.
        shuffle: ``False``: the same batches in each epoch, from the longest samples to the shortest.

    Raises:
        ValueError: a sample is longer than ``max_tokens``, a length is negative, there are no samples, or an argument is not possible.
        TypeError: lengths are not whole numbers.
    """

    def __init__(
        self, lengths: Any, max_tokens: int, *, padded: bool = True, pool: int | None = None, shuffle: bool = True
    ) -> None:
        max_tokens = whole_number(f"TokenBudget(max_tokens={max_tokens!r})", max_tokens, "the most tokens in a batch")
        if pool is not None:
            pool = whole_number(f"TokenBudget(pool={pool!r})", pool, "the samples among which similar ones are found")
        for name, flag in (("padded", padded), ("shuffle", shuffle)):
            if not isinstance(flag, (bool, numpy.bool_)):
                raise TypeError(f"TokenBudget({name}={flag!r}): give True or False")
        self.lengths = _checked(lengths, max_tokens)
        self.max_tokens, self.padded, self.shuffle = max_tokens, padded, shuffle
        self.tokens_per_batch = max_tokens
        """The most tokens in a batch, from which a number of tokens in a step is divided."""
        self.tells_tokens = True
        """The batches of an epoch tell their tokens and samples, so a training's clock counts the lengths of the samples after each step."""
        count = len(self.lengths)
        if pool is None and not shuffle:
            pool = count
        elif pool is None:
            samples_of_batch = count * max_tokens // max(1, int(self.lengths.sum(dtype=numpy.int64)))
            pool = min(max(_LEAST_POOL, _BATCHES_OF_POOL * samples_of_batch), -(-count // 2))
        self.pool = pool
        self._slots: Numbers | None = None
        """By place in the order of classes, the place in the order of batches; ``None``: the same."""
        if padded:
            self._plan_padded(-(-count // pool))
        else:
            self._plan_joined()
        self._seed = self._epoch = 0

    def _plan_padded(self, batches_of_span: int) -> None:
        """Cut the sorted samples into spans of ``batches_of_span`` batches each, which are the classes."""
        order = _longest_first(self.lengths)
        lengths, count = self.lengths[order], len(order)
        starts: list[Numbers] = []
        edges, start = [], 0
        while start < count:
            samples_of_batch = self.max_tokens // max(1, int(lengths[start]))
            size = min(samples_of_batch * batches_of_span, count - start)
            batches = -(-size // samples_of_batch)
            starts.append(start + numpy.arange(batches) * size // batches)
            edges.append(start)
            start += size
        sizes = numpy.diff([*edges, count])
        self._set_classes(order, numpy.arange(len(edges)).repeat(sizes))
        self._starts = numpy.concatenate(starts)
        self._ends = numpy.append(self._starts[1:], count)

    def _plan_joined(self) -> None:
        """Pack lengths that are rounded up, by best fit decreasing. All samples of a rounded length are a class."""
        lengths = numpy.maximum(self.lengths, 1)
        steps = 2.0 ** numpy.floor(numpy.log2(lengths)) / _CLASSES_OF_OCTAVE
        steps = numpy.maximum(steps, 1).astype(numpy.int64)
        rounded = numpy.minimum(-(-lengths // steps) * steps, self.max_tokens)
        # A budget for more than all samples is as one for all of them.
        items, self._ends = best_fit_decreasing(rounded, min(self.max_tokens, int(rounded.sum())))
        self._starts = numpy.append(0, self._ends[:-1])
        order = _longest_first(rounded)
        changes = numpy.diff(rounded[order], prepend=rounded[order[:1]]) != 0
        self._set_classes(order, changes.cumsum())
        self._slots = numpy.argsort(self._classes[items], kind="stable")

    def _set_classes(self, order: Numbers, classes: Numbers) -> None:
        """Keep the class of each sample. ``classes``: those of the samples in ``order``."""
        self._order = order.astype(numpy.min_scalar_type(len(order)))
        self._classes = numpy.empty(len(order), numpy.min_scalar_type(int(classes[-1])))
        self._classes[order] = classes

    def __len__(self) -> int:
        """The number of batches in each epoch."""
        return len(self._starts)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch that :meth:`set_epoch` says, with seed 0; in a training the run's seed is used."""
        return iter(self.draws(self._epoch))

    @cached_property
    def plan_checksum(self) -> int:
        """A checksum of the samples' classes and of the batches' sizes, from which the batches of each epoch follow."""
        slots = [] if self._slots is None else [self._slots]
        return checksum_of_arrays(
            numpy.array([self.shuffle]), self._order, self._classes, self._starts, self._ends, *slots
        )

    def set_epoch(self, epoch: int) -> None:
        """Let ``iter`` yield the batches of this epoch."""
        self._epoch = whole_number(f"TokenBudget.set_epoch({epoch!r})", epoch, "the number of an epoch", lowest=0)

    def seeded(self, seed: int, shuffle: bool) -> TokenBudget:
        """A copy that draws with this seed; see :class:`engine.data.drawn.Drawn`."""
        budget = copy.copy(self)
        budget._seed = seed
        return budget

    def draws(self, epoch: int) -> BatchesOfEpoch:
        """The batches of an epoch, the same on all ranks."""
        if not self.shuffle:
            return BatchesOfEpoch(self._in_batches(self._order), self._starts, self._ends, self.lengths)
        shuffled = permutation(len(self._order), self._seed, epoch).numpy().astype(self._order.dtype)
        # Classes of 16 bits are sorted by their digits, which costs less than the shuffle.
        samples = shuffled[numpy.argsort(self._classes[shuffled], kind="stable")]
        batches = permutation(len(self), mixed(self._seed, _SEED_OF_BATCHES), epoch).numpy()
        return BatchesOfEpoch(self._in_batches(samples), self._starts[batches], self._ends[batches], self.lengths)

    def _in_batches(self, samples: Numbers) -> Numbers:
        """Samples in the order of batches, from samples in the order of classes."""
        if self._slots is None:
            return samples
        placed = numpy.empty_like(samples)
        placed[self._slots] = samples
        return placed


def _longest_first(lengths: Numbers) -> Numbers:
    """The order of samples from the longest to the shortest; of equal lengths the first comes first."""
    largest = int(lengths.max())
    return numpy.argsort((largest - lengths).astype(numpy.min_scalar_type(largest)), kind="stable")


def _checked(lengths: Any, max_tokens: int) -> Numbers:
    """The lengths as an array.

    Raises:
        ValueError, TypeError: they are no lengths, or one is larger than the budget.
    """
    array = lengths_array("TokenBudget: lengths", lengths)
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"TokenBudget: lengths have the shape {list(array.shape)}: give the number of tokens in each sample of the dataset"
        )
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"TokenBudget: lengths have the dtype {array.dtype}: give whole numbers, the tokens of each sample"
        )
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0:
        raise ValueError(f"TokenBudget: sample {int(array.argmin())} has the length {lowest}: give 0 or more")
    if highest > max_tokens:
        raise ValueError(
            f"TokenBudget(max_tokens={max_tokens}): {int((array > max_tokens).sum())} of {len(array)} samples are longer, the longest (sample "
            f"{int(array.argmax())}) has {highest} tokens: give a larger budget, or cut or leave out those samples"
        )
    return array.astype(numpy.int64)
