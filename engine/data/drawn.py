"""Data that orders itself: what the order of a loader asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset


class Drawn(Protocol):
    """A dataset, or a batch sampler, that orders itself: each draw is a function of a seed and the draw's number.

    :class:`engine.data.order.DrawOrder` reads it.

    A dataset, such as :class:`engine.data.mixture.Mixture`, gives a sample for every draw from 0 on, ``dataset[draw]``, and an epoch is
    ``len(dataset)`` draws. A batch sampler's ``draws`` are batches: lists of indices of the loader's dataset.
    """

    def __len__(self) -> int:
        """The number of draws in an epoch."""

    def seeded(self, seed: int, shuffle: bool) -> Drawn:
        """A copy that draws with this seed, which is the same on all ranks; the object itself, which is the user's, does not change.

        Args:
            shuffle: whether the loader asks for a random order; of a batch sampler always ``True``.
        """

    def draws(self, epoch: int) -> Sequence[Any]:
        """The draws of an epoch: numbers of a dataset's draws, or batches. It can be sliced, and is the same on all ranks."""


class DrawnDataset(Dataset[Any], ABC):
    """A :class:`Drawn` dataset of the library with a state: :class:`engine.data.mixture.Mixture`."""

    @abstractmethod
    def seeded(self, seed: int, shuffle: bool) -> DrawnDataset:
        """See :meth:`Drawn.seeded`."""

    @abstractmethod
    def draws(self, epoch: int) -> Sequence[int]:
        """See :meth:`Drawn.draws`."""

    @abstractmethod
    def state_at(self, epoch: int, position: int) -> dict[str, Any]:
        """The state after ``position`` draws of an epoch: a tree of plain values."""

    @abstractmethod
    def changes_since(self, state: Mapping[str, Any]) -> list[str]:
        """The differences between this dataset and the one that has saved ``state``, each as a text.

        Raises:
            ValueError: there are some, and the user wants none.
        """

    @abstractmethod
    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Let the draws after ``state`` continue what was drawn before it."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The facts that must be equal on all ranks, by name (plain values)."""

    @abstractmethod
    def count_steps(self, samples: int) -> None:
        """Take note that a step of the training has this number of samples, on any number of ranks."""

    @abstractmethod
    def compare_samples(self) -> None:
        """Refuse sources whose samples cannot be in one batch: now those that say it, others when their first sample is read."""

    @abstractmethod
    def place_of(self, draw: int) -> str:
        """A text that names the sample of a draw."""

    @abstractmethod
    def counts_between(self, epoch: int, start: int, stop: int) -> dict[str, int]:
        """By source, its samples in the draws of an epoch from position ``start`` to ``stop``."""

    @abstractmethod
    def stages_in(self, epoch: int) -> list[tuple[int, str, bool]]:
        """The stages of the weights in an epoch, in their order: the position at which each begins (0: there or before), its shares as a text, and
        whether it is the first of all. ``[]``: there is one stage only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let a stream continue after its ``state_dict()``; data with indices has no such state."""
        raise NotImplementedError(f"{type(self).__name__} has indices, and its draws continue by their numbers")

    @abstractmethod
    def restart(self) -> None:
        """Let the next pass over a stream begin with its first draw."""
