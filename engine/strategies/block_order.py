"""The order in which ranks gather and reduce the blocks of a model that FSDP shards, where some ranks leave blocks out.

FSDP2 pairs the ranks' collectives by their order alone. A rank that leaves out a block that another rank runs (an expert without tokens, a dropped
layer, an early exit) would compute with another block's parameters, and add gradients of different parameters. So all ranks gather and reduce the
blocks in one order: what a rank leaves out it gathers and frees all the same, and reduces zeros for it. The ranks find the order in the first
forward pass of each kind (:mod:`engine.strategies.merged_steps`), and follow it from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed import stacks
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.distributed.waiting import told_waiting
from engine.strategies.merged_steps import MergedSteps
from engine.strategies.unreached import UnreachedParameters
from engine.utils import torch_private
from engine.utils.torch_private import FSDPBlock, FSDPSteps

MOST_PASSES = 4
"""Forward passes before a backward pass, and backward passes after it, that are told apart."""

# A step is the number of a block, where it begins, or the complement of the number, where it ends: ~3 ends block 3.
_FIRST = "is in its first forward pass"
"""The kind of the ranks' exchange in such a pass."""


class Order:
    """The steps of one kind of pass, the same on all ranks.

    Args:
        parts: the first guess; a backward pass has a part for each forward pass.
    """

    def __init__(self, parts: Sequence[Sequence[int]], is_backward: bool) -> None:
        self.steps = [step for part in parts for step in part]
        self.is_backward = is_backward
        self.is_found = is_backward
        """Whether the ranks have found the order of a forward pass."""
        self.is_settled = not is_backward
        """Whether parts that the backward pass does not reach were removed."""
        self.idle: set[int] = set()
        """Blocks that no rank's backward pass reached when it was new; their steps are left out while they are frozen."""
        self._lengths = list(map(len, parts))

    def settle(self, indices: set[int], without_grad: set[int]) -> None:
        """Remove parts of which no rank has made a step (``indices``), unless that is all, and those of blocks ``without_grad``."""
        bounds = [0, *itertools.accumulate(self._lengths)]
        idle = [range(low, high) for low, high in itertools.pairwise(bounds) if indices.isdisjoint(range(low, high))]
        dropped = set(itertools.chain.from_iterable(idle)) if len(idle) < len(self._lengths) else set()
        left_out = self._left_out(indices)
        self.idle = {self.steps[index] for index in left_out} - {self.steps[index] for index in indices}
        self._remove(dropped | {index for index in left_out if self.steps[index] in without_grad})
        self.is_settled = True

    def drop_old_places(self, indices: set[int]) -> None:
        """Remove the steps of blocks that ranks have made at another place (``indices``), after steps were added."""
        elsewhere = {self.steps[index] for index in indices}
        self._remove({index for index in self._left_out(indices) if self.steps[index] in elsewhere})

    def _left_out(self, indices: set[int]) -> list[int]:
        return [index for index, step in enumerate(self.steps) if step >= 0 and index not in indices]

    def _remove(self, dropped: set[int]) -> None:
        """Remove steps by index, and the ends of blocks whose begin is removed."""
        for index in [index for index in dropped if self.steps[index] >= 0]:
            if ~self.steps[index] in self.steps[index:]:
                dropped.add(self.steps.index(~self.steps[index], index))
        self.steps = [step for index, step in enumerate(self.steps) if index not in dropped]


class Pass:
    """One pass in its :class:`Order`: makes the steps that this rank leaves out, each before the next one that it makes.

    Args:
        order: the order; a new step is added if all ranks make it.
        blocks: the model.
    """

    def __init__(self, order: Order, blocks: BlockOrder) -> None:
        self.order, self._blocks, self._next = order, blocks, 0
        self.indices: set[int] = set()
        """The indices of the steps that this rank has made by itself."""
        self.open: list[int] = []
        """Blocks that run now."""
        self.has_new = False
        """Whether steps were added to the order."""

    def reach(self, step: int) -> None:
        """Gather or reduce, in the order of all ranks, the blocks that come before ``step`` and that this rank leaves out; this rank runs ``step``
        next."""
        steps, at = self.order.steps, self._next
        if at == len(steps) or steps[at] != step:
            index = self._find(step)
            at = self._add(step) if index is None else index
            self._run_until(at)
        self._next = at + 1
        self.indices.add(at)
        if step >= 0:
            self.open.append(step)
        elif ~step in self.open:
            self.open.remove(~step)

    def left(self) -> list[int]:
        """The steps after the latest one."""
        return self.order.steps[self._next :]

    def complete(self, until: int | None = None) -> None:
        """Make all steps that are left, or those before the step ``until``."""
        steps = self.order.steps
        self._run_until(len(steps) if until is None else steps.index(until, self._next))

    def _run_until(self, end: int) -> None:
        while self._next < end:
            self._next += 1
            self._blocks.run_step(self.order.steps[self._next - 1], self)

    def _find(self, step: int) -> int | None:
        """The index of ``step`` among the steps that are left."""
        steps, bound = self.order.steps, self._bound()
        if step < 0 and bound < len(steps) and steps[bound] == step:
            return bound
        return steps.index(step, self._next, bound) if step in steps[self._next : bound] else None

    def _bound(self) -> int:
        """The index of the next end of a block that runs in this forward pass: what comes after it cannot come now."""
        steps = self.order.steps
        if not self.order.is_backward:
            for index in range(self._next, len(steps)):
                if steps[index] < 0 and ~steps[index] in self.open:
                    return index
        return len(steps)

    def _add(self, step: int) -> int:
        """Add a step to the order if all ranks make it now, or another one of the same part of the model. Return its index.

        Raises:
            RuntimeError: they do not.
        """
        added = self._blocks.steps_to_add(step, self)
        if not self.order.is_backward:  # other ranks may make the steps that are left
            self._run_until(self._bound())
        at = self._blocks.agree(self._next, step, added, self)
        self._run_until(at)
        self.has_new = True
        self.order.steps[at:at] = added
        return self.order.steps.index(step, at)


class FirstPass(Pass):
    """The first forward pass in an :class:`Order`, in which the ranks find it; each step is exchanged before it is made."""

    def __init__(self, order: Order, blocks: BlockOrder, merged: MergedSteps) -> None:
        super().__init__(order, blocks)
        self._merged = merged

    def reach(self, step: int) -> None:
        while (chosen := self._blocks.agree_on_next(step, self._merged)) != step:
            self._blocks.run_step(chosen, self)

    def complete(self, until: int | None = None) -> None:
        while (chosen := self._blocks.agree_on_next(None, self._merged)) is not None:
            self._blocks.run_step(chosen, self)
        self.order.steps, self.order.is_found = self._merged.order(), True


class BlockOrder(FSDPSteps):
    """Keeps the ranks' collectives for the blocks of ``root`` in one order.

    In the first forward pass of a kind the ranks find the order, by a small collective for each step; no later pass has one. In a backward pass the
    first guess is the opposite of the forward passes before it. Where all ranks run blocks in an order that is new, they agree on it likewise.

    A parameter that this rank has not reached gets a zero gradient, for the ranks that have; one that no rank has reached gets none.

    Args:
        root: the sharded model.
        ranks: the ranks that share its blocks and train on different samples.
        apart: parameters that FSDP ignores, whose gradients are averaged at the end of each backward pass that reduces.
    """

    def __init__(self, root: nn.Module, ranks: Group, apart: Sequence[Tensor]) -> None:
        self._root, self._ranks, self._apart = root, ranks, apart
        self._blocks: list[FSDPBlock] = torch_private.fsdp_blocks(root)
        self._own = next((number for number, block in enumerate(self._blocks) if block.module is root), None)
        self._orders: dict[object, Order] = {}
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._passes: list[Order] = []  # forward passes since the last backward pass
        self._backwards = 0  # backward passes since the last forward pass
        self._without_grad: set[int] = set()  # blocks that ran without gradients in these forward passes
        self._begun: set[int] = set()  # blocks whose backward pass has begun, and has not ended
        self._ended: set[int] = set()  # blocks whose backward pass was ended before its own end came
        self._has_grad = self._finishing = False
        every = [*(p for block in self._blocks for p in block.parameters), *apart]
        self._unreached = UnreachedParameters(ranks, every)
        torch_private.follow_fsdp(root, self._blocks, self)
        root.register_forward_pre_hook(self._begin_forward_pass, prepend=True)
        root.register_forward_hook(self._end_forward_pass, prepend=True)

    # -- forward ----------------------------------------------------------------------------------------------------------------

    @torch_private.without_dynamo
    def _begin_forward_pass(self, module: nn.Module, inputs: Any) -> None:
        self._backward = None  # an error may have ended one early
        has_grad = self._has_grad = torch.is_grad_enabled()
        if has_grad:
            if self._backwards:
                self._passes, self._backwards, self._without_grad = [], 0, set()
            if len(self._passes) == MOST_PASSES:
                self._passes.pop(0)
        key = ("forward", has_grad, len(self._passes) if has_grad else 0)
        if key not in self._orders:
            earlier = next((order.steps for order in self._orders.values() if not order.is_backward), None)
            self._orders[key] = Order([earlier or list(_in_model(self._root, self._blocks))], False)
        if has_grad:
            self._passes.append(self._orders[key])
        order = self._orders[key]
        self._forward = Pass(order, self) if order.is_found else self._first_pass(order)

    def _first_pass(self, order: Order) -> FirstPass:
        paths = _paths(self._root, self._blocks)
        return FirstPass(order, self, MergedSteps(order.steps, paths, self._ranks.world_size))

    @torch_private.without_dynamo
    def _end_forward_pass(self, module: nn.Module, inputs: Any, output: Any) -> None:
        running = self._forward
        if running is None:
            return
        running.complete(None if self._own is None else ~self._own)
        self._forward = None
        if running.has_new:
            running.order.drop_old_places(self._steps_of_any(running))

    def begin_forward(self, number: int) -> None:
        if self._forward is not None:
            self._forward.reach(number)
            if self._has_grad and not torch.is_grad_enabled():
                self._without_grad.add(number)

    def end_forward(self, number: int) -> None:
        if self._forward is not None:
            self._forward.reach(~number)

    # -- backward ---------------------------------------------------------------------------------------------------------------

    def begin_backward(self, number: int) -> None:
        if self._backward is None:
            self._begin_backward_pass()
        assert self._backward is not None
        self._backward.reach(number)
        self._mark_begun(number)

    def _mark_begun(self, number: int) -> None:
        self._begun.add(number)
        self._ended.discard(number)

    def _begin_backward_pass(self) -> None:
        key = ("backward", len(self._passes), min(self._backwards, MOST_PASSES))
        if key not in self._orders:
            self._orders[key] = Order(self._opposite(), True)
        self._backward, self._begun, self._ended = Pass(self._orders[key], self), set(), set()
        self._unreached.begin()

    def _opposite(self) -> list[list[int]]:
        """The steps of the forward passes, backwards. The root begins once, and ends once."""
        parts = [[~step for step in reversed(order.steps)] for order in reversed(self._passes)]
        root = self._own
        if root is not None:
            begins, ends = [part[0] == root for part in parts], [part[-1] == ~root for part in parts]
            parts = [
                part[begin and number > 0 : len(part) - (end and number < len(parts) - 1)]
                for number, (part, begin, end) in enumerate(zip(parts, begins, ends, strict=True))
            ]
        return parts

    def end_backward(self, number: int) -> None:
        block, running = self._blocks[number], self._backward
        if running is None or (self._finishing and number not in self._begun):
            block.end_backward()
        elif self._finishing:  # its inputs need no gradient, and the order has no place for its end
            self._end_block(number, running)
        elif number not in self._ended:
            running.reach(~number)
            self._end_block(number, running)

    def _end_block(self, number: int, running: Pass) -> None:
        block = self._blocks[number]
        self._begun.discard(number)
        if block.reduces:
            self._unreached.add(block.zero_missing(), block.parameters)
            if self._unreached.missing and block.reduces_fully and self._reduces_no_more(running):
                self._unreached.ask()
        block.end_backward()

    def _reduces_no_more(self, running: Pass) -> bool:
        """Whether the pass reduces nothing after the present block."""
        return not self._has_trained_apart() and not any(
            step < 0 and self._blocks[~step].is_trained for step in running.left()
        )

    def run_step(self, step: int, running: Pass) -> None:
        """Make a step that this rank leaves out."""
        number = max(step, ~step)
        if number in running.order.idle and number not in self._begun and not self._blocks[number].is_trained:
            return
        if running is self._forward:
            if step >= 0:
                self._blocks[step].begin_forward()
            else:
                self._blocks[~step].end_forward()
        elif step >= 0:
            self._mark_begun(step)
            self._blocks[step].begin_backward()
        else:
            self._ended.add(~step)
            self._end_block(~step, running)

    def end_pass(self, finish: Callable[[], None]) -> None:
        running = self._backward
        if running is None:
            finish()
            return
        self._finishing = True
        try:
            running.complete()
            self._check_complete()
            reduces = [block for block in self._blocks if block.reduces_fully]
            if reduces and self._has_trained_apart():
                self._average_apart()
            finish()
        finally:
            self._finishing, self._backward = False, None
            self._backwards += 1
        if reduces:
            self._unreached.clear()
        if not running.order.is_settled:
            running.order.settle(self._steps_of_any(running), self._without_grad_on_any())

    def _check_complete(self) -> None:
        """Check that the backward pass added nothing to gradients that were reduced before.

        Raises:
            RuntimeError: it did.
        """
        blocks = [(number, self._blocks[number]) for number in self._ended]
        late = [number for number, block in blocks if block.reduces and block.has_unreduced()]
        if late:
            raise RuntimeError(
                f"the backward pass added to gradients of {self._names(late)} after FSDP had reduced them, because other blocks began in between. "
                "Blocks must run in one order, and use their parameters in their own forward pass only"
            )

    def _has_trained_apart(self) -> bool:
        return any(p.requires_grad for p in self._apart)

    def _average_apart(self) -> None:
        """Average the gradients of the parameters that FSDP ignores; averaging those that are averaged already does no harm."""
        missing = [p for p in self._apart if p.requires_grad and p.grad is None]
        self._unreached.add(missing, self._apart)
        self._unreached.ask()
        for parameter in self._apart:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self._ranks.wide)
                parameter.grad.div_(self._ranks.world_size)

    # -- the other ranks --------------------------------------------------------------------------------------------------------

    def _steps_of_any(self, running: Pass) -> set[int]:
        """The indices of the steps that some rank has made by itself."""
        return set().union(
            *(indices for _, indices in self._gathered("is at the end of its passes", sorted(running.indices)))
        )

    def _without_grad_on_any(self) -> set[int]:
        return set().union(
            *(numbers for _, numbers in self._gathered("has ended its backward pass", sorted(self._without_grad)))
        )

    def _gathered(self, kind: str, *content: Any) -> list[list[Any]]:
        """Gather ``content`` of all ranks at this place of the pass, with the kind of the place.

        Raises:
            RuntimeError: a rank is at a place of another kind; raised on all ranks.
        """
        return self._of_kind(kind, gather_json(self._ranks, [kind, *content]))

    def _of_kind(self, kind: str, requests: list[list[Any]]) -> list[list[Any]]:
        """The ``requests``, if all are of this kind."""
        if any(request[0] != kind for request in requests):
            raise RuntimeError(self._orders_text(requests))
        return requests

    def steps_to_add(self, step: int, running: Pass) -> list[int]:
        """The steps to add for one that is new in the order: in a forward pass those of all blocks in its part of the model, because each rank may
        run others of them first."""
        if running is self._backward or step < 0 or running.open[1:]:
            return [step]
        blocks = [block.module for block in self._blocks if block.module is not self._root]
        part = next(part for part in _parts(self._root, blocks) if self._blocks[step].module in set(part.modules()))
        return list(_in_model(part, self._blocks))

    def agree_on_next(self, step: int | None, merged: MergedSteps) -> Any:
        """Agree on the next step of all ranks in a first forward pass; ``None``: all are at its end.

        Args:
            step: the step that this rank makes next by itself; ``None``: it is at the end.

        Raises:
            RuntimeError: there is none that comes next; raised on all ranks.
        """
        with stacks.doing(
            "waiting for the other ranks, which agree on the order of blocks in their first forward pass"
        ):
            requests = self._gathered(_FIRST, step)
        steps = [request[1] for request in requests]
        chosen = merged.add(steps)
        if chosen is None and any(step is not None for step in steps):
            raise RuntimeError(self._orders_text(requests))
        return chosen

    def agree(self, at: int, step: int, added: Sequence[int], running: Pass) -> int:
        """Agree on steps that are new in the order, if all ranks make one of them now. Return their index.

        Args:
            at: the index of this rank's next step.
            step: the step that this rank makes.
            added: the steps to add.

        Raises:
            RuntimeError: they do not; raised on all ranks.
        """
        kind = "backward" if running is self._backward else "forward"
        name = self._names([max(step, ~step)])
        requests = self._of_kind(
            kind,
            wait_at_new_place(
                self._ranks,
                [kind, step, at, list(added)],
                f"{'begins' if step >= 0 else 'ends'} the {kind} pass of block {name}",
            ),
        )
        if any(request[3] != list(added) for request in requests):
            raise RuntimeError(self._orders_text(requests))
        return max(int(request[2]) for request in requests)

    def _orders_text(self, requests: Sequence[Sequence[Any]]) -> str:
        """The message of an error about ranks that are at these places."""
        lines = [
            f"  rank {rank} {'begins' if place[0] >= 0 else 'ends'} the {kind} pass of {self._names([max(place[0], ~place[0])])}"
            if kind in ("forward", "backward")
            else f"  rank {rank} {kind}"
            for rank, (kind, *place) in enumerate(requests)
        ]
        return "\n".join(
            (
                "the ranks run the blocks of FSDP in different orders:",
                *lines,
                "Ranks may leave blocks out, but must run them in one order; FSDP(blocks=...) names the modules that are blocks",
            )
        )

    def _names(self, numbers: Sequence[int]) -> str:
        """The names of these blocks in the user's module."""
        names = {id(module): name.removeprefix("module.") or "the model" for name, module in self._root.named_modules()}
        return ", ".join(names[id(self._blocks[number].module)] for number in numbers)


def wait_at_new_place(ranks: Group, request: list[Any], place: str) -> list[list[Any]]:
    """Gather ``request`` of all ranks, because this one is at a place of a pass that is new; warn if the others do not come.

    Args:
        place: what this rank does there, as in "begins the forward pass of block layers.1".
    """
    why = f"because it {place} at a place where no rank did so before: ranks may leave blocks out, but must run them in one order"
    with told_waiting(ranks, why):
        requests: list[list[Any]] = gather_json(ranks, request)
    return requests


def _parts(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The children of the innermost module that contains all blocks; that is ``root``, or inside of wrappers and containers in it."""
    children = list(root.children())
    for child in children:
        if set(blocks) <= set(child.modules()) - {child}:
            return _parts(child, blocks)
    return children


def _paths(root: nn.Module, blocks: Sequence[FSDPBlock]) -> dict[int, list[int]]:
    """By block, the index of the child of ``root`` that has it, of the child of this one, and so on; a module counts where it is first."""
    paths: dict[int, list[int]] = {id(root): []}

    def walk(module: nn.Module, path: list[int]) -> None:
        for index, child in enumerate(module.children()):
            if id(child) not in paths:
                paths[id(child)] = [*path, index]
                walk(child, paths[id(child)])

    walk(root, [])
    return {number: paths[id(block.module)] for number, block in enumerate(blocks)}


def _in_model(root: nn.Module, blocks: Sequence[FSDPBlock]) -> Iterator[int]:
    """The steps of blocks in the order of the model's modules."""
    numbers = {id(block.module): number for number, block in enumerate(blocks)}
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[int]:
        if id(module) in seen:
            return
        seen.add(id(module))
        number = numbers.get(id(module))
        if number is not None:
            yield number
        for child in module.children():
            yield from walk(child)
        if number is not None:
            yield ~number

    return walk(root)
