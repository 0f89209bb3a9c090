"""Feeds: sources of an epoch's micro-batches, one class for each kind of user data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset

from engine.data.combined_loaders import CombinedLoader, combined
from engine.data.indexed import Micro, indexed
from engine.data.stream import Stream
from engine.distributed.group import Group


class Feed(Protocol):
    """A source of micro-batches: :class:`~engine.data.indexed.SampleIndices`, :class:`~engine.data.indexed.BatchIndices` and
    :class:`~engine.data.indexed.Batches` of data with indices, :class:`~engine.data.stream.Stream` of other data, and
    :class:`~engine.data.combined_loaders.Indexed` of several loaders."""

    @property
    def reads_ahead(self) -> bool:
        """Whether reading beyond a window's end does not change what a checkpoint there must save."""

    @property
    def feistel(self) -> bool:
        """Whether a shuffle is computed rather than stored; a resume must do the same."""

    def length(self, limit: int | None) -> int | None:
        """Micro-batches of this rank in an epoch; ``None`` when unknown in advance."""

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        """The micro-batches of an epoch from position ``start`` on; ``state`` is the result of :meth:`state` there."""

    def advance(self, window: int) -> int:
        """The increase of the position by a full window."""

    def state(self, closed: bool) -> Any:
        """The state that a resume needs besides the position, after the current window (``closed``) or before it; ``None``: nothing."""

    def opening(self) -> Any:
        """The state needed to start this pass again; ``None``: nothing."""

    def carry(self) -> Any:
        """At the end of a pass, the start of the next one: the state of data that continues across passes; else ``None``."""

    def leave(self) -> None:
        """Release a pass that ends early: worker processes must not wait for the next one."""

    def close(self) -> None:
        """End the data's worker processes."""


def feed_for(data: Any, group: Group, seed: int, feistel: bool = True) -> Feed:
    """The feed for the user's data. A collective.

    Args:
        feistel: whether large shuffles are computed rather than stored (see :mod:`engine.data.permutation`).

    Raises:
        TypeError: it cannot be iterated, or is a dataset without a loader.
    """
    if isinstance(data, CombinedLoader):
        return combined(data, group, seed, feistel)
    found = indexed(data, group, seed, feistel)
    if found is not None:
        return found
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"a loader gives batches, and {type(data).__name__} is a dataset of samples: give DataLoader(dataset, batch_size=32, shuffle=True), "
            "or batch_size=None if its items are batches already"
        )
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"a loader must be iterable (a DataLoader, a list of batches, a generator), got {type(data).__name__}: {data!r:.80}"
        )
    return Stream(data, group, seed)
