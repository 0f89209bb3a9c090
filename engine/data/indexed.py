"""Data with indices: loaders over map-style datasets and lists of batches. Their position in an epoch is one number, and skipping to it is free."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from engine.data.sampler import Deal, Shards
from engine.data.sampler_order import Order, is_a, order_for
from engine.data.stream_position import altered, end_workers, presharded
from engine.distributed.collectives import gather_object, gather_row
from engine.distributed.group import Group
from engine.step.window import Share, shares
from engine.utils.tree import batch_size

Micro = tuple[Any, Share]
_WHOLE = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""A batch that is its own window on one process: only metrics need its size, and determine it themselves."""


class _Indices(Sampler[Any]):
    """The index stream placed under a user's loader; it yields what its owner set."""

    def __init__(self) -> None:
        self.stream: Iterable[Any] = ()
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def __len__(self) -> int:
        return self.count


class _Positioned:
    """Data that is fully described by its position."""

    iterator: Iterator[Any] | None = None
    order: Order | None = None
    sized = True
    """Whether the samples in each batch are known before it is read."""

    @property
    def feistel(self) -> bool:
        """Whether a shuffle is computed rather than stored."""
        return self.order is not None and self.order.feistel

    @property
    def units(self) -> int | None:
        """Samples (or batches, where these are ready) of every epoch; ``None`` when a user's sampler, or the ranks, determine it."""
        return None if self.order is None or self.order.sharded or self.order.together else self.order.length()

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        """The dataset's indices of these units, in order, of ready batches their numbers; ``None``: a user's sampler draws each order once."""
        units = range(start, start + count)
        if self.order is None:
            return [unit for unit in units if self.units is None or unit < self.units]
        if self.order.state(over=False) is not None:
            return None
        drawn = self.order.draw(epoch)
        found = [drawn[unit] for unit in units if unit < len(drawn)]
        return [int(index) for each in found for index in (each if isinstance(each, (list, tuple)) else [each])]

    def state(self, closed: bool) -> Any:
        return None if self.order is None else self.order.state(over=False)

    def opening(self) -> Any:
        return self.state(closed=False)

    def carry(self) -> Any:
        return None if self.order is None else self.order.state(over=True)

    def leave(self) -> None:
        self.iterator = None

    def close(self) -> None:
        end_workers(self.iterator)
        self.iterator = None
        kept = getattr(self, "loader", None)  # by a loader with persistent workers
        if kept is not None:
            end_workers(kept._iterator)
            kept._iterator = None


class Cut(NamedTuple):
    """The batches of one pass over a loader, as a loop on one process would get them."""

    items: Callable[[int], Any]
    """The items of the loader's index stream (or the batch itself) for a batch number."""
    size: Callable[[int], int]
    """Samples in it."""
    batches: int


def indexed(data: Any, group: Group, seed: int, feistel: bool = True) -> SampleIndices | BatchIndices | Batches | None:
    """The feed for data with indices; ``None`` for other data.

    Raises:
        ValueError: a torchdata loader over a map-style dataset has loaded its own state.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        if getattr(data, "next_iter_state", None) is not None:
            raise ValueError(
                f"{type(data).__name__}.load_state_dict() was called before the loader was prepared, and is lost: the engine "
                "now sets its order; save and load the state of the prepared loader"
            )
        return (SampleIndices if is_a(data.batch_sampler, BatchSampler) else BatchIndices)(data, group, seed, feistel)
    return Batches(data, group) if isinstance(data, (list, tuple)) and not presharded(data) else None


class SampleIndices(_Positioned):
    """A ``DataLoader`` over a map-style dataset: samples are distributed to ranks and micro-batches.

    The loader is copied shallowly and only the copy's index stream is replaced: class, workers and collate function stay the user's.
    """

    order: Order

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, feistel: bool = True) -> None:
        batches = loader.batch_sampler  # the loader's own attributes are unset when the user passed one
        assert isinstance(batches, BatchSampler)
        sampler: Any = batches.sampler
        self.order = order_for(sampler, loader, group, seed, feistel)
        self.group = group
        self.batch = batches.batch_size
        self.drop_last = batches.drop_last or (type(sampler) is DistributedSampler and sampler.drop_last)
        self.indices = _Indices()
        self.loader = altered(loader, batch_sampler=self.indices)
        self.reads_ahead = (
            loader.num_workers > 0
        )  # in this process, the dataset draws random numbers that a checkpoint saves

    def deal(self, units: int, window: int, limit: int | None) -> Deal:
        return Deal(units, self.batch, window, self.group.world_size, self.group.rank, self.drop_last, limit)

    def length(self, limit: int | None) -> int | None:
        units = self.order.length()
        if units is None:
            return None
        return len(self.deal(units * self.group.world_size if self.order.sharded else units, 1, limit))

    def advance(self, window: int) -> int:
        return self.batch * self.group.world_size * window

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        self.order.enter(state)
        order = self.order.draw(epoch, None if limit is None else limit * self.advance(1))
        deal = given_out(self.order, len(order), self.batch, window, self.drop_last, limit)
        self.indices.stream, self.indices.count = order.pieces(deal.windows(start)), len(deal)
        self.iterator = iter(self.loader)
        return zip(self.iterator, _shares(deal, start), strict=True)

    def whole(self) -> int | None:
        """Batches in a pass of one process over everything."""
        units = self.order.length()
        return None if units is None else units // self.batch if self.drop_last else -(-units // self.batch)

    def cut(self, epoch: int) -> Cut:
        order, batch = self.order.draw(epoch), self.batch
        units = len(order)

        def items(number: int) -> list[Any]:
            piece: list[Any] = order[number * batch : (number + 1) * batch]
            return piece

        return Cut(
            items,
            lambda number: min(batch, units - number * batch),
            units // batch if self.drop_last else -(-units // batch),
        )

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        """The batches for the result of :attr:`Cut.items`."""
        self.indices.stream = items
        self.iterator = iter(self.loader)
        return self.iterator


def given_out(order: Order, units: int, batch: int, window: int, drop_last: bool, limit: int | None) -> Deal | Shards:
    """Which rank gets which of an epoch's ``units``: they are distributed, or each rank has its own. A collective in the second case."""
    group = order.group
    if order.sharded:
        return Shards(order.everywhere(units), batch, window, group.rank, drop_last, limit)
    return Deal(units, batch, window, group.world_size, group.rank, drop_last, limit)


def _shares(deal: Deal | Shards, start: int) -> Iterator[Share]:
    full = shares(((deal.batch,) * deal.world_size,) * deal.window, deal.rank)
    for _, dealt in deal.windows(start):
        yield from shares(tuple(tuple(map(len, micro)) for micro in dealt), deal.rank) if dealt else full


def weighed(
    batches: Iterator[Any],
    deal: Deal | Shards,
    start: int,
    group: Group,
    size: Callable[[Any], int | None] = batch_size,
) -> Iterator[Micro]:
    """Batches whose sizes are known only once they are read: a window is read ahead, and the ranks exchange its sizes."""
    if deal.world_size * deal.window == 1:
        yield from zip(batches, itertools.repeat(_WHOLE))
        return
    for own, dealt in deal.windows(start):
        read = list(itertools.islice(batches, len(own)))
        sizes = [size(batch) or 1 for batch in read]
        if dealt:
            sizes = [found if micro[deal.rank] else 0 for found, micro in zip(sizes, dealt, strict=True)]
        every = gather_row(group, torch.tensor(sizes, dtype=torch.int64)).expand(deal.world_size, -1).t().tolist()
        yield from zip(read, shares(tuple(map(tuple, every)), deal.rank), strict=True)


class Batches(_Positioned):
    """A list of ready batches: they are distributed to the ranks one by one."""

    reads_ahead = True

    def __init__(self, batches: Sequence[Any], group: Group) -> None:
        self.batches, self.group = batches, group

    @property
    def units(self) -> int | None:
        return len(self.batches)

    def length(self, limit: int | None) -> int | None:
        return len(self.deal(1, limit))

    def advance(self, window: int) -> int:
        return self.group.world_size * window

    def deal(self, window: int, limit: int | None) -> Deal:
        return Deal(len(self.batches), 1, window, self.group.world_size, self.group.rank, limit=limit)

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        deal, batches = self.deal(window, limit), self.batches
        if deal.round * window == 1:
            for i in range(start, deal.used):
                yield batches[i], _WHOLE
            return
        every, used, rank = deal.world_size, deal.used, deal.rank
        full = every * window
        sizes: list[Any]
        for base in range(start, used, full):
            if base + full > used:  # the last window
                ((own, dealt),) = deal.windows(base)
                rows = tuple(tuple(self.size(part.start) if part else 0 for part in micro) for micro in dealt)
                for part, share in zip(own, shares(rows, rank), strict=True):
                    yield batches[part.start], share
                return
            sizes = list(map(batch_size, map(batches.__getitem__, range(base, base + full))))
            if None in sizes or 0 in sizes:
                sizes = [size or 1 for size in sizes]
            rows = tuple([tuple(sizes[first : first + every]) for first in range(0, full, every)])
            for index, share in zip(range(base + rank, base + full, every), shares(rows, rank), strict=True):
                yield batches[index], share

    def size(self, index: int) -> int:
        return batch_size(self.batches[index]) or 1

    def whole(self) -> int | None:
        return len(self.batches)

    def cut(self, epoch: int) -> Cut:
        return Cut(self.batches.__getitem__, self.size, len(self.batches))

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        return items


class BatchIndices(_Positioned):
    """A ``DataLoader`` with a user's batch sampler, or with ``batch_size=None``: its batches stay whole and are distributed to the ranks."""

    order: Order

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, feistel: bool = True) -> None:
        self.group = group
        self.sized = loader.batch_sampler is not None  # from the indices; a batch of the dataset must be read
        sampler = loader.batch_sampler if self.sized else loader.sampler
        self.order = order_for(sampler, loader, group, seed, feistel)
        self.indices = _Indices()
        self.loader = altered(loader, **{"batch_sampler" if self.sized else "sampler": self.indices})
        self.reads_ahead = loader.num_workers > 0

    def length(self, limit: int | None) -> int | None:
        units = self.order.length()
        if units is None:
            return None
        return len(Deal(units, 1, 1, 1 if self.order.sharded else self.group.world_size, 0, limit=limit))

    def advance(self, window: int) -> int:
        return self.group.world_size * window

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        self.order.enter(state)
        order = self.order.draw(epoch, None if limit is None else limit * self.advance(1))
        deal = given_out(self.order, len(order), 1, window, False, limit)
        self.indices.count = len(deal)
        self.indices.stream = itertools.chain.from_iterable(order.pieces(deal.windows(start)))
        if self.sized:
            sizes = self._shares(self._sizes(order), deal, start)
            self.iterator = iter(self.loader)
            return zip(self.iterator, sizes, strict=True)
        self.iterator = iter(self.loader)
        return weighed(self.iterator, deal, start, self.group)

    def whole(self) -> int | None:
        return self.order.length()

    def cut(self, epoch: int) -> Cut:
        order = self.order.draw(epoch)
        return Cut(order.__getitem__, lambda number: len(order[number]), len(order))

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        self.indices.stream = items
        self.iterator = iter(self.loader)
        return self.iterator

    def _sizes(self, order: Any) -> Callable[[int, int], int]:
        """The samples in a rank's batch, by rank and number."""
        if not self.order.sharded:
            return lambda rank, number: len(order[number])
        everyone = gather_object(self.group, [len(batch) for batch in order])
        return lambda rank, number: everyone[rank][number]

    def _shares(self, size: Callable[[int, int], int], deal: Deal | Shards, start: int) -> Iterator[Share]:
        for base, (_, dealt) in zip(
            itertools.count(start, deal.round * deal.window), deal.windows(start), strict=False
        ):
            full = [
                [range(base + j * deal.round + r, base + j * deal.round + r + 1) for r in range(deal.world_size)]
                for j in range(deal.window)
            ]
            sizes = tuple(
                tuple(size(r, part.start) if part else 0 for r, part in enumerate(micro)) for micro in dealt or full
            )
            yield from shares(sizes, deal.rank)
