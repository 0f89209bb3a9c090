"""Several loaders read as one: which batches are combined, how the combined batches are distributed to the ranks, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.data.deal import Deal
from engine.data.feed import Feed, LoaderUse, MicroBatch
from engine.data.indexed import IndexedFeed, PassBatches, counted_batches, indexed_feed
from engine.data.order import epoch_of_repetition, mixed
from engine.data.sample_counter import SampleCounter
from engine.data.stream import StreamFeed, StreamReader, mixture_of, reader_for, seeded_stream
from engine.data.user_loaders import flat_loaders, holds_loaders, presharded
from engine.distributed.group import Group
from engine.step.position import Share, shares
from engine.utils.errors import nearest
from engine.utils.sample_count import Count

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_END = object()
"""Returned in place of a batch when a member has no more."""


class CombinedLoader:
    """Loaders that are read together. A combined batch has one batch of each, in a container like the input::

        loader = CombinedLoader({"labelled": a, "unlabelled": b}, "max_size_cycle")

        def training_step(self, batch, batch_idx):
            x, y = batch["labelled"]

    A member yields the same batches as it would alone (each member shuffles in its own order), combined batch ``i`` is the same at any
    world size, and the ranks take turns at whole combined batches. The weight of a scalar loss is the number of samples in the combined
    batch. If every member has indices (a ``DataLoader`` over a map-style dataset, a list of batches), each rank reads only its own batches,
    and resuming costs nothing. If a member is a stream, every rank reads everything, and a resume needs the streams' own states.

    Args:
        loaders: a dict, list or tuple of ``DataLoader``s, lists of batches, or iterables; or of further dicts, lists and tuples with loaders in them.
            One loader alone gives its own batches.
        mode: ``"min_size"`` ends with the shortest member. ``"max_size_cycle"`` ends with the longest, and shorter members start again (in
            another order when they shuffle). ``"max_size"`` ends with the longest, and shorter members yield ``None`` once exhausted.
            ``"sequential"`` reads one member after the other, and ``training_step`` gets the member's batch alone, without its name.

    Raises:
        ValueError: the mode is unknown, or there are no loaders.
        TypeError: a member cannot be iterated.
    """

    def __init__(self, loaders: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ValueError(
                f"CombinedLoader(mode={mode!r}) is unknown{nearest(mode, MODES)}; possible: {', '.join(MODES)}"
            )
        if isinstance(loaders, (str, bytes)):
            raise TypeError(f"CombinedLoader takes loaders, got {type(loaders).__name__}: {loaders!r:.80}")
        self._is_single = not isinstance(loaders, (Mapping, list, tuple))
        if not self._is_single and not loaders:
            raise ValueError(f"CombinedLoader got no loaders: {loaders!r}")
        self.loaders, self.mode = loaders, mode
        self.members: list[Any] = []
        entries = [loaders] if self._is_single else loaders
        named = entries.items() if isinstance(entries, Mapping) else enumerate(entries)
        for name, entry in named:
            for member in flat_loaders(entry):
                if not isinstance(member, Iterable) and not hasattr(member, "__getitem__"):
                    raise TypeError(
                        f"CombinedLoader: {name!r} cannot be iterated: {type(member).__name__}: {member!r:.80}"
                    )
                if isinstance(member, Tensor):
                    raise TypeError(
                        f"CombinedLoader: {name!r} is a batch, not a loader: {type(member).__name__} of shape {tuple(member.shape)}"
                    )
                self.members.append(member)
        self._nested = len(self.members) > len(entries) or any(map(holds_loaders, _entries(entries)))

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a full combined batch; ``None`` if a member does not tell, or in sequential mode if they differ."""
        sizes = [
            size for size in (getattr(member, "batch_size", None) for member in self.members) if isinstance(size, int)
        ]
        if len(sizes) < len(self.members) or (self.mode == "sequential" and len(set(sizes)) > 1):
            return None
        return sizes[0] if self.mode == "sequential" else sum(sizes)

    @property
    def presharded(self) -> bool:
        """True if each rank's members are its own shards of the data already."""
        return all(map(presharded, self.members))

    def __len__(self) -> int:
        """The number of combined batches in a pass of one process."""
        return total(self.mode, [len(member) for member in self.members])

    def __iter__(self) -> Iterator[Any]:
        """Iterate without an engine, in one process and in the members' own orders."""
        return combined_batches(self, [MemberReader(member) for member in self.members])

    def packed(self, batches: list[Any]) -> Any:
        """Put the members' batches into a container like the user's."""
        if self._is_single:
            return batches[0]
        if self._nested:
            return _filled(self.loaders, iter(batches))
        if isinstance(self.loaders, Mapping):
            return dict(zip(self.loaders, batches, strict=True))
        return tuple(batches) if isinstance(self.loaders, tuple) else batches

    def parts(self, batch: Any) -> list[Any]:
        """The members' batches in a combined batch: the opposite of :meth:`packed`."""
        if self._is_single:
            return [batch]
        return _parts(self.loaders, batch) if self._nested else _entries(batch)

    def with_members(self, members: list[Any]) -> CombinedLoader:
        """A loader with other members in the places of these."""
        return CombinedLoader(members[0] if self._is_single else _filled(self.loaders, iter(members)), self.mode)


def _entries(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, Mapping) else container)


def _filled(loaders: Any, items: Iterator[Any], is_top: bool = True) -> Any:
    """Nested containers of loaders, with an item in each loader's place."""
    if not is_top and not holds_loaders(loaders):
        return next(items)
    if isinstance(loaders, Mapping):
        return {name: _filled(entry, items, False) for name, entry in loaders.items()}
    filled = [_filled(entry, items, False) for entry in loaders]
    return tuple(filled) if isinstance(loaders, tuple) else filled


def _parts(loaders: Any, batch: Any, is_top: bool = True) -> list[Any]:
    """The items that :func:`_filled` has put into the loaders' places."""
    if not is_top and not holds_loaders(loaders):
        return [batch]
    pairs = zip(_entries(loaders), _entries(batch), strict=True)
    return [part for entry, item in pairs for part in _parts(entry, item, False)]


def total(mode: str, counts: list[int]) -> int:
    """The number of combined batches; ``counts``: each member's number of batches."""
    if mode == "sequential":
        return sum(counts)
    return min(counts) if mode == "min_size" else max(counts)


def combined_feed(
    loader: CombinedLoader, group: Group, seed: int, computed_from: int, use: LoaderUse
) -> CombinedFeed | StreamFeed:
    """Create the feed of a combined loader. A collective.

    Raises:
        ValueError: only some members are divided among the ranks already.
    """
    # Each member has a seed of its own: with one seed, two members of the same length would be shuffled alike.
    feeds = [
        indexed_feed(member, group, mixed(seed, index + 1), computed_from)
        for index, member in enumerate(loader.members)
    ]
    indexed_feeds = [feed for feed in feeds if feed is not None]
    if any(feed is None and mixture_of(member) is not None for feed, member in zip(feeds, loader.members, strict=True)):
        loader = loader.with_members(
            [
                seeded_stream(member, mixed(seed, index + 1)) if feeds[index] is None else member
                for index, member in enumerate(loader.members)
            ]
        )
    are_presharded = [presharded(member) for member in loader.members]
    if any(are_presharded) and not all(are_presharded):
        raise ValueError(
            "CombinedLoader: some of the loaders are presharded, others are not; make all or none of them presharded"
        )
    for feed in indexed_feeds:
        feed.use = use
        if not are_presharded[0] and feed.order is not None and feed.order.sharded:
            raise ValueError(
                f"CombinedLoader: {type(feed.order.sampler).__name__} divides the data among the ranks already, but here whole combined "
                "batches are distributed: give this member a plain sampler"
            )
    if len(indexed_feeds) == len(feeds) and not are_presharded[0]:
        return CombinedFeed(loader, indexed_feeds, group, use)
    return StreamFeed(loader, group, seed, CombinedReader(loader, feeds), use)


class CombinedCounter(SampleCounter):
    """Counts the samples of combined batches: those of the members' batches together, unless the user counts."""

    def __init__(self, loader: CombinedLoader) -> None:
        super().__init__(loader)
        self.loader = loader
        self.members = [SampleCounter(member) for member in loader.members]
        sizes = [getattr(member, "batch_size", None) for member in loader.members]
        self.sizes = [size if isinstance(size, int) else None for size in sizes]

    def count(self, batch: Any, list_length: int | None = None) -> Count:
        if self.owner is not None or self.loader.mode == "sequential":
            return super().count(batch, list_length)
        return total_count(self.count_member(index, part) for index, part in enumerate(self.loader.parts(batch)))

    def count_member(self, index: int, part: Any) -> Count:
        """The number of samples in a member's batch, which is ``None`` if the member has ended."""
        return (0, "") if part is None else self.members[index].count(part, self.sizes[index])


def total_count(counts: Iterable[Count]) -> Count:
    """The sum of counts; a guess if one of them is."""
    rows = list(counts)
    return sum(samples for samples, _ in rows), next((guess for _, guess in rows if guess), "")


# -- all members have indices: reading can start at any position of the combination -------------------------------------------------------------


class MemberPasses:
    """The batches of a member with indices, numbered consecutively over its passes in one epoch of the combination."""

    def __init__(self, feed: IndexedFeed) -> None:
        self.feed = feed
        self.epoch, self.count = 0, 0
        self.passes: dict[int, PassBatches] = {}
        """Recent passes by their number in the epoch."""
        self.drawn_by_all_ranks = feed.order is not None and feed.order.drawn_by_all_ranks
        self.start_state: Any = None
        """The state needed to draw this epoch's first pass again."""
        self.repetitions = 1
        """The number of passes in each epoch of the combination."""

    def begin(self, epoch: int, state: Any) -> int:
        """Start an epoch of the combination, and return the number of batches in one pass of this member."""
        self.epoch, self.passes = epoch, {}
        self.feed.tell_epoch(epoch)
        if self.feed.order is not None:
            self.feed.order.enter(state)
        self.count = self.batches_of(0).count
        self.start_state = self.feed.state(after_window=True)
        return self.count

    def draw(self, last: int) -> None:
        """Draw the orders of the first ``last`` passes now, if that is a collective: later each rank reads at another position. The passes of data
        that orders itself are numbered through, from epoch to epoch."""
        if self.feed.drawn is not None and last != self.repetitions:
            self.repetitions, self.passes = last, {}
        if self.drawn_by_all_ranks:
            for number in range(last):  # also passes before the position of a resume: a sampler may count its passes
                self.batches_of(number)

    def batches_of(self, number: int) -> PassBatches:
        """The batches of pass ``number`` within the epoch."""
        if number not in self.passes:
            if len(self.passes) > 2 and not self.drawn_by_all_ranks:
                # The loader's workers are at most one pass ahead of the computed shares.
                del self.passes[min(self.passes)]
            self.passes[number] = self.feed.pass_batches(self.epoch_of(number))
        return self.passes[number]

    def epoch_of(self, number: int) -> int:
        """The epoch whose order is used by pass ``number`` within the epoch of the combination."""
        if self.feed.drawn is not None:
            return self.epoch * self.repetitions + number
        return epoch_of_repetition(self.epoch, number)

    def place_of(self, epoch: int, number: int) -> tuple[int, int]:
        """The epoch of this member's own, and the position in it, before its batch ``number`` of an epoch of the combination."""
        count = self.count or self.feed.batches_in_pass() or 1
        passes, batches = divmod(number, count)
        if passes == self.repetitions:  # the end of the last pass
            passes, batches = passes - 1, count
        return epoch * self.repetitions + passes, min(batches * self.feed.units_in_batch, self.feed.units or 0)

    def size(self, number: int) -> int:
        """The number of samples in batch ``number``, counted over the epoch's passes."""
        batches = self.batches_of(number // self.count)
        return batches.size(number % self.count % batches.count)

    def fetch(self, numbers: Iterator[int]) -> Iterator[Any]:
        return self.feed.fetch(self._items(numbers))

    def _items(self, numbers: Iterator[int]) -> Iterator[Any]:
        for number in numbers:
            batches = self.batches_of(number // self.count)
            yield batches.items(number % self.count % batches.count)  # a user's sampler may draw fewer in a later pass


class CombinedFeed(Feed):
    """The feed of a combination of members with indices. A position counts combined batches of all ranks."""

    without_units = "several loaders"

    def __init__(self, loader: CombinedLoader, feeds: Sequence[IndexedFeed], group: Group, use: LoaderUse) -> None:
        self.loader, self.group, self.feeds, self.use = loader, group, feeds, use
        self.counter = CombinedCounter(loader)
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

    @property
    def has_draws(self) -> bool:
        return any(feed.drawn is not None for feed in self.feeds)

    def draws_state(self, epoch: int, position: int) -> Any:
        if not self.has_draws:
            return None
        counts = [feed.batches_in_pass() or 0 for feed in self.feeds]
        states = []
        for index, member in enumerate(self.members):
            number = position
            if self.loader.mode == "sequential":
                number = max(0, position - sum(counts[:index]))
            if self.loader.mode != "max_size_cycle":
                number = min(number, counts[index])
            states.append(member.feed.draws_state(*member.place_of(epoch, number)))
        return {"members": states}

    def continue_draws(self, state: Any) -> None:
        for feed, saved in zip(self.feeds, state["members"], strict=True):
            if feed.drawn is None or saved is None:
                continue
            changes = feed.drawn.changes_since(saved)
            if changes and self.loader.mode == "max_size_cycle":
                raise ValueError(
                    f"CombinedLoader(mode='max_size_cycle') starts its members again within an epoch, so a mixture in it cannot change at a resume: "
                    f"{'; '.join(changes)}. Give the mixture as it was, or use another mode"
                )
            feed.continue_draws(saved)

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
        self.counter.follow(self.use.owner)
        if self.counter.owner is not None or not all(feed.sized for feed in self.feeds):
            return counted_batches(batches, deal, start, self.group, self.counter, self.use)
        return zip(batches, self._shares(deal, start), strict=True)

    def _side_by_side(self, deal: Deal, start: int) -> Iterator[Any]:
        """Read this rank's combined batches when each has one batch of every member."""
        cycles = self.loader.mode == "max_size_cycle"
        ends = [deal.used if cycles else min(member.count, deal.used) for member in self.members]
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
        """Read this rank's batches in sequential mode, one member after the other."""

        def batches_of_member(index: int) -> Iterator[Any]:
            member_start = self.offsets[index]
            numbers = _rank_numbers(deal, start, member_start, self.offsets[index + 1])
            return self.members[index].fetch(number - member_start for number in numbers)

        def read() -> Iterator[Any]:
            for number in numbers:
                index = self._member_of(number)
                if index not in readers:
                    readers[index] = batches_of_member(index)
                yield next(readers[index])

        numbers = _rank_numbers(deal, start, 0, deal.used)
        first = next(_rank_numbers(deal, start, 0, deal.used), None)
        readers: dict[int, Iterator[Any]] = {}
        previous = start - deal.world_size + deal.rank  # this rank's last batch before the start
        # Creating an iterator draws a random number, so it has to happen where the run without a stop did it: the first member's at once, a later
        # one's at its turn, which a resume that starts with that member's first batch still has before it.
        if first is not None and (not start or self._member_of(previous) == self._member_of(first)):
            readers[self._member_of(first)] = batches_of_member(self._member_of(first))
        return read()

    def _member_of(self, number: int) -> int:
        """The index of the member that has batch ``number`` in sequential mode."""
        return next(i for i in range(len(self.members)) if number < self.offsets[i + 1])

    def _size(self, number: int) -> int:
        mode = self.loader.mode
        if mode == "sequential":
            index = self._member_of(number)
            return self.members[index].size(number - self.offsets[index])
        return sum(member.size(number) for member in self.members if mode == "max_size_cycle" or number < member.count)

    def _shares(self, deal: Deal, start: int) -> Iterator[Share]:
        """Yield this rank's share of each combined batch, from position ``start`` on."""
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
    """The numbers of this rank's units from ``start`` on that lie in [low, high), without iterating over the others."""
    full = deal.round * deal.window
    first = start + max(0, low - start) // full * full
    short = start + max(0, deal.used - start) // full * full
    # In the last, short window a rank without units of its own may repeat a unit with any number.
    stop = min(high, short)
    for _, (ranges, _) in zip(range(first, stop, full), deal.windows(first), strict=False):
        yield from (part.start for part in ranges if low <= part.start < high)
    for ranges, _ in deal.windows(short):
        yield from (part.start for part in ranges if low <= part.start < high)


# -- some member has no indices: each member is read pass after pass, and reports its position --------------------------------------------------


class MemberReader:
    """Reads one member, pass after pass."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.iterator: Iterator[Any] | None = None
        self.passes, self.count, self.over = 0, 0, False
        """The number of earlier passes, of batches read in the current pass, and whether the current pass has ended."""
        self.start: Any = None
        """The state from which to start reading; ``None``: from the beginning."""

    def next(self) -> Any:
        """Return the next batch of the current pass, or ``_END``."""
        if self.iterator is None:
            self.iterator = self.open()
        batch = next(self.iterator, _END)
        self.count += batch is not _END
        return batch

    def first_batch_of_next_pass(self) -> Any:
        """Start another pass, and return its first batch."""
        self.iterator, self.passes, self.count = None, self.passes + 1, 0
        batch = self.next()
        if batch is _END:
            kind = type(self.data).__name__
            raise ValueError(
                f"CombinedLoader: a {kind} yielded no batch when it was read again: it is empty, or can be read only once"
            )
        return batch

    def open(self) -> Iterator[Any]:
        """Start reading at the current position."""
        return iter(self.data)

    def position(self) -> Any:
        """The position in the current pass, besides the number of batches read; ``None``: that number suffices."""
        return None

    def state(self, position: Any) -> Any:
        """A :meth:`position` as a tree of plain values."""
        return None


class IndexedMember(MemberReader):
    """Reads a member with indices, which can start at any batch."""

    def __init__(self, data: Any, feed: IndexedFeed, epoch: int) -> None:
        super().__init__(data)
        self.feed, self.epoch = feed, epoch

    def open(self) -> Iterator[Any]:
        saved, self.start = self.start, None
        if saved is not None and self.feed.drawn is not None:
            self.feed.continue_draws(saved)
        batches = self.feed.pass_batches(epoch_of_repetition(self.epoch, self.passes))
        return self.feed.fetch(batches.items(number) for number in range(self.count, batches.count))

    def position(self) -> Any:
        feed = self.feed
        if feed.drawn is None:
            return None
        epoch = epoch_of_repetition(self.epoch, self.passes)
        return feed.draws_state(epoch, min(self.count * feed.units_in_batch, feed.units or 0))

    def state(self, position: Any) -> Any:
        return position


class StreamMember(MemberReader):
    """Reads a member that is a stream, from a saved state or from the beginning."""

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
    """Yield the combined batches from the readers' positions on."""
    try:
        yield from _one_by_one(readers) if loader.mode == "sequential" else _side_by_side(loader, readers)
    finally:
        for reader in readers:
            reader.iterator = None  # ends worker processes; the position stays known


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
    """Reads combined batches one after the other. Its state consists of the members' positions.

    Args:
        feeds: for each member its feed if it has indices; ``None`` for a stream.
    """

    def __init__(self, loader: CombinedLoader, feeds: Sequence[IndexedFeed | None]) -> None:
        super().__init__(loader)
        self.loader, self.feeds = loader, feeds
        self.epoch = 0
        self.sources = [
            reader_for(member) if feed is None else None for feed, member in zip(feeds, loader.members, strict=True)
        ]
        self.buffers = [buffer for source in self.sources if source is not None for buffer in source.buffers]
        self.counter: CombinedCounter = CombinedCounter(loader)
        self.readers: list[MemberReader] = []

    def count(self, batch: Any) -> Count:
        if self.counter.owner is not None:
            return self.counter.count(batch)
        if self.loader.mode == "sequential":
            index = next((index for index, reader in enumerate(self.readers) if not reader.over), -1)
            return self._count_member(index, batch)
        return total_count(self._count_member(index, part) for index, part in enumerate(self.loader.parts(batch)))

    def _count_member(self, index: int, part: Any) -> Count:
        source = self.sources[index]
        return self.counter.count_member(index, part) if source is None or part is None else source.count(part)

    def is_compared(self) -> bool:
        return all(source is None or source.is_compared() for source in self.sources)

    def compared(self, batch: Any) -> Any:
        # Members with indices are the same on all ranks, and may be augmented by each in its own way.
        if self.loader.mode == "sequential":
            return None if None in self.sources else batch
        parts = zip(self.loader.parts(batch), self.sources, strict=True)
        return [part for part, source in parts if source is not None]

    def separate_workers(self, group: Group) -> None:
        for source in self.sources:
            if source is not None:
                source.separate_workers(group)

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        self.readers = [self._reader(index) for index in range(len(self.feeds))]
        for reader, saved in zip(self.readers, state["members"] if state else (), strict=False):
            reader.passes, reader.count = saved["pass"], saved["given"]
            reader.over, reader.start = saved["over"], saved["state"]
        # Start reading now, because a resume restores the random state that this changes; later members of a sequence start at their turn.
        cycles, sequential = self.loader.mode == "max_size_cycle", self.loader.mode == "sequential"
        for reader in [r for r in self.readers if not r.over or cycles][: 1 if sequential else None]:
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
        members_read = [
            (saved, source)
            for saved, source in zip(state["members"], self.sources, strict=True)
            if saved["given"] and source is not None
        ]
        return all(
            self._is_finished(saved) or (saved["state"] is not None and source.accepts(saved["state"]))
            for saved, source in members_read
        )

    def _is_finished(self, saved: dict[str, Any]) -> bool:
        return saved["over"] and self.loader.mode != "max_size_cycle"

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for source, feed in zip(self.sources, self.feeds, strict=True):
            if source is not None:
                source.set_epoch(epoch)
            if feed is not None:
                feed.tell_epoch(epoch)

    def close(self) -> None:
        for part in (*self.feeds, *self.sources):
            if part is not None:
                part.close()
