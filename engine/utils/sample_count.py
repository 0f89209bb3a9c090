"""How many samples a batch has, by what its tensors and lists show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from engine.utils.tree import batch_size, leaves, parts_of

Count = tuple[int, str]
"""The number of samples, and why it is only a guess; empty: it is none."""

NOTHING_SHOWN = "nothing in it shows it"
"""Why the count of an object without tensors and lists is a guess."""
_ATTRIBUTES_SHOW = "only attributes of an object show it"
_MAY_BE_TIME_FIRST = "its first or its second dimension may be the samples"
_NO_VALUES = (str, bytes, int, float, bool, complex, type(None))


def counted(batch: Any, list_length: int | None = None) -> Count:
    """Count the samples of a batch.

    Args:
        list_length: the number of samples from which the batch was made, if that is known. A batch that shows fewer has left some out.
    """
    # The usual case first, without a call, because this may be called in every step: tensors with one first dimension.
    if list_length is None and type(batch) in (tuple, list) and batch and type(batch[0]) is Tensor:
        size = -1 if not batch[0].ndim or batch[0].is_nested else batch[0].shape[0]
        for item in batch:
            if type(item) is not Tensor or not item.ndim or item.is_nested or item.shape[0] != size:
                break
        else:
            return size, ""
    if (size_attribute := _size_attribute(batch)) is not None:
        return size_attribute, ""
    evidence = list(_evidence(batch))
    if not evidence and (attributes := _attributes(batch)):
        size, why = counted(attributes, list_length)
        return size, why or ("" if list_length is not None else _ATTRIBUTES_SHOW)
    return (
        _without_list_length(batch, evidence)
        if list_length is None
        else _with_list_length(batch, evidence, list_length)
    )


def _with_list_length(batch: Any, evidence: list[set[int]], list_length: int) -> Count:
    if batch is None:
        return 0, ""
    if not evidence:
        return list_length, "" if _is_plain(batch) else f"{NOTHING_SHOWN}, and samples may have been left out"
    if any(list_length in sizes for sizes in evidence):
        return list_length, ""
    tensors = [part for part in _entries(batch) if type(part) is Tensor and part.ndim and not part.is_nested]
    fewer = sorted(size for size in set.intersection(*evidence) if size < list_length)
    if tensors and all(
        tensor.ndim > 1 and tensor.shape[0] and tensor.shape[1] == list_length for tensor in tensors
    ):  # sequences with the time first
        return list_length, _MAY_BE_TIME_FIRST if fewer else ""
    if len(fewer) == 1:
        return fewer[0], ""
    if fewer:
        return fewer[-1], "its lists and tensors can be read in two ways"
    sides = [{*tensor.shape[:2]} for tensor in tensors]
    either = {size for size in set.intersection(*sides) if size < list_length} if len(sides) > 1 else set()
    if len(either) == 1:
        return either.pop(), "its tensors agree on it only if some have the samples in their second dimension"
    if any(size < list_length for sizes in evidence for size in sizes):
        return list_length, "no tensor of it has as many rows as there were samples, and samples may have been left out"
    return list_length, ""


def _without_list_length(batch: Any, evidence: list[set[int]]) -> Count:
    if not evidence:
        return 1, "" if _is_plain(batch) else NOTHING_SHOWN
    common = set.intersection(*evidence)
    if len(common) == 1:
        return common.pop(), ""
    first = batch_size(batch)
    why = "its tensors and lists differ in length" if not common else "its lists and tensors can be read in two ways"
    return (min(evidence[0]) if first is None else first), why


def _is_plain(batch: Any) -> bool:
    """True for a number, a text or ``None``, and for a batch with tensors."""
    return isinstance(batch, (_NO_VALUES, Tensor)) or any(True for _ in leaves(batch))


def _attributes(batch: Any) -> dict[str, Any]:
    """The tensors, arrays and lists that are attributes of an object; empty for tensors and plain values."""
    if isinstance(batch, (_NO_VALUES, Tensor)):
        return {}
    items = getattr(batch, "__dict__", {}).items()
    return {
        name: value
        for name, value in items
        if (isinstance(value, Tensor) and value.ndim) or isinstance(value, list) or type(value).__name__ == "ndarray"
    }


class SingleTensors:
    """Notices ready batches that are one tensor each and may have the time first: ``[T, B]`` or ``[T, B, C]``, where batches of equal second
    dimensions have three first ones or more. With the samples first all but the last batch of an epoch usually have as many."""

    def __init__(self) -> None:
        self._first_dimensions: dict[int, set[int]] = {}

    def doubt(self, batch: Tensor) -> str:
        """The reason why the first dimension of a batch is only a guess of its number of samples; empty if it is certain."""
        # Of two dimensions those of floating point values are rows of features.
        if batch.is_nested or not (batch.ndim == 3 or (batch.ndim == 2 and not batch.is_floating_point())):
            return ""
        first, second = batch.shape[:2]
        dimensions = self._first_dimensions.setdefault(second, set())
        if len(dimensions) < 3:
            dimensions.add(first)
        return _MAY_BE_TIME_FIRST if second > 1 and len(dimensions) > 2 else ""


def _size_attribute(batch: Any) -> int | None:
    """The ``batch_size`` of an object (PyG's ``Batch``, a ``TensorDict``, a user's class), or the number of sequences of a ``PackedSequence``."""
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])  # always on the host, so this does not wait for a device
    if type(batch) in (dict, list, tuple) or isinstance(batch, (_NO_VALUES, Tensor)):
        return None
    size = getattr(batch, "batch_size", None)
    if isinstance(size, tuple):
        size = size[0] if size else None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _entries(batch: Any) -> Sequence[Any]:
    """The parts of a batch; a batch without parts is one itself."""
    if type(batch) in (list, tuple):
        return batch
    return list(parts_of(batch).values()) or [batch]


def _evidence(batch: Any) -> Iterator[set[int]]:
    """For each part of a batch, the numbers of samples that it may show."""
    if type(batch) in (list, tuple):
        if not batch:
            yield {0}
            return
        if sizes := _evidence_of_samples(batch):
            yield sizes
            return
    yield from _evidence_of_parts(_entries(batch))


def _evidence_of_samples(batch: Any) -> set[int]:
    """Numbers of samples that a list of samples may show; empty: the batch is collated, with a part for each kind of value."""
    size, first = len(batch), batch[0]
    if all(isinstance(entry, Mapping) for entry in batch):
        if size == 1 or any(entry.keys() != first.keys() for entry in batch):
            return set()
    elif all(type(entry) is tuple for entry in batch):
        kinds = {tuple(map(type, entry)) for entry in batch}
        if len(kinds) > 1:
            return set()
        return {size, len(first)} if len({kind for pattern in kinds for kind in pattern}) == 1 else {size}
    elif all(type(entry) is Tensor and entry.ndim > 1 and entry.ndim == first.ndim for entry in batch):
        return {size, *_lengths(batch)} if size > 3 else set()
    elif any(
        isinstance(entry, (Tensor, list, tuple, Mapping))
        or hasattr(entry, "shape")
        or _size_attribute(entry) is not None
        for entry in batch
    ):
        return set()
    return {size, *_lengths(batch)}


def _lengths(batch: Any) -> set[int]:
    """The first dimension of all tensors in a batch, if it is one and the same; else empty."""
    lengths = {tensor.size(0) if tensor.ndim else -1 for tensor in leaves(batch)}
    return lengths if len(lengths) == 1 and lengths != {-1} else set()


def _evidence_of_parts(entries: Iterable[Any]) -> Iterator[set[int]]:
    for entry in entries:
        if isinstance(entry, Tensor):
            if entry.ndim:
                yield {entry.size(0)}
        elif (size_attribute := _size_attribute(entry)) is not None:
            yield {size_attribute}
        elif isinstance(entry, (list, tuple)) and not hasattr(entry, "_fields"):
            yield _evidence_of_list(entry)
        elif isinstance(entry, (Mapping, list, tuple)) or parts_of(entry):
            yield from _evidence_of_parts(parts_of(entry).values())
        elif isinstance(shape := getattr(entry, "shape", None), tuple) and shape:  # an array of numpy
            yield {int(shape[0])}


def _evidence_of_list(entries: Any) -> set[int]:
    """Numbers of samples that a list within a batch may show: one entry a sample or, if these are tensors of one length, tensors of all samples."""
    lengths = {entry.size(0) for entry in entries if isinstance(entry, Tensor) and entry.ndim}
    tensors = [entry for entry in entries if isinstance(entry, Tensor) and entry.ndim]
    return {len(entries), *lengths} if len(lengths) == 1 and len(tensors) == len(entries) else {len(entries)}


def guess_text(why: str) -> str:
    """A warning that the number of samples of batches is guessed."""
    return (
        f"how many samples a batch has is guessed: {why}. The guess decides a weight, of a gradient or in a mean over the epoch. Say it: "
        "count_samples(batch) of the module, the data module, the loader or its dataset returns the number; or give the batch an attribute "
        "batch_size, or return Loss(sum, count)"
    )
