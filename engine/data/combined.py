"""Several loaders as one: which batches are combined, how they are distributed to the ranks, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from engine.data.deal import Deal
from engine.data.feed import Feed, MicroBatch
from engine.data.indexed import Cut, IndexedFeed, indexed_feed, with_exchanged_sizes
from engine.data.order import epoch_of_repetition, mixed
from engine.data.stream import StreamFeed, StreamReader, reader_for
from engine.data.user_loaders import presharded
from engine.distributed.group import Group
from engine.step.window import Share, shares
from engine.utils.errors import nearest
from engine.utils.tree import batch_size

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_END = object()
"""Stands for the batch of a member that has ended."""


class CombinedLoader:
    """Loaders that are read together. A batch has one batch of each, in a dict or list like the input::

        loader = CombinedLoader({"labelled": a, "unlabelled": b}, "max_size_cycle")

        def training_step(self, batch, batch_idx):
            x, y = batch["labelled"]

    The order is exact: a member yields the same batches as alone (each member shuffles in its own order), batch ``i`` of
    the combination is the same at any world size, and the ranks get whole combined batches in turn. The weight of a scalar loss is the
    number of samples in the combined batch. When every member has indices (a ``DataLoader`` over a map-style dataset, a list of batches),
    each rank reads only its own batches, and resuming costs nothing. When one is a stream, every rank reads everything, and a resume uses
    the streams' own states.

    Args:
        loaders: a dict, list or tuple of ``DataLoader``s, lists of batches, or iterables.
        mode: ``"min_size"`` ends with the shortest; ``"max_size_cycle"`` with the longest, the others start again (in another order when
            they shuffle); ``"max_size"`` with the longest, the others yield ``None`` when they are exhausted; ``"sequential"`` reads one
            after the other, and ``training_step`` gets the member's batch alone, without its name.

    Raises:
        ValueError: an unknown mode, or no loaders.
        TypeError: a member cannot be iterated.
    """

    def __init__(self, loaders: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ValueError(
                f"CombinedLoader(mode={mode!r}) is unknown{nearest(mode, MODES)}; possible: {', '.join(MODES)}"
            )
        if not isinstance(loaders, (Mapping, list, tuple)):
            raise TypeError(
                f"CombinedLoader takes a dict, list or tuple of loaders, got {type(loaders).__name__}: {loaders!r:.80}"
            )
        if not loaders:
            raise ValueError(f"CombinedLoader got no loaders: {loaders!r}")
        self.loaders, self.mode = loaders, mode
        self.members: list[Any] = list(loaders.values() if isinstance(loaders, Mapping) else loaders)
        for index, member in zip(
            loaders if isinstance(loaders, Mapping) else range(len(loaders)), self.members, strict=True
        ):
            if not isinstance(member, Iterable) and not hasattr(member, "__getitem__"):
                raise TypeError(
                    f"CombinedLoader: {index!r} cannot be iterated: {type(member).__name__}: {member!r:.80}"
                )

    @property
    def batch_size(self) -> int | None:
        """Samples in a full combined batch; ``None`` when the members do not know, or differ in sequential mode."""
        sizes = [
            size for size in (getattr(member, "batch_size", None) for member in self.members) if isinstance(size, int)
        ]
        if len(sizes) < len(self.members) or (self.mode == "sequential" and len(set(sizes)) > 1):
            return None
        return sizes[0] if self.mode == "sequential" else sum(sizes)

    @property
    def presharded(self) -> bool:
        """True if each rank has its own share of every member already."""
        return all(map(presharded, self.members))

    def __len__(self) -> int:
        """Combined batches in a pass of one process."""
        return total(self.mode, [len(member) for member in self.members])

    def __iter__(self) -> Iterator[Any]:
        """Iterate without an engine: one process, the members' own orders."""
        return combined_batches(self, [MemberReader(member) for member in self.members])

    def packed(self, batches: list[Any]) -> Any:
        """The members' batches in a container like the user's."""
        if isinstance(self.loaders, Mapping):
            return dict(zip(self.loaders, batches, strict=True))
        return tuple(batches) if isinstance(self.loaders, tuple) else batches


def total(mode: str, counts: list[int]) -> int:
    """Combined batches, from the members' numbers of batches."""
    if mode == "sequential":
        return sum(counts)
    return min(counts) if mode == "min_size" else max(counts)


def combined_feed(loader: CombinedLoader, group: Group, seed: int, feistel: bool = True) -> CombinedFeed | StreamFeed:
    """The feed of a combination. A collective.

    Raises:
        ValueError: only some members are divided among the ranks already.
    """
    # A seed for each: two members of one length would be shuffled alike.
    feeds = [
        indexed_feed(member, group, mixed(seed, index + 1), feistel) for index, member in enumerate(loader.members)
    ]
    with_indices = [feed for feed in feeds if feed is not None]
    divided = [presharded(member) for member in loader.members]
    if any(divided) and not all(divided):
        raise ValueError(
            "CombinedLoader: some of the loaders are presharded, others are not; make all or none of them presharded"
        )
    for feed in with_indices:
        if not divided[0] and feed.order is not None and feed.order.sharded:
            raise ValueError(
                f"CombinedLoader: {type(feed.order.sampler).__name__} divides the data among the ranks already, but here whole combined "
                "batches are distributed: give this member a plain sampler"
            )
    if len(with_indices) == len(feeds) and not divided[0]:
        return CombinedFeed(loader, with_indices, group)
    return StreamFeed(loader, group, seed, CombinedReader(loader, feeds))


def _samples(loader: CombinedLoader, batch: Any) -> int:
    """The number of samples in a combined batch."""
    if loader.mode == "sequential":
        return batch_size(batch) or 1
    parts = batch.values() if isinstance(batch, dict) else batch
    return sum(batch_size(part) or 1 for part in parts if part is not None)


# -- all members have indices: any position of the combination is entered directly --------------------------------------------------------------


class MemberPasses:
    """A member's batches, numbered consecutively over its passes in one epoch of the combination."""

    def __init__(self, feed: IndexedFeed) -> None:
        self.feed = feed
        self.epoch, self.count = 0, 0
        self.cuts: dict[int, Cut] = {}
        self.drawn_by_all_ranks = feed.order is not None and feed.order.drawn_by_all_ranks
        self.start_state: Any = None
        """The state needed to draw this epoch's first pass again."""

    def begin(self, epoch: int, state: Any) -> int:
        """Start an epoch of the combination; the result is the number of batches in one pass."""
        self.epoch, self.cuts = epoch, {}
        if self.feed.order is not None:
            self.feed.order.enter(state)
        self.count = self.cut(0).batches
        self.start_state = self.feed.state(after_window=True)
        return self.count

    def draw(self, last: int) -> None:
        """Prepare passes that the ranks must draw together: later, each rank's workers are at another position."""
        if self.drawn_by_all_ranks:
            for number in range(last):  # also those before a resume's position: a sampler may count its passes
                self.cut(number)

    def cut(self, number: int) -> Cut:
        if number not in self.cuts:
            if len(self.cuts) > 2 and not self.drawn_by_all_ranks:
                del self.cuts[min(self.cuts)]  # the workers read at most one pass ahead of the weights
            self.cuts[number] = self.feed.cut(epoch_of_repetition(self.epoch, number))
        return self.cuts[number]

    def size(self, number: int) -> int:
        cut = self.cut(number // self.count)
        return cut.size(number % self.count % cut.batches)

    def fetch(self, numbers: Iterator[int]) -> Iterator[Any]:
        return self.feed.fetch(self._items(numbers))

    def _items(self, numbers: Iterator[int]) -> Iterator[Any]:
        for number in numbers:
            cut = self.cut(number // self.count)
            yield cut.items(number % self.count % cut.batches)  # a user's sampler may draw fewer in a later pass


class CombinedFeed(Feed):
    """The combination of members with indices. The position counts combined batches of all ranks."""

    def __init__(self, loader: CombinedLoader, feeds: Sequence[IndexedFeed], group: Group) -> None:
        self.loader, self.group, self.feeds = loader, group, feeds
        self.members = [MemberPasses(feed) for feed in feeds]
        self.reads_ahead = all(feed.reads_ahead for feed in feeds)
        self.offsets: list[int] = []

    @property
    def feistel(self) -> bool:
        return any(feed.feistel for feed in self.feeds)

    def length(self, limit: int | None) -> int | None:
        counts = [feed.batches_in_pass() for feed in self.feeds]
        known_counts = [count for count in counts if count is not None]
        return (
            len(self._deal(total(self.loader.mode, known_counts), 1, limit))
            if len(known_counts) == len(counts)
            else None
        )

    def stride(self, window: int) -> int:
        return self.group.world_size * window

    def state(self, after_window: bool) -> Any:
        return _orders([member.start_state for member in self.members])

    def start_state(self) -> Any:
        return self.state(after_window=False)

    def next_pass_state(self) -> Any:
        return _orders([feed.next_pass_state() for feed in self.feeds])

    def stop_pass(self) -> None:
        for feed in self.feeds:
            feed.stop_pass()

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()

    def _deal(self, units: int, window: int, limit: int | None) -> Deal:
        return Deal(units, 1, window, self.group.world_size, self.group.rank, limit=limit)

    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        mode = self.loader.mode
        orders = state["orders"] if state is not None else [None] * len(self.members)
        counts = [member.begin(epoch, order) for member, order in zip(self.members, orders, strict=True)]
        self.offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
        deal = self._deal(total(mode, counts), window, limit)
        if mode == "max_size_cycle" and deal.used:
            if not all(counts):
                empty = self.loader.members[counts.index(0)]
                raise ValueError(
                    f"CombinedLoader: a {type(empty).__name__} is empty and cannot be read again; leave it out, or use mode='max_size'"
                )
            for member in self.members:
                member.draw(-(-deal.used // member.count))
        batches = self._one_by_one(deal, start) if mode == "sequential" else self._side_by_side(deal, start)
        if not all(feed.sized for feed in self.feeds):
            return with_exchanged_sizes(batches, deal, start, self.group, partial(_samples, self.loader))
        return zip(batches, self._shares(deal, start), strict=True)

    def _side_by_side(self, deal: Deal, start: int) -> Iterator[Any]:
        cycle = self.loader.mode == "max_size_cycle"
        ends = [deal.used if cycle else min(member.count, deal.used) for member in self.members]
        parts = [
            member.fetch(_rank_numbers(deal, start, 0, end)) if end else iter(())
            for member, end in zip(self.members, ends, strict=True)
        ]
        return self._packed(deal, start, ends, parts)

    def _packed(self, deal: Deal, start: int, ends: list[int], parts: list[Iterator[Any]]) -> Iterator[Any]:
        for number in _rank_numbers(deal, start, 0, deal.used):
            yield self.loader.packed(
                [next(part) if number < end else None for part, end in zip(parts, ends, strict=True)]
            )

    def _one_by_one(self, deal: Deal, start: int) -> Iterator[Any]:
        def opened(index: int) -> Iterator[Any]:
            low = self.offsets[index]
            numbers = _rank_numbers(deal, start, low, self.offsets[index + 1])
            return self.members[index].fetch(number - low for number in numbers)

        def read() -> Iterator[Any]:
            for number in numbers:
                index = self._member_of(number)
                if index not in parts:
                    parts[index] = opened(index)
                yield next(parts[index])

        numbers = _rank_numbers(deal, start, 0, deal.used)
        first = next(_rank_numbers(deal, start, 0, deal.used), None)
        parts: dict[int, Iterator[Any]] = {}
        previous = start - deal.world_size + deal.rank  # this rank's last batch before the start
        # Now, as any loader's iterator is created when a pass starts. A later member's is created at its turn: its random number is still to be
        # drawn where a resume starts with that member's first batch.
        if first is not None and (not start or self._member_of(previous) == self._member_of(first)):
            parts[self._member_of(first)] = opened(self._member_of(first))
        return read()

    def _member_of(self, number: int) -> int:
        return next(i for i in range(len(self.members)) if number < self.offsets[i + 1])

    def _size(self, number: int) -> int:
        mode = self.loader.mode
        if mode == "sequential":
            index = self._member_of(number)
            return self.members[index].size(number - self.offsets[index])
        return sum(member.size(number) for member in self.members if mode == "max_size_cycle" or number < member.count)

    def _shares(self, deal: Deal, start: int) -> Iterator[Share]:
        ranks = deal.world_size
        bases = range(start, deal.used, ranks * deal.window)
        for base, (ranges, dealt) in zip(bases, deal.windows(start), strict=True):
            if dealt:
                sizes = tuple(tuple(self._size(part.start) if part else 0 for part in micro) for micro in dealt)
            else:
                sizes = tuple(tuple(self._size(base + j * ranks + r) for r in range(ranks)) for j in range(len(ranges)))
            yield from shares(sizes, deal.rank)


def _orders(states: list[Any]) -> dict[str, Any] | None:
    return {"orders": states} if any(state is not None for state in states) else None


def _rank_numbers(deal: Deal, start: int, low: int, high: int) -> Iterator[int]:
    """This rank's numbers from ``start`` on, only those in [low, high), without iterating over the rest."""
    full = deal.round * deal.window
    first = start + max(0, low - start) // full * full
    short = start + max(0, deal.used - start) // full * full
    # In the last, short window any number may be a rank's, which repeats one when it has none.
    stop = min(high, short)
    for _, (ranges, _) in zip(range(first, stop, full), deal.windows(first), strict=False):
        yield from (part.start for part in ranges if low <= part.start < high)
    for ranges, _ in deal.windows(short):
        yield from (part.start for part in ranges if low <= part.start < high)


# -- a member has no indices: each member is read pass after pass, and reports its position -----------------------------------------------------


class MemberReader:
    """Reads one member, pass after pass."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.iterator: Iterator[Any] | None = None
        self.passes, self.count, self.over = 0, 0, False
        """Earlier passes, batches read in this one, and whether it has ended."""
        self.start: Any = None
        """The state from which the next pass starts."""

    def next(self) -> Any:
        """The next batch of this pass, or ``_END``."""
        if self.iterator is None:
            self.iterator = self.open()
        batch = next(self.iterator, _END)
        self.count += batch is not _END
        return batch

    def first_batch_of_next_pass(self) -> Any:
        """The first batch of another pass."""
        self.iterator, self.passes, self.count = None, self.passes + 1, 0
        batch = self.next()
        if batch is _END:
            kind = type(self.data).__name__
            raise ValueError(
                f"CombinedLoader: a {kind} yielded no batch when it was read again: it is empty, or can be read only once"
            )
        return batch

    def open(self) -> Iterator[Any]:
        """Start to read where the position says."""
        return iter(self.data)

    def position(self) -> Any:
        """The place in this pass, besides the number of batches."""
        return None

    def state(self, position: Any) -> Any:
        """A :meth:`position` as a tree of plain values."""
        return None


class IndexedMember(MemberReader):
    """A member with indices: can start anywhere."""

    def __init__(self, data: Any, feed: IndexedFeed, epoch: int) -> None:
        super().__init__(data)
        self.feed, self.epoch = feed, epoch

    def open(self) -> Iterator[Any]:
        cut = self.feed.cut(epoch_of_repetition(self.epoch, self.passes))
        return self.feed.fetch(cut.items(number) for number in range(self.count, cut.batches))


class StreamMember(MemberReader):
    """A member that is a stream: starts from its state."""

    def __init__(self, data: Any, reader: StreamReader) -> None:
        super().__init__(data)
        self.reader = reader
        self.begun = False

    def open(self) -> Iterator[Any]:
        state, self.start, self.begun = self.start, None, True
        return self.reader.begin(state)[1]

    def position(self) -> Any:
        return (True, self.reader.position()) if self.begun else (False, self.start)

    def state(self, position: Any) -> Any:
        begun, place = position
        return self.reader.state(place) if begun and place is not None else place


def combined_batches(loader: CombinedLoader, readers: Sequence[MemberReader]) -> Iterator[Any]:
    """The combined batches, from where the readers are."""
    try:
        yield from _one_by_one(readers) if loader.mode == "sequential" else _side_by_side(loader, readers)
    finally:
        for reader in readers:
            reader.iterator = None  # the position stays known, worker processes end


def _one_by_one(readers: Sequence[MemberReader]) -> Iterator[Any]:
    for reader in readers:
        while not reader.over:
            batch = reader.next()
            reader.over = batch is _END
            if not reader.over:
                yield batch


def _side_by_side(loader: CombinedLoader, readers: Sequence[MemberReader]) -> Iterator[Any]:
    mode = loader.mode
    while True:
        row = []
        for reader in readers:
            batch = _END if reader.over and mode == "max_size" else reader.next()
            if batch is _END:
                reader.over = True
                if mode == "min_size" or all(r.over for r in readers):
                    return
                batch = reader.first_batch_of_next_pass() if mode == "max_size_cycle" else None
            row.append(batch)
        yield loader.packed(row)


class CombinedReader(StreamReader):
    """Reads combined batches in turn; the state consists of the members' positions.

    Args:
        feeds: of the members that have indices; ``None``: a stream.
    """

    def __init__(self, loader: CombinedLoader, feeds: Sequence[IndexedFeed | None]) -> None:
        super().__init__(loader)
        self.loader, self.feeds = loader, feeds
        self.epoch = 0
        self.sources = [
            reader_for(member) if feed is None else None for feed, member in zip(feeds, loader.members, strict=True)
        ]
        self.buffers = [buffer for source in self.sources if source is not None for buffer in source.buffers]
        self.readers: list[MemberReader] = []

    def samples(self, batch: Any) -> int:
        return _samples(self.loader, batch)

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        self.readers = [self._reader(index) for index in range(len(self.feeds))]
        for reader, saved in zip(self.readers, state["members"] if state else (), strict=False):
            reader.passes, reader.count = saved["pass"], saved["given"]
            reader.over, reader.start = saved["over"], saved["state"]
        # Start now, because a resume restores the random numbers that this draws; later members of a sequence start at their turn.
        cycle, sequential = self.loader.mode == "max_size_cycle", self.loader.mode == "sequential"
        for reader in [r for r in self.readers if not r.over or cycle][: 1 if sequential else None]:
            reader.iterator = reader.open()
        return None, combined_batches(self.loader, self.readers)

    def _reader(self, index: int) -> MemberReader:
        member, feed, source = self.loader.members[index], self.feeds[index], self.sources[index]
        if feed is not None:
            return IndexedMember(member, feed, self.epoch)
        assert source is not None
        return StreamMember(member, source)

    def position(self) -> Any:
        return [(reader.passes, reader.count, reader.over, reader.position()) for reader in self.readers]

    def state(self, position: Any) -> dict[str, Any] | None:
        members = [
            {"pass": passes, "given": count, "over": over, "state": reader.state(place)}
            for reader, (passes, count, over, place) in zip(self.readers, position, strict=True)
        ]
        return {"mode": self.loader.mode, "members": members}

    def accepts(self, state: Any) -> bool:
        if state.get("mode") != self.loader.mode or len(state["members"]) != len(self.sources):
            return False
        read = [
            (saved, source)
            for saved, source in zip(state["members"], self.sources, strict=True)
            if saved["given"] and source is not None
        ]
        return all(
            self._is_finished(saved) or (saved["state"] is not None and source.accepts(saved["state"]))
            for saved, source in read
        )

    def _is_finished(self, saved: dict[str, Any]) -> bool:
        return saved["over"] and self.loader.mode != "max_size_cycle"

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for source in self.sources:
            if source is not None:
                source.set_epoch(epoch)

    def close(self) -> None:
        for part in (*self.feeds, *self.sources):
            if part is not None:
                part.close()
