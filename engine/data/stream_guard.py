"""The guard of streams that every rank reads whole: it compares, over the ranks, the batches that they read and where the stream ends."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.checksums import checksum
from engine.utils.log import warn_once
from engine.utils.tree import parts_of

_VALUES = 64
"""How many values of each tensor are compared where the checksums of first batches differ."""
_TOLERANCE = 1e-3
"""Relative differences up to this are those of arithmetic on unlike processors, not of other samples."""
_SAMPLED = 1024
"""Values of a tensor that a sample of it has, at most about as many."""
_TEXT = 64
"""Characters of a text that a sample of it has."""


class StreamGuard:
    """Compares what the ranks read of one stream, which must be the same on all: all of each pass's first batch, and a sample of later ones.

    A rank gives :meth:`columns` to the exchange of sizes at the start of each window, so that no collective is added, and checks the ranks' columns.

    Args:
        data: the stream, for messages.
    """

    def __init__(self, data: Any, group: Group) -> None:
        self._name, self._group, self._compares = type(data).__name__, group, True
        self._epoch = self._windows = 0
        self._first: Any = None
        self._has_first = False
        self._random: tuple[Any, ...] = ()
        self._seed = 0
        self._follows = True
        """Whether batches after the first are compared: not once the ranks have read others, which was a warning."""
        self._compares_values = True
        """Whether values of later batches are compared, too: not once first batches of the same samples had other bits."""
        self._draws = False
        """Whether reading the pass's first window has drawn random numbers of this process."""
        self._checksum = 0
        """The checksum of samples of the window's batches."""
        self._start = self._position = 0
        """The positions of the window's start and end."""

    def begin(self, epoch: int, compares: bool, position: int) -> None:
        """Begin a pass at ``position``; its first batch is read next. ``compares``: whether batches are compared."""
        self._epoch, self._windows, self._has_first, self._compares = epoch, 0, False, compares
        self._checksum, self._draws, self._position = 0, False, position
        if compares:
            self._random, self._seed = _random_states(), torch.initial_seed()

    def note(self, batch: Any) -> None:
        """Note the next batch that this rank has read in the pass."""
        if not self._has_first:
            self._first, self._has_first = batch, True
        if self._follows:
            self._checksum = _checksum_of_sample(batch, self._checksum, self._compares_values)

    @property
    def needs_batch(self) -> bool:
        """Whether the next batch is compared, so that :meth:`note` needs it."""
        return self._compares and (self._follows or not self._has_first)

    def columns(self, position: int, ended: bool) -> list[int]:
        """Numbers that must be equal on all ranks: the position, whether the stream has ended, and a checksum of samples of the window's batches; in
        a pass's first window one of the whole first batch, too."""
        self._start, self._position = self._position, position
        first = [] if self._windows else [checksum_of_batch(self._first) if self._has_first else -1]
        return [2 * position + ended, self._checksum, *first]

    def check(self, columns_by_rank: list[list[int]]) -> None:
        """Compare the ranks' :meth:`columns`. A collective if batches differ.

        Raises:
            ValueError: the ranks read different data; on all ranks.
        """
        self._windows += 1
        places = [place for place, *_ in columns_by_rank]
        if len(set(places)) > 1:
            raise ValueError(self._where_the_ends_differ(places))
        if self._windows == 1 and self._compares:
            # Without workers, a stream may draw from this process's numbers, which are other ones on each rank: for augmentation, or for its order.
            self._draws = self._random != _random_states() and self._seed == torch.initial_seed()
        if len({tuple(first) for _, _, *first in columns_by_rank}) > 1:
            self._compare_first_batches()
        elif len({total for _, total, *_ in columns_by_rank}) > 1:
            self._refuse_later_batches([total for _, total, *_ in columns_by_rank])
        self._first, self._checksum = None, 0

    def _compare_first_batches(self) -> None:
        digest = _digest(self._first) if self._has_first else None
        rows = gather_json(self._group, [digest, self._draws])
        ranks = [rank for rank, (digest, _) in enumerate(rows) if not _alike(rows[0][0], digest)]
        if not ranks:
            self._compares_values = False
            return
        self._report(ranks[0], "first batch", "is another one", any(draws for _, draws in rows))

    def _refuse_later_batches(self, totals: list[int]) -> None:
        """Raise an error, or warn, because the batches of this window differ: a later one, or one of unlike sizes."""
        rank = next(rank for rank, total in enumerate(totals) if total != totals[0])
        draws = any(gather_json(self._group, self._draws))
        self._report(rank, f"batches {self._start + 1} to {self._position}", "are other ones", draws)

    def _report(self, rank: int, batches: str, are_others: str, draws: bool) -> None:
        what = (
            f"the {batches} of epoch {self._epoch} that rank {rank} reads from {self._name} {are_others} than rank 0's. Each rank reads the "
            "whole stream and keeps the batches of its turn"
        )
        if draws:
            self._follows = False
            warn_once(
                f"{what}, and reading draws random numbers of the process, which differ by rank. If they choose or order samples, samples "
                "are trained twice and left out: draw them from a generator that set_epoch(epoch) seeds. If they only augment samples, set "
                "presharded = False on the data or its dataset, and this is not compared"
            )
            return
        raise ValueError(
            f"{what}, so samples would be trained twice and left out. {self._advice()} If only random augmentation differs, set presharded = False "
            "on it"
        )

    def _where_the_ends_differ(self, places: list[int]) -> str:
        ended = [rank for rank, place in enumerate(places) if place % 2]
        first = min(ended, key=lambda rank: places[rank]) if ended else 0
        other = next(rank for rank, place in enumerate(places) if place != places[first])
        goes_on = f"ends after {places[other] // 2}" if places[other] % 2 else "reads on"
        return (
            f"the ranks read different data from {self._name}: for rank {first} epoch {self._epoch} ends after {places[first] // 2} batch(es), and "
            f"rank {other} {goes_on}. Each rank reads the whole stream and keeps the batches of its turn, so the {self._windows - 1} step(s) of "
            "this epoch before this one may have trained samples twice and left out others: start again, or continue from a checkpoint of "
            "before the epoch. " + self._advice()
        )

    def _advice(self) -> str:
        return (
            "If the data is divided among the ranks already (by litData, Mosaic, split_by_node, or code that asks for its rank), set presharded = "
            "True on it or on its dataset; otherwise make it the same on every rank, with one seed."
        )


def _random_states() -> tuple[Any, ...]:
    """The states of this process's random generators, to compare."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        None if state is None else (state[1].tobytes(), state[2]),
    )


def checksum_of_batch(batch: Any) -> int:
    """A checksum of a batch's tensors and of the plain values in it."""
    total = zlib.crc32(repr(_plain_values(batch)).encode())
    for tensor in _tensors(batch):
        if _has_bytes(tensor):
            total = checksum(tensor, total)
        total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
    return total


def _checksum_of_sample(batch: Any, before: int, values: bool) -> int:
    """A checksum of the shapes of a batch's tensors, after that of what came ``before``, and of a sample of its ``values``: plain ones, and those of
    tensors on the host, so that nothing waits for a device."""
    total = zlib.crc32(repr(_plain_values(batch, shorten=True)).encode(), before) if values else before
    for tensor in _tensors(batch):
        if values and tensor.device.type == "cpu" and _has_bytes(tensor):
            total = checksum(_spread(tensor), total)
        total = zlib.crc32(repr((tensor.dtype, *tensor.shape)).encode(), total)
    return total


def _spread(tensor: Tensor) -> Tensor:
    """A view of values at even distances in a tensor, about :data:`_SAMPLED` of them; of a small tensor all."""
    distance = -(-tensor.numel() // _SAMPLED)
    if distance <= 1:
        return tensor
    steps: list[slice] = []
    for size in reversed(tensor.shape):
        step = min(size, distance)
        steps.insert(0, slice(step // 2, None, step))
        distance = -(-distance // step)
    return tensor[tuple(steps)]


def _has_bytes(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, and those that are attributes of objects in it."""
    if type(batch) in (tuple, list, dict):
        for item in batch.values() if type(batch) is dict else batch:
            yield from [item] if type(item) is Tensor else _tensors(item)
    elif isinstance(batch, Tensor):
        yield batch
    elif parts := parts_of(batch):
        yield from _tensors(parts)
    else:
        yield from (value for value in getattr(batch, "__dict__", {}).values() if isinstance(value, Tensor))


def _digest(batch: Any) -> list[Any]:
    """The plain values of a batch, and the shape and some values of each of its tensors, to compare where checksums differ."""
    digest: list[Any] = [repr(_plain_values(batch))]
    for tensor in _tensors(batch):
        values: list[str] = []
        if _has_bytes(tensor) and not tensor.is_complex():
            flat = tensor.detach().cpu().reshape(-1)
            values = [repr(float(value)) for value in flat[:: max(1, len(flat) // _VALUES)].tolist()]
        digest.append([list(tensor.shape), values])
    return digest


def _alike(first: Any, second: Any) -> bool:
    """True if two digests are those of the same samples."""
    if first is None or second is None or len(first) != len(second) or first[0] != second[0]:
        return first == second
    pairs = zip(first[1:], second[1:], strict=True)
    return all(
        shape == other_shape and all(map(_close, map(float, values), map(float, other_values)))
        for (shape, values), (other_shape, other_values) in pairs
    )


def _close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _TOLERANCE * (abs(a) + abs(b)) or (a != a and b != b)


def _plain_values(tree: Any, depth: int = 0, shorten: bool = False) -> Any:
    """The numbers and texts in the dicts, lists and tuples of a batch; other objects are left out.

    Args:
        shorten: of a long text only its length and its ends, and of an array a sample.
    """
    if isinstance(tree, (int, float)):
        return tree
    if isinstance(tree, (str, bytes)):
        return (len(tree), tree[: _TEXT // 2], tree[-_TEXT // 2 :]) if shorten and len(tree) > _TEXT else tree
    if isinstance(tree, Tensor) or depth > 4:
        return None
    if isinstance(tree, Mapping):
        return [(str(key), _plain_values(value, depth + 1, shorten)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [_plain_values(value, depth + 1, shorten) for value in tree]
    if hasattr(tree, "tobytes") and getattr(getattr(tree, "dtype", None), "kind", "O") != "O":  # an array of numpy
        return zlib.crc32((tree.flat[:: max(1, tree.size // _SAMPLED)] if shorten else tree).tobytes(), len(tree.shape))
    return None
