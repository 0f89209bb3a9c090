"""The ranks' sums of logged values, brought together in as few collectives as possible."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group

Row = tuple[list[str], list[str], list[float]]
"""A rank's names, their reductions, and (total, weight) of each."""


class RankExchange:
    """Exchanges the numbers of step and epoch values over ``group``. A rank that does not ``speak`` gives weights of 0."""

    def __init__(self, group: Group, speaks: bool) -> None:
        self.group, self.speaks = group, speaks
        self._widths = {False: 0, True: 0}
        """How many numbers the ranks exchanged the last time, for a step and for an epoch; the same on all ranks."""

    def rows(
        self,
        names: list[str],
        ops: list[str],
        numbers: list[float],
        epoch: bool,
        objects: int,
        compute: Callable[[], dict[str, float]],
    ) -> list[Row]:
        """Every rank's row. In the usual case ranks log the same names as the last time: then one collective does.

        Args:
            objects: torchmetrics objects that this rank has logged.
            compute: their values; called on all ranks if one of them has logged some.
        """
        if not self.speaks:
            numbers[1::2] = [0.0] * (len(numbers) // 2)
        head, width = [zlib.crc32(repr((names, ops)).encode()), objects], self._widths[epoch]
        guess = numbers if len(numbers) == width else [0.0] * width
        rows = gather_row(self.group, torch.tensor([*head, *guess], dtype=torch.float64)).tolist()
        computes, differ = any(row[1] for row in rows), len({row[0] for row in rows}) > 1
        if computes:
            for name, value in compute().items():
                names, ops, numbers = [*names, name], [*ops, "mean"], [*numbers, value, float(self.speaks)]
        if computes or differ:
            return gather_json(self.group, (names, ops, numbers))
        if len(numbers) == width:
            return [(names, ops, row[2:]) for row in rows]
        self._widths[epoch] = len(numbers)
        rows = gather_row(self.group, torch.tensor(numbers, dtype=torch.float64)).tolist()
        return [(names, ops, row) for row in rows]
