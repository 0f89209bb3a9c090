"""Reads data without indices batch by batch, with its position: the state after each batch, and resuming from one.

A mark is a copy of the state, which later reading cannot change.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from engine.distributed import scratch


def source_for(data: Any) -> Source:
    """The reader of ``data``, an iterable or a ``DataLoader`` over an ``IterableDataset``."""
    # A loader with its own iteration may read ahead or change batches: its dataset's state is not its position.
    plain = isinstance(data, DataLoader) and not stateful(data) and type(data).__iter__ is DataLoader.__iter__
    if not plain or isinstance(data.dataset, IterDataPipe) or (data.num_workers and not data.in_order):
        return Source(data)
    return FromWorkers(data) if data.num_workers else InProcess(data)


def stateful(item: Any) -> bool:
    """Whether it implements torch's protocol for resuming (torchdata's ``StatefulDataLoader`` does)."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def presharded(data: Any) -> bool:
    """Whether each rank has its own shard of ``data`` already: it is declared, or Hugging Face's ``split_dataset_by_node`` has divided it."""
    owners = (data, getattr(data, "dataset", None))
    return any(
        getattr(owner, "presharded", False) is True or getattr(owner, "_distributed", None) is not None
        for owner in owners
    )


def shuffle_buffers(data: Any) -> list[Any]:
    """The shuffle buffers of a Hugging Face stream (``.shuffle(buffer_size=...)``), anywhere in it: its state does not include their contents."""
    found = []
    parts = [getattr(owner, "_ex_iterable", None) for owner in (data, getattr(data, "dataset", None))]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            found.append(part)
        parts += [
            inner
            for inner in (getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ()))
            if inner is not None
        ]
    return found


def mark_of(**owners: Any) -> dict[str, Any] | None:
    """The states of those of ``owners`` that have one; ``None`` when none has."""
    found = {name: owner.state_dict() for name, owner in owners.items() if stateful(owner)}
    return copy.deepcopy(found) or None


_OVER = {"over": True}


def _rest(iterator: Any) -> Iterator[Any]:
    """What ``iterator`` has left. It is data that is its own iterator: another ``iter`` of it, at each window, would rewind it."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


class Source:
    """Data that is read unchanged; its state is its own, or else its iterator's."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.workers: int = getattr(data, "num_workers", 0)
        self.buffers = shuffle_buffers(data)
        self._iterator: Any = None

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        """A pass over the data, from ``state`` on or from the start: its iterator, and the batches."""
        if state is not None and "data" in state:
            self.data.load_state_dict(state["data"])
        iterator = iter(self.data)
        if state is not None and "iterator" in state:
            iterator.load_state_dict(state["iterator"])
        self._iterator = iterator if stateful(iterator) and not stateful(self.data) else None
        return iterator, _rest(iterator) if iterator is self.data else iterator

    def mark(self) -> Any:
        """The data's state after the last batch read; ``None`` if it has none."""
        if self.buffers:
            return None
        return mark_of(data=self.data) if self._iterator is None else mark_of(iterator=self._iterator)

    def carry(self) -> dict[str, Any] | None:
        """The start of the next pass, as it would be in this process: for a dataset that continues across passes; ``None``: nothing."""
        return self.state(self.mark()) if stateful(self.data) and not self.buffers else None

    def shuffle(self) -> str | None:
        """The values that determine the order of a stream with shuffle buffers; ``None``: it has none."""
        return (
            repr([buffer.generator.bit_generator.state["state"] for buffer in self.buffers]) if self.buffers else None
        )

    def state(self, mark: Any) -> dict[str, Any] | None:
        """A mark as a tree of plain values."""
        return None if mark is None else {"workers": self.workers, **mark}

    def fits(self, state: Any) -> bool:
        """Whether :meth:`begin` can continue from ``state``: it was saved with as many worker processes, from data of this kind."""
        kind = "data" if stateful(self.data) else "iterator"
        return bool(state["workers"] == self.workers and kind in state)

    def close(self) -> None:
        """End the worker processes of an iterator that the data keeps."""
        if isinstance(self.data, DataLoader) and stateful(self.data):
            end_workers(self.data._iterator)
            self.data._iterator = None

    def set_epoch(self, epoch: int) -> None:
        """Notify the listeners."""
        for owner in (self.data, getattr(self.data, "dataset", None)):
            if owner is not None and callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)


class Traced(IterableDataset[Any]):
    """A dataset whose position can be read, and that can start at another position, in this process or in a worker.

    ``states`` are of the workers (or of this process alone), and worker ``i`` continues as worker ``first + i``: that one's batch is next.
    """

    def __init__(
        self, dataset: Any, first: int = 0, states: list[Any] | None = None, epoch: torch.Tensor | None = None
    ) -> None:
        self.dataset, self.first, self.states, self.epoch = dataset, first, states, epoch
        self.iterator: Any = None
        self.over = False
        self.forgets = bool(shuffle_buffers(dataset))

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if self.epoch is not None:
            self.dataset.set_epoch(int(self.epoch))
        state = self.states[worker.id if worker else 0] if self.states else None
        self.over = state is not None and state.get("over", False)
        if self.over:
            return iter(())
        if state is not None and "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        self.iterator = iter(self.dataset)
        if state is not None and "iterator" in state:
            self.iterator.load_state_dict(state["iterator"])
        own: Iterator[Any] = self.iterator
        if worker is not None:
            end_orphan()
        return self._watched(own) if stateful(self.dataset) or stateful(own) else own

    def _watched(self, own: Iterator[Any]) -> Iterator[Any]:
        yield from own
        self.over = True

    def mark(self) -> dict[str, Any] | None:
        """The dataset's state. At the end of a pass it may have started again already: then the state says that the pass is over."""
        if self.forgets:
            return None
        return (
            _OVER
            if self.over
            else mark_of(dataset=self.dataset, **({} if self.iterator is self.dataset else {"iterator": self.iterator}))
        )


class _Tagging:
    """The user's collate function in a worker; each batch is sent with the worker's number and its dataset's state after it."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Traced) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any] | None, Any]:
        worker = get_worker_info()
        assert worker is not None
        return worker.id, self.dataset.mark(), self.collate(samples)


class _Role:
    """The worker's first call: it sets its number and the user's dataset, then calls the user's own function."""

    def __init__(self, user: Callable[[int], Any] | None, dataset: Traced) -> None:
        self.user, self.dataset = user, dataset

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        role = (self.dataset.first + worker_id) % info.num_workers
        object.__setattr__(info, "id", role)  # it forbids a plain assignment
        object.__setattr__(info, "dataset", self.dataset.dataset)
        if self.user is not None:
            self.user(role)


class InProcess(Source):
    """A loader without workers: the dataset is at the end of the last batch."""

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        self.dataset = Traced(self.data.dataset, states=state and state["states"])
        iterator = iter(altered(self.data, dataset=self.dataset))
        return iterator, iterator

    def mark(self) -> Any:
        return self.dataset.mark()

    def carry(self) -> dict[str, Any] | None:
        if self.buffers or not stateful(self.data.dataset):
            return None
        return {"workers": 0, "states": [{"dataset": self.data.dataset.state_dict()}]}

    def state(self, mark: Any) -> dict[str, Any] | None:
        return None if mark is None else {"workers": 0, "states": [mark]}

    def fits(self, state: Any) -> bool:
        return "states" in state and state["workers"] == 0


class FromWorkers(Source):
    """A loader with workers, which have read ahead: its state is each worker's state after its last batch that arrived here."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        told = data.persistent_workers and callable(getattr(data.dataset, "set_epoch", None))
        self.epoch = (
            torch.zeros((), dtype=torch.int64).share_memory_() if told else None
        )  # persistent workers have copies of the dataset
        self.whole = self._loader()
        self.next = 0
        self.marks: list[dict[str, Any] | None] = []

    def _loader(self, first: int = 0, states: list[Any] | None = None) -> DataLoader[Any]:
        dataset = Traced(self.data.dataset, first, states, self.epoch)
        return altered(
            self.data,
            dataset=dataset,
            collate_fn=_Tagging(self.data.collate_fn, dataset),
            worker_init_fn=_Role(self.data.worker_init_fn, dataset),
        )

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        # Workers that continue other workers' positions are used for one pass, even persistent ones.
        loader = self.whole if state is None else self._loader(state["next"], state["states"])
        self.next = state["next"] if state else 0
        self.marks = list(state["states"]) if state else [None] * self.workers
        iterator = iter(loader)
        return iterator, self._batches(iterator)

    def _batches(self, tagged: Iterator[Any]) -> Iterator[Any]:
        for worker, mark, batch in tagged:
            self.marks[worker], self.next = mark, (worker + 1) % self.workers
            yield batch

    def mark(self) -> Any:
        return self.next, tuple(self.marks)

    def carry(self) -> dict[str, Any] | None:
        return None  # the next pass has new workers, with new copies of the dataset

    def state(self, mark: Any) -> dict[str, Any] | None:
        following, marks = mark
        if not any(marks):
            return None
        return {"workers": self.workers, "next": following, "states": list(marks)}

    def fits(self, state: Any) -> bool:
        return "states" in state and bool(state["workers"] == self.workers)

    def close(self) -> None:
        end_workers(self.whole._iterator)
        self.whole._iterator = None

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self.epoch is not None:
            self.epoch.fill_(epoch)


def end_workers(iterator: Any) -> None:
    """End the worker processes of a loader's iterator now."""
    end = getattr(iterator, "_shutdown_workers", None)  # a DataLoader has no public way
    if end is not None:
        end()


def altered(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """A shallow copy of a user's loader, of the same class, with some attributes replaced and no iterator yet.

    Its workers end when this process is killed, also while they start, and leave no directories behind.
    """
    copied = copy.copy(loader)
    copied._iterator = None
    if loader.num_workers:
        _keep_directory()
        initialise = attributes.get("worker_init_fn", loader.worker_init_fn)
        attributes["worker_init_fn"] = initialise if isinstance(initialise, _Start) else _Start(initialise)
    for name, value in attributes.items():
        object.__setattr__(copied, name, value)  # DataLoader's own __setattr__ forbids it
    return copied


class _Start:
    """A worker's first call: the user's function. A worker whose parent died meanwhile ends."""

    def __init__(self, user: Callable[[int], Any] | None) -> None:
        self.user = user

    def __call__(self, worker_id: int) -> None:
        if self.user is not None:
            self.user(worker_id)
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
        directory = scratch.make("fitw-")  # as short as "pymp-": a socket's path has 107 characters
        configuration["tempdir"] = str(directory)
        # As multiprocessing does with its own: after its children have ended.
        multiprocessing.util.Finalize(None, scratch.remove, args=(directory,), exitpriority=-100)
