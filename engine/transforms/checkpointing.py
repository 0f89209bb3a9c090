"""Activation checkpointing: blocks whose intermediate results are recomputed in the backward pass rather than stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.config.transform_settings import Recompute
from engine.transforms.blocks import units, user_module
from engine.transforms.rerun import Buffers, Pass

_KEPT = (
    "mm.default",
    "addmm.default",
    "bmm.default",
    "_scaled_mm.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
)
"""The operations whose results "selective" keeps: they are the most expensive to recompute."""


def recompute(model: nn.Module, setting: Recompute) -> None:
    """Recompute the model's repeated blocks in the backward pass, in place: classes and names stay. ``None`` undoes it.

    Random numbers are the same as in the first pass, so dropout drops the same units. Buffers (running statistics) and torchmetrics
    objects are updated once. Other side effects of a block's forward pass, such as appending to a list, happen twice.

    Raises:
        ValueError: the model has no blocks.
    """
    for module in model.modules():
        override = vars(module).get("forward")
        if isinstance(override, partial) and override.func is _recomputed:
            del module.forward
    if setting is None:
        return
    blocks = list(reversed(units(model, [], 0)))  # in the model's order
    if not blocks:
        raise ValueError(
            f"activation_checkpointing={setting!r}: {type(user_module(model)).__name__} has no repeated blocks; define blocks(self) that returns "
            "the modules to recompute"
        )
    every = setting if isinstance(setting, int) else 1
    for block in blocks[::every]:
        block.forward = partial(_recomputed, block, setting == "selective", Buffers())


def _recomputed(block: nn.Module, selective: bool, buffers: Buffers, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiled graph updates buffers once
        context: dict[str, Any] = (
            {"context_fn": partial(create_selective_checkpoint_contexts, _kept())} if selective else {}
        )
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)
    first = buffers.before(block)
    outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, first, selective), **kwargs)
    buffers.after(first)
    return outputs


def _contexts(first: Pass, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the two passes."""
    if not selective:
        return nullcontext(), first
    once, first.inner = create_selective_checkpoint_contexts(_kept())
    return _uncached(once), first


@contextmanager
def _uncached(recording: AbstractContextManager[Any]) -> Iterator[None]:
    """Let autocast cast weights at each use: from its cache, a block that is used twice would have a cast to repeat that was not recorded."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with recording:
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def _kept() -> list[Any]:
    found = []
    for name in _KEPT:
        packet, overload = name.split(".")
        operation = getattr(torch.ops.aten, packet, None)
        if operation is not None:
            found.append(getattr(operation, overload))
    return found
