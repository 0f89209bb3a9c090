"""The base class of feeds, which give a rank its micro-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.data.drawn import DrawnDataset
from engine.data.sample_counter import CountsSamples
from engine.data.user_loaders import end_workers
from engine.step.position import Share


@dataclass(slots=True)
class LoaderUse:
    """Facts about the loop that reads a loader, for the loader's feeds. The loop sets them before the first pass."""

    evaluates: bool = False
    """Whether the loop evaluates: no rank needs to know the others' sizes, and map-style datasets are not told an epoch, which is training's."""
    repeats: bool = False
    """Whether every epoch has the batches of the first, which ``overfit_batches`` promises."""
    owner: CountsSamples | None = None
    """The module or data module that counts the samples of batches, unless the loader does."""
    ranks_draw_apart: bool = False
    """Whether the ranks' random generators have different states already, as in a run."""


MicroBatch = tuple[Any, Share]
"""A batch for one rank, and its share of its window."""


class Feed(ABC):
    """Gives one rank the micro-batches of an epoch, each with its share of the window's weight.

    ``feed_for`` (``loader.py``) creates a feed, and a ``PreparedLoader`` owns it. The implementations are ``SampleFeed``, ``BatchFeed`` and
    ``ListFeed`` (``indexed.py``), ``StreamFeed`` (``stream.py``), and ``CombinedFeed`` for several loaders (``combined.py``).

    A position counts an epoch's samples, or its batches where the user's data consists of ready batches, over all ranks.
    """

    reads_ahead = False
    """True if reading beyond a window's end does not change the state that a checkpoint at that end must save."""
    without_units = "a stream"
    """A name of the kind of data, for texts, where :meth:`indices_at` gives nothing."""
    use: LoaderUse = LoaderUse()
    """Facts about the loop that reads this feed."""
    iterator: Iterator[Any] | None = None
    """The iterator of the current pass over the user's loader, which owns the worker processes."""

    @property
    def feistel(self) -> bool:
        """True if a shuffle is computed index by index rather than stored; a resume must then compute it too."""
        return False

    @property
    def units(self) -> int | None:
        """The number of samples (or ready batches) in every epoch; ``None`` if it depends on the epoch or the ranks, or is unknown."""
        return None

    @property
    def samples_of_round(self) -> int | None:
        """The number of samples in a full micro-batch of every rank; ``None``: it differs, or is not known before a batch is read."""
        return None

    @abstractmethod
    def length(self, limit: int | None) -> int | None:
        """The number of micro-batches of this rank in an epoch, at most ``limit``; ``None`` if it is not known in advance."""

    @abstractmethod
    def stride(self, window: int) -> int:
        """The increase of the position by a full window of ``window`` micro-batches per rank."""

    @abstractmethod
    def micro_batches(
        self, epoch: int, start: int, window: int, limit: int | None, state: Any = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from position ``start`` on.

        Args:
            window: the number of micro-batches in a window.
            limit: the maximum number of micro-batches in the epoch.
            state: the result of :meth:`state` at position ``start``.
        """

    @abstractmethod
    def state(self, after_window: bool) -> Any:
        """The state that a resume after (or before) the current window needs besides the position; ``None`` if the position suffices."""

    def start_state(self) -> Any:
        """The state needed to start the current pass again; ``None`` if none is needed."""
        return None

    def next_pass_state(self) -> Any:
        """The state from which the next pass starts, for data that continues across passes; else ``None``. Call this at the end of a pass."""
        return None

    def indices_at(self, epoch: int, start: int, count: int) -> list[int] | None:
        """The dataset's indices of ``count`` units from position ``start`` on (for ready batches their numbers); ``None`` if they cannot be known.

        A user's sampler may draw each order only once: its indices are known in the epoch that is being read.
        """
        return None

    @property
    def drawn(self) -> DrawnDataset | None:
        """The dataset that orders itself, if the data is one with indices."""
        return None

    @property
    def has_draws(self) -> bool:
        """Whether the data orders itself, or a part of it that has indices does."""
        return self.drawn is not None

    @property
    def plan(self) -> int | None:
        """A checksum of the plan by which the data is packed into rows or batches: ``plan_checksum`` of dataset or batch sampler, if there is one."""
        return None

    @property
    def tells_tokens(self) -> bool:
        """Whether tokens and samples of each batch are known before it is read: :meth:`tokens_between` and :meth:`samples_between` tell them."""
        return False

    def tokens_between(self, epoch: int, start: int, stop: int) -> int:
        """The tokens in the batches of an epoch from position ``start`` to ``stop``."""
        raise NotImplementedError(f"{type(self).__name__} does not know the tokens of its batches")

    def samples_between(self, epoch: int, start: int, stop: int) -> int:
        """The number of samples in the batches of an epoch from position ``start`` to ``stop``."""
        raise NotImplementedError(f"{type(self).__name__} does not know the samples of its batches")

    def draws_state(self, epoch: int, position: int) -> Any:
        """The state, at a position in an epoch, of data that orders itself, from which it continues if it changes; ``None`` for other data."""
        return None

    def continue_draws(self, state: Any) -> None:
        """Let the data continue what was drawn before :meth:`draws_state` gave ``state``."""
        raise NotImplementedError(f"{type(self).__name__} has no draws to continue")

    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int] | None:
        """By source of a mixture, its samples between two positions of an epoch; ``None`` for other data."""
        return None

    def stages_in(self, epoch: int) -> list[tuple[int, str, bool]]:
        """The stages of a mixture's weights in an epoch, as :meth:`engine.data.drawn.DrawnDataset.stages_in`; ``[]`` for other data."""
        return []

    def stop_pass(self) -> None:
        """Release the iterator at the end of a pass, so that worker processes end rather than wait for the next pass."""
        self.iterator = None

    def close(self) -> None:
        """End the worker processes of the data."""
        end_workers(self.iterator)
        self.iterator = None
