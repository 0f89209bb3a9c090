"""Combined batches read in turn, for members without indices: each member is read pass after pass, and reports its position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.data.indexed import Batches, BatchIndices, SampleIndices
from engine.data.sampler import repeated
from engine.data.stream_position import Source, source_for

Feed = SampleIndices | BatchIndices | Batches
_END = object()


class Reader:
    """One member being read: pass after pass."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.iterator: Iterator[Any] | None = None
        self.passes, self.given, self.over = 0, 0, False
        self.start: Any = None

    def next(self) -> Any:
        if self.iterator is None:
            self.iterator = self.open()
        batch = next(self.iterator, _END)
        self.given += batch is not _END
        return batch

    def again(self) -> Any:
        """The first batch of another pass."""
        self.iterator, self.passes, self.given = None, self.passes + 1, 0
        batch = self.next()
        if batch is _END:
            kind = type(self.data).__name__
            raise ValueError(
                f"CombinedLoader: a {kind} yielded no batch when it was read again: it is empty, or can be read only once"
            )
        return batch

    def open(self) -> Iterator[Any]:
        return iter(self.data)

    def mark(self) -> Any:
        return None

    def state(self, mark: Any) -> Any:
        return None


def rows(mode: str, packed: Callable[[list[Any]], Any], readers: Sequence[Reader]) -> Iterator[Any]:
    """Combined batches, from where the readers are."""
    try:
        yield from _one_by_one(readers) if mode == "sequential" else _side_by_side(mode, packed, readers)
    finally:
        for reader in readers:
            reader.iterator = None  # the position stays known, worker processes end


def _one_by_one(readers: Sequence[Reader]) -> Iterator[Any]:
    for reader in readers:
        while not reader.over:
            batch = reader.next()
            reader.over = batch is _END
            if not reader.over:
                yield batch


def _side_by_side(mode: str, packed: Callable[[list[Any]], Any], readers: Sequence[Reader]) -> Iterator[Any]:
    while True:
        row = []
        for reader in readers:
            batch = _END if reader.over and mode == "max_size" else reader.next()
            if batch is _END:
                reader.over = True
                if mode == "min_size" or all(r.over for r in readers):
                    return
                batch = reader.again() if mode == "max_size_cycle" else None
            row.append(batch)
        yield packed(row)


class _IndexedReader(Reader):
    """A member with indices: can start anywhere."""

    def __init__(self, data: Any, feed: Feed, epoch: int) -> None:
        super().__init__(data)
        self.feed, self.epoch = feed, epoch

    def open(self) -> Iterator[Any]:
        cut = self.feed.cut(repeated(self.epoch, self.passes))
        return self.feed.fetch(cut.items(number) for number in range(self.given, cut.batches))


class _StreamReader(Reader):
    """A member that is a stream: starts from its state."""

    def __init__(self, data: Any, source: Source) -> None:
        super().__init__(data)
        self.source = source
        self.begun = False

    def open(self) -> Iterator[Any]:
        state, self.start, self.begun = self.start, None, True
        return self.source.begin(state)[1]

    def mark(self) -> Any:
        return (True, self.source.mark()) if self.begun else (False, self.start)

    def state(self, mark: Any) -> Any:
        begun, position = mark
        return self.source.state(position) if begun and position is not None else position


class Rows(Source):
    """Combined batches read in turn; the state consists of the members' positions."""

    def __init__(
        self,
        data: Any,
        members: Sequence[Any],
        feeds: Sequence[Feed | None],
        mode: str,
        packed: Callable[[list[Any]], Any],
    ) -> None:
        super().__init__(data)
        self.members, self.feeds, self.mode, self.packed = members, feeds, mode, packed
        self.epoch = 0
        self.sources = [None if feed else source_for(member) for feed, member in zip(feeds, members, strict=True)]
        self.buffers = [buffer for source in self.sources if source is not None for buffer in source.buffers]
        self.readers: list[Reader] = []

    def begin(self, state: Any = None) -> tuple[Any, Iterator[Any]]:
        self.readers = [self._reader(index) for index in range(len(self.feeds))]
        for reader, saved in zip(self.readers, state["members"] if state else (), strict=False):
            reader.passes, reader.given, reader.over, reader.start = (
                saved["pass"],
                saved["given"],
                saved["over"],
                saved["state"],
            )
        # Start now, because a resume restores the random numbers that this draws; later members of a sequence start at their turn.
        for reader in [r for r in self.readers if not r.over or self.mode == "max_size_cycle"][
            : 1 if self.mode == "sequential" else None
        ]:
            reader.iterator = reader.open()
        return None, rows(self.mode, self.packed, self.readers)

    def _reader(self, index: int) -> Reader:
        member, feed, source = self.members[index], self.feeds[index], self.sources[index]
        if feed is not None:
            return _IndexedReader(member, feed, self.epoch)
        assert source is not None
        return _StreamReader(member, source)

    def mark(self) -> Any:
        return [(reader.passes, reader.given, reader.over, reader.mark()) for reader in self.readers]

    def state(self, mark: Any) -> dict[str, Any] | None:
        members = [
            {"pass": passes, "given": given, "over": over, "state": reader.state(own)}
            for reader, (passes, given, over, own) in zip(self.readers, mark, strict=True)
        ]
        return {"mode": self.mode, "members": members}

    def fits(self, state: Any) -> bool:
        if state.get("mode") != self.mode or len(state["members"]) != len(self.sources):
            return False
        read = [
            (saved, source)
            for saved, source in zip(state["members"], self.sources, strict=True)
            if saved["given"] and source is not None
        ]
        return all(
            self._done(saved) or (saved["state"] is not None and source.fits(saved["state"])) for saved, source in read
        )

    def _done(self, saved: dict[str, Any]) -> bool:
        return saved["over"] and self.mode != "max_size_cycle"

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for source in self.sources:
            if source is not None:
                source.set_epoch(epoch)

    def close(self) -> None:
        for part in (*self.feeds, *self.sources):
            if part is not None:
                part.close()
