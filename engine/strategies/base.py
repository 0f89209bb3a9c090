"""What a strategy is: a value with a few verbs. The base class is the single process, where every verb is a no-op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.group import Group


@dataclass(kw_only=True)
class Strategy:
    """How one model is trained by several processes. Subclass it, override what differs, pass an instance or register its name."""

    matched_forward: bool = field(default=False, init=False, repr=False)
    """Whether a forward pass holds collectives, so that all ranks must run equally many, in evaluation too."""
    group: Group = field(init=False, repr=False)

    def connect(self, group: Group) -> None:
        """Called once, before ``setup``, with the processes of this job.

        Raises:
            ValueError: when the strategy cannot work on them.
        """
        self.group = group

    def setup(self, model: nn.Module) -> nn.Module:
        """The model as it is called in training; ``model`` is on its device and in its dtype already."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that ``setup`` was given."""
        return model

    def sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        """Whether the coming forward and backward passes reduce gradients over the ranks (only a window's last one needs to)."""

    def expect(self, models: Sequence[nn.Module], root: Tensor) -> None:
        """The coming backward pass starts at ``root``, which no forward pass has returned."""

    def share_parameters(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers, for a model that is trained without ``setup`` (manual optimization)."""

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the ranks at once, for loops that step when they like (manual optimization)."""

    def sum(self, value: Tensor | float) -> Tensor | float:
        """The sum of a scalar over all ranks that saw different data."""
        return value

    def norm(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients. Shape ``()``."""
        if not grads:
            return torch.zeros(())
        return torch.nn.utils.get_total_norm(grads, norm_type)

    def agree(self, found: Tensor) -> Tensor:
        """The largest over all ranks of a flag (1.0: a gradient is not finite)."""
        return found


@dataclass(kw_only=True)
class Single(Strategy):
    """One process, one device."""

    def connect(self, group: Group) -> None:
        if group.world_size > 1:
            raise ValueError(f"strategy='single' was asked for, but this job has {group.world_size} processes; use strategy='ddp' or 'auto'")
        super().connect(group)


def trained(model: nn.Module) -> Iterable[Any]:
    """The parameters that receive gradients."""
    return (p for p in model.parameters() if p.requires_grad)
