"""Data with indices: loaders over map-style datasets and lists of batches. Their place in an epoch is one number, entered at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from engine.data.order import Order, is_a
from engine.data.sampler import Deal, Share, shares
from engine.data.stateful import altered, end_workers
from engine.distributed.group import Group
from engine.tree import batch_size

Micro = tuple[Any, Share]
_WHOLE = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""A batch that is its own window on one process: its size matters to nobody but metrics, which look themselves."""


class _Indices(Sampler[Any]):
    """The index stream that is put under a user's loader; it yields what its owner set."""

    def __init__(self) -> None:
        self.stream: Iterable[Any] = ()
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def __len__(self) -> int:
        return self.count


class _Positioned:
    """Data whose position says everything."""

    iterator: Iterator[Any] | None = None

    def state(self, closed: bool) -> Any:
        return None

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
    """What of the loader's index stream (or which batch itself) is a batch, by its number."""
    size: Callable[[int], int]
    """Samples in it."""
    batches: int


def indexed(data: Any, group: Group, seed: int) -> SampleIndices | BatchIndices | Batches | None:
    """The feed for data with indices; ``None`` for other data.

    Raises:
        ValueError: a torchdata loader over a map-style dataset was told to go on from a state of its own.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        if getattr(data, "next_iter_state", None) is not None:
            raise ValueError(
                f"{type(data).__name__}.load_state_dict() was called before the loader was prepared, and is lost: its order is the engine's now; "
                "take and load the state of what prepare() gives back"
            )
        return (SampleIndices if is_a(data.batch_sampler, BatchSampler) else BatchIndices)(data, group, seed)
    return Batches(data, group) if isinstance(data, (list, tuple)) else None


class SampleIndices(_Positioned):
    """A ``DataLoader`` over a map-style dataset: samples are dealt to ranks and micro-batches.

    The loader is copied shallowly and only the copy's index stream is replaced: class, workers and collate function stay the user's.
    """

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int) -> None:
        batches = loader.batch_sampler  # the loader's own attributes say nothing when the user made it
        assert isinstance(batches, BatchSampler)
        sampler = batches.sampler
        self.order = Order(sampler, loader, group, seed)
        self.group = group
        self.batch = batches.batch_size
        self.drop_last = batches.drop_last or (isinstance(sampler, DistributedSampler) and sampler.drop_last)
        self.indices = _Indices()
        self.loader = altered(loader, batch_sampler=self.indices)
        self.reads_ahead = loader.num_workers > 0  # in this process, the dataset takes random numbers that a checkpoint holds

    def deal(self, units: int, window: int, limit: int | None) -> Deal:
        return Deal(units, self.batch, window, self.group.world_size, self.group.rank, self.drop_last, limit)

    def length(self, limit: int | None) -> int | None:
        units = self.order.length()
        return None if units is None else len(self.deal(units, 1, limit))

    def advance(self, window: int) -> int:
        return self.batch * self.group.world_size * window

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        order = self.order.draw(epoch)
        deal = self.deal(len(order), window, limit)
        self.indices.stream, self.indices.count = _positions(order, deal, start), len(deal)
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
            piece = order[number * batch : (number + 1) * batch]
            return piece.tolist() if isinstance(piece, torch.Tensor) else list(piece)

        return Cut(items, lambda number: min(batch, units - number * batch), units // batch if self.drop_last else -(-units // batch))

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        """The batches for what :attr:`Cut.items` gave."""
        self.indices.stream = items
        self.iterator = iter(self.loader)
        return self.iterator


def _positions(order: Sequence[Any] | torch.Tensor, deal: Deal, start: int) -> Iterator[list[Any]]:
    for own, _ in deal.windows(start):
        for part in own:
            piece = order[part.start : part.stop]
            yield piece.tolist() if isinstance(piece, torch.Tensor) else list(piece)


def _shares(deal: Deal, start: int) -> Iterator[Share]:
    full = shares(((deal.batch,) * deal.world_size,) * deal.window, deal.rank)
    for _, dealt in deal.windows(start):
        yield from shares(tuple(tuple(map(len, micro)) for micro in dealt), deal.rank) if dealt else full


class Batches(_Positioned):
    """A list of ready batches: they are dealt to the ranks one by one."""

    reads_ahead = True

    def __init__(self, batches: Sequence[Any], group: Group) -> None:
        self.batches, self.group = batches, group

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
        for base, (own, dealt) in zip(range(start, deal.used, deal.round * window), deal.windows(start), strict=True):
            if dealt:
                sizes = [[self.size(part.start) if part else 0 for part in micro] for micro in dealt]
            else:
                sizes = [[self.size(base + j * deal.round + r) for r in range(deal.world_size)] for j in range(window)]
            for part, share in zip(own, shares(tuple(map(tuple, sizes)), deal.rank), strict=True):
                yield batches[part.start], share

    def size(self, index: int) -> int:
        return batch_size(self.batches[index]) or 1

    def whole(self) -> int | None:
        return len(self.batches)

    def cut(self, epoch: int) -> Cut:
        return Cut(self.batches.__getitem__, self.size, len(self.batches))

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        return items


class BatchIndices(_Positioned):
    """A ``DataLoader`` with a batch sampler of the user's own, or with ``batch_size=None``: its batches stay whole and are dealt to the ranks."""

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int) -> None:
        self.group = group
        self.batched = loader.batch_sampler is not None
        sampler = loader.batch_sampler if self.batched else loader.sampler
        self.order = Order(sampler, loader, group, seed)
        self.indices = _Indices()
        self.loader = altered(loader, **{"batch_sampler" if self.batched else "sampler": self.indices})
        self.reads_ahead = loader.num_workers > 0

    def length(self, limit: int | None) -> int | None:
        units = self.order.length()
        return None if units is None else len(Deal(units, 1, 1, self.group.world_size, self.group.rank, limit=limit))

    def advance(self, window: int) -> int:
        return self.group.world_size * window

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        order = self.order.draw(epoch)
        deal = Deal(len(order), 1, window, self.group.world_size, self.group.rank, limit=limit)
        self.indices.count = len(deal)
        self.indices.stream = (_plain(order[part.start]) for own, _ in deal.windows(start) for part in own)
        self.iterator = iter(self.loader)
        return zip(self.iterator, self._shares(order, deal, start), strict=True)

    def whole(self) -> int | None:
        return self.order.length()

    def cut(self, epoch: int) -> Cut:
        order, batched = self.order.draw(epoch), self.batched
        return Cut(lambda number: _plain(order[number]), lambda number: len(order[number]) if batched else 1, len(order))

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        self.indices.stream = items
        self.iterator = iter(self.loader)
        return self.iterator

    def _shares(self, order: Sequence[Any] | torch.Tensor, deal: Deal, start: int) -> Iterator[Share]:
        for base, (_, dealt) in zip(range(start, deal.used, deal.round * deal.window), deal.windows(start), strict=True):
            full = [[range(base + j * deal.round + r, base + j * deal.round + r + 1) for r in range(deal.world_size)] for j in range(deal.window)]
            sizes = tuple(tuple((len(order[p.start]) if self.batched else 1) if p else 0 for p in micro) for micro in dealt or full)
            yield from shares(sizes, deal.rank)


def _plain(index: Any) -> Any:
    """An index as the dataset expects it: a shuffled order is a tensor."""
    return index.item() if isinstance(index, torch.Tensor) else index
