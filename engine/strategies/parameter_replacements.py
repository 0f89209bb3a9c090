"""Tracks the parameters that replace others while a model is sharded in several steps: pipeline stages, tensor parallelism, ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from engine.distributed.group import Group
from engine.strategies import deferred_init, dtensors
from engine.strategies.base import broadcast_from_rank_0
from engine.utils import host_memory, torch_private


class ParameterReplacements:
    """A record of the parameters that have replaced others, and of those that only other ranks have. All keys are weak references.

    A strategy keeps one record for all its runs: an optimizer that was created before one run may be prepared in the next.
    """

    def __init__(self) -> None:
        self._newer: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By parameter, its replacement, which may have been replaced itself."""
        self._placed: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Tensors that are on the device and have rank 0's values."""
        self._elsewhere: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Stand-ins, on the meta device, for parameters that only other ranks have."""

    def begin(self, model: nn.Module, group: Group) -> None:
        """Start to shard ``model`` over the ranks of ``group``; rank 0 will initialize parameters without values.

        Raises:
            ValueError: initial values that ``configure_model`` gave are lost.
        """
        deferred_init.check_recorded(model)
        self._group, self._initialise = (group, deferred_init.initialiser(model) if group.is_main else None)
        if self._initialise is not None and deferred_init.lacks_values(model) and not torch_private.is_simulated():
            self._note(deferred_init.record_initial_values(model, group.device, self._initialise))

    def materialise(self, module: nn.Module) -> None:
        """Move tensors that are not sharded yet to the device, with rank 0's values; initialize those without values."""
        device = self._group.device
        if deferred_init.is_deferred(module, self._elsewhere):
            host_memory.return_freed()
            self.update(module)  # parameters that another part has, too
            replaced = deferred_init.materialise(module, device, self._initialise, self._elsewhere)
            self._note(replaced)
        tensors = (*module.parameters(), *module.buffers())
        new = [t for t in tensors if not dtensors.is_dtensor(t) and not t.is_meta and t not in self._placed]
        for tensor in new:
            tensor.data = tensor.data.to(device)
            self._placed[tensor] = True
        broadcast_from_rank_0(self._group, [t.detach() for t in new])

    def _note(self, replaced: Mapping[Tensor, Tensor]) -> None:
        self._newer.update({old: new for old, new in replaced.items() if isinstance(old, nn.Parameter)})

    def record(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """Record that the module's parameters have replaced ``before``, and free the memory of those: an optimizer may still refer to them."""
        replacements = dict(module.named_parameters(remove_duplicate=False))
        for name, old in before.items():
            if replacements[name] is not old:
                self._newer[old] = replacements[name]
                if not dtensors.is_dtensor(old):
                    old.data = old.data.new_empty(0)

    def current(self, parameter: Tensor) -> Tensor:
        """The parameter that has replaced this one by now, or the parameter itself."""
        while parameter in self._newer:
            parameter = self._newer[parameter]
        return parameter

    def update(self, model: nn.Module) -> None:
        """Replace parameters in all modules that share them."""
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter in self._newer:
                    module._parameters[key] = self.current(parameter)  # type: ignore[assignment]

    def send_away(self, parameter: nn.Parameter) -> nn.Parameter:
        """Free a parameter that only other ranks keep; return its stand-in on the meta device."""
        stand_in: nn.Parameter | None = self._newer.get(parameter)
        if stand_in is None:
            stand_in = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            self._newer[parameter], self._elsewhere[stand_in] = stand_in, True
            parameter.data = parameter.data.new_empty(0)
        return stand_in

    def is_elsewhere(self, parameter: Tensor) -> bool:
        """Whether only other ranks have this parameter."""
        return parameter in self._elsewhere
