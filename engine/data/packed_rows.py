"""Finds rows in which ``position_ids`` start again: several documents, of which a model must keep each to itself.

It looks at batches on the host, before they are copied to the device, and notes the answer on the copy: asking the device would wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has no values to look at."""
    return tensor.is_meta or torch.compiler.is_compiling() or type(tensor).__name__ == "FakeTensor"
