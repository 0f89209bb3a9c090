"""A module's full (unsharded) weights after a run, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.json_tree import same_memory
from engine.checkpoint.reader import own_state
from engine.distributed.collectives import broadcast, gather_json
from engine.loop.run import Run
from engine.loop.setup import distribute


def whole_state(run: Run, everywhere: bool) -> dict[str, Any]:
    """Full parameters and buffers by name, on the CPU; all ranks call this.

    Args:
        everywhere: on every rank, rather than on the main process only (others get ``{}``).
    """
    module, group = run.module, run.engine.group
    if not module.sharded_root:
        with _complete(module):
            return _on_cpu(own_state(module)) if group.is_main or everywhere else {}
    distribute(run)  # with the strategy's objects of an earlier run, which the module kept
    with _complete(module):
        state = run.engine.strategy.model_state(module)
    state = _on_cpu(state) if group.is_main else {}
    return _shared(run, state) if everywhere and group.world_size > 1 else state


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
    made: dict[Any, Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            key, here = same_memory(value), value.detach().cpu()
            part = here.untyped_storage().nbytes() > here.numel() * here.element_size()
            value = made.setdefault(key, here.clone() if part else here)
        found[name] = value
    return found


def _shared(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    """The main process's ``state`` on every rank; tied tensors stay tied."""
    group = run.engine.group
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
    found: dict[str, Any] = {}
    for name, same, shape, dtype in gather_json(group, rows)[0]:
        if same in found:
            found[name] = found[same]
        else:
            found[name] = broadcast(
                group, state[name] if group.is_main else torch.empty(shape, dtype=getattr(torch, dtype))
            )
    return found


@contextmanager
def holding(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block the module has the tensors of ``state`` instead of its own; names that are missing keep their tensors."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    classes = [(inner, type(inner)) for inner in module.modules()] if state else []
    made: dict[int, nn.Parameter] = {}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for store in (inner._parameters, inner._buffers):
            for key, own in store.items():
                value = state.get(f"{prefix}.{key}" if prefix else key)
                if own is not None and isinstance(value, Tensor):
                    replaced.append((store, key, own))
                    if isinstance(own, nn.Parameter):
                        value = made.setdefault(id(own), nn.Parameter(value, own.requires_grad))
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
        for store, key, own in replaced:
            store[key] = own


_OF_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _of_fsdp(thing: Any) -> bool:
    """Whether a class, or a hook of a module, is torch's FSDP's."""
    return str(getattr(getattr(thing, "hook", thing), "__module__", "")).startswith("torch.distributed.fsdp")
