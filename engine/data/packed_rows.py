"""Packed rows in batches: finds rows in which ``position_ids`` start again, and cuts rows into shorter ones.

Rows that start again are several documents, of which a model must keep each to itself. Batches are looked at on the host, before they are copied to
the device, and the answer is noted on the copy: asking the device would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from engine.config.duration import Duration
from engine.data.user_loaders import owners_of

IGNORED = -100
"""The label of a place that has no target."""

_NAME = "position_ids"
_NOTE = "_fit_starts_again"


def starts_again(positions: Tensor, mask: Tensor | None = None) -> bool:
    """Whether positions ``[rows, tokens]`` start again within a row. On a device this waits for it.

    Positions that stay the same until the row ends are padding.

    Args:
        mask: ``[rows, tokens or more]``, 0 at padding; its last columns belong to the tokens.
    """
    if positions.dim() != 2 or positions.size(1) < 2 or positions.is_floating_point():
        return False
    again = positions[:, 1:] <= positions[:, :-1]
    rises = positions[:, 1:] > positions[:, :-1]
    again = again & rises.flip(1).cumsum(1).flip(1).bool()
    if mask is not None and mask.dim() == 2:
        tokens = mask[:, -positions.size(1) :].bool()
        again = again & tokens[:, 1:] & tokens[:, :-1]
    return bool(again.any())


def note_restarts(batch: Any, moved: Any) -> None:
    """Note on ``moved``, the copy of a ``batch`` of the host, whether its ``position_ids`` start again."""
    if not isinstance(batch, Mapping) or _NAME not in batch or not isinstance(moved, Mapping):
        return
    positions, mask, copy = batch[_NAME], batch.get("attention_mask"), moved.get(_NAME)
    if (
        isinstance(positions, Tensor)
        and isinstance(copy, Tensor)
        and positions.device.type == "cpu" != copy.device.type
    ):
        setattr(copy, _NOTE, starts_again(positions, mask if isinstance(mask, Tensor) else None))


def noted_restarts(positions: Tensor) -> bool | None:
    """The note on ``position_ids``; ``None``: there is none, because they were made on the device."""
    note: bool | None = vars(positions).get(_NOTE)
    return note


def copy_note(positions: Tensor, changed: Tensor) -> None:
    """Keep the note on ``position_ids`` on others that were computed from them."""
    if _NOTE in vars(positions):
        setattr(changed, _NOTE, vars(positions)[_NOTE])


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has no values to look at."""
    return tensor.is_meta or torch.compiler.is_compiling() or type(tensor).__name__ == "FakeTensor"


@dataclass(frozen=True)
class LengthSchedule:
    """The lengths of a training's rows by stage.

    Rows are packed with the longest length, and cut into equal parts in stages with a shorter one, so a step has the same tokens in each stage, and
    the order of rows and the position in the data do not depend on the stage.
    """

    starts: tuple[Duration, ...]
    """When each stage begins: at the first step at or after this."""
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def unit(self) -> str:
        """The unit of the stages' starts."""
        return self.starts[-1].unit

    def length_at(self, at: int | float | Fraction) -> int:
        """The length of rows in a window that begins when the training has this much of :attr:`unit`."""
        stages = zip(self.starts, self.lengths, strict=True)
        return [length for start, length in stages if not start.value or start.value <= at][-1]

    def is_first(self, at: int | float | Fraction) -> bool:
        """Whether a window that begins when the training has this much of :attr:`unit` is in the first stage."""
        return len(self.starts) == 1 or self.starts[1].value > at

    def __str__(self) -> str:
        stages = zip(self.starts, self.lengths, strict=True)
        return str({str(start) if start.value else 0: length for start, length in stages})

    def cut(self, batch: Any, length: int) -> Any:
        """A batch of rows of the longest length, as rows of ``length``.

        A document that goes on in the next part begins there again: its positions start at 0, and its first label is -100.

        Raises:
            ValueError: the batch does not have rows of the longest length.
        """
        rows = batch.get("input_ids") if isinstance(batch, Mapping) else None
        longest = self.longest
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.size(1) != longest:
            shape = f"input_ids of shape {list(rows.shape)}" if isinstance(rows, Tensor) else "no tensor input_ids"
            raise ValueError(
                f"Packed(length={self}) cuts batches of shape [rows, {longest}], and a batch has {shape}: let the collate function keep the rows "
                "and their names, or give one length"
            )
        if length == longest:
            return batch
        count, parts = rows.size(0), longest // length
        cut: dict[str, Any] = {}
        for key, value in batch.items():
            if isinstance(value, Tensor) and value.shape[:2] == (count, longest):
                cut[key] = value.reshape(count * parts, length, *value.shape[2:])
            elif isinstance(value, Tensor) and value.dim() and value.size(0) == count:
                cut[key] = value.repeat_interleave(parts, 0)
            else:
                cut[key] = [entry for entry in value for _ in range(parts)] if isinstance(value, list) else value
        if "labels" in cut:
            cut["labels"] = cut["labels"].clone()
            cut["labels"][:, 0] = IGNORED
        if "position_ids" in cut:
            positions = cut["position_ids"]
            goes_on = (positions != 0).cumprod(1)  # of the document that began in the part before
            cut["position_ids"] = positions - goes_on * positions[:, :1]
            copy_note(batch["position_ids"], cut["position_ids"])
        if "document_ids" in cut:
            numbers = cut["document_ids"]
            cut["document_ids"] = numbers - (numbers >= 0) * numbers[:, :1].clamp(min=0)
        return cut


def length_schedule_of(*data: Any) -> LengthSchedule | None:
    """The schedule of lengths of loaders or datasets; ``None``: their rows have one length.

    Raises:
        ValueError: they have different ones.
    """
    owners = [owner for part in data for owner in owners_of(part, "length_schedule")]
    first, *others = [getattr(owner, "length_schedule", None) for owner in owners]
    for schedule in others:
        if schedule != first:
            raise ValueError(
                f"Packed(length={schedule if first is None else first}): another part of the training's data has "
                f"{'one length' if None in (schedule, first) else f'length={schedule}'}: give all parts the same schedule"
            )
    return first
