"""The user's module on its device, and its full (unsharded) weights after a run, under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.json_tree import same_memory
from engine.checkpoint.reader import own_state
from engine.distributed.collectives import broadcast, gather_json
from engine.distributed.group import Group
from engine.engine import Engine
from engine.loop.method_arguments import step_accepting
from engine.module import TrainModule
from engine.utils.log import warn_once


class TrainingStep(nn.Module):
    """A module whose forward pass is the user's ``training_step``, or another step by name, for strategies that wrap forward passes."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.module = module

    @property
    def user_module(self) -> TrainModule:
        """The user's module, as :func:`engine.transforms.blocks.user_module` looks for it."""
        return self.module

    def forward(self, *args: Any, step: str = "training_step") -> Any:
        return getattr(self.module, step)(*args)


class PlacedModule:
    """The user's module on its device, and how its steps are called: directly, or through the strategy's wrapper."""

    def __init__(self, engine: Engine, module: TrainModule) -> None:
        self.module, self._engine = module, engine
        self.training_step: Callable[..., Any] = module.training_step
        """The module's own ``training_step``; call it with a batch and the batch's index."""
        self.call: Callable[..., Any] = module.training_step
        """The module's ``training_step``, or the strategy's wrapper of a :class:`TrainingStep`; if the step takes other arguments than a run passes,
        wrapped by :mod:`engine.loop.method_arguments`."""
        self._wrapper: nn.Module | None = None

    def accept_training_step(self) -> None:
        """Find out which arguments ``training_step`` takes.

        Raises:
            TypeError: it requires arguments that a run does not pass.
        """
        module = self.module
        self.call = module.training_step
        self.training_step = step_accepting(module, "training_step", module.training_step, training=True)

    def for_training(self) -> None:
        """Move the module to its device; compile and distribute it as the settings say."""
        module, strategy = self.module, self._engine.strategy
        if not module.training and self._engine.is_main_process:
            warn_once(
                f"{type(module).__name__} is in eval mode (dropout off, batch norm frozen) during training; call module.train() before the run"
            )
        if module.automatic_optimization:
            self._distribute()
        else:
            if strategy.matched_forward or strategy.fused:
                raise ValueError(
                    f"automatic_optimization=False under {type(strategy).__name__}: the backward pass would run in the sharded model's "
                    "forward pass; use strategy='ddp', or your own loop with Engine"
                )
            self._engine.place_model(module)
            strategy.transform(module)
            if self._engine.activation_offload is not None:
                self._engine.activation_offload.attach(module)
        self._read_weights()
        self.call = step_accepting(module, "training_step", self.call, training=True)

    def for_evaluation(self) -> None:
        """Move the module to its device; wrap it if the strategy's forward pass has collectives."""
        if self._engine.strategy.matched_forward:
            self._distribute()
        else:
            self._engine.place_model(self.module)
        self._read_weights()

    def evaluation_step(self, name: str) -> Callable[..., Any]:
        """Return the function that runs the module's step ``name``, through the strategy's wrapper if there is one."""
        return getattr(self.module, name) if self._wrapper is None else partial(self._wrapper, step=name)

    def whole_state(self, everywhere: bool) -> dict[str, Any]:
        """Return full parameters and buffers by name, on the CPU; all ranks call this.

        Args:
            everywhere: return them on every rank; otherwise on the main process only, and ``{}`` on the others.
        """
        module, engine = self.module, self._engine
        group = engine.group
        if not module.sharded_root:
            with _with_complete_state(module):
                return _on_cpu(own_state(module)) if group.is_main or everywhere else {}
        self._distribute()  # reuses the strategy's wrapper of an earlier run, which the module has kept
        with _with_complete_state(module):
            state = engine.strategy.model_state(module)
        state = _on_cpu(state) if group.is_main else {}
        return _broadcast_state(group, state) if everywhere and group.world_size > 1 else state

    def release(self) -> None:
        """Drop the reference to the strategy's wrapper."""
        self.call, self._wrapper = self.module.training_step, None

    def _distribute(self) -> None:
        """Let the strategy wrap the training step, and evaluation steps if their forward pass has collectives."""
        module, forward_has_collectives = self.module, self._engine.strategy.matched_forward
        # A sharded module stays sharded after its run, so a later run must use the same wrapper.
        step = module.sharded_root[0] if forward_has_collectives and module.sharded_root else TrainingStep(module)
        wrapped = self._engine.prepare_model(step, autocast=False)
        # A strategy that wraps nothing leaves the direct call, unless the step itself has hooks.
        if forward_has_collectives or type(wrapped) is not TrainingStep or self._engine.activation_offload is not None:
            self.call = wrapped
        if forward_has_collectives:
            module.sharded_root = [wrapped]
            self._wrapper = wrapped

    def _read_weights(self) -> None:
        """Let a module with a method ``read_weights()``, as :class:`engine.huggingface.HFModule`, load values for parameters that it built without
        memory, now that each rank has its shards."""
        read = getattr(self.module, "read_weights", None)
        if read is not None:
            read()


@contextmanager
def _with_complete_state(module: nn.Module) -> Iterator[None]:
    """Inside the block, the module's ``state_dict`` returns everything, even if it usually leaves out what checkpoints need not store."""
    before = vars(module).get("complete_state", False)
    module.complete_state = True  # type: ignore[assignment]
    try:
        yield
    finally:
        module.complete_state = before


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tensors to the CPU, each with its own memory: DeepSpeed's are views of one flat tensor, which safetensors refuses. Tied tensors
    stay tied."""
    copies: dict[Any, Tensor] = {}
    cpu_state: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            key, copy = same_memory(value), value.detach().cpu()
            is_view = copy.untyped_storage().nbytes() > copy.numel() * copy.element_size()
            value = copies.setdefault(key, copy.clone() if is_view else copy)
        cpu_state[name] = value
    return cpu_state


def _broadcast_state(group: Group, state: dict[str, Any]) -> dict[str, Any]:
    """Broadcast the main process's ``state`` to every rank; tied tensors stay tied."""
    first_names: dict[Any, str] = {}
    descriptions = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            first_name = first_names.setdefault(same_memory(value), name)
            descriptions.append([name, first_name, list(value.shape), str(value.dtype).removeprefix("torch.")])
    received: dict[str, Any] = {}
    for name, first_name, shape, dtype in gather_json(group, descriptions)[0]:
        if first_name in received:
            received[name] = received[first_name]
        else:
            received[name] = broadcast(
                group, state[name] if group.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            )
    return received


@contextmanager
def holding(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the module has the tensors of ``state`` instead of its own; tensors whose names ``state`` lacks stay."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    classes = [(inner, type(inner)) for inner in module.modules()] if state else []
    replacements: dict[int, nn.Parameter] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for store in (inner._parameters, inner._buffers):
            for key, tensor in store.items():
                value = state.get(f"{prefix}.{key}" if prefix else key)
                if tensor is not None and isinstance(value, Tensor):
                    replaced.append((store, key, tensor))
                    if isinstance(tensor, nn.Parameter):
                        value = replacements.setdefault(id(tensor), nn.Parameter(value, tensor.requires_grad))
                    store[key] = value
    for (
        inner,
        sharded,
    ) in classes:  # FSDP's class cannot be copied, and its hooks would gather tensors that are whole already
        if any(_is_of_fsdp(part) for part in sharded.__bases__):
            inner.__class__ = next(part for part in sharded.__bases__ if not _is_of_fsdp(part))
        for name, value in list(vars(inner).items()):
            if name in _HOOK_ATTRIBUTES and any(map(_is_of_fsdp, value.values())):
                vars(inner)[name] = type(value)((key, hook) for key, hook in value.items() if not _is_of_fsdp(hook))
            elif name.startswith(_FSDP_ATTRIBUTES):
                del vars(inner)[name]
            else:
                continue
            replaced.append((vars(inner), name, value))
    try:
        yield
    finally:
        for inner, sharded in classes:
            inner.__class__ = sharded
        for store, key, tensor in replaced:
            store[key] = tensor


_FSDP_ATTRIBUTES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The beginnings of names of attributes that torch's FSDP sets on modules."""
_HOOK_ATTRIBUTES = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_of_fsdp(class_or_hook: Any) -> bool:
    """Whether a class, or a hook of a module, belongs to torch's FSDP."""
    owner = getattr(class_or_hook, "hook", class_or_hook)
    return str(getattr(owner, "__module__", "")).startswith("torch.distributed.fsdp")
