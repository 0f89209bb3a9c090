"""Feeds for data with indices: loaders over map-style datasets, and lists of batches. A position is one number, and skipping to it is free."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from engine.data.deal import Deal, Shards
from engine.data.drawn import DrawnDataset
from engine.data.epochs import EpochDataset, UsersDataset, epoch_listeners, shared_epoch, tell_epoch
from engine.data.feed import Feed, LoaderUse, MicroBatch
from engine.data.order import LARGE, DrawOrder, FeistelIndices, SampleOrder, StoredIndices, order_for
from engine.data.sample_counter import SampleCounter, keeps_samples
from engine.data.user_loaders import altered, collates_like_samples, end_workers, holds_loaders, is_a, presharded
from engine.data.worker_seeds import WorkerSeeds
from engine.distributed.collectives import gather_object, gather_row
from engine.distributed.group import Group
from engine.step.position import Share, share_of, shares
from engine.utils.sample_count import counted

WHOLE_WINDOW = Share(size=-1, divisor=1.0, alone=1.0, last=True)
"""The share of a micro-batch that is a whole window on one process. Only metrics need the batch's size, and they determine it themselves."""


class IndexStream(Sampler[Any]):
    """The sampler of a copy of the user's loader; it yields the indices that the feed sets."""

    def __init__(self) -> None:
        self.indices: Iterable[Any] = ()
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.count


class PassBatches(ABC):
    """The batches of one pass over a loader, numbered as a loop on one process would get them: ``pass_batches`` of each subclass of
    :class:`IndexedFeed` says which of the classes below they are."""

    count: int
    """The number of batches in the pass."""

    @abstractmethod
    def items(self, number: int) -> Any:
        """The indices of batch ``number``, as an entry of the loader's index stream; of a list of batches, the batch itself."""

    @abstractmethod
    def size(self, number: int) -> int:
        """The number of samples in batch ``number``."""


class SampleBatches(PassBatches):
    """A pass over samples, in batches of ``batch``."""

    def __init__(self, order: StoredIndices | FeistelIndices, batch: int, drop_last: bool) -> None:
        self.order, self.batch, self.units = order, batch, len(order)
        self.count = self.units // batch if drop_last else -(-self.units // batch)

    def items(self, number: int) -> Any:
        return self.order[number * self.batch : (number + 1) * self.batch]

    def size(self, number: int) -> int:
        return min(self.batch, self.units - number * self.batch)


class SamplerBatches(PassBatches):
    """A pass over the batches of a batch sampler."""

    def __init__(self, order: StoredIndices | FeistelIndices) -> None:
        self.order, self.count = order, len(order)

    def items(self, number: int) -> Any:
        return self.order[number]

    def size(self, number: int) -> int:
        return self.order.size_of(number)


class ListBatches(PassBatches):
    """A pass over a list of batches."""

    def __init__(self, batches: Sequence[Any], counter: SampleCounter) -> None:
        self.batches, self.count, self.counter = batches, len(batches), counter

    def items(self, number: int) -> Any:
        return self.batches[number]

    def size(self, number: int) -> int:
        return self.counter.count(self.batches[number])[0]


class IndexedFeed(Feed):
    """A feed over data with indices: ``SampleFeed``, ``BatchFeed`` or ``ListFeed``, as :class:`engine.data.feed.Feed` says. A combination reads
    it as a member: pass by pass, and by batch number."""

    order: SampleOrder | None = None
    counter: SampleCounter
    """Counts the samples of batches that were read."""
    units_in_batch = 1
    """The number of :attr:`units` in a batch of the user's loader."""

    @property
    def sized(self) -> bool:
        """True if the number of samples in each batch is known before the batch is read."""
        return self.counter.owner is None

    def state(self, after_window: bool) -> Any:
        return None

    def tell_epoch(self, epoch: int) -> None:
        """Tell the dataset the epoch of the next pass, if it has ``set_epoch``."""

    @abstractmethod
    def batches_in_pass(self) -> int | None:
        """The number of batches in a pass of one process over all data; ``None`` if unknown."""

    @abstractmethod
    def pass_batches(self, epoch: int) -> PassBatches:
        """The batches of one process's pass over all data, in this epoch's order."""

    @abstractmethod
    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        """Read the batches for these results of :meth:`PassBatches.items`."""


class LoaderFeed(IndexedFeed):
    """A feed over a ``DataLoader``.

    The loader is copied shallowly, and only the copy's sampler is replaced: class, workers and collate function stay the user's.
    """

    order: SampleOrder
    without_units = "data that is divided among the ranks already, or whose indices are not numbers"

    def __init__(
        self, loader: DataLoader[Any], sampler: Any, replaces: str, group: Group, seed: int, computed_from: int
    ) -> None:
        self.group = group
        self.order = order_for(sampler, loader, group, seed, computed_from)
        self.stream = IndexStream()
        self.counter, self.keeps_samples = SampleCounter(loader), keeps_samples(loader.collate_fn)
        self.latest: tuple[int, StoredIndices | FeistelIndices] | None = None
        """The epoch that is being read, and its order."""
        self._counted: tuple[int, Any] | None = None
        """The epoch whose tokens were asked for last, and its batches."""
        self.dataset: Any = loader.dataset
        self.epoch: torch.Tensor | None = None
        attributes: dict[str, Any] = {replaces: self.stream}
        if isinstance(self.order, DrawOrder) and self.order.unseeded is loader.dataset:
            attributes["dataset"] = self.dataset = self.order.source
            if self.drawn is not None and collates_like_samples(loader):
                self.drawn.compare_samples()
        if loader.num_workers and loader.persistent_workers and epoch_listeners(self.dataset):
            self.epoch = shared_epoch()
            attributes["dataset"] = EpochDataset(self.dataset, self.epoch)
            attributes["worker_init_fn"] = UsersDataset(loader.worker_init_fn)
        self.loader = altered(loader, **attributes)
        self.worker_seeds = WorkerSeeds(self.loader, loader.generator, group)
        # Without workers, reading a sample may change this process's random state, which a checkpoint saves.
        self.reads_ahead = loader.num_workers > 0

    @property
    def sized(self) -> bool:
        return self.keeps_samples and self.counter.owner is None

    @property
    def feistel(self) -> bool:
        return self.order.feistel

    @property
    def units(self) -> int | None:
        return None if self.order.sharded or self.order.drawn_by_all_ranks else self.order.length()

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        if self.order.sharded:
            return None
        if self.order.state(over=False) is None:
            order = self.order.draw(self.epoch_of_order(epoch))
        elif self.latest is not None and self.latest[0] == epoch:
            order = self.latest[1]
        else:
            return None
        entries = [order[unit] for unit in range(start, start + count) if unit < len(order)]
        indices = [index for entry in entries for index in (entry if isinstance(entry, (list, tuple)) else [entry])]
        return [int(index) for index in indices] if all(hasattr(index, "__index__") for index in indices) else None

    def state(self, after_window: bool) -> Any:
        return self.order.state(over=False)

    @property
    def drawn(self) -> DrawnDataset | None:
        source = self.order.source if isinstance(self.order, DrawOrder) else None
        return source if isinstance(source, DrawnDataset) else None

    @property
    def plan(self) -> int | None:
        sources: list[Any] = [
            self.loader.dataset,
            *([self.order.unseeded] if isinstance(self.order, DrawOrder) else []),
        ]
        return next((source.plan_checksum for source in sources if hasattr(source, "plan_checksum")), None)

    def epoch_of_order(self, epoch: int) -> int:
        """The epoch whose order is used: an evaluation of data that orders itself reads the same samples each time."""
        return 0 if self.use.evaluates and isinstance(self.order, DrawOrder) else epoch

    def draws_state(self, epoch: int, position: int) -> Any:
        return None if self.drawn is None else self.drawn.state_at(epoch, position)

    def continue_draws(self, state: Any) -> None:
        assert isinstance(self.order, DrawOrder)
        self.close()  # persistent workers have copies of the dataset
        self.order.continue_from(state)

    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int] | None:
        return None if self.drawn is None else self.drawn.counts_between(epoch, start, stop)

    def stages_in(self, epoch: int) -> list[tuple[int, str, bool]]:
        return [] if self.drawn is None else self.drawn.stages_in(epoch)

    def start_state(self) -> Any:
        return self.order.state(over=False)

    def next_pass_state(self) -> Any:
        return self.order.state(over=True)

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        self.stream.indices = items
        # A generator of the user's has the same numbers on every rank, in a run, too.
        if not self.use.ranks_draw_apart or self.worker_seeds.generator is not None:
            self.worker_seeds.separate()
        self.iterator = iter(self.loader)
        return self.iterator

    def tell_epoch(self, epoch: int) -> None:
        if self.use.evaluates:
            return
        tell_epoch(self.dataset, epoch)
        if self.epoch is not None:
            self.epoch.fill_(epoch)

    def close(self) -> None:
        super().close()
        end_workers(self.loader._iterator)  # persistent workers
        self.loader._iterator = None


class SampleFeed(LoaderFeed):
    """Feeds a ``DataLoader`` over a map-style dataset: its samples are distributed to ranks and micro-batches."""

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, computed_from: int = LARGE) -> None:
        batches = loader.batch_sampler  # the loader's own attributes are unset if the user passed a batch sampler
        assert isinstance(batches, BatchSampler)
        sampler: Any = batches.sampler
        super().__init__(loader, sampler, "batch_sampler", group, seed, computed_from)
        self.batch = self.units_in_batch = batches.batch_size
        self.drop_last = batches.drop_last or (type(sampler) is DistributedSampler and sampler.drop_last)

    def length(self, limit: int | None) -> int | None:
        units, group = self.order.length(), self.group
        if units is None:
            return None
        units_of_all_ranks = units * group.world_size if self.order.sharded else units
        return len(Deal(units_of_all_ranks, self.batch, 1, group.world_size, group.rank, self.drop_last, limit))

    def stride(self, window: int) -> int:
        return self.batch * self.group.world_size * window

    @property
    def samples_of_round(self) -> int | None:
        return self.stride(1) if self.sized and self.use.owner is None else None

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        self.tell_epoch(epoch)
        self.order.enter(state)
        order = self.order.draw(self.epoch_of_order(epoch), None if limit is None else limit * self.stride(1))
        self.latest = epoch, order
        deal = deal_of(self.order, len(order), self.batch, window, self.drop_last, limit)
        self.stream.count = len(deal)
        self.counter.follow(self.use.owner)
        batches = self.fetch(order.pieces(deal.windows(start)))
        if self.sized:
            return zip(batches, shares_of(deal, start), strict=True)
        list_length = (len(part) for ranges, _ in deal.windows(start) for part in ranges)
        return counted_batches(batches, deal, start, self.group, self.counter, self.use, list_length)

    def batches_in_pass(self) -> int | None:
        units = self.order.length()
        return None if units is None else units // self.batch if self.drop_last else -(-units // self.batch)

    def pass_batches(self, epoch: int) -> PassBatches:
        return SampleBatches(self.order.draw(self.epoch_of_order(epoch)), self.batch, self.drop_last)


class BatchFeed(LoaderFeed):
    """Feeds a ``DataLoader`` with a user's batch sampler, or with ``batch_size=None``: whole batches are distributed to the ranks."""

    def __init__(self, loader: DataLoader[Any], group: Group, seed: int, computed_from: int = LARGE) -> None:
        # With a batch sampler the indices tell the size; else the batch must be read.
        self.indices_tell = loader.batch_sampler is not None
        replaces = "batch_sampler" if self.indices_tell else "sampler"
        super().__init__(loader, getattr(loader, replaces), replaces, group, seed, computed_from)

    @property
    def sized(self) -> bool:
        return self.indices_tell and super().sized

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
        self.tell_epoch(epoch)
        self.order.enter(state)
        order = self.order.draw(self.epoch_of_order(epoch), None if limit is None else limit * self.stride(1))
        self.latest = epoch, order
        deal = deal_of(self.order, len(order), 1, window, False, limit)
        self.stream.count = len(deal)
        entries = itertools.chain.from_iterable(order.pieces(deal.windows(start)))
        self.counter.follow(self.use.owner)
        if not self.sized:
            list_length = None
            if self.indices_tell:
                list_length = (order.size_of(part.start) for ranges, _ in deal.windows(start) for part in ranges)
            return counted_batches(self.fetch(entries), deal, start, self.group, self.counter, self.use, list_length)
        sizes = self._sizes(order)
        return zip(self.fetch(entries), self._shares(sizes, deal, start), strict=True)

    @property
    def tells_tokens(self) -> bool:
        return isinstance(self.order, DrawOrder) and getattr(self.order.source, "tells_tokens", False) is True

    def tokens_between(self, epoch: int, start: int, stop: int) -> int:
        tokens: int = self._batches_of(epoch).tokens_between(start, stop)
        return tokens

    def samples_between(self, epoch: int, start: int, stop: int) -> int:
        samples: int = self._batches_of(epoch).samples_between(start, stop)
        return samples

    def _batches_of(self, epoch: int) -> Any:
        """The batches of an epoch, which tell their tokens and samples."""
        if self._counted is None or self._counted[0] != epoch:
            is_latest = self.latest is not None and self.latest[0] == epoch
            order: Any = self.latest[1] if self.latest is not None and is_latest else self.order.draw(epoch)
            self._counted = epoch, order.items
        return self._counted[1]

    def batches_in_pass(self) -> int | None:
        return self.order.length()

    def pass_batches(self, epoch: int) -> PassBatches:
        return SamplerBatches(self.order.draw(self.epoch_of_order(epoch)))

    def _sizes(self, order: StoredIndices | FeistelIndices) -> Callable[[int, int], int]:
        """A function that returns the number of samples in a rank's batch, from the rank and the batch's number."""
        if not self.order.sharded:
            return lambda rank, number: order.size_of(number)
        by_rank = gather_object(self.group, [order.size_of(number) for number in range(len(order))])
        return lambda rank, number: by_rank[rank][number]

    def _shares(self, size: Callable[[int, int], int], deal: Deal | Shards, start: int) -> Iterator[Share]:
        """Yield this rank's share of each batch, from position ``start`` on; ``size`` returns a batch's samples by rank and number."""
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


_SHAPE = attrgetter("shape")


class ListFeed(IndexedFeed):
    """Feeds a list of ready batches, which are distributed to the ranks one by one."""

    reads_ahead = True

    def __init__(self, batches: Sequence[Any], group: Group) -> None:
        self.batches, self.group, self.counter = batches, group, SampleCounter(batches)

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
        self.counter.follow(self.use.owner)
        owner_counts = self.counter.owner is not None
        if deal.round * window == 1 and not owner_counts:
            for i in range(start, deal.used):
                yield batches[i], WHOLE_WINDOW
            return
        count = self.counter.count if owner_counts or self._needs_counter() else counted
        ranks, used, rank = deal.world_size, deal.used, deal.rank
        full = ranks * window
        certain = ("",) * full
        for base in range(start, used, full):
            if base + full > used:  # the last window
                ((ranges, dealt),) = deal.windows(base)
                counts = {part.start: count(batches[part.start]) for micro in dealt for part in micro if part}
                rows = tuple(tuple(counts[part.start][0] if part else 0 for part in micro) for micro in dealt)
                shares_here = shares(rows, rank)
                for j, part in enumerate(ranges):
                    yield batches[part.start], share_of(shares_here, j, counts[part.start][1], not dealt[j][rank])
                return
            sizes, guesses = zip(*map(count, map(batches.__getitem__, range(base, base + full))), strict=True)
            rows = tuple([sizes[first : first + ranks] for first in range(0, full, ranks)])
            plain = 0 not in sizes and guesses == certain
            for j, share in enumerate(shares_here := shares(rows, rank)):
                index = j * ranks + rank
                yield batches[base + index], share if plain else share_of(shares_here, j, guesses[index], False)

    def _needs_counter(self) -> bool:
        """Whether only all batches together show how each is counted: ``None`` among others, or tensors that may have the time first. Shows them to
        the counter then."""
        kinds = set(map(type, self.batches))  # one call, not one for each batch
        shapes: set[torch.Size] = set()
        if kinds == {Tensor}:
            with suppress(RuntimeError):  # a nested tensor has no shape
                shapes = set(map(_SHAPE, self.batches))
        if len(shapes) < 3 and not (type(None) in kinds and len(kinds) > 1):
            return False
        for batch in self.batches:
            self.counter.count(batch)
        return True

    def batches_in_pass(self) -> int | None:
        return len(self.batches)

    def pass_batches(self, epoch: int) -> PassBatches:
        return ListBatches(self.batches, self.counter)

    def fetch(self, items: Iterator[Any]) -> Iterator[Any]:
        return items


def indexed_feed(data: Any, group: Group, seed: int, computed_from: int = LARGE) -> IndexedFeed | None:
    """Create the feed for data with indices; ``None`` for other data. A collective.

    Raises:
        ValueError: a torchdata loader over a map-style dataset has loaded its own state.
        TypeError: a list of batches has a loader in it.
    """
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        if getattr(data, "next_iter_state", None) is not None:
            raise ValueError(
                f"{type(data).__name__}.load_state_dict() was called before the loader was prepared, and is lost: the engine "
                "now sets its order; save and load the state of the prepared loader"
            )
        return (SampleFeed if is_a(data.batch_sampler, BatchSampler) else BatchFeed)(data, group, seed, computed_from)
    if not isinstance(data, (list, tuple)) or presharded(data):
        return None
    if holds_loaders(data):
        raise TypeError(
            f"a list of batches has a loader in it: {data!r:.120}. Give loaders that are read side by side as engine.CombinedLoader(loaders, mode)"
        )
    return ListFeed(data, group)


def deal_of(
    order: SampleOrder, units: int, batch: int, window: int, drop_last: bool, limit: int | None
) -> Deal | Shards:
    """Distribute an epoch's ``units`` to the ranks. A collective if each rank has its own units already, since their numbers are exchanged."""
    group = order.group
    if order.sharded:
        return Shards(order.units_of_ranks(units), batch, window, group.rank, drop_last, limit)
    return Deal(units, batch, window, group.world_size, group.rank, drop_last, limit)


def shares_of(deal: Deal | Shards, start: int) -> Iterator[Share]:
    """This rank's share of each micro-batch of samples, from position ``start`` (samples over all ranks) on.

    A window that is not full comes with its units; a full one has none, since all its micro-batches have ``deal.batch`` samples on each rank.
    """
    full = shares(((deal.batch,) * deal.world_size,) * deal.window, deal.rank)
    for _, dealt in deal.windows(start):
        yield from shares(tuple(tuple(map(len, micro)) for micro in dealt), deal.rank) if dealt else full


def counted_batches(
    batches: Iterator[Any],
    deal: Deal | Shards,
    start: int,
    group: Group,
    counter: SampleCounter,
    use: LoaderUse,
    list_length: Iterator[int] | None = None,
) -> Iterator[MicroBatch]:
    """Yield micro-batches whose samples are counted once they are read. ``list_length``: for each, of how many samples it was made."""
    is_whole = deal.world_size * deal.window == 1
    if is_whole and list_length is None and type(counter) is SampleCounter and counter.owner is None:
        return zip(batches, itertools.repeat(WHOLE_WINDOW), strict=False)
    if is_whole or use.evaluates:
        return with_own_sizes(batches, deal, start, counter, list_length)
    return with_exchanged_sizes(batches, deal, start, group, counter, list_length)


def with_own_sizes(
    batches: Iterator[Any],
    deal: Deal | Shards,
    start: int,
    counter: SampleCounter,
    list_length: Iterator[int] | None,
) -> Iterator[MicroBatch]:
    """Yield micro-batches with the sizes that this rank has counted.

    The ranks need not know each other's sizes in an evaluation, nor in windows of one micro-batch on one process.
    """
    repeated = (dealt and not dealt[j][deal.rank] for ranges, dealt in deal.windows(start) for j in range(len(ranges)))
    for batch, is_repeated in zip(batches, repeated, strict=True):
        samples, guess = counter.count(batch, None if list_length is None else next(list_length))
        shares_here = shares(((0 if is_repeated else samples,),), 0)
        yield batch, share_of(shares_here, 0, "" if is_repeated else guess, bool(is_repeated))


def with_exchanged_sizes(
    batches: Iterator[Any],
    deal: Deal | Shards,
    start: int,
    group: Group,
    counter: SampleCounter,
    list_length: Iterator[int] | None = None,
) -> Iterator[MicroBatch]:
    """Yield micro-batches whose sizes are known only once they are read: each window is read ahead, and the ranks exchange its sizes."""
    for ranges, dealt in deal.windows(start):
        window = list(itertools.islice(batches, len(ranges)))
        counts = [counter.count(batch, None if list_length is None else next(list_length)) for batch in window]
        repeated = [bool(dealt) and not micro[deal.rank] for micro in dealt] or [False] * len(ranges)
        sizes = [0 if is_repeated else size for (size, _), is_repeated in zip(counts, repeated, strict=True)]
        rows = gather_row(group, torch.tensor(sizes, dtype=torch.int64)).expand(deal.world_size, -1).t().tolist()
        shares_here = shares(tuple(map(tuple, rows)), deal.rank)
        for j, batch in enumerate(window):
            yield batch, share_of(shares_here, j, "" if repeated[j] else counts[j][1], repeated[j])
