"""Tells datasets the epoch: those with ``set_epoch``, also inside torch's own wrappers, and their copies in persistent workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import ChainDataset, ConcatDataset, Dataset, StackDataset, Subset, get_worker_info


def epoch_listeners(dataset: Any) -> list[Any]:
    """The dataset if it has ``set_epoch``; else those inside torch's ``Subset``, ``ConcatDataset``, ``StackDataset`` and ``ChainDataset`` that have
    it."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    if isinstance(dataset, Subset):
        return epoch_listeners(dataset.dataset)
    if isinstance(dataset, (ConcatDataset, StackDataset, ChainDataset)):
        parts = dataset.datasets.values() if isinstance(dataset.datasets, Mapping) else dataset.datasets
        return [listener for part in parts for listener in epoch_listeners(part)]
    return []


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the :func:`epoch_listeners`."""
    for listener in epoch_listeners(dataset):
        listener.set_epoch(epoch)


def shared_epoch() -> torch.Tensor:
    """A number that worker processes see change. Shape ``()``, int64."""
    return torch.zeros((), dtype=torch.int64).share_memory_()


class EpochDataset(Dataset[Any]):
    """Wraps a map-style dataset for persistent workers, which have copies of it: tells the copy the epoch before it gives a sample.

    Args:
        epoch: a :func:`shared_epoch`.
    """

    def __init__(self, dataset: Any, epoch: torch.Tensor) -> None:
        self.dataset, self.epoch = dataset, epoch
        self._told = -1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        self._follow()
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        self._follow()
        read: Callable[[Any], Any] | None = getattr(self.dataset, "__getitems__", None)
        return read(indices) if read else [self.dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is unpickled, there is no dataset yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def _follow(self) -> None:
        epoch = int(self.epoch)
        if epoch != self._told:
            self._told = epoch
            tell_epoch(self.dataset, epoch)


class UsersDataset:
    """A ``worker_init_fn`` that shows the user's dataset rather than an :class:`EpochDataset`, and then calls the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the class forbids plain assignment
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
