"""Ranks that reach different parameters under ZeRO stages 1 and 2, which add up the ranks' gradients by their order alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.group import Group
from engine.utils import accelerator

_numbers = itertools.count()


class ReducedOrder:
    """Lets all ranks reduce the gradients of all parameters in one order: a zero for a parameter that the backward pass of this rank left out.

    Stage 1 reduces at the end of a backward pass, in the order of the parameters. Stage 2 reduces when the backward pass reaches a parameter. The
    ranks compare that order after the first backward pass, through the job's store; later passes follow it, without asking other ranks.

    Args:
        ranks: the ranks that reduce gradients together.
        wrapper: DeepSpeed's optimizer of stage 1 or 2, whose methods are followed.
        names: the parameters' names by ``id``.
    """

    def __init__(self, ranks: Group, wrapper: Any, names: Mapping[int, str]) -> None:
        self._ranks, self._wrapper, self._names = ranks, wrapper, names
        self._parameters: list[tuple[Tensor, int]] = [
            (p, group) for group, parameters in enumerate(wrapper.bit16_groups) for p in parameters if p.requires_grad
        ]
        self._numbers = {id(p): number for number, (p, _) in enumerate(self._parameters)}
        self._topic = f"reduced/{next(_numbers)}"
        self._order: list[int] = []
        """The numbers of parameters in the order in which all ranks reduce them; empty: not known yet."""
        self._next = 0
        self._reached: list[int] = []
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
        """Stage 2: reduce a gradient that the backward pass has computed."""
        number = self._numbers[id(parameter)]
        if self._order:
            if number not in self._order[self._next :]:
                raise RuntimeError(
                    f"the backward pass reaches {self._names.get(id(parameter))} at another place than in earlier steps, and ZeRO stage 2 adds up "
                    "the ranks' gradients by their order: run modules in one order, or use strategy='fsdp', 'ddp' or 'deepspeed_stage_1'"
                )
            self._zero_until(self._order.index(number, self._next))
            self._next += 1
        self._reached.append(number)
        self._process(parameter, group)

    def _zero_until(self, end: int) -> None:
        for number in self._order[self._next : end]:
            self._zero(*self._parameters[number])
        self._next = end

    def _end(self) -> None:
        """Stage 2: finish the reductions of a backward pass.

        Raises:
            RuntimeError: the ranks have reached different parameters in the first one.
        """
        if self._order:
            self._zero_until(len(self._order))
            self._next = 0
            self._finish()
        else:
            reached = list(self._reached)
            for number in sorted(set(range(len(self._parameters))) - set(reached)):
                self._zero(*self._parameters[number])
            store: Any = self._ranks.store
            notes = dist.PrefixStore(self._topic, store.clone())
            notes.set(str(self._ranks.rank), json.dumps(reached))
            notes.check([str(self._ranks.rank)])  # a set has no answer
            self._finish()
            if self._ranks.device.type != "cpu":
                accelerator.current_stream(self._ranks.device).synchronize()
            # All ranks have begun the last reduction, and so have written.
            self._compare([json.loads(notes.get(str(rank))) for rank in range(self._ranks.world_size)])
            self._order = self._with_unreached(reached)
        self._reached.clear()

    def _compare(self, orders: Sequence[list[int]]) -> None:
        """Raise ``RuntimeError`` unless all ranks have reached the same parameters in the same order."""
        rank = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if rank is None:
            return
        lines = [
            f"only rank {one} reached {self._first(set(orders[one]) - set(orders[other]))}"
            for one, other in ((0, rank), (rank, 0))
            if set(orders[one]) - set(orders[other])
        ]
        what = "; ".join(lines) or "they reached the same ones in different orders"
        raise RuntimeError(
            f"the first backward passes of ranks 0 and {rank} reached different parameters, and ZeRO stage 2 adds up the ranks' gradients by their "
            f"order: {what}. Use strategy='fsdp', 'deepspeed_stage_1', or 'ddp' with find_unused_parameters=True, which are exact then, or let "
            "the first loss of each rank depend on all parameters: + 0.0 * sum(p.sum() for p in expert.parameters())"
        )

    def _first(self, numbers: set[int], limit: int = 6) -> str:
        names = [str(self._names.get(id(self._parameters[number][0]))) for number in sorted(numbers)]
        return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

    def _with_unreached(self, reached: list[int]) -> list[int]:
        """The order with the parameters that no rank has reached yet: each before those that come before it in the model, as in a backward pass."""
        order = list(reached)
        for number in sorted(set(range(len(self._parameters))) - set(reached)):
            order.insert(next((at for at, other in enumerate(order) if other < number), len(order)), number)
        return order
