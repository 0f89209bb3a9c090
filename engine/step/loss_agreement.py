"""The ranks' agreement about their losses: of which kind they are, how large their counts are, and what these sum up to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.step.gradient_state import SCALAR, WEIGHTED, GradientState
from engine.step.gradient_sync import GradientSync
from engine.utils import accelerator

SCALAR_LOSS, NO_LOSS = -1.0, -2.0
"""Instead of a count, where the ranks agree on the largest count of a ``Loss``."""


class LossAgreement:
    """Agreement of the ranks on the kind and the size of their losses, so that a rank without a loss takes part in what the others do.

    Args:
        gradient_sync: how the ranks combine gradients.
    """

    __slots__ = ("gradient_sync", "lockstep", "reference", "reference_agreed", "scalars")

    def __init__(self, gradient_sync: GradientSync) -> None:
        self.gradient_sync = gradient_sync
        self.lockstep = False
        """Whether all ranks run their backward passes together, as they do for prepared models."""
        self.scalars = False
        """Whether any loss was a scalar: on this rank, or on any rank when the ranks last agreed on it."""
        self.reference: float | None = None
        """fp16: a power of two by which the sum of a ``Loss`` is divided before backward, so that its gradients fit the format."""
        self.reference_agreed = False
        """Whether the ranks need not agree on :attr:`reference` any more."""

    def agree_on_kind(self, state: GradientState) -> None:
        """Agree on the kind of losses, in the first window in which some rank had one, so that ranks without join the collectives at its end.

        Raises:
            TypeError: the ranks' losses are of different kinds (on all ranks).
        """
        flags = (state.scalars, state.count is not None, self.scalars)
        scalars, weighted, any_scalar = self.gradient_sync.largest([float(flag) for flag in flags])
        self.scalars = bool(any_scalar)
        if scalars and weighted:
            raise TypeError("a scalar loss on one rank and Loss(sum, count) on another in one window: return one kind")
        state.kind = WEIGHTED if weighted else SCALAR if any_scalar else 0

    def agree_on_reference(self, count: float, window_size: int) -> None:
        """Agree on :attr:`reference`, once; waits for the device.

        Args:
            count: the loss's count, ``SCALAR_LOSS`` or ``NO_LOSS``.
            window_size: micro-batches in a full window.
        """
        largest_count = self.gradient_sync.largest([count])[0]
        self.reference_agreed = largest_count > NO_LOSS
        if largest_count >= 0.0:
            self.reference = 2.0 ** math.ceil(math.log2(max(largest_count, 1.0) * window_size))

    def total(self, count: Tensor | float | None, fed: bool) -> tuple[Tensor, bool]:
        """Sum up the ranks' counts of a window. Return the sum, shape ``()``, and whether any rank had a loss.

        ``fed``: whether this rank had one; only a rank without one waits for the device.
        """
        sync = self.gradient_sync
        summed: Any = sync.sum(packed(count, fed, sync.group.device))
        return summed[0], fed or bool(summed[1])

    def state_dict(self) -> dict[str, Any]:
        """The state on which later windows depend; between two windows it is the same on all ranks."""
        return {"scalars": self.scalars, "reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.scalars, self.reference = state["scalars"], state["reference"]
        self.reference_agreed = self.reference is not None


def packed(count: Tensor | float | None, fed: bool, device: torch.device) -> Tensor:
    """This rank's count and whether it had a loss (``fed``), always on ``device``, so that all ranks use the same backend. Shape [2], fp64."""
    if isinstance(count, Tensor):
        count = count.to(device, accelerator.wide(device), non_blocking=True).reshape(())
        return torch.stack([count, torch.full_like(count, float(fed))])
    return torch.tensor([count or 0.0, float(fed)], dtype=accelerator.wide(device)).to(device, non_blocking=True)
