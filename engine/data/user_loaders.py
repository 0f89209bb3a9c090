"""Work with a user's loader: what it declares, copies with other attributes, and the end of its worker processes."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, default_collate

from engine.utils import scratch

_LOOKED_INTO = 16
"""How many entries of a list :func:`holds_loaders` looks into."""


def is_a(item: Any, kind: type) -> bool:
    """True if the item's class is exactly ``kind``, a class of torch, or torchdata's class of the same name (torchdata is not imported here)."""
    cls = type(item)
    return cls is kind or (cls.__name__ == kind.__name__ and cls.__module__.startswith("torchdata."))


def holds_loaders(item: Any) -> bool:
    """True for a dict, list or tuple with a loader in it, at any depth: its entries are loaders or lists of batches then, not batches.

    Of a long list, all entries and the contents of the first ones are looked at: it is a list of batches, or has a loader among these.
    """
    if type(item) not in (dict, list, tuple) and not isinstance(item, Mapping):
        return False
    entries = list(item.values()) if isinstance(item, Mapping) else item
    if any(issubclass(kind, (DataLoader, IterableDataset)) for kind in set(map(type, entries))):
        return True
    return any(map(holds_loaders, entries[:_LOOKED_INTO]))


def flat_loaders(item: Any) -> list[Any]:
    """The loaders and lists of batches in nested dicts, lists and tuples of loaders, in order; of anything else the item itself."""
    if not holds_loaders(item):
        return [item]
    entries = item.values() if isinstance(item, Mapping) else item
    return [loader for entry in entries for loader in flat_loaders(entry)]


def presharded(data: Any) -> bool:
    """True if each rank's ``data`` is its own shard already: an attribute declares it, or Hugging Face's ``split_dataset_by_node`` made it."""
    owners = (data, getattr(data, "dataset", None))
    return any(
        getattr(owner, "presharded", False) is True or getattr(owner, "_distributed", None) is not None
        for owner in owners
    )


def owners_of(data: Any, attribute: str) -> list[Any]:
    """The objects in a loader or dataset that have an attribute; a dataset without it stands for itself.

    ``Subset`` and ``ConcatDataset`` of datasets, and the members of a combination, are looked into.
    """
    if getattr(data, attribute, None) is not None:
        return [data]
    parts = data.datasets if isinstance(data, ConcatDataset) else getattr(data, "members", None)
    if parts is None:
        dataset = getattr(data, "dataset", None)
        parts = [] if dataset is None or dataset is data else [dataset]
    return [owner for part in parts for owner in owners_of(part, attribute)] or [data]


def tokens_per_sample(*data: Any) -> int | None:
    """The tokens of each sample of loaders or datasets, which they say by an attribute of this name; ``None``: not all do, or they differ.

    Raises:
        ValueError: the attribute is not a number of tokens.
    """
    lengths: set[int | None] = set()
    for owner in (owner for part in data for owner in owners_of(part, "tokens_per_sample")):
        length = getattr(owner, "tokens_per_sample", None)
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"{type(owner).__name__}.tokens_per_sample={length!r} must be an int of at least 1")
        lengths.add(length)
    return lengths.pop() if len(lengths) == 1 else None


def collates_like_samples(loader: DataLoader[Any]) -> bool:
    """Whether a loader makes batches of several samples by torch's own function, which needs samples of one form."""
    return loader.collate_fn is default_collate and loader.batch_size is not None and loader.batch_size > 1


def declared_common(data: Any) -> bool:
    """True if the user says, by ``presharded = False`` on the data or its dataset, that all ranks read the same samples."""
    return any(getattr(owner, "presharded", None) is False for owner in (data, getattr(data, "dataset", None)))


def altered(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A shallow copy of a user's loader, of its class, with some attributes replaced and no iterator yet.

    If this process is killed, the copy's workers end too, even during their start, and leave no directories behind.
    """
    copied = copy.copy(loader)
    copied._iterator = None
    if loader.num_workers:
        _keep_directory()
        initialise = attributes.get("worker_init_fn", loader.worker_init_fn)
        attributes["worker_init_fn"] = initialise if isinstance(initialise, _WorkerStart) else _WorkerStart(initialise)
    for name, value in attributes.items():
        object.__setattr__(copied, name, value)  # DataLoader's own __setattr__ forbids it
    return copied


def end_workers(iterator: Any) -> None:
    """End the worker processes of a loader's iterator now."""
    end = getattr(iterator, "_shutdown_workers", None)  # a DataLoader has no public method for it
    if end is not None:
        end()


class _WorkerStart:
    """A ``worker_init_fn`` that calls the user's, and then ends the worker if its parent has died meanwhile."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        end_orphan()


def end_orphan() -> None:
    """End this worker if its parent has died. Torch's worker loop, which begins next, would take the new parent for the old one and never end."""
    parent = multiprocessing.parent_process()
    by_server = type(multiprocessing.current_process()).__name__ == "ForkServerProcess"  # its parent is the fork server
    if parent is not None and os.getppid() != parent.pid and not by_server:
        os._exit(1)


def _keep_directory() -> None:
    """Set the directory in which multiprocessing puts the sockets of this process and its workers; our next job deletes it if this one is killed.

    By default each worker creates a directory of its own, which stays forever if the worker is killed.
    """
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # children inherit it
    if configuration.get("tempdir") is not None:
        return
    # No space or permission: multiprocessing reports that itself if it needs a directory.
    with contextlib.suppress(OSError):
        directory = scratch.make_directory("fitw-")  # as short as "pymp-": a socket's path has 107 characters
        configuration["tempdir"] = str(directory)
        # Deleted after the child processes have ended, as multiprocessing does with its own directory.
        multiprocessing.util.Finalize(None, scratch.remove, args=(directory,), exitpriority=-100)
