"""Micro-batches that some rank repeats at weight 0, so that all ranks run the same collectives: their gradients are ``None``, not zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from engine.distributed.group import Group


class Reached:
    """Which parameters the samples of a window have reached on this rank, except those of a repeated micro-batch."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.forget()

    def forget(self) -> None:
        """The window ends without a step."""
        self._remove()
        self._without: set[int] | None = None
        """Parameters (by id) without gradient at the start of the window; ``None``: it has not started."""
        self._found: set[int] = set()
        self._over = False

    def watch(self, parameters: Iterable[Tensor], repeated: bool) -> None:
        """Start a forward pass, of a ``repeated`` micro-batch or of samples that count."""
        if self._over:
            self.forget()
        if self._without is None:
            chosen = [p for p in parameters if p.requires_grad and p.grad is None]
            self._without = {id(p) for p in chosen}
            self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in chosen]
        if repeated:
            self._remove()

    @torch.no_grad()
    def settle(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Remove the gradients of parameters that no sample of any rank has reached. A collective."""
        self._remove()
        self._over, without = True, self._without
        # A model that this rank has not called in the window, as in manual optimization, keeps its gradients.
        known = [without is None or id(p) in self._found or id(p) not in without for p in parameters]
        anywhere = torch.tensor(known, dtype=torch.uint8, device=ranks.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        for parameter, reached in zip(parameters, anywhere.tolist(), strict=True):
            if not reached:
                parameter.grad = None

    def _note(self, parameter: Tensor) -> None:
        self._found.add(id(parameter))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
