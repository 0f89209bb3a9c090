"""The base class of what gives a rank its micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from engine.data.user_loaders import end_workers
from engine.step.window import Share

MicroBatch = tuple[Any, Share]
"""A batch for one rank, and its share of its window."""


class Feed(ABC):
    """Gives one rank the micro-batches of an epoch, each with its share of the window's weight.

    ``feed_for`` (``loader.py``) creates it, and a ``PreparedLoader`` owns it: a ``SampleFeed``, ``BatchFeed`` or ``ListFeed`` (``indexed.py``), a
    ``StreamFeed`` (``stream.py``) or a ``CombinedFeed`` of several (``combined.py``).

    A position counts samples or ready batches of an epoch, over all ranks.
    """

    reads_ahead = False
    """True if reading beyond a window's end does not change what a checkpoint there must save."""
    iterator: Iterator[Any] | None = None
    """The iterator of the current pass over the user's loader: it owns worker processes."""

    @property
    def feistel(self) -> bool:
        """True if a shuffle is computed rather than stored; a resume must do the same."""
        return False

    @property
    def units(self) -> int | None:
        """The number of samples in every epoch, or of batches where the data come in ready batches; ``None``: it depends on the epoch or the ranks,
        or is unknown."""
        return None

    @abstractmethod
    def length(self, limit: int | None) -> int | None:
        """Micro-batches of this rank in an epoch; ``None`` when unknown in advance. ``limit``: the maximum."""

    @abstractmethod
    def stride(self, window: int) -> int:
        """How far a full window of ``window`` micro-batches moves the position."""

    @abstractmethod
    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch from position ``start`` on.

        Args:
            window: micro-batches in a window.
            limit: the maximum number of micro-batches in the epoch.
            state: the result of :meth:`state` at ``start``.
        """

    @abstractmethod
    def state(self, after_window: bool) -> Any:
        """The state that a resume needs besides the position, after the current window or before it; ``None``: nothing."""

    def start_state(self) -> Any:
        """The state needed to start this pass again; ``None``: nothing."""
        return None

    def next_pass_state(self) -> Any:
        """The state from which the next pass starts, for data that continues across passes; else ``None``. For use at the end of a pass."""
        return None

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        """The dataset's indices of ``count`` units, in order (for ready batches their numbers); ``None`` when they cannot be known."""
        return None

    def stop_pass(self) -> None:
        """Release the iterator of a pass that ends: worker processes must not wait for the next one."""
        self.iterator = None

    def close(self) -> None:
        """End the worker processes of the data."""
        end_workers(self.iterator)
        self.iterator = None
