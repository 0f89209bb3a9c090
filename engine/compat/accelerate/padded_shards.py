"""Distributes data over processes as Accelerate does: in whole global batches, the last of which is padded with samples of the first.

The engine's own loaders never pad; these classes are for comparisons with trainers that do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler


class BatchSamplerShard(BatchSampler):
    """The batches of one process, out of those of a batch sampler.

    Args:
        split_batches: each process takes a part of every batch, rather than every ``num_processes``-th batch.
        even_batches: pad the last global batch; otherwise processes may have different numbers of batches. May be changed between passes.

    Raises:
        ValueError: batches cannot be split evenly; during a pass: their sizes differ although ``even_batches`` is set.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches=True: batch_size={self.batch_size} must be a multiple of {num_processes} processes"
            )

    def __len__(self) -> int:
        whole, remainder = divmod(len(self.batch_sampler), 1 if self.split_batches else self.num_processes)
        has_remainder = self.even_batches or self.process_index < remainder
        return whole + (remainder > 0 and not self.drop_last and has_remainder)

    def __iter__(self) -> Iterator[Any]:
        if self.batch_size is None or not (self.even_batches or self.split_batches):  # whole batches, in turns
            parts = _process_parts(self.batch_sampler, self.num_processes, self)
            yield from (batch for (batch,) in parts)
        else:
            size = self.batch_size * (1 if self.split_batches else self.num_processes)
            yield from _process_parts(self._samples(), size, self)

    def _samples(self) -> Iterator[Any]:
        """The samples of all batches; only the last batch may be shorter than ``batch_size``."""
        short = False
        for batch in self.batch_sampler:
            if short:
                raise ValueError("batches have different sizes: give DataLoaderConfiguration(even_batches=False)")
            short = len(batch) < self.batch_size
            yield from batch


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, out of those of a stream; for the arguments see :class:`BatchSamplerShard`."""

    even_batches = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset, self.drop_last, self.num_processes, self.process_index = (
            dataset,
            drop_last,
            num_processes,
            process_index,
        )
        self.whole = batch_size if split_batches else batch_size * num_processes
        self.generator = getattr(dataset, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, or seed its generator with it."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(epoch)

    def __len__(self) -> int:
        whole, remainder = divmod(len(self.dataset), self.whole)
        return (whole + (remainder > 0 and not self.drop_last)) * (self.whole // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(_process_parts(self.dataset, self.whole, self))


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on a seed and the epoch."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed, self.epoch = torch.initial_seed() if data_seed is None else data_seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1


def _process_parts(items: Iterable[Any], whole: int, shard: Any) -> Iterator[list[Any]]:
    """Yield this process's part of every ``whole`` items. A shorter rest is dropped, padded with the first items, or distributed as it is."""
    size, stream = whole // shard.num_processes, iter(items)
    rank_slice = slice(shard.process_index * size, (shard.process_index + 1) * size)
    first: list[Any] = []
    while current := list(itertools.islice(stream, whole)):
        first = first or current
        if len(current) < whole and shard.drop_last:
            return
        if len(current) < whole and shard.even_batches:
            current += itertools.islice(itertools.cycle(first[:]), whole - len(current))
        if part := current[rank_slice]:
            yield part
