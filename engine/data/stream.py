"""Feed for data without indices: it is distributed to the ranks as it is read, and readers know the position after each batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from engine.data.data_states import load_state, stateful, states_of, warn_of_forgetful_samplers
from engine.data.drawn import DrawnDataset
from engine.data.epochs import epoch_listeners, shared_epoch, tell_epoch
from engine.data.feed import Feed, LoaderUse, MicroBatch
from engine.data.order import mixed
from engine.data.sample_counter import CountingCollate, SampleCounter
from engine.data.stream_guard import StreamGuard, checksum_of_batch
from engine.data.user_loaders import (
    altered,
    collates_like_samples,
    declared_common,
    end_orphan,
    end_workers,
    presharded,
)
from engine.data.worker_seeds import WorkerSeeds
from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group
from engine.step.position import share_of, shares
from engine.utils.log import logger, warn_once
from engine.utils.sample_count import NOTHING_SHOWN, Count, counted
from engine.utils.seed import isolated

_NOTHING = object()
"""Stands for a batch that does not exist."""
_OVER = {"over": True}
"""The position of a dataset whose pass is over."""


class StreamFeed(Feed):
    """Feeds data without indices: an ``IterableDataset``'s loader, a generator, any iterable.

    Every rank reads the stream, which must be the same on all, and keeps every ``world_size``-th batch. After a round of ``world_size``
    batches all ranks are at the same position, so one rank's state is valid for every rank, at any world size. A position counts the
    batches of all ranks. Data that is divided already has ``presharded = True`` on it or on its dataset: then each rank has its own
    state, valid for the same world size, and a position counts one rank's batches.

    Each window is read ahead, so that the weights of its micro-batches are known before its first backward pass. The ranks exchange the batches'
    sizes once per window, and a rank whose data is exhausted continues at weight 0 until all ranks are at the end.

    Args:
        reader: :class:`engine.data.combined.CombinedReader` for a combination; by default the one that :func:`reader_for` chooses.
    """

    def __init__(
        self, data: Any, group: Group, seed: int, reader: StreamReader | None = None, use: LoaderUse | None = None
    ) -> None:
        data = seeded_stream(data, seed) if reader is None else data
        self.data, self.group, self.seed, self.use = data, group, seed, use or LoaderUse()
        self.presharded = presharded(data)
        # Batches that are read for one micro-batch of each rank.
        self.round = 1 if self.presharded else group.world_size
        self.turn = 0 if self.presharded else group.rank  # the index of this rank's batch in a round
        self.reader = reader or reader_for(data)
        self.shuffle = self.reader.shuffle()
        if self.shuffle is not None and not self.presharded and len(set(gather_json(group, self.shuffle))) > 1:
            raise ValueError(
                "the ranks shuffle this stream differently, so each would take its batches from another order: give .shuffle() the same seed "
                "on every rank"
            )
        # One process, and ranks with data of their own, have nothing to compare.
        self._guard = None if self.round == 1 else StreamGuard(data, group)
        self._begun = self._ended = False
        self._window_start: Any = None
        """The reader's position before the current window."""
        self._first_checksum: int | None = None
        """The checksum of the first batch of the latest epoch, where every epoch has the same batches."""

    def length(self, limit: int | None) -> int | None:
        try:
            total = len(self.data)
        except TypeError:
            return None
        batches = -(-total // self.round)
        return batches if limit is None else min(batches, limit)

    def stride(self, window: int) -> int:
        return window * self.round

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        usable = state is not None and "source" in state and bool(start) != state.get("carried", False)
        usable = usable and self._owner() == (state["rank"], state["world_size"])
        if start and state is not None and state.get("shuffle") != self.shuffle:
            warn_once(
                "this stream is shuffled in another order than before the resume: samples may be repeated or left out. Give .shuffle() the same seed"
            )
        state = state if usable else None
        self._begun, self._ended = True, state is not None and state["ended"]
        mixture = mixture_of(self.data)
        same_samples = self.use.evaluates or self.use.repeats
        if mixture is not None and same_samples:
            mixture.restart()
            epoch = 0
        elif mixture is not None and self._ended and state is not None and state.get("next") is not None:
            mixture.load_state_dict(state["next"]["states"][0]["dataset"])
        self.reader.set_epoch(epoch)
        self.reader.counter.follow(self.use.owner)
        if self._guard is not None:
            self._guard.begin(epoch, self.reader.is_compared(), start)
        batches: Iterator[Any] = iter(())
        if not self._ended:
            saved = state["source"] if state else None
            if mixture is not None and saved is not None:
                self._report_changes(mixture, saved)
            batches = self._open(epoch, saved if saved and self.reader.accepts(saved) else None, start)
        end = None if limit is None else limit * self.round
        if self.use.repeats and not start:
            batches = self._compared(batches)
        return self._windows(batches, start, window, end)

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; warn if the first is another than that of the first epoch."""
        for number, batch in enumerate(batches):
            if number == 0:
                total = checksum_of_batch(batch)
                if self._first_checksum not in (None, total):
                    warn_once(
                        f"overfit_batches: {type(self.data).__name__} reads {type(getattr(self.data, 'dataset', self.data)).__name__}, a stream, and "
                        "begins a later epoch with another batch than the first epoch, so the batches are not the same in every epoch. Give a list "
                        "of batches, such as list(itertools.islice(loader, 10))"
                    )
                self._first_checksum = total
            yield batch

    def _open(self, epoch: int, saved: Any, start: int) -> Iterator[Any]:
        """Start reading at position ``start``, from the reader's ``saved`` state or, without one, by skipping batches."""
        if self.presharded and not self.use.ranks_draw_apart:
            self.reader.separate_workers(self.group)
        with self._isolated_start(epoch, start):
            self.iterator, batches = self.reader.begin(saved)
        if start and saved is None:
            warn_once(
                f"this data cannot be read from the middle of an epoch ({self._reason()}): "
                f"{start} batches are read and discarded to get back to the position"
            )
            next(itertools.islice(batches, start - 1, start), None)
        return batches

    def _report_changes(self, mixture: DrawnDataset, saved: Any) -> None:
        """Log the differences between a mixture and the one that has saved a state.

        Raises:
            ValueError: there are some, and the user wants none.
        """
        states = [place["dataset"] for place in saved.get("states", ()) if place and "dataset" in place]
        changes = mixture.changes_since(states[0]) if states else []
        for change in changes if self.group.is_main else ():
            logger.info("%s", change)

    def _reason(self) -> str:
        """Why this data cannot start at a position, for a warning."""
        if self.shuffle is not None:
            return "its state does not include its shuffle buffer"
        return "it has no state_dict, or its state was saved with other numbers of workers or ranks"

    def state(self, after_window: bool) -> Any:
        if not self._begun:
            return None
        ended = after_window and self._ended
        position = None if ended else self.reader.position() if after_window else self._window_start
        source = None if position is None else self.reader.state(position)
        if source is None and not ended and self.shuffle is None:
            return None
        rank, world_size = self._owner()
        shuffle = {} if self.shuffle is None else {"shuffle": self.shuffle}
        # The sources of a mixture continue in the next pass, also if the run ends between the last step of this one and its end.
        following = {"next": self.reader.next_pass_state()} if ended and mixture_of(self.data) is not None else {}
        return {"source": source, "ended": ended, "rank": rank, "world_size": world_size, **shuffle, **following}

    def next_pass_state(self) -> Any:
        source = self.reader.next_pass_state() if self._begun else None
        rank, world_size = self._owner()
        return (
            None
            if source is None
            else {"source": source, "ended": False, "rank": rank, "world_size": world_size, "carried": True}
        )

    def close(self) -> None:
        super().close()
        self.reader.close()

    def _owner(self) -> tuple[int | None, int | None]:
        """The rank and world size for which a state is valid; ``None`` twice if it is valid for all."""
        return (self.group.rank, self.group.world_size) if self.presharded else (None, None)

    @contextlib.contextmanager
    def _isolated_start(self, epoch: int, start: int) -> Iterator[None]:
        """Undo what the start of reading draws from the random state: in the middle of an epoch that was drawn before the resume."""
        if self.round == 1 and not start:
            yield
            return
        with isolated():
            if self.round > 1:  # the seed of worker processes, which must be the same on all ranks
                torch.manual_seed(mixed(self.seed, epoch))
            yield

    def _windows(self, batches: Iterator[Any], position: int, window: int, end: int | None) -> Iterator[MicroBatch]:
        """Read window after window, exchange the batches' sizes, and yield this rank's micro-batches up to position ``end``."""
        spare: Any = _NOTHING
        resumed, guard = position > 0, self._guard
        while True:
            self._window_start = None if self._ended else self.reader.position()
            own_batches, counts = [], []
            for _ in range(window):
                # A position counts full windows, so it is beyond the end if the last window was short.
                count = self.round if end is None else min(self.round, max(0, end - position))
                read = 0
                for batch in itertools.islice(batches, count):
                    if guard is not None and guard.needs_batch:
                        guard.note(self.reader.compared(batch))
                    if read == self.turn or spare is _NOTHING:
                        spare = batch
                    if read == self.turn:
                        own_batches.append(batch)
                        counts.append(self.reader.count(batch))
                    read += 1
                position += read
                self._ended = self._ended or read < count
                if read < self.round:
                    break
            sizes = self._exchange_sizes([samples for samples, _ in counts], window, position)
            if not sizes:
                return
            # This rank's data was exhausted before the resume: any batch of it serves at weight 0.
            if spare is _NOTHING and resumed:
                spare = next(self.reader.begin()[1], _NOTHING)
            if spare is _NOTHING:
                raise ValueError(
                    f"rank {self.group.rank} got no batch from {type(self.data).__name__} while other ranks did: give every rank some data"
                )
            shares_here = shares(sizes, self.group.rank)
            for j in range(len(shares_here)):
                if j < len(own_batches):
                    yield own_batches[j], share_of(shares_here, j, counts[j][1], False)
                else:
                    yield spare, shares_here[j]

    def _exchange_sizes(self, sizes: list[int], window: int, position: int) -> tuple[tuple[int, ...], ...]:
        """Exchange this rank's batch sizes in the next window, and let the guard compare the ranks' ``position`` after it.

        Returns all sizes as ``[micro-batch][rank]``; empty when every rank is at its end.
        """
        if self.group.world_size == 1:
            return tuple((size,) for size in sizes)
        columns = [] if self._guard is None else self._guard.columns(position, self._ended)
        missing = [-1] * (window - len(sizes))  # no batch, while 0 is an empty one
        rows = gather_row(self.group, torch.tensor(sizes + missing + columns, dtype=torch.int64)).tolist()
        if self._guard is not None:
            self._guard.check([row[window:] for row in rows])
        micro_batches = zip(*(row[:window] for row in rows), strict=True)
        return tuple(tuple(max(0, size) for size in micro) for micro in micro_batches if max(micro) >= 0)


def mixture_of(data: Any) -> DrawnDataset | None:
    """The mixture of streams that a loader reads."""
    dataset = getattr(data, "dataset", None)
    return dataset if isinstance(dataset, DrawnDataset) else None


def seeded_stream(data: Any, seed: int) -> Any:
    """The loader, if it reads a mixture of streams a copy with a copy of the mixture that draws with this seed."""
    mixture = mixture_of(data)
    if mixture is None or not isinstance(data, DataLoader) or stateful(data):
        return data
    seeded = mixture.seeded(seed, True)
    if collates_like_samples(data):
        seeded.compare_samples()
    return altered(data, dataset=seeded)


# -- readers: they read data batch by batch, know the position after each batch, and can start at a position -----------------------------------


def reader_for(data: Any) -> StreamReader:
    """Create the reader of ``data``, an iterable or a ``DataLoader`` over an ``IterableDataset``."""
    # A loader that overrides __iter__ may read ahead or change batches, so its dataset's state is not its position.
    plain = isinstance(data, DataLoader) and not stateful(data) and type(data).__iter__ is DataLoader.__iter__
    if not plain or isinstance(data.dataset, IterDataPipe) or (data.num_workers and not data.in_order):
        return StreamReader(data)
    return WorkerReader(data) if data.num_workers else InProcessReader(data)


class StreamReader:
    """Reads data unchanged. The position is the state of the data or, if it has none, of its iterator.

    :func:`reader_for` chooses between this class and its subclasses ``InProcessReader`` and ``WorkerReader``; a combination has
    :class:`engine.data.combined.CombinedReader`.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.workers: int = getattr(data, "num_workers", 0)
        self.buffers = shuffle_buffers(data)
        self.counter = SampleCounter(data)
        """Counts the samples of batches that were read."""
        size = getattr(data, "batch_size", None)
        self.batch_size: int | None = size if isinstance(size, int) else None
        self._latest: Count = 1, ""
        """The count of the latest batch, where the collate function's wrapper has counted it."""
        warn_of_forgetful_samplers(data)
        self._iterator: Any = None

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        """Start a pass over the data, at ``state`` or at the beginning. Returns the data's iterator, and an iterator over the batches."""
        if state is not None and "data" in state:
            load_state(self.data, state["data"])
        iterator = iter(self.data)
        if state is not None and "iterator" in state:
            load_state(iterator, state["iterator"])
        self._iterator = iterator if stateful(iterator) and not stateful(self.data) else None
        return iterator, _remaining_batches(iterator) if iterator is self.data else iterator

    def count(self, batch: Any) -> Count:
        """The number of samples in the batch that was read last."""
        samples, guess = self.counter.count(batch, self.batch_size)
        is_as_asked = self.batch_size is not None and self.counter.owner is None and not guess
        if is_as_asked and counted(batch)[1] == NOTHING_SHOWN:
            return samples, NOTHING_SHOWN  # it may be a short last batch
        return samples, guess

    def position(self) -> Any:
        """A copy of the data's state after the last batch that was read; ``None`` if the data has no state."""
        if self.buffers:
            return None
        return states_of(data=self.data) if self._iterator is None else states_of(iterator=self._iterator)

    def state(self, position: Any) -> dict[str, Any] | None:
        """Convert a :meth:`position` to a tree of plain values."""
        return None if position is None else {"workers": self.workers, **position}

    def next_pass_state(self) -> dict[str, Any] | None:
        """The state from which the next pass would start in this process, for data that continues across passes; else ``None``."""
        return self.state(self.position()) if stateful(self.data) and not self.buffers else None

    def accepts(self, state: Any) -> bool:
        """True if :meth:`begin` can continue from ``state``: it was saved with the same number of workers, and by data of this kind."""
        kind = "data" if stateful(self.data) else "iterator"
        return bool(state["workers"] == self.workers and kind in state)

    def shuffle(self) -> str | None:
        """A text that determines the order of a stream with shuffle buffers; ``None`` if it has none."""
        return (
            repr([buffer.generator.bit_generator.state["state"] for buffer in self.buffers]) if self.buffers else None
        )

    def is_compared(self) -> bool:
        """True if the first batches that the ranks read are compared, because nobody has said that they are of the same samples."""
        return not declared_common(self.data)

    def compared(self, batch: Any) -> Any:
        """The part of a batch that must be the same on all ranks."""
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the data and of its dataset, where they have one."""
        for owner in (self.data, getattr(self.data, "dataset", None)):
            tell_epoch(owner, epoch)

    def separate_workers(self, group: Group) -> None:
        """Let worker processes draw other random numbers on each rank, for data that is divided already."""

    def close(self) -> None:
        """End the worker processes of the iterator that the data keeps, if it does."""
        if isinstance(self.data, DataLoader) and stateful(self.data):
            end_workers(self.data._iterator)
            self.data._iterator = None


class InProcessReader(StreamReader):
    """Reads a loader without workers, whose dataset is always just after the last batch."""

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        self.dataset = TrackedDataset(self.data.dataset, states=state and state["states"])
        if self.batch_size is None:
            iterator = iter(altered(self.data, dataset=self.dataset))
            return iterator, iterator
        collate_fn = CountingCollate(self.data.collate_fn)
        iterator = iter(altered(self.data, dataset=self.dataset, collate_fn=collate_fn))
        return iterator, self._batches(iterator)

    def _batches(self, tagged: Iterator[Any]) -> Iterator[Any]:
        for samples, guess, batch in tagged:
            self._latest = samples, guess
            yield batch

    def count(self, batch: Any) -> Count:
        return self._latest if self.batch_size is not None and self.counter.owner is None else self.counter.count(batch)

    def position(self) -> Any:
        return self.dataset.position()

    def state(self, position: Any) -> dict[str, Any] | None:
        return None if position is None else {"workers": 0, "states": [position]}

    def next_pass_state(self) -> dict[str, Any] | None:
        if self.buffers or not stateful(self.data.dataset):
            return None
        return {"workers": 0, "states": [states_of(dataset=self.data.dataset)]}

    def accepts(self, state: Any) -> bool:
        return "states" in state and state["workers"] == 0


class WorkerReader(StreamReader):
    """Reads a loader with workers, which read ahead. The position consists of each worker's state after its last batch that was yielded here."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        notified = data.persistent_workers and epoch_listeners(data.dataset)
        # Shared with persistent workers, which have copies of the dataset.
        self.epoch = shared_epoch() if notified else None
        self.group: Group | None = None
        self.loader_from_start = self._loader()
        self.next = 0
        self.positions: list[dict[str, Any] | None] = []

    def _loader(self, first_worker: int = 0, states: list[Any] | None = None) -> DataLoader[Any]:
        dataset = TrackedDataset(self.data.dataset, first_worker, states, self.epoch)
        return altered(
            self.data,
            dataset=dataset,
            collate_fn=TaggingCollate(self.data.collate_fn, dataset, self.batch_size is not None),
            worker_init_fn=WorkerRole(self.data.worker_init_fn, dataset),
        )

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        # Workers that start at saved positions serve this pass only, even persistent ones.
        loader = self.loader_from_start if state is None else self._loader(state["next"], state["states"])
        self.next = state["next"] if state else 0
        self.positions = list(state["states"]) if state else [None] * self.workers
        if self.group is not None:
            WorkerSeeds(loader, self.data.generator, self.group).separate()
        iterator = iter(loader)
        return iterator, self._batches(iterator)

    def separate_workers(self, group: Group) -> None:
        self.group = group

    def _batches(self, tagged: Iterator[Any]) -> Iterator[Any]:
        for worker, position, samples, guess, batch in tagged:
            self.positions[worker], self.next = position, (worker + 1) % self.workers
            self._latest = samples, guess
            yield batch

    def count(self, batch: Any) -> Count:
        return self._latest if self.batch_size is not None and self.counter.owner is None else self.counter.count(batch)

    def position(self) -> Any:
        return self.next, tuple(self.positions)

    def state(self, position: Any) -> dict[str, Any] | None:
        following, positions = position
        if not any(positions):
            return None
        return {"workers": self.workers, "next": following, "states": list(positions)}

    def next_pass_state(self) -> dict[str, Any] | None:
        return None  # the next pass has new workers, with new copies of the dataset

    def accepts(self, state: Any) -> bool:
        return "states" in state and bool(state["workers"] == self.workers)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self.epoch is not None:
            self.epoch.fill_(epoch)

    def close(self) -> None:
        end_workers(self.loader_from_start._iterator)
        self.loader_from_start._iterator = None


class TrackedDataset(IterableDataset[Any]):
    """Wraps a dataset so that its position can be read and set, in this process or in a worker.

    ``states`` has the saved state of each worker (or of this process alone). Worker ``i`` takes the place of worker ``first_worker + i``, because
    worker ``first_worker`` was the next to deliver a batch.
    """

    def __init__(
        self, dataset: Any, first_worker: int = 0, states: list[Any] | None = None, epoch: torch.Tensor | None = None
    ) -> None:
        self.dataset, self.first_worker, self.states, self.epoch = dataset, first_worker, states, epoch
        self.iterator: Any = None
        self.over = False
        self.has_no_state = bool(shuffle_buffers(dataset))  # a state would lack the buffers' contents

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if self.epoch is not None:
            tell_epoch(self.dataset, int(self.epoch))
        state = self.states[worker.id if worker else 0] if self.states else None
        self.over = state is not None and state.get("over", False)
        if self.over:
            return iter(())
        if state is not None and "dataset" in state:
            load_state(self.dataset, state["dataset"])
        self.iterator = iter(self.dataset)
        if state is not None and "iterator" in state:
            load_state(self.iterator, state["iterator"])
        iterator: Iterator[Any] = self.iterator
        if worker is not None:
            end_orphan()
        return self._watched(iterator) if stateful(self.dataset) or stateful(iterator) else iterator

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from iterator
        self.over = True

    def position(self) -> dict[str, Any] | None:
        """The dataset's state, or ``None``; at a pass's end only that it is over, since the iterator may already have restarted the dataset."""
        if self.has_no_state:
            return None
        return (
            _OVER
            if self.over
            else states_of(
                dataset=self.dataset, **({} if self.iterator is self.dataset else {"iterator": self.iterator})
            )
        )


class TaggingCollate:
    """Wraps the user's collate function in a worker: each batch is sent with the worker's number, the position of its dataset after the batch, and
    the count of its samples.

    Args:
        batches: whether the function gets lists of samples.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], dataset: TrackedDataset, batches: bool) -> None:
        self.collate_fn = CountingCollate(collate_fn) if batches else collate_fn
        self.dataset, self.batches = dataset, batches

    def __call__(self, samples: Any) -> tuple[int, dict[str, Any] | None, int, str, Any]:
        worker = get_worker_info()
        assert worker is not None
        position, batch = self.dataset.position(), self.collate_fn(samples)
        return (worker.id, position, *batch) if self.batches else (worker.id, position, 1, "", batch)


class WorkerRole:
    """A ``worker_init_fn`` that sets the worker's number and shows the user's dataset, and then calls the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], Any] | None, dataset: TrackedDataset) -> None:
        self.worker_init_fn, self.dataset = worker_init_fn, dataset

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        role = (self.dataset.first_worker + worker_id) % info.num_workers
        object.__setattr__(info, "id", role)  # the class forbids plain assignment
        object.__setattr__(info, "dataset", self.dataset.dataset)
        if self.worker_init_fn is not None:
            self.worker_init_fn(role)


def shuffle_buffers(data: Any) -> list[Any]:
    """The shuffle buffers (``.shuffle(buffer_size=...)``) anywhere in a Hugging Face stream, whose state does not include their contents."""
    buffers = []
    owners = [data]  # a loader, its dataset, and the stream that a PackedStream packs
    while len(owners) < 4 and getattr(owners[-1], "dataset", None) is not None:
        owners.append(owners[-1].dataset)
    parts = [getattr(owner, "_ex_iterable", None) for owner in owners]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            buffers.append(part)
        parts += [
            inner_part
            for inner_part in (getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ()))
            if inner_part is not None
        ]
    return buffers


def _remaining_batches(iterator: Any) -> Iterator[Any]:
    """Yield the remaining batches of data that is its own iterator. Calling ``iter`` on it again, for each window, would rewind it."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch
