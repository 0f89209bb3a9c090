"""The guard of streams that every rank reads whole: it compares, over the ranks, the first batch of each pass and where the stream ends."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.checksums import checksum
from engine.utils.log import warn_once
from engine.utils.tree import leaves

_VALUES = 64
"""How many values of each tensor are compared where the checksums of first batches differ."""
_TOLERANCE = 1e-3
"""Relative differences up to this are those of arithmetic on unlike processors, not of other samples."""


class StreamGuard:
    """Compares what the ranks read of one stream, which must be the same on all.

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

    def begin(self, epoch: int, compares: bool) -> None:
        """Begin a pass; its first batch is read next. ``compares``: whether first batches are compared."""
        self._epoch, self._windows, self._has_first, self._compares = epoch, 0, False, compares
        if compares:
            self._random, self._seed = _random_states(), torch.initial_seed()

    def note_first(self, batch: Any) -> None:
        """Note the first batch that this rank has read in the pass."""
        self._first, self._has_first = batch, True

    def columns(self, position: int, ended: bool) -> list[int]:
        """Numbers that must be equal on all ranks: the position and whether the stream has ended; in a pass's first window a checksum, too."""
        first = [] if self._windows else [_checksum_of(self._first) if self._has_first and self._compares else -1]
        return [2 * position + ended, *first]

    def check(self, columns_by_rank: list[list[int]]) -> None:
        """Compare the ranks' :meth:`columns`. A collective if first batches differ.

        Raises:
            ValueError: the ranks read different data; on all ranks.
        """
        self._windows += 1
        places = [columns[0] for columns in columns_by_rank]
        if len(set(places)) > 1:
            raise ValueError(self._where_the_ends_differ(places))
        if len({tuple(columns) for columns in columns_by_rank}) > 1:
            self._compare_first_batches()
        self._first = None

    def _compare_first_batches(self) -> None:
        digest = _digest(self._first) if self._has_first else None
        # Without workers, a stream may draw from this process's numbers, which are other ones on each rank: for augmentation, or for its order.
        draws = self._random != _random_states() and self._seed == torch.initial_seed()
        rows = gather_json(self._group, [digest, draws])
        ranks = [rank for rank, (digest, _) in enumerate(rows) if not _alike(rows[0][0], digest)]
        if not ranks:
            return
        what = (
            f"the first batch of epoch {self._epoch} that rank {ranks[0]} reads from {self._name} is another one than rank 0's. Each rank reads the "
            "whole stream and keeps the batches of its turn"
        )
        if any(draws for _, draws in rows):
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


def _checksum_of(batch: Any) -> int:
    """A checksum of a batch's tensors and of the plain values in it."""
    total = zlib.crc32(repr(_plain_values(batch)).encode())
    for tensor in leaves(batch):
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta:
            total = checksum(tensor, total)
        total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
    return total


def _digest(batch: Any) -> list[Any]:
    """The plain values of a batch, and the shape and some values of each of its tensors, to compare where checksums differ."""
    digest: list[Any] = [repr(_plain_values(batch))]
    for tensor in leaves(batch):
        values: list[str] = []
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and not tensor.is_complex():
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


def _plain_values(tree: Any, depth: int = 0) -> Any:
    """The numbers and texts in the dicts, lists and tuples of a batch; other objects are left out."""
    if isinstance(tree, (str, bytes, int, float)):
        return tree
    if isinstance(tree, Tensor) or depth > 4:
        return None
    if isinstance(tree, Mapping):
        return [(str(key), _plain_values(value, depth + 1)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [_plain_values(value, depth + 1) for value in tree]
    if (
        hasattr(tree, "tobytes") and hasattr(tree, "dtype") and getattr(tree.dtype, "kind", "O") != "O"
    ):  # an array of numpy
        return zlib.crc32(tree.tobytes())
    return None
