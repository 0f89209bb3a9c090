"""A user's loader: what it declares, a copy with other attributes, and the end of its worker processes."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.util
import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from engine.utils import scratch


def is_a(item: Any, kind: type) -> bool:
    """True if the item's class is exactly this one of torch, or torchdata's version of it (which is not imported here)."""
    cls = type(item)
    return cls is kind or (cls.__name__ == kind.__name__ and cls.__module__.startswith("torchdata."))


def stateful(item: Any) -> bool:
    """True if the item implements torch's protocol for resuming (torchdata's ``StatefulDataLoader`` does)."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def presharded(data: Any) -> bool:
    """True if each rank has its own shard of ``data`` already: it is declared, or Hugging Face's ``split_dataset_by_node`` has divided it."""
    owners = (data, getattr(data, "dataset", None))
    return any(
        getattr(owner, "presharded", False) is True or getattr(owner, "_distributed", None) is not None
        for owner in owners
    )


def altered(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A shallow copy of a user's loader, of its class, with some attributes replaced and no iterator yet.

    Its workers end when this process is killed, also while they start, and leave no directories behind.
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
    end = getattr(iterator, "_shutdown_workers", None)  # a DataLoader has no public way
    if end is not None:
        end()


class _WorkerStart:
    """A worker's first call: the user's function. A worker whose parent died meanwhile ends."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None) -> None:
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        end_orphan()


def end_orphan() -> None:
    """End this worker if its parent has died: torch's worker loop, which begins now, takes the new parent for the old one and never ends."""
    parent = multiprocessing.parent_process()
    by_server = type(multiprocessing.current_process()).__name__ == "ForkServerProcess"  # a child of the server
    if parent is not None and os.getppid() != parent.pid and not by_server:
        os._exit(1)


def _keep_directory() -> None:
    """Give multiprocessing a directory for the sockets of this process and of its workers, which our next job removes if this one is killed.

    By default each worker makes one for itself, and a worker that is killed leaves it there for ever.
    """
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # children inherit it
    if configuration.get("tempdir") is not None:
        return
    with contextlib.suppress(OSError):  # no place for it: multiprocessing says so if it needs one
        directory = scratch.make_directory("fitw-")  # as short as "pymp-": a socket's path has 107 characters
        configuration["tempdir"] = str(directory)
        # As multiprocessing does with its own: after its children have ended.
        multiprocessing.util.Finalize(None, scratch.remove, args=(directory,), exitpriority=-100)
