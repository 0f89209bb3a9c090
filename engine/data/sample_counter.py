"""Who counts the samples of a loader's batches: the user, or what the batches show."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import default_collate, default_convert

from engine.utils.sample_count import Count, SingleTensors, counted

_KEEPING = ("torch", "torchdata", "torch_geometric")
"""Packages whose collate functions make a batch of all samples that they get; collators in a module ``data.data_collator`` do so, too."""


@runtime_checkable
class CountsSamples(Protocol):
    """An object that says how many samples a batch has: a module, a data module, a loader, a dataset."""

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch."""


class SampleCounter:
    """Counts the samples of a loader's batches.

    Args:
        data: the user's loader, which may count by itself, as may its dataset and its collate function.
    """

    def __init__(self, data: Any) -> None:
        owners = (data, getattr(data, "dataset", None), getattr(data, "collate_fn", None))
        self.owner: CountsSamples | None = next((owner for owner in owners if isinstance(owner, CountsSamples)), None)
        """The object that counts; ``None``: the batches show it."""
        self._has_batches = False
        """Whether a batch was counted that is not ``None``: where all are, the module makes its own data, and each counts as one sample."""
        self._single_tensors = SingleTensors()

    def follow(self, owner: CountsSamples | None) -> None:
        """Let the module or data module ``owner`` count, if the loader does not."""
        self.owner = self.owner or owner

    def count(self, batch: Any, list_length: int | None = None) -> Count:
        """The number of samples in a batch.

        Args:
            list_length: the number of samples from which the batch was made, if that is known.

        Raises:
            TypeError, ValueError: the user's ``count_samples`` returns no number of samples.
        """
        if self.owner is None:
            if batch is None and list_length is None:
                return (0, "") if self._has_batches else counted(batch)
            self._has_batches = True
            if list_length is None and type(batch) is Tensor and batch.ndim:
                return batch.size(0), self._single_tensors.doubt(batch)
            return counted(batch, list_length)
        number = self.owner.count_samples(batch)
        try:
            samples = operator.index(number)
        except TypeError:
            raise TypeError(
                f"{type(self.owner).__name__}.count_samples(batch) must return the number of samples as an int, got {number!r:.80}"
            ) from None
        if samples < 0:
            raise ValueError(
                f"{type(self.owner).__name__}.count_samples(batch) returned {samples}: a batch has 0 samples or more"
            )
        return samples, ""


def keeps_samples(collate_fn: Any) -> bool:
    """True if a collate function makes a batch of all samples that it gets: torch's own, those of known libraries, and those that say so by an
    attribute ``keeps_samples = True``. Others may leave out samples, so their batches are counted."""
    while isinstance(collate_fn, partial):
        collate_fn = collate_fn.func
    if (
        collate_fn is default_collate
        or collate_fn is default_convert
        or getattr(collate_fn, "keeps_samples", False) is True
    ):
        return True
    module = getattr(collate_fn, "__module__", None) or type(collate_fn).__module__
    return module.split(".")[0] in _KEEPING or module.endswith(".data.data_collator")


class CountingCollate:
    """Wraps a user's collate function, which gets the list of samples: each batch comes with the count of its samples."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn, self.keeps = collate_fn, keeps_samples(collate_fn)

    def __call__(self, samples: Any) -> tuple[int, str, Any]:
        list_length = sum(sample is not None for sample in samples)
        batch = self.collate_fn(samples)
        return (list_length, "", batch) if self.keeps else (*counted(batch, list_length), batch)
