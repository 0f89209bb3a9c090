"""Data with indices: loaders over map-style datasets and lists of batches. Their position in an epoch is one number, and skipping to it is free."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from engine.data.deal import Deal, Shards
from engine.data.feed import Feed, MicroBatch
from engine.data.order import FeistelIndices, SampleOrder, StoredIndices, order_for
from engine.data.user_loaders import altered, end_workers, is_a, presharded
from engine.distributed.collectives import gather_object, gather_row
from engine.distributed.group import Group
from engine.step.window import Share, shares
from engine.utils.tree import batch_size

WHOLE_WINDOW = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""The share of a batch that is its own window on one process: only metrics need its size, and determine it themselves."""


class IndexStream(Sampler[Any]):
    """The sampler placed under a copy of the user's loader; it yields the indices that the feed sets."""

    def __init__(self) -> None:
        self.indices: Iterable[Any] = ()
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.count


class Cut(ABC):
    """One pass over a loader, cut into the batches that a loop on one process would get."""

    batches: int
    """The number of batches."""

    @abstractmethod
    def items(self, number: int) -> Any:
        """The entry of the loader's index stream (or the batch itself) for a batch number."""

    @abstractmethod
    def size(self, number: int) -> int:
        """Samples in a batch."""


class SampleCut(Cut):
    """A pass over samples, cut into batches of ``batch``."""

    def __init__(self, order: StoredIndices | FeistelIndices, batch: int, drop_last: bool) -> None:
        self.order, self.batch, self.units = order, batch, len(order)
        self.batches = self.units // batch if drop_last else -(-self.units // batch)

    def items(self, number: int) -> Any:
        return self.order[number * self.batch : (number + 1) * self.batch]

    def size(self, number: int) -> int:
        return min(self.batch, self.units - number * self.batch)


class BatchCut(Cut):
    """A pass over the batches of a batch sampler."""

    def __init__(self, order: StoredIndices | FeistelIndices) -> None:
        self.order, self.batches = order, len(order)

    def items(self, number: int) -> Any:
        return self.order[number]

    def size(self, number: int) -> int:
        return len(self.order[number])


class ListCut(Cut):
    """A pass over a list of batches."""

    def __init__(self, ready: Sequence[Any]) -> None:
        self.ready, self.batches = ready, len(ready)

    def items(self, number: int) -> Any:
        return self.ready[number]

    def size(self, number: int) -> int:
        return batch_size(self.ready[number]) or 1


class IndexedFeed(Feed):
    """A feed over data with indices. It can also be read as a member of a combination: pass by pass, by batch number."""

    order: SampleOrder | None = None
    sized = True
    """True if the number of samples in each batch is known before the batch is read."""

    def state(self, after_window: bool) -> Any:
        return None

    @abstractmethod
    def batches_in_pass(self) -> int | None:
        """Batches in a pass of one process over everything; ``None`` when unknown."""

    @abstractmethod
    def cut(self, epoch: int) -> Cut:
        """The pass of one process over everything, in this epoch's order."""

    @abstractmethod
    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        """The batches for results of :meth:`Cut.items`."""


class LoaderFeed(IndexedFeed):
    """A feed over a ``DataLoader``.

    The loader is copied shallowly and only the copy's index stream is replaced: class, workers and collate function stay the user's.
    """

    order: SampleOrder

    def __init__(
        self, loader: DataLoader[Any], sampler: Any, replaces: str, group: Group, seed: int, feistel: bool
    ) -> None:
        self.group = group
        self.order = order_for(sampler, loader, group, seed, feistel)
        self.stream = IndexStream()
        self.loader = altered(loader, **{replaces: self.stream})
        # In this process, the dataset draws random numbers that a checkpoint saves.
        self.reads_ahead = loader.num_workers > 0

    @property
    def feistel(self) -> bool:
        return self.order.feistel

    @property
    def units(self) -> int | None:
        return None if self.order.sharded or self.order.drawn_by_all_ranks else self.order.length()

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        if self.order.state(over=False) is not None:  # a user's sampler draws each order once
            return None
        order = self.order.draw(epoch)
        entries = [order[unit] for unit in range(start, start + count) if unit < len(order)]
        return [int(index) for entry in entries for index in (entry if isinstance(entry, (list, tuple)) else [entry])]

    def state(self, after_window: bool) -> Any:
        return self.order.state(over=False)

    def start_state(self) -> Any:
        return self.order.state(over=False)

    def next_pass_state(self) -> Any:
        return self.order.state(over=True)

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        self.stream.indices = items
        self.iterator = iter(self.loader)
        return self.iterator

    def close(self) -> None:
        super().close()
        end_workers(self.loader._iterator)  # persistent ones
        self.loader._iterator = None


class SampleFeed(LoaderFeed):
    """A ``DataLoader`` over a map-style dataset: samples are distributed to ranks and micro-batches."""

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, feistel: bool = True) -> None:
        batches = loader.batch_sampler  # the loader's own attributes are unset when the user passed one
        assert isinstance(batches, BatchSampler)
        sampler: Any = batches.sampler
        super().__init__(loader, sampler, "batch_sampler", group, seed, feistel)
        self.batch = batches.batch_size
        self.drop_last = batches.drop_last or (type(sampler) is DistributedSampler and sampler.drop_last)

    def length(self, limit: int | None) -> int | None:
        units, group = self.order.length(), self.group
        if units is None:
            return None
        everywhere = units * group.world_size if self.order.sharded else units
        return len(Deal(everywhere, self.batch, 1, group.world_size, group.rank, self.drop_last, limit))

    def stride(self, window: int) -> int:
        return self.batch * self.group.world_size * window

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        self.order.enter(state)
        order = self.order.draw(epoch, None if limit is None else limit * self.stride(1))
        deal = deal_of(self.order, len(order), self.batch, window, self.drop_last, limit)
        self.stream.count = len(deal)
        return zip(self.fetch(order.pieces(deal.windows(start))), shares_of(deal, start), strict=True)

    def batches_in_pass(self) -> int | None:
        units = self.order.length()
        return None if units is None else units // self.batch if self.drop_last else -(-units // self.batch)

    def cut(self, epoch: int) -> Cut:
        return SampleCut(self.order.draw(epoch), self.batch, self.drop_last)


class BatchFeed(LoaderFeed):
    """A ``DataLoader`` with a user's batch sampler, or with ``batch_size=None``: its batches stay whole and are distributed to the ranks."""

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, feistel: bool = True) -> None:
        self.sized = loader.batch_sampler is not None  # from the indices; a batch of the dataset must be read
        replaces = "batch_sampler" if self.sized else "sampler"
        super().__init__(loader, getattr(loader, replaces), replaces, group, seed, feistel)

    def length(self, limit: int | None) -> int | None:
        units = self.order.length()
        if units is None:
            return None
        return len(Deal(units, 1, 1, 1 if self.order.sharded else self.group.world_size, 0, limit=limit))

    def stride(self, window: int) -> int:
        return self.group.world_size * window

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        self.order.enter(state)
        order = self.order.draw(epoch, None if limit is None else limit * self.stride(1))
        deal = deal_of(self.order, len(order), 1, window, False, limit)
        self.stream.count = len(deal)
        entries = itertools.chain.from_iterable(order.pieces(deal.windows(start)))
        if not self.sized:
            return with_exchanged_sizes(self.fetch(entries), deal, start, self.group)
        sizes = self._sizes(order)
        return zip(self.fetch(entries), self._shares(sizes, deal, start), strict=True)

    def batches_in_pass(self) -> int | None:
        return self.order.length()

    def cut(self, epoch: int) -> Cut:
        return BatchCut(self.order.draw(epoch))

    def _sizes(self, order: StoredIndices | FeistelIndices) -> Callable[[int, int], int]:
        """The samples in a rank's batch, by rank and number."""
        if not self.order.sharded:
            return lambda rank, number: len(order[number])
        by_rank = gather_object(self.group, [len(order[number]) for number in range(len(order))])
        return lambda rank, number: by_rank[rank][number]

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


class ListFeed(IndexedFeed):
    """A list of ready batches: they are distributed to the ranks one by one."""

    reads_ahead = True

    def __init__(self, batches: Sequence[Any], group: Group) -> None:
        self.batches, self.group = batches, group

    @property
    def units(self) -> int | None:
        return len(self.batches)

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        return [unit for unit in range(start, start + count) if unit < len(self.batches)]

    def length(self, limit: int | None) -> int | None:
        return len(self.deal(1, limit))

    def stride(self, window: int) -> int:
        return self.group.world_size * window

    def deal(self, window: int, limit: int | None) -> Deal:
        return Deal(len(self.batches), 1, window, self.group.world_size, self.group.rank, limit=limit)

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        deal, batches = self.deal(window, limit), self.batches
        if deal.round * window == 1:
            for i in range(start, deal.used):
                yield batches[i], WHOLE_WINDOW
            return
        ranks, used, rank = deal.world_size, deal.used, deal.rank
        full = ranks * window
        sizes: list[Any]
        for base in range(start, used, full):
            if base + full > used:  # the last window
                ((ranges, dealt),) = deal.windows(base)
                rows = tuple(
                    tuple((batch_size(batches[part.start]) or 1) if part else 0 for part in micro) for micro in dealt
                )
                for part, share in zip(ranges, shares(rows, rank), strict=True):
                    yield batches[part.start], share
                return
            sizes = list(map(batch_size, map(batches.__getitem__, range(base, base + full))))
            if None in sizes or 0 in sizes:
                sizes = [size or 1 for size in sizes]
            rows = tuple([tuple(sizes[first : first + ranks]) for first in range(0, full, ranks)])
            for index, share in zip(range(base + rank, base + full, ranks), shares(rows, rank), strict=True):
                yield batches[index], share

    def batches_in_pass(self) -> int | None:
        return len(self.batches)

    def cut(self, epoch: int) -> Cut:
        return ListCut(self.batches)

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        return items


def indexed_feed(data: Any, group: Group, seed: int, feistel: bool = True) -> IndexedFeed | None:
    """The feed for data with indices; ``None`` for other data. A collective.

    Raises:
        ValueError: a torchdata loader over a map-style dataset has loaded its own state.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        if getattr(data, "next_iter_state", None) is not None:
            raise ValueError(
                f"{type(data).__name__}.load_state_dict() was called before the loader was prepared, and is lost: the engine "
                "now sets its order; save and load the state of the prepared loader"
            )
        return (SampleFeed if is_a(data.batch_sampler, BatchSampler) else BatchFeed)(data, group, seed, feistel)
    return ListFeed(data, group) if isinstance(data, (list, tuple)) and not presharded(data) else None


def deal_of(
    order: SampleOrder, units: int, batch: int, window: int, drop_last: bool, limit: int | None
) -> Deal | Shards:
    """Distribute an epoch's ``units`` to the ranks, unless each rank has its own. A collective in the second case."""
    group = order.group
    if order.sharded:
        return Shards(order.everywhere(units), batch, window, group.rank, drop_last, limit)
    return Deal(units, batch, window, group.world_size, group.rank, drop_last, limit)


def shares_of(deal: Deal | Shards, start: int) -> Iterator[Share]:
    """This rank's share of each micro-batch of samples, from position ``start`` on."""
    full = shares(((deal.batch,) * deal.world_size,) * deal.window, deal.rank)
    for _, dealt in deal.windows(start):
        yield from shares(tuple(tuple(map(len, micro)) for micro in dealt), deal.rank) if dealt else full


def with_exchanged_sizes(
    batches: Iterator[Any],
    deal: Deal | Shards,
    start: int,
    group: Group,
    size: Callable[[Any], int | None] = batch_size,
) -> Iterator[MicroBatch]:
    """Batches whose sizes are known only once they are read: a window is read ahead, and the ranks exchange its sizes."""
    if deal.world_size * deal.window == 1:
        yield from zip(batches, itertools.repeat(WHOLE_WINDOW))
        return
    for ranges, dealt in deal.windows(start):
        window = list(itertools.islice(batches, len(ranges)))
        sizes = [size(batch) or 1 for batch in window]
        if dealt:
            sizes = [count if micro[deal.rank] else 0 for count, micro in zip(sizes, dealt, strict=True)]
        rows = gather_row(group, torch.tensor(sizes, dtype=torch.int64)).expand(deal.world_size, -1).t().tolist()
        yield from zip(window, shares(tuple(map(tuple, rows)), deal.rank), strict=True)
