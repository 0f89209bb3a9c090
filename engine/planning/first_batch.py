"""The batch that a plan traces: the first of the user's loader, read without a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from engine.data.prepared_loader import PreparedLoader
from engine.utils.seed import isolated
from engine.utils.tree import batch_size, move


def first_batch(loader: PreparedLoader) -> tuple[Any, int]:
    """A full micro-batch and the number of its samples. No generator, sampler or worker of the loader is used.

    Raises:
        ValueError: the loader gives no batch, or can be read only once.
    """
    given = loader.loader
    with isolated():
        batch = _read(given, loader)
        transfer = loader.transfer or move
        batch = transfer(batch, loader._group.device, loader._dtype)
    return batch, batch_size(batch) or 1


def _read(given: Any, loader: PreparedLoader) -> Any:
    if isinstance(given, Iterator):
        raise ValueError(
            f"the training data is a {type(given).__name__}, which can be read only once, and a plan would take its first batch: give a list of "
            "batches, a DataLoader or an object whose __iter__ starts again"
        )
    if isinstance(given, DataLoader) and not isinstance(given.dataset, IterableDataset):
        return _of_dataset(given)
    source = given if hasattr(given, "__iter__") else loader
    batch = next(iter(source), None)
    if batch is None:
        raise ValueError(f"the training data ({type(given).__name__}) has no batch")
    return batch


def _of_dataset(loader: DataLoader[Any]) -> Any:
    """The dataset's first samples in a batch: their number is what the plan needs, not their order."""
    dataset: Any = loader.dataset
    size = loader.batch_size
    if size is None and loader.batch_sampler is not None:
        with isolated():
            size = len(next(iter(loader.batch_sampler)))
    if size is None:
        return loader.collate_fn(dataset[0])
    try:
        indices = [index % len(dataset) for index in range(size)]
    except TypeError:
        return next(iter(loader))
    if hasattr(dataset, "__getitems__"):
        return loader.collate_fn(dataset.__getitems__(indices))
    return loader.collate_fn([dataset[index] for index in itertools.islice(indices, size)])
