"""Feeds: where the micro-batches of an epoch come from, one class for each kind of data that users pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset

from engine.data.combined_loaders import CombinedLoader, combined
from engine.data.indexed import Micro, indexed
from engine.data.stream import Stream
from engine.distributed.group import Group


class Feed(Protocol):
    """A source of micro-batches."""

    @property
    def reads_ahead(self) -> bool:
        """Whether reading beyond a window's end changes nothing that a checkpoint there has to hold."""

    @property
    def feistel(self) -> bool:
        """Whether a shuffle is computed rather than stored; a resume has to do the same."""

    def length(self, limit: int | None) -> int | None:
        """Micro-batches of this rank in an epoch; ``None`` when that is not known beforehand."""

    def micros(self, epoch: int, start: int, window: int, limit: int | None, state: Any = None) -> Iterator[Micro]:
        """The micro-batches of an epoch from position ``start`` on; ``state`` is what :meth:`state` gave there."""

    def advance(self, window: int) -> int:
        """What a full window adds to the position."""

    def state(self, closed: bool) -> Any:
        """What a resume needs besides the position, after the window that is given out (``closed``) or before it; ``None``: nothing."""

    def opening(self) -> Any:
        """What beginning this pass again needs; ``None``: nothing."""

    def carry(self) -> Any:
        """What the next pass begins from, at the end of one: the state of data that counts on from pass to pass; else ``None``."""

    def leave(self) -> None:
        """Let go of a pass that is left early: worker processes are not to wait for the next one."""

    def close(self) -> None:
        """End the data's worker processes."""


def feed_for(data: Any, group: Group, seed: int, feistel: bool = True) -> Feed:
    """The feed for what the user passed. A collective.

    Args:
        feistel: whether large shuffles are computed rather than stored (see :mod:`engine.data.permutation`).

    Raises:
        TypeError: when it cannot be iterated, or is a dataset that has not got a loader.
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
        raise TypeError(f"a loader must be iterable (a DataLoader, a list of batches, a generator), got {type(data).__name__}: {data!r:.80}")
    return Stream(data, group, seed)
