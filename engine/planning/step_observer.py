"""One observer of all operations of a step: it reports each one to the log of storages and to the counters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from engine.planning import counters, storages, torch_private
from engine.planning.counters import CollectiveCounter, OperationCounter
from engine.planning.rank_trace import Phase
from engine.planning.storages import StorageLog
from engine.planning.strategy_facts import KeptTensors
from engine.planning.traced_offload import TracedCopies
from engine.utils.torch_private import whole_gradients


class StepObserver(torch_private.Mode):
    """Observes a training, real or simulated::

    observer = StepObserver(axes)
    with observer:
        set up the training
        observer.begin_window(model, optimizers, inputs)
        for each micro-batch:
            observer.next_micro_batch(inputs)
            forward and backward pass
        observer.enter("optimizer step")
        the step
        observer.end_window()
    """

    def __init__(self, axes: Mapping[str, tuple[int, ...]], accelerated: bool = False) -> None:
        super().__init__()
        self._accelerated = accelerated
        self.memory, self.operations = StorageLog(), OperationCounter()
        self.collectives = CollectiveCounter(axes)
        self.copies = TracedCopies(self.memory)
        """Stands for the copies of activations to the host."""
        self._stack = ExitStack()
        self._modules: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        """The module of each parameter, by the parameter's id."""
        self._running = ""
        self._path: list[tuple[str, bool]] = []
        """For each module whose forward pass is under way, outermost first: the name of the module around it, and whether a backward pass recomputes
        it."""
        self._nodes: list[int] = [0]
        """The numbers of autograd nodes at which another module began to run, ascending."""
        self._module_from_node: list[str] = [""]
        """For each number in ``_nodes``, the module whose forward pass creates the nodes from that number on."""
        self._outside: Phase = "set-up"
        """The phase of operations outside of backward passes."""
        self._recording = False
        self._propagating = False

    def __enter__(self) -> StepObserver:
        self._stack.enter_context(self.memory.watching_resizes())
        self._stack.enter_context(torch_private.outside_of_propagation(self._watch))
        for handle in (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
            nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._propagating or torch_private.asks_device(operator):
            return operator(*args, **kwargs)
        self._set_phase()
        memory = self.memory
        if torch_private.wraps(types):
            if self._recording:
                self.operations.wrapped(operator, memory.phase)
            return NotImplemented
        memory.next_operation()
        result = operator(*args, **kwargs)
        namespace = operator.namespace
        if namespace in counters.NAMESPACES:
            tensors = self.collectives.note(operator, args, kwargs, result, memory.phase)
            if namespace == "c10d":  # what functional collectives exchange stays an activation
                memory.used_to_communicate(tensors)
        elif namespace == "fsdp":
            memory.used_to_communicate(_tensors((args, kwargs, result)))
        if self._recording and namespace not in counters.NAMESPACES and not (memory.made_on_host and self._accelerated):
            self.operations.note(operator, args, kwargs, result, memory.phase)
        if isinstance(result, Tensor):
            if operator is not torch.ops.aten.detach.default:  # no operation has made a generator's state
                memory.follow(result)
            if operator is torch.ops.aten.add.Tensor and memory.phase == "backward":
                memory.summed_in_place(args[0], result)
        elif isinstance(result, (list, tuple)):
            for tensor in _tensors(result):
                memory.follow(tensor)
        return result

    def _watch(self, watched: bool) -> None:
        """Stop observing (``watched`` is false) while ``DTensor`` computes the shape of a result, and continue afterwards."""
        self._propagating = not watched

    def begin_window(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        inputs: list[Tensor],
        own_tensors: Iterable[KeptTensors] = (),
    ) -> None:
        """Begin to record a step; ``own_tensors``: see :meth:`mark_kept`."""
        memory = self.memory
        memory.phase, memory.module, self._running = "start", "", ""
        self._nodes, self._module_from_node = [torch_private.next_node()], [""]
        self.mark_kept(own_tensors)
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
        for parameter in model.parameters():
            memory.set_kind([parameter], storages.PARAMETERS, self._owners[id(parameter)])
        memory.set_kind(model.buffers(), storages.BUFFERS)
        for optimizer in optimizers:
            memory.set_kind(_tensors(optimizer.state), storages.OPTIMIZER)
        memory.set_kind(inputs, storages.INPUTS)
        self.collectives.clear()
        self.operations.clear()
        self.copies.begin_step()
        memory.record()
        self._recording = True

    def next_micro_batch(self, inputs: list[Tensor], count_as: int = 1) -> None:
        """Begin a micro-batch that represents ``count_as`` equal micro-batches of the step."""
        self.collectives.weight = self.operations.weight = self.copies.weight = count_as
        self.memory.set_kind(inputs, storages.INPUTS)
        self.enter("forward")

    def enter(self, phase: Phase) -> None:
        """Assign the operations from now on to ``phase``, except for those of backward passes."""
        self._outside = phase

    def end_window(self) -> None:
        """End the recorded step."""
        self._recording = False
        self.enter("set-up")

    def _set_phase(self) -> None:
        """Update the phase and the module to which the next operation belongs."""
        memory = self.memory
        phase = "backward" if torch_private.in_backward() else self._outside
        if phase != memory.phase:
            if phase == "backward" and memory.phase == "forward":
                memory.kept_for_backward()
            memory.phase = phase
        is_recomputed = bool(self._path) and self._path[-1][1]
        memory.module = (
            self._module_of_node(memory.module) if phase == "backward" and not is_recomputed else self._running
        )

    # -- the running module -----------------------------------------------------------------------------------------------------------------

    def name(self, model: nn.Module) -> None:
        """Call the submodules by their names in ``model``."""
        self._modules = {id(module): name for name, module in model.named_modules()}

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._path.append((self._running, torch_private.in_backward()))
        self._enter(self._modules.get(id(module), self._running))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._path:
            self._enter(self._path.pop()[0])

    def _enter(self, name: str) -> None:
        """Note that the module ``name`` runs from now on. Autograd numbers nodes in the order of the forward pass, so this module's begin with the
        next number."""
        self._running = name
        number = torch_private.next_node()
        if self._nodes[-1] == number:
            self._module_from_node[-1] = name
        elif self._module_from_node[-1] != name:
            self._nodes.append(number)
            self._module_from_node.append(name)

    def _module_of_node(self, before: str) -> str:
        """The module that created the running node of the backward pass; ``before``, the module until now, if that is not known."""
        number, parameter = torch_private.running_node()
        if parameter is not None:
            return self._owners.get(id(parameter), before)
        return before if number < self._nodes[0] else self._module_from_node[bisect_right(self._nodes, number) - 1]

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.mark_gradients([optimizer])
        self.memory.made_on_host = self.memory.offloaded(optimizer.param_groups[0]["params"])

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.memory.made_on_host = False
        self.memory.set_kind(_tensors(optimizer.state), storages.OPTIMIZER)

    def mark_gradients(self, optimizers: list[Optimizer]) -> None:
        """Label the current ``.grad`` tensors of the parameters of ``optimizers`` as gradients."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.memory.set_kind([parameter.grad], storages.GRADIENTS, self._owners.get(id(parameter)))

    def mark_kept(self, own_tensors: Iterable[KeptTensors]) -> None:
        """Label a strategy's own tensors (:attr:`engine.planning.strategy_facts.StrategyFacts.kept_tensors`) with their kinds."""
        for kind, tensors, on_host in own_tensors:
            self.memory.set_kind(tensors, kind, on_host=on_host)

    def mark_kept_gradients(self, model: nn.Module) -> None:
        """Label the whole gradients that FSDP keeps until the last micro-batch of a window as gradients."""
        self.memory.set_kind(whole_gradients([model]), storages.GRADIENTS)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for item in tree.values() for tensor in _tensors(item)]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in _tensors(item)]
    return []
