"""The order in which ranks gather the modules of a model under ZeRO stage 3, where some ranks leave modules out."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed import process_groups
from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.strategies.block_order import MOST_PASSES, wait_at_new_place
from engine.utils import torch_private

# A step is the number of a module, which is gathered; in a backward pass also the complement of the number: ~3 gathers module 3 for a recomputation
# of its forward pass (activation checkpointing).
_Item = tuple[int, int]  # a step, and how often the pass has made it before


class Order:
    """The order in which one kind of pass (training, evaluation) gathers modules under ZeRO 3, the same on all ranks; a step is a module's number."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = list(steps)
        self.is_known = False
        """Whether the ranks have told each other how they ran the modules; until then the steps are a guess."""
        self.unsure: set[int] = set(steps)
        """Modules that may run at a later place: no rank has run them yet, or two ranks in different orders."""

    def learn(self, runs: Sequence[Sequence[int]]) -> None:
        """Take over the order in which the ranks ran the modules."""
        guess = {item: place for place, item in enumerate(_counted(self.steps))}
        items, unsure = merged([list(_counted(run)) for run in runs], guess)
        self.steps, self.unsure, self.is_known = [step for step, _ in items], unsure, True


def _counted(steps: Sequence[int]) -> Iterator[_Item]:
    seen = Counter[int]()
    for step in steps:
        yield step, seen[step]
        seen[step] += 1


def merged(runs: Sequence[Sequence[_Item]], guess: dict[_Item, int]) -> tuple[list[_Item], set[int]]:
    """Merge the ranks' orders into one, as far as they agree; return it, and the steps whose place is not sure.

    Args:
        runs: the order of each rank.
        guess: the places of all items that were expected; items that no rank has run are put where these say.
    """
    order = list(runs[0])
    unsure: set[int] = set()
    for run in runs[1:]:
        placed, in_run, at = set(order), set(run), 0
        for item in run:
            if item in placed:
                place = order.index(item)
                if place < at:
                    unsure.add(item[0])
                at = max(at, place + 1)
                continue
            while (
                at < len(order) and order[at] not in in_run and guess.get(order[at], -1) < guess.get(item, len(guess))
            ):
                at += 1
            order.insert(at, item)
            at += 1
    placed = set(order)
    for item in sorted(guess.keys() - placed, key=guess.__getitem__):
        before = [place for place, other in enumerate(order) if guess.get(other, len(guess)) < guess[item]]
        order.insert(before[-1] + 1 if before else 0, item)
        unsure.add(item[0])
    return order, unsure


class Pass:
    """A pass that runs now: its place in the :class:`Order` of its kind."""

    def __init__(self, order: Order, kind: str) -> None:
        self.order, self.kind = order, kind
        self.next = 0
        """The index of the next step."""
        self.run: list[int] = []
        """The steps of the modules that this rank has run, while the order is a guess."""
        self.held: dict[int, list[tuple[Any, Tensor]]] = {}
        """Parameters and whole values of modules that were gathered before this rank has run them."""
        self.held_elements = 0


class GatheredOrder:
    """Lets all ranks gather the modules of a model in one order: a rank also gathers, and frees, a module that it leaves out.

    DeepSpeed pairs the ranks' collectives by their order alone. A rank that leaves out a module that another rank runs (an expert without tokens, a
    dropped layer, an early exit) would compute with another module's weights.

    In a first forward pass the guess is the order of the modules in the model, and in a first backward pass the opposite of the forward passes before
    it. A module that a rank runs later than the guess says keeps its gathered values until then, as far as ``stage3_max_live_parameters`` allows. At
    the end of this pass the ranks tell each other in which order they have run the modules; no later pass has a collective more, unless all ranks
    run modules at a new place.

    Args:
        root: the model.
        ranks: the ranks that share its parameters.
        wrapper: DeepSpeed's optimizer of stage 3, or what it has without one.
    """

    def __init__(self, root: nn.Module, ranks: Group, wrapper: Any) -> None:
        self._root = root
        self._ranks = copy.copy(ranks)
        # Of its own, because DeepSpeed's collectives of a rank that does not come to an exchange here must not pair with it.
        everybody = [list(range(ranks.world_size))]
        self._ranks.cpu = ranks.made_once(("gathered order",), lambda: process_groups.on_cpu(everybody))
        self._offload = getattr(wrapper, "parameter_offload", wrapper)
        self._coordinator = self._offload.get_param_coordinator()
        self._modules = [module for module in root.modules() if hasattr(module, "ds_id")]
        self._numbers = {id(module): number for number, module in enumerate(self._modules)}
        self._orders: dict[tuple[Any, ...], Order] = {}
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._passes: list[Order] = []  # forward passes since the last backward pass
        self._backwards = 0  # backward passes since the last forward pass
        self._to_come = Counter[int]()  # modules whose forward pass had gradients, and whose backward pass has not come
        self._running: list[bool] = []  # of the modules that run now: whether they were gathered for it
        self._in_backward: set[int] = set()
        self._restored: dict[int, list[Any]] = {}
        self._follow()
        self._hooks = [
            root.register_forward_pre_hook(self._begin_forward_pass, prepend=True),
            root.register_forward_hook(self._end_forward_pass, prepend=True),
        ]

    def _follow(self) -> None:
        """Let DeepSpeed's hooks call the methods of this object."""
        offload = self._offload
        offload.pre_sub_module_forward_function = self._begin_forward
        offload.post_sub_module_forward_function = self._end_forward
        offload.pre_sub_module_backward_function = self._begin_backward
        offload.post_sub_module_backward_function = self._end_backward

    def leave(self) -> None:
        """Remove the hooks of this object."""
        for hook in self._hooks:
            hook.remove()

    def backward_guess(self) -> list[nn.Module]:
        """The modules in the opposite of the order of the latest forward passes."""
        return [self._modules[step] for order in reversed(self._passes) for step in reversed(order.steps)]

    # -- passes -----------------------------------------------------------------------------------------------------------------

    def _begin_forward_pass(self, module: nn.Module, inputs: Any) -> None:
        self._backward = None  # an error may have ended one early
        self._in_backward.clear()
        self._running.clear()
        self._restored.clear()
        has_grad = torch.is_grad_enabled()
        if has_grad:
            if self._backwards:
                self._passes, self._backwards = [], 0
                self._to_come.clear()
            if len(self._passes) == MOST_PASSES:
                self._passes.pop(0)
        key = ("forward", has_grad, len(self._passes) if has_grad else 0)
        if key not in self._orders:
            earlier = next((order.steps for (kind, *_), order in self._orders.items() if kind == "forward"), None)
            in_model = [number for number, m in enumerate(self._modules) if self._parameters(m)]
            self._orders[key] = Order(in_model if earlier is None else earlier)
        if has_grad:
            self._passes.append(self._orders[key])
        self._forward = Pass(self._orders[key], "forward")

    def _end_forward_pass(self, module: nn.Module, inputs: Any, output: Any) -> None:
        running, self._forward = self._forward, None
        if running is not None:
            self._end(running)

    def _begin_backward_pass(self) -> Pass:
        key = ("backward", len(self._passes), min(self._backwards, MOST_PASSES))
        if key not in self._orders:
            self._orders[key] = Order([step for order in reversed(self._passes) for step in reversed(order.steps)])
        self._backward = Pass(self._orders[key], "backward")
        self._in_backward.clear()
        # For a pass that is none for DeepSpeed: one through a frozen model.
        torch_private.call_after_backward(self.end_backward_pass)
        return self._backward

    def end_backward_pass(self) -> None:
        """Make the steps that are left of a backward pass, if one runs. Called before the last gradients are reduced."""
        running, self._backward = self._backward, None
        if running is not None:
            self._backwards += 1
            self._in_backward.clear()  # DeepSpeed releases what is left
            self._end(running)

    def _end(self, running: Pass) -> None:
        """End a pass."""
        self._leave_out_until(len(running.order.steps), running, ends=True)
        if not running.order.is_known:
            runs = gather_json(self._ranks, ["end", running.kind, running.run])
            self._check(runs, ["end", running.kind])
            running.order.learn([run for *_, run in runs])

    # -- modules ----------------------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module) -> None:
        _module_stack().append(module)
        number = self._numbers[id(module)]
        # A module whose forward pass is recomputed within its backward pass has its parameters already.
        is_step = bool(self._parameters(module)) and number not in self._in_backward
        self._running.append(is_step)
        if not is_step:
            return
        if self._forward is not None:
            if torch.is_grad_enabled():
                self._to_come[number] += 1
            self._reach(number, self._forward)
        elif self._backward is not None:
            self._reach(~number, self._backward)
        else:
            self._gather(module, True)

    def _end_forward(self, module: nn.Module) -> None:
        if self._running.pop():
            number = self._numbers[id(module)]
            step = number if self._forward is not None or self._backward is None else ~number
            self._free(module, step, True)

    def _begin_backward(self, module: nn.Module) -> None:
        if self._parameters(module):
            number = self._numbers[id(module)]
            running = self._backward or self._begin_backward_pass()
            self._in_backward.add(number)
            self._to_come[number] -= 1
            self._reach(number, running)

    def _end_backward(self, module: nn.Module) -> None:
        number = self._numbers[id(module)]
        if number in self._in_backward:
            self._in_backward.remove(number)
            self._free(module, number, False)

    def _reach(self, step: int, running: Pass) -> None:
        """Make the steps before ``step``, which this rank makes now, and this one."""
        order = running.order
        if not order.is_known:
            running.run.append(step)
        values = running.held.pop(step, None)
        if values is not None:
            self._restore(step, values)
            return
        if running.next == len(order.steps) or order.steps[running.next] != step:
            at = self._find(step, running)
            self._leave_out_until(self._add(step, running) if at is None else at, running)
        running.next += 1
        self._gather(self._modules[max(step, ~step)], running is self._forward or step < 0)

    def _find(self, step: int, running: Pass) -> int | None:
        steps = running.order.steps
        return steps.index(step, running.next) if step in steps[running.next :] else None

    def _add(self, step: int, running: Pass) -> int:
        """Add a step that is new in the order, if all ranks make it now. Return its index.

        Raises:
            RuntimeError: they do not; raised on all ranks.
        """
        request = [running.kind, step, running.next]
        requests = wait_at_new_place(self._ranks, request, self._text(["", *request]))
        self._check(requests, [running.kind, step])
        at = max(int(request[2]) for request in requests)
        running.order.steps.insert(at, step)
        return at

    def _leave_out_until(self, end: int, running: Pass, ends: bool = False) -> None:
        while running.next < end:
            running.next += 1
            self._leave_out(running.order.steps[running.next - 1], running, ends)

    def _leave_out(self, step: int, running: Pass, ends: bool) -> None:
        """Make a step of a module that this rank does not run now; keep the values if it may run it later in this pass (not if it ``ends``)."""
        order, number = running.order, max(step, ~step)
        module, in_backward = self._modules[number], running is not self._forward and step >= 0
        if in_backward and order.is_known and step in order.unsure and not self._is_trained(module):
            return
        forward = not in_backward
        self._gather(module, forward)
        values = []
        may_come = self._to_come[number] > 0 if running.kind == "backward" else step in order.unsure
        if may_come and not ends:
            values = [(p, p.data) for p in self._parameters(module)]
            elements = sum(value.numel() for _, value in values)
            if running.held_elements + elements > self._offload._max_available_parameters_in_numel:
                values = []
            else:
                running.held_elements += elements
        self._coordinator.release_sub_module(module, forward=forward)
        if values:
            running.held[step] = values

    # -- DeepSpeed --------------------------------------------------------------------------------------------------------------

    def _parameters(self, module: nn.Module) -> list[Any]:
        """The parameters that DeepSpeed gathers for a module."""
        if getattr(module, "_z3_leaf", False):
            return list(module.parameters())
        external: Any = module.ds_external_parameters
        return [p for p in (*module._parameters.values(), *(p for _, p in external())) if p is not None]

    def _is_trained(self, module: nn.Module) -> bool:
        return any(p.requires_grad for p in self._parameters(module))

    def _gather(self, module: nn.Module, forward: bool) -> None:
        """Gather a module's parameters as DeepSpeed's hooks do."""
        coordinator = self._coordinator
        coordinator.trace_prologue(module)
        if coordinator.is_record_trace():
            coordinator.record_module(module)
        coordinator.fetch_sub_module(module, forward=forward)

    def _restore(self, step: int, values: list[tuple[Any, Tensor]]) -> None:
        """Give a module the values that were gathered for it before."""
        module = self._modules[max(step, ~step)]
        inflight: Any = self._root.ds_inflight_param_registry
        restored: list[Any] = []
        self._restored[step] = restored
        for parameter, value in values:
            if parameter in inflight:
                inflight.pop(parameter).wait()
            if parameter.ds_status.name == "NOT_AVAILABLE":
                parameter.data, parameter.ds_status = value, type(parameter.ds_status).AVAILABLE
                restored.append(parameter)
            parameter.ds_active_sub_modules.add(module.ds_id)

    def _free(self, module: nn.Module, step: int, forward: bool) -> None:
        """Free a module's parameters after its pass."""
        if step not in self._restored:
            self._coordinator.release_sub_module(module, forward=forward)
            return
        from deepspeed.runtime.zero.partition_parameters import free_param

        for parameter in self._parameters(module):
            parameter.ds_active_sub_modules.discard(module.ds_id)
        for parameter in self._restored.pop(step):
            if not parameter.ds_active_sub_modules:
                free_param(parameter)

    # -- errors -----------------------------------------------------------------------------------------------------------------

    def _check(self, requests: Sequence[Sequence[Any]], place: Sequence[Any]) -> None:
        """Raise ``RuntimeError`` unless all ranks are at this place."""
        if any(list(request[: len(place)]) != list(place) for request in requests):
            lines = [f"  {self._text([f'rank {rank} ', *request])}" for rank, request in enumerate(requests)]
            raise RuntimeError(
                "\n".join(
                    (
                        "the ranks run the modules of ZeRO stage 3 in different orders:",
                        *lines,
                        "Ranks may leave modules out, but must run them in one order, and none more often than in the first pass. Let all ranks run "
                        "all modules in the first step, or mark the module around them: deepspeed.utils.set_z3_leaf_modules(model, [its class]); "
                        "strategy='deepspeed_stage_2' and 'fsdp' gather less often",
                    )
                )
            )

    def _text(self, place: Sequence[Any]) -> str:
        """A rank's place as text. ``place``: the start of the text, the kind of pass, and the step."""
        who, kind, step = place[:3]
        if kind == "end":
            return f"{who}is at the end of its {step} pass"
        names = {id(module): name.removeprefix("module.") or "the model" for name, module in self._root.named_modules()}
        return f"{who}begins the {kind} pass of {names[id(self._modules[max(step, ~step)])]}"


def _module_stack() -> list[nn.Module]:
    """The modules that run now, which DeepSpeed follows."""
    from deepspeed.runtime.zero import parameter_offload

    stack: list[nn.Module] = parameter_offload.FWD_MODULE_STACK
    return stack
