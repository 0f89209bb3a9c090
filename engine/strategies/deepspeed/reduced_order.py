"""Ranks that reach different parameters under ZeRO, which adds up the ranks' gradients by their order alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.strategies.deepspeed.gathered_order import GatheredOrder


class ReductionOrder:
    """The order in which all ranks reduce the gradients of parameters, by the parameters' numbers.

    Args:
        ranks: the ranks that reduce gradients together.
        numbers: a guess of the order, for the first pass; then rank 0 tells the others in which order it has reached the parameters.
    """

    def __init__(self, ranks: Group, numbers: Sequence[int]) -> None:
        self._ranks, self._numbers = ranks, list(numbers)
        self._is_known = False
        self._next = 0
        self.reached: dict[int, None] = {}
        """The parameters that this rank's backward pass has reached, in order."""

    def reach(self, number: int) -> Iterator[int]:
        """Record that the backward pass has computed a gradient, and yield the parameters whose gradients can be reduced now."""
        self.reached[number] = None
        while self._next < len(self._numbers) and self._numbers[self._next] in self.reached:
            self._next += 1
            yield self._numbers[self._next - 1]

    def left(self) -> list[int]:
        """The parameters whose gradients are still to be reduced."""
        return self._numbers[self._next :]

    def end(self) -> None:
        """End the pass."""
        if not self._is_known:
            self._numbers = _with_unreached(gather_json(self._ranks, list(self.reached))[0], len(self._numbers))
            self._is_known = True
        self._next = 0
        self.reached.clear()


class ReducedOrder:
    """Lets all ranks reduce the gradients of all parameters in one order: a zero for a parameter that the backward pass of this rank left out.

    Stage 1 reduces at the end of a backward pass, in the order of the parameters. Stage 2 reduces when the backward pass reaches a parameter: here a
    gradient waits, in ``p.grad``, until those before it in the order are there, at most until the end of the pass. The first pass takes the
    opposite of the parameters' order; then rank 0 tells the others in which order it has reached them.

    Args:
        ranks: the ranks that reduce gradients together.
        wrapper: DeepSpeed's optimizer of stage 1 or 2, whose methods are followed.
    """

    def __init__(self, ranks: Group, wrapper: Any) -> None:
        self._ranks, self._wrapper = ranks, wrapper
        self._parameters: list[tuple[Tensor, int]] = [
            (p, group) for group, parameters in enumerate(wrapper.bit16_groups) for p in parameters if p.requires_grad
        ]
        self._numbers = {id(p): number for number, (p, _) in enumerate(self._parameters)}
        self._order = ReductionOrder(ranks, range(len(self._parameters))[::-1])
        self._process, self._finish = wrapper.process_gradients, wrapper.overlapping_partition_gradients_reduce_epilogue
        self._reduce = wrapper.reduce_gradients
        if wrapper.partition_gradients:
            wrapper.process_gradients = self._reach
            wrapper.overlapping_partition_gradients_reduce_epilogue = self._end
        else:
            wrapper.reduce_gradients = self._reduce_all

    def _reduce_all(self, *args: Any, **kwargs: Any) -> None:
        """Stage 1: reduce all gradients."""
        for parameter, group in self._parameters:
            if self._wrapper.get_gradient_for_reduction(parameter) is None:
                self._zero(parameter, group)
        self._reduce(*args, **kwargs)

    def _zero(self, parameter: Tensor, group: int) -> None:
        """Reduce a zero."""
        parameter.grad = torch.zeros_like(parameter)
        self._process(parameter, group)

    def _reach(self, parameter: Tensor, group: int) -> None:
        """Stage 2: reduce what can be reduced now that the backward pass has computed this gradient."""
        for number in self._order.reach(self._numbers[id(parameter)]):
            self._process(*self._parameters[number])

    def _end(self) -> None:
        """Stage 2: reduce all that is left, and finish the reductions of a backward pass."""
        for number in self._order.left():
            if number in self._order.reached:
                self._process(*self._parameters[number])
            else:
                self._zero(*self._parameters[number])
        self._finish()
        self._order.end()


class ShardedReducedOrder:
    """Lets all ranks reduce the gradients of stage 3 in one order, as :class:`ReducedOrder` does for stage 2.

    A parameter that no rank reaches gets a zero, too, also in a single process: DeepSpeed would step it with the gradient of an earlier step. The
    first pass takes the order in which the modules are gathered for it.

    Args:
        ranks: the ranks that reduce gradients together.
        wrapper: DeepSpeed's optimizer of stage 3, whose methods are followed.
        gathered: the order of the modules; a backward pass over them ends before its last reductions.
    """

    def __init__(self, ranks: Group, wrapper: Any, gathered: GatheredOrder | None) -> None:
        self._ranks, self._wrapper, self._gathered = ranks, wrapper, gathered
        self._parameters: list[Any] = [p for group in wrapper.fp16_groups for p in group if p.requires_grad]
        self._numbers = {id(p): number for number, p in enumerate(self._parameters)}
        self._order: ReductionOrder | None = None
        self._process = wrapper.reduce_ready_partitions_and_remove_grads
        self._finish = wrapper.overlapping_partition_gradients_reduce_epilogue
        wrapper.reduce_ready_partitions_and_remove_grads = self._reach
        wrapper.overlapping_partition_gradients_reduce_epilogue = self._end

    def _known_order(self) -> ReductionOrder:
        """The order; first a guess, which the first backward pass needs: the parameters of the modules in the order of this pass, then all others."""
        if self._order is None:
            modules = [] if self._gathered is None else self._gathered.backward_guess()
            of_modules = [self._numbers.get(id(p)) for module in modules for p in reversed(module._parameters.values())]
            numbers = [number for number in of_modules if number is not None]
            self._order = ReductionOrder(
                self._ranks, list(dict.fromkeys([*numbers, *reversed(range(len(self._parameters)))]))
            )
        return self._order

    def _reach(self, parameter: Tensor) -> None:
        """Reduce what can be reduced now that the backward pass has computed this gradient."""
        for number in self._known_order().reach(self._numbers[id(parameter)]):
            self._process(self._parameters[number])

    def _end(self) -> None:
        """Reduce all that is left, and finish the reductions of a backward pass."""
        if self._gathered is not None:
            self._gathered.end_backward_pass()
        order = self._known_order()
        for number in order.left():
            if number not in order.reached:
                self._zero(self._parameters[number])
            self._process(self._parameters[number])
        self._finish()
        order.end()

    def _zero(self, parameter: Any) -> None:
        """Give a zero gradient of the whole shape to a parameter, which is a shard now."""
        shard = parameter.data
        parameter.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = parameter.data
        parameter.data = shard


def _with_unreached(reached: list[int], count: int) -> list[int]:
    """Put the parameters that rank 0 has not reached into the order: each before those that come before it in the model, as in a backward pass."""
    order = list(reached)
    for number in sorted(set(range(count)) - set(reached)):
        order.insert(next((at for at, other in enumerate(order) if other < number), len(order)), number)
    return order
