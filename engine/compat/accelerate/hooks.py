"""Hooks around a module's ``forward``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class ModelHook:
    """The base of hooks, which a module calls before and after its ``forward``, and which may change arguments and output."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module to which the hook is added."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for ``forward``."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output of the module."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module from which the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, each of which gets what the one before returned."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook to a module, in place, and return the module. The hook replaces another one, or with ``append`` comes after it."""
    before = vars(module).get("_hf_hook")
    if append and before is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    forward = vars(module).setdefault("_old_forward", module.forward)
    module = hook.init_hook(module)

    @functools.wraps(forward)
    def hooked_forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
            output = forward(*args, **kwargs)
        return hook.post_forward(module, output)

    vars(module).update(_hf_hook=hook, forward=hooked_forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, in place, and with ``recurse`` those of its submodules; return the module."""
    for part in module.modules() if recurse else (module,):
        if (hook := vars(part).pop("_hf_hook", None)) is not None:
            hook.detach_hook(part)
        if "_old_forward" in vars(part):
            forward = vars(part).pop("_old_forward")
            if getattr(forward, "__func__", None) is type(part).forward:
                del vars(part)["forward"]
            else:
                part.forward = forward
    return module
