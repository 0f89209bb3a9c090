"""Exchanges the ranks' sums of logged values, in as few collectives as possible."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch

from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group

Row = tuple[list[str], list[str], list[float]]
"""The logged names of a rank, their reductions, and for each name its total and its weight."""


class RankExchange:
    """Exchanges the totals and weights of logged values over ``group``. Of ranks that see the same data only one ``is_counted``; the others send
    weights of 0."""

    def __init__(self, group: Group, is_counted: bool) -> None:
        self.group, self.is_counted = group, is_counted
        self._widths = {False: 0, True: 0}
        """How many numbers the ranks exchanged last, for the values of a step (``False``) and of an epoch (``True``); the same on all ranks."""

    def rows(
        self,
        names: list[str],
        ops: list[str],
        numbers: list[float],
        epoch: bool,
        objects: int,
        compute: Callable[[], dict[str, float]],
    ) -> list[Row]:
        """Gather the rows of all ranks. One collective is enough in the usual case, in which all ranks log the same names as in the last exchange.

        Args:
            names: the logged names of this rank.
            ops: the reduction of each name.
            numbers: the total and the weight of each name, alternating.
            epoch: whether these are values of an epoch rather than of a step.
            objects: the number of torchmetrics objects that this rank has logged.
            compute: computes the values of these objects; called on all ranks if any rank has logged some.
        """
        if not self.is_counted:
            numbers[1::2] = [0.0] * (len(numbers) // 2)
        head, width = [zlib.crc32(repr((names, ops)).encode()), objects], self._widths[epoch]
        # Gathering needs the same width on all ranks: if the names are new, send zeros of the old width first.
        body = numbers if len(numbers) == width else [0.0] * width
        rows = gather_row(self.group, torch.tensor([*head, *body], dtype=torch.float64)).tolist()
        has_objects, names_differ = any(row[1] for row in rows), len({row[0] for row in rows}) > 1
        if has_objects:
            for name, value in compute().items():
                names, ops, numbers = [*names, name], [*ops, "mean"], [*numbers, value, float(self.is_counted)]
        if has_objects or names_differ:
            return gather_json(self.group, (names, ops, numbers))
        if len(numbers) == width:
            return [(names, ops, row[2:]) for row in rows]
        self._widths[epoch] = len(numbers)
        rows = gather_row(self.group, torch.tensor(numbers, dtype=torch.float64)).tolist()
        return [(names, ops, row) for row in rows]
