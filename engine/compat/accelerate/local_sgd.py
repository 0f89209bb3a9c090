"""``LocalSGD``: ranks train independently and average their weights at intervals."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch

from engine.compat.accelerate.accelerator import Accelerator
from engine.compat.checked_arguments import checking_arguments
from engine.config.kinds import WholeNumber


class LocalSGD:
    """A block in which each rank steps with its own gradients; weights are averaged every ``local_sgd_steps`` calls of :meth:`step`, and at its end.

    Raises:
        ValueError, TypeError: an argument is invalid.
        NotImplementedError: the strategy shards the model over the ranks.
    """

    @checking_arguments(but=("accelerator",))  # not its class but its strategy matters
    def __init__(self, accelerator: Accelerator, model: Any, local_sgd_steps: int, enabled: bool = True) -> None:
        self.local_sgd_steps = WholeNumber(1).normalized("LocalSGD: local_sgd_steps", local_sgd_steps)
        kind = str(accelerator.distributed_type)
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise NotImplementedError(
                f"LocalSGD needs the whole model on each rank; with {kind} the ranks share it: leave LocalSGD out, or use strategy='ddp'"
            )
        self.enabled = enabled and kind != "NO"
        self.num_steps = 0
        self.accelerator, self.model = accelerator, model
        self._block = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._block.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the block. After an error nothing is averaged: the other ranks may not come."""
        if self.enabled and kind is None:
            self._average()
        self._block.close()

    def step(self) -> None:
        """Count a step, and average the weights when it is due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.reduce(parameter, reduction="mean"))
