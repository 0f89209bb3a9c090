"""Trials of unknown optimizers on small matrices: whether an update depends on one element, a whole tensor or all parameters."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine import optim
from engine.step.own_generators import own_generators
from engine.utils import seed
from engine.utils.log import warn_once

_ROWS, _COLUMNS = 8, 6
_SCALES = (1.0, 0.1, 10.0, 0.03, 3.0, 1.0)
"""The size of each step's gradients; the second matrix has them in the opposite order, so that values over both differ from those over one."""
_MATRIX_TOLERANCE, _ALL_TOLERANCE = 1e-3, 0.1
"""By how much updates may differ, as a part of the larger one. Rounding is far below the first; matrices that are stacked and iterated on in bf16
differ by 1e-2, so the second is larger."""


class UpdateScope(Enum):
    """The gradients that the update of one element depends on."""

    ELEMENT = "the element's own gradient"
    MATRIX = "the gradient of the whole tensor"
    ALL = "the gradients of all parameters"
    UNKNOWN = "not found out"


def update_scope(optimizer: Optimizer) -> UpdateScope:
    """Find out what an optimizer's updates depend on: steps on two matrices together, apart, and on halves of them.

    The trials run on the host, with new optimizers of the same class and the settings of the first parameter group; random generators are as before
    afterwards. Effects that begin after some steps are not seen. A class that cannot be tried so (another constructor, a closure, kernels for
    devices only), or draws random numbers, is unknown.
    """
    if own_generators(optimizer):
        return UpdateScope.UNKNOWN
    with seed.isolated(), warnings.catch_warnings(), redirect_stdout(io.StringIO()), _without_compiling():
        warnings.simplefilter("ignore")
        try:
            return _tried(_Trials(optimizer))
        except Exception:  # whatever a class that is not known raises says only that it cannot be tried
            return UpdateScope.UNKNOWN


def _without_compiling() -> AbstractContextManager[Any]:
    """A context in which compiled functions run as they are written. Does not import torch's compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _tried(trials: _Trials) -> UpdateScope:
    whole, upper, lower = slice(0, _ROWS), slice(0, _ROWS // 2), slice(_ROWS // 2, _ROWS)
    before = seed.states()
    together = trials.updates([[(0, whole), (1, whole)]])
    if not seed.are_equal(before, seed.states()):
        return UpdateScope.UNKNOWN
    apart = trials.updates([[(0, whole)], [(1, whole)]])
    if _difference(together, apart) > _ALL_TOLERANCE:
        return UpdateScope.ALL
    halves = trials.updates([[(0, upper)], [(0, lower)], [(1, upper)], [(1, lower)]])
    return UpdateScope.MATRIX if _difference(apart, halves) > _MATRIX_TOLERANCE else UpdateScope.ELEMENT


def _difference(updates: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """The largest difference of a matrix's updates, as a part of the larger of the two."""
    return max(
        float((a - b).norm() / torch.stack([a.norm(), b.norm()]).max().clamp(min=1e-30))
        for a, b in zip(updates, references, strict=True)
    )


class _Trials:
    """Steps on two small matrices, with the same values and gradients each time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._class: Any = type(optimizer)
        group = next(group for group in optimizer.param_groups if group["params"])
        left_out = ("params", "param_names", "foreach", "fused", "capturable")
        self._settings = {name: copy.deepcopy(value) for name, value in group.items() if name not in left_out}
        generator = torch.Generator().manual_seed(0)
        shape = (_ROWS, _COLUMNS)
        self._values = [torch.randn(shape, generator=generator) for _ in range(2)]
        self._gradients = [
            [torch.randn(shape, generator=generator) * scale for scale in scales] for scales in (_SCALES, _SCALES[::-1])
        ]

    def updates(self, parts: Sequence[Sequence[tuple[int, slice]]]) -> list[Tensor]:
        """The change of both matrices by all steps.

        Args:
            parts: for each optimizer that is made, its parameters: rows of a matrix, as its number and a slice.
        """
        updates = [torch.zeros_like(value) for value in self._values]
        for of_one in parts:
            parameters = [nn.Parameter(self._values[number][rows].clone()) for number, rows in of_one]
            optimizer = self._class([{**copy.deepcopy(self._settings), "params": parameters}])
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()
            for step in range(len(_SCALES)):
                for parameter, (number, rows) in zip(parameters, of_one, strict=True):
                    parameter.grad = self._gradients[number][step][rows].clone()
                optimizer.step()
            for parameter, (number, rows) in zip(parameters, of_one, strict=True):
                updates[number][rows] = parameter.detach() - self._values[number][rows]
        return updates


def warn_of_matrices(optimizer: Optimizer) -> None:
    """Warn if an optimizer of an unknown class, which steps shards, seems to treat each tensor as a whole."""
    if not optim.was_tried(optimizer) and update_scope(optimizer) is UpdateScope.MATRIX:
        name = type(optimizer).__name__
        warn_once(
            f"{name} seems to treat each tensor as a whole (tried on small matrices), and steps shards here: torch then communicates in its "
            f"operations, or raises an error. engine.optim.whole({name}(...)) lends it whole tensors, by two collectives a step"
        )


def check_lent(optimizer: Optimizer) -> None:
    """Check that an optimizer that steps whole tensors, each on one rank, needs no others beside them.

    Raises:
        ValueError: it seems to, and its class is known by name only. If the user has said that it needs whole tensors, this is a warning.
    """
    if optim.was_tried(optimizer) or update_scope(optimizer) is not UpdateScope.ALL:
        return
    name = type(optimizer).__name__
    what = (
        "the update of a tensor also depends on the gradients of others (tried on two small matrices), which the rank that steps it does not "
        "have. With these settings it computes a value over all parameters, such as a norm to clip by"
    )
    instead = "Switch that off and clip with gradient_clip_val, or use strategy='ddp'"
    if optim.was_said(optimizer):
        warn_once(f"engine.optim.whole({name}): {what}, so its numbers will not be those of one process. {instead}")
        return
    raise ValueError(
        f"{name} needs whole tensors, and parameters are sharded; {what}. {instead}. If this is wrong, engine.optim.whole(optimizer) overrides it"
    )
