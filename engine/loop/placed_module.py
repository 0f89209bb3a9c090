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
    """``training_step``, or another step by name, as a forward pass, for strategies that wrap forward passes."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.module = module

    @property
    def user_module(self) -> TrainModule:
        """For :func:`engine.transforms.blocks.user_module`."""
        return self.module

    def forward(self, *args: Any, step: str = "training_step") -> Any:
        return getattr(self.module, step)(*args)


class PlacedModule:
    """The user's module on its device, and how its steps are called: directly, or through the strategy's wrapper."""

    def __init__(self, engine: Engine, module: TrainModule) -> None:
        self.module, self._engine = module, engine
        self.training_step: Callable[..., Any] = module.training_step
        """The module's own ``training_step``, for a batch and its number."""
        self.call: Callable[..., Any] = module.training_step
        """The module's ``training_step``, or the strategy's wrapper of a :class:`TrainingStep`; where it takes other arguments than a run gives,
        a function of :mod:`engine.loop.method_arguments` around that."""
        self._wrapper: nn.Module | None = None

    def accept_training_step(self) -> None:
        """Find out which arguments ``training_step`` takes.

        Raises:
            TypeError: it needs some that a run does not give.
        """
        module = self.module
        self.training_step = step_accepting(module, "training_step", module.training_step, training=True)

    def for_training(self) -> None:
        """Bring the module to its device, compiled and distributed as the settings say."""
        module, strategy = self.module, self._engine.strategy
        if not module.training and self._engine.is_main_process:  # it holds on all ranks
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
        self._read_weights()
        self.call = step_accepting(module, "training_step", self.call, training=True)

    def for_evaluation(self) -> None:
        """Bring the module to its device; a strategy whose forward pass has collectives wraps it."""
        if self._engine.strategy.matched_forward:
            self._distribute()
        else:
            self._engine.place_model(self.module)
        self._read_weights()

    def evaluation_step(self, name: str) -> Callable[..., Any]:
        """The callable that runs the module's step of this name."""
        return getattr(self.module, name) if self._wrapper is None else partial(self._wrapper, step=name)

    def whole_state(self, everywhere: bool) -> dict[str, Any]:
        """Full parameters and buffers by name, on the CPU; all ranks call this.

        Args:
            everywhere: on every rank, rather than on the main process only (others get ``{}``).
        """
        module, engine = self.module, self._engine
        group = engine.group
        if not module.sharded_root:
            with _complete(module):
                return _on_cpu(own_state(module)) if group.is_main or everywhere else {}
        self._distribute()  # with the strategy's objects of an earlier run, which the module kept
        with _complete(module):
            state = engine.strategy.model_state(module)
        state = _on_cpu(state) if group.is_main else {}
        return _shared(group, state) if everywhere and group.world_size > 1 else state

    def release(self) -> None:
        """Forget the wrapper."""
        self.call, self._wrapper = self.module.training_step, None

    def _distribute(self) -> None:
        """Let the strategy wrap the training step, and evaluation steps if their forward pass has collectives."""
        module, matched = self.module, self._engine.strategy.matched_forward
        # A module stays sharded: a later run calls the same root.
        step = module.sharded_root[0] if matched and module.sharded_root else TrainingStep(module)
        wrapped = self._engine.prepare_model(step, autocast=False)
        if matched or type(wrapped) is not TrainingStep:
            self.call = wrapped
        if matched:
            module.sharded_root = [wrapped]
            self._wrapper = wrapped

    def _read_weights(self) -> None:
        """Let a module with a method ``read_weights()`` read values for what it has built without them: each rank has its shards now.

        :class:`engine.huggingface.HFModule` is one.
        """
        read = getattr(self.module, "read_weights", None)
        if read is not None:
            read()


@contextmanager
def _complete(module: nn.Module) -> Iterator[None]:
    """A module whose ``state_dict`` leaves out what need not be in checkpoints gives everything while its ``complete_state`` is true."""
    before = vars(module).get("complete_state", False)
    module.complete_state = True  # type: ignore[assignment]
    try:
        yield
    finally:
        module.complete_state = before


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies with their own memory: DeepSpeed's parameters are views of one flat tensor, which safetensors refuses. Tied ones stay tied."""
    copies: dict[Any, Tensor] = {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            key, copy = same_memory(value), value.detach().cpu()
            part = copy.untyped_storage().nbytes() > copy.numel() * copy.element_size()
            value = copies.setdefault(key, copy.clone() if part else copy)
        whole[name] = value
    return whole


def _shared(group: Group, state: dict[str, Any]) -> dict[str, Any]:
    """The main process's ``state`` on every rank; tied tensors stay tied."""
    first: dict[Any, str] = {}
    rows = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            rows.append(
                [
                    name,
                    first.setdefault(same_memory(value), name),
                    list(value.shape),
                    str(value.dtype).removeprefix("torch."),
                ]
            )
    whole: dict[str, Any] = {}
    for name, first_name, shape, dtype in gather_json(group, rows)[0]:
        if first_name in whole:
            whole[name] = whole[first_name]
        else:
            whole[name] = broadcast(
                group, state[name] if group.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            )
    return whole


@contextmanager
def holding(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the module has the tensors of ``state`` instead of its own; names that are missing keep their tensors."""
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
    for inner, sharded in classes:  # FSDP's class cannot be copied, and its hooks would gather what is whole
        if any(_of_fsdp(part) for part in sharded.__bases__):
            inner.__class__ = next(part for part in sharded.__bases__ if not _of_fsdp(part))
        for name, value in list(vars(inner).items()):
            if name in _HOOKS and any(map(_of_fsdp, value.values())):
                vars(inner)[name] = type(value)((key, hook) for key, hook in value.items() if not _of_fsdp(hook))
            elif name.startswith(_OF_FSDP):
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


_OF_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _of_fsdp(thing: Any) -> bool:
    """Whether a class, or a hook of a module, is torch's FSDP's."""
    return str(getattr(getattr(thing, "hook", thing), "__module__", "")).startswith("torch.distributed.fsdp")
