"""Gradients that no backward pass reduces: averages over the ranks, and gradients that only repeated micro-batches have reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from engine.distributed import stacks
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group

_Form = list[list[int]]


@torch.no_grad()
def average(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Average the gradients of ``parameters``, which all ranks pass alike, in place: one collective for each dtype.

    A parameter may have a gradient on some ranks only; if no rank has one it stays ``None``, as on one process. A rank that lacks one waits
    for the answer whether another rank has it; a rank that has them all waits for nothing.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        _average_of_dtype(ranks, [p for p in parameters if p.dtype is dtype])


def _average_of_dtype(ranks: Group, parameters: Sequence[Tensor]) -> None:
    """Sum the gradients and, behind them, how many ranks have each: always the same layout, whatever a rank lacks."""
    lacking = [p for p in parameters if p.grad is None]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    counts = grads[0].new_ones(len(grads))
    for index in [index for index, p in enumerate(parameters) if p.grad is None]:
        counts[index] = 0
    flat = torch.cat([*(g.flatten() for g in grads), counts])
    dist.all_reduce(flat)
    *pieces, counts = flat.split([*(g.numel() for g in grads), len(grads)])
    anywhere = [x != 0 for x in counts.tolist()] if lacking else [True] * len(grads)
    for parameter, grad, piece, some in zip(parameters, grads, pieces, anywhere, strict=True):
        if some:
            grad.copy_(piece.view_as(grad).div_(ranks.world_size))
            parameter.grad = grad


class GradientAverage:
    """Averages the gradients of one strategy's optimizers in manual optimization, where no backward pass does.

    Which parameters are trained is compared between the ranks at the first step, and when it has changed.
    """

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, ...], _Form] = {}
        """The trained parameters that the ranks have agreed on, by the parameters of an optimizer."""

    def forget(self) -> None:
        self._agreed.clear()

    def __call__(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Average an optimizer's gradients in place, as :func:`average` does.

        Raises:
            ValueError: the ranks train different parameters (on all of them).
        """
        trained = [p for p in parameters if p.requires_grad or p.grad is not None]
        self._agree(ranks, parameters, trained)
        average(ranks, trained)

    def _agree(self, ranks: Group, parameters: Sequence[Tensor], trained: Sequence[Tensor]) -> None:
        """Compare the trained parameters over the ranks: a rank that has changed them waits until all others have."""
        numbers = {id(p): index for index, p in enumerate(parameters)}
        form = [[numbers[id(p)], *p.shape] for p in trained]
        if self._agreed.get(key := tuple(numbers)) == form:
            return
        with stacks.doing(
            "waiting for the other ranks to step an optimizer whose trained parameters have changed on this one"
        ):
            forms = gather_json(ranks, form)
        for rank, other_form in enumerate(forms):
            if other_form != forms[0]:
                only = [row for row in forms[0] if row not in other_form] or [
                    row for row in other_form if row not in forms[0]
                ]
                index, *shape = only[0]
                raise ValueError(
                    f"manual optimization: ranks 0 and {rank} step an optimizer with different trained parameters: one of them does not train "
                    f"number {index} of its parameters (shape {shape}). Freeze and unfreeze on all ranks, before the same step"
                )
        self._agreed[key] = form


class ReachedParameters:
    """Records which parameters the samples of a window have reached on this rank.

    A micro-batch that a rank repeats at weight 0, so that all ranks run the same collectives, reaches nothing: gradients that only such
    micro-batches have made are ``None``, not zero.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.forget()

    def forget(self) -> None:
        """End the window without a step."""
        self._remove()
        self._without: set[int] | None = None
        """Parameters (by id) without gradient at the start of the window; ``None``: it has not started."""
        self._reached: set[int] = set()
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
    def clear_unreached(self, ranks: Group, parameters: Sequence[Tensor]) -> None:
        """Remove the gradients of parameters that no sample of any rank has reached. A collective."""
        self._remove()
        self._over, without = True, self._without
        # A model that this rank has not called in the window, as in manual optimization, keeps its gradients.
        reached_here = [without is None or id(p) in self._reached or id(p) not in without for p in parameters]
        anywhere = torch.tensor(reached_here, dtype=torch.uint8, device=ranks.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        for parameter, reached in zip(parameters, anywhere.tolist(), strict=True):
            if not reached:
                parameter.grad = None

    def _note(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
