"""Data without indices, distributed to the ranks as it is read."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from engine.data.indexed import Micro
from engine.data.sampler import mixed
from engine.data.stream_position import Source, end_workers, presharded, source_for
from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group
from engine.step.window import shares
from engine.utils.log import warn_once
from engine.utils.seed import isolated
from engine.utils.tree import batch_size


class Stream:
    """Data without indices: an ``IterableDataset``'s loader, a generator, any iterable.

    Every rank reads the stream, which must be the same on all, and keeps each ``world_size``-th batch: after a round of ``world_size``
    batches all are at the same position, so that one rank's state is every rank's, at any world size. The position counts the
    batches of all ranks. Data that is divided already has ``presharded = True`` on it or on its dataset: then each rank has its own
    state, valid for the same world size, and the position counts one rank's batches.

    A window is read ahead, so that its weights are known before its first backward; the ranks exchange their sizes once per window,
    and a rank without more data continues at weight 0 until all are at the end.
    """

    iterator: Iterator[Any] | None = None
    reads_ahead = False
    feistel = False

    def __init__(
        self,
        data: Any,
        group: Group,
        seed: int,
        source: Source | None = None,
        size: Callable[[Any], int | None] = batch_size,
    ) -> None:
        self.data, self.group, self.seed, self.size = data, group, seed, size
        self.presharded = presharded(data)
        self.round = 1 if self.presharded else group.world_size
        self.turn = 0 if self.presharded else group.rank
        self.source = source or source_for(data)
        self.shuffle = self.source.shuffle()
        if self.shuffle is not None and not self.presharded and len(set(gather_json(group, self.shuffle))) > 1:
            raise ValueError(
                "the ranks shuffle this stream differently, and each would keep its batches of another order: give .shuffle() the same seed "
                "on every rank"
            )
        self._begun = self._ended = False
        self._opened: Any = None  # the mark before the current window

    def length(self, limit: int | None) -> int | None:
        try:
            total = len(self.data)
        except TypeError:
            return None
        own = -(-total // self.round)
        return own if limit is None else min(own, limit)

    def advance(self, window: int) -> int:
        return window * self.round

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        usable = state is not None and "source" in state and bool(start) != state.get("carried", False)
        usable = usable and self._whose() == (state["rank"], state["world_size"])
        if start and state is not None and state.get("shuffle") != self.shuffle:
            warn_once(
                "this stream is shuffled in another order than before the resume: samples may be repeated or left out. Give .shuffle() the same seed"
            )
        state = state if usable else None
        self._begun, self._ended = True, state is not None and state["ended"]
        self.source.set_epoch(epoch)
        batches: Iterator[Any] = iter(())
        if not self._ended:
            source = state["source"] if state else None
            batches = self._open(epoch, source if source and self.source.fits(source) else None, start)
        end = None if limit is None else limit * self.round
        return self._windows(batches, start, window, end)

    def _open(self, epoch: int, source: Any, start: int) -> Iterator[Any]:
        with self._apart(epoch, start):
            self.iterator, batches = self.source.begin(source)
        if start and source is None:
            warn_once(
                f"this data cannot be entered in the middle ({self._reason()}): "
                f"{start} batches are read and discarded to get back to the position"
            )
            next(itertools.islice(batches, start - 1, start), None)
        return batches

    def _reason(self) -> str:
        if self.shuffle is not None:
            return "its state does not include its shuffle buffer"
        return "it has no state_dict, or its state was saved with other numbers of workers or ranks"

    def state(self, closed: bool) -> Any:
        """The data's state after the latest window (``closed``), or before it; ``None`` if it has none."""
        if not self._begun:
            return None
        ended = closed and self._ended
        mark = None if ended else self.source.mark() if closed else self._opened
        source = None if mark is None else self.source.state(mark)
        if source is None and not ended and self.shuffle is None:
            return None
        rank, world_size = self._whose()
        shuffle = {} if self.shuffle is None else {"shuffle": self.shuffle}
        return {"source": source, "ended": ended, "rank": rank, "world_size": world_size, **shuffle}

    def opening(self) -> Any:
        return None

    def carry(self) -> Any:
        """The start of the next pass for data that continues across passes; ``None``: it starts again."""
        source = self.source.carry() if self._begun else None
        rank, world_size = self._whose()
        return (
            None
            if source is None
            else {"source": source, "ended": False, "rank": rank, "world_size": world_size, "carried": True}
        )

    def leave(self) -> None:
        self.iterator = None

    def close(self) -> None:
        end_workers(self.iterator)
        self.iterator = None
        self.source.close()

    def _whose(self) -> tuple[int | None, int | None]:
        """The only rank that a state is valid for; ``None`` for all."""
        return (self.group.rank, self.group.world_size) if self.presharded else (None, None)

    @contextlib.contextmanager
    def _apart(self, epoch: int, start: int) -> Iterator[None]:
        """Starting to read may draw random numbers: in the middle of an epoch that has happened before."""
        if self.round == 1 and not start:
            yield
            return
        with isolated():
            if self.round > 1:  # worker processes are seeded here, where ranks differ, but must read the same
                torch.manual_seed(mixed(self.seed, epoch))
            yield

    def _windows(self, batches: Iterator[Any], position: int, window: int, end: int | None) -> Iterator[Micro]:
        spare: Any = _NOTHING
        resumed = position > 0
        while True:
            self._opened = None if self._ended else self.source.mark()
            own = []
            for _ in range(window):
                # A position counts full windows: it is beyond the end when the last one was short.
                count = self.round if end is None else min(self.round, max(0, end - position))
                read = 0
                for batch in itertools.islice(batches, count):
                    if read == self.turn or spare is _NOTHING:
                        spare = batch
                    if read == self.turn:
                        own.append(batch)
                    read += 1
                position += read
                self._ended = self._ended or read < count
                if read < self.round:
                    break
            sizes = self._agree([self.size(b) or 1 for b in own], window)
            if not sizes:
                return
            if (
                spare is _NOTHING and resumed
            ):  # this rank's data was exhausted before: any batch of it works at weight 0
                spare = next(self.source.begin()[1], _NOTHING)
            if spare is _NOTHING:
                raise ValueError(
                    f"rank {self.group.rank} got no batch from {type(self.data).__name__} while other ranks did: give every rank some data"
                )
            for j, share in enumerate(shares(sizes, self.group.rank)):
                yield (own[j] if j < len(own) else spare), share

    def _agree(self, sizes: list[int], window: int) -> tuple[tuple[int, ...], ...]:
        """``[micro-batch][rank]`` sizes of the next window; empty when every rank is at its end."""
        if self.group.world_size == 1:
            return tuple((size,) for size in sizes)
        mine = torch.tensor(sizes + [0] * (window - len(sizes)), dtype=torch.int64)
        every = gather_row(self.group, mine).t().tolist()
        return tuple(tuple(micro) for micro in every if any(micro))


_NOTHING = object()
