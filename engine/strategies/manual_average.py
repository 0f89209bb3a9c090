"""Average gradients over the ranks in manual optimization, where no backward pass does: one collective, and the host waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.health import stacks

_Form = list[list[int]]


class ManualAverage:
    """Averages the gradients of one strategy's optimizers.

    A parameter may have a gradient on some ranks only; if no rank has one it stays ``None``, as on one process. Which parameters are
    trained is compared between the ranks at the first step, and when it has changed.
    """

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, ...], _Form] = {}
        """What the ranks train, by the parameters of an optimizer."""

    def forget(self) -> None:
        self._agreed.clear()

    @torch.no_grad()
    def __call__(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Average them in place. A rank on which a trained parameter has no gradient waits for the answer whether another one has it.

        Raises:
            ValueError: the ranks train different parameters (on all of them).
        """
        trained = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._agree(ranks, parameters, trained)
        for dtype in dict.fromkeys(p.dtype for p in trained):
            _reduce(ranks, [p for p in trained if p.dtype is dtype])

    def _agree(self, ranks: Group, parameters: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
        """A rank that has changed what it trains waits until all others have."""
        known = {id(p): index for index, p in enumerate(parameters)}
        form = [[known[id(p)], *p.shape] for p in trained]
        if self._agreed.get(key := tuple(known)) == form:
            return
        with stacks.doing(
            "waiting for the other ranks to step an optimizer whose trained parameters have changed on this one"
        ):
            forms = gather_json(ranks, form)
        for rank, other in enumerate(forms):
            if other != forms[0]:
                only = [row for row in forms[0] if row not in other] or [row for row in other if row not in forms[0]]
                index, *shape = only[0]
                raise ValueError(
                    f"manual optimization: ranks 0 and {rank} step an optimizer with different trained parameters: one of them does not train "
                    f"number {index} of its parameters (shape {shape}). Freeze and unfreeze on all ranks, before the same step"
                )
        self._agreed[key] = form


def _reduce(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Sum the gradients and, behind them, how many ranks have each: always the same layout, whatever a rank lacks."""
    lacking = [p for p in parameters if p.grad is None]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    there = grads[0].new_ones(len(grads))
    for index in [index for index, p in enumerate(parameters) if p.grad is None]:
        there[index] = 0
    flat = torch.cat([*(g.flatten() for g in grads), there])
    dist.all_reduce(flat)
    *pieces, there = flat.split([*(g.numel() for g in grads), len(grads)])
    anywhere = [x != 0 for x in there.tolist()] if lacking else [True] * len(grads)
    for parameter, grad, piece, some in zip(parameters, grads, pieces, anywhere, strict=True):
        if some:
            grad.copy_(piece.view_as(grad).div_(ranks.world_size))
            parameter.grad = grad
