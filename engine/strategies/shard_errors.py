"""The limits of sharded parameters: refused before the first step where it is known, explained where torch says it in its own words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.strategies import dtensors
from engine.strategies.quantized_weights import of_torchao
from engine.transforms.blocks import user_module
from engine.utils import torch_private
from engine.utils.parameters import of_classes
from engine.utils.tree import leaves

_INSTEAD = (
    "use strategy='ddp', or an optimizer that treats each element by itself (AdamW, SGD and most others of torch.optim)"
)


def check_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Check that one of torch's optimizers can step these parameters.

    Raises:
        ValueError: some are sharded, and it cannot; the message says why.
    """
    if isinstance(optimizer, torch.optim.SparseAdam) and any(map(dtensors.is_dtensor, parameters)):
        raise ValueError(
            f"{type(optimizer).__name__} cannot step sharded parameters: it needs sparse gradients, and sharded ones are dense. To go on, {_INSTEAD}"
        )


def check_model(model: nn.Module) -> None:
    """Check that the parameters of a model can be sharded.

    Raises:
        ValueError: a layer has sparse gradients, or weights that only work whole; the message names it.
    """
    for name, module in model.named_modules():
        if (
            getattr(module, "sparse", False) is True
            and isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name or type(module).__name__} has sparse gradients (sparse=True), which cannot be reduced to shards: set sparse=False, or use "
                "strategy='ddp'"
            )
    if quantized := of_classes(user_module(model), ("Int8Params",)) + of_torchao(model):
        raise ValueError(
            f"{', '.join(quantized[:3])}{', ...' if len(quantized) > 3 else ''}: quantized weights of these classes cannot be sharded by FSDP. Use "
            "weights in 4 bits (bitsandbytes' Linear4bit), or unquantized ones; bitsandbytes' 8 bits work under strategy='ddp'"
        )


def watch_passes(model: nn.Module) -> None:
    """Refuse backward passes that create a graph: they need weights that are freed by then, and torch may read freed memory (a segmentation fault).

    In the passes through the first forward pass, ``torch.autograd.grad`` with respect to parameters is explained, too. Where the whole model is
    compiled, only the first forward pass is watched. The cost is a few Python calls for an output of the model.
    """

    def check(gradient: Tensor) -> None:
        if torch.is_grad_enabled():  # autograd enables it for passes that create a graph
            raise RuntimeError(explanation(_FREED, "a backward pass"))

    def check_returned(gradient: Tensor) -> None:
        if any(torch_private.fate_of_gradient(p) == "returned" for p in model.parameters() if p.requires_grad):
            raise RuntimeError(explanation(_UNUSED, "a backward pass"))

    is_first = True

    @torch_private.without_dynamo
    def watch(module: nn.Module, args: Any, outputs: Any) -> None:
        nonlocal is_first
        for tensor in (outputs,) if isinstance(outputs, Tensor) else leaves(outputs):
            if tensor.requires_grad:
                tensor.register_hook(check)
                if is_first:
                    tensor.register_hook(check_returned)
        if module._compiled_call_impl is not None:
            handle.remove()
        is_first = False

    handle = model.register_forward_hook(watch)


_FREED = "storage of size 0"
_UNUSED = "appears to not have been used in the graph"


def explanation_of_step(error: Exception, doing: str) -> str:
    """Say what an error in an optimizer's step means if torch has raised it where it computes with shards; empty if it is another error.

    Args:
        doing: as for :func:`explanation`.
    """
    text, trace = str(error), error.__traceback__
    is_of_shards = any(part in text for part in _MIXED)
    while trace is not None and not is_of_shards:
        is_of_shards = _DTENSOR in trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
    if not is_of_shards:
        return explanation(text, doing)
    return (
        f"{doing} does not work on sharded parameters (it treats them as whole matrices, or has tensors of its own): return "
        f"engine.optim.whole(optimizer), which lends it whole ones; or {_INSTEAD}"
    )


_DTENSOR = os.path.join("torch", "distributed", "tensor", "")
"""The folder of torch's files that compute with sharded tensors."""
_MIXED = ("mixed torch.Tensor and DTensor", "placement changes are not supported", "sharding strategy registered")


def explanation(text: str, doing: str) -> str:
    """Say what an error of torch means under a strategy that shards parameters; empty if it is another error.

    Args:
        doing: what has raised it, as the beginning of a sentence.
    """
    if any(part in text for part in _MIXED):
        return (
            f"{doing} computes with a sharded parameter (a DTensor) outside of the module that owns it, beside plain tensors: call the module, do "
            "the computation in its forward, or use strategy='ddp'"
        )
    if _FREED in text:
        return (
            f"{doing} needs weights that are freed by then: a backward pass through a backward pass (create_graph=True, a gradient penalty) does "
            "not work under FSDP, which gathers weights for one pass only. Use strategy='ddp', or 'deepspeed_stage_1' or '_2'"
        )
    if _UNUSED in text:
        return (
            f"{doing} calls torch.autograd.grad with respect to parameters, which are shards outside of the graph: call backward for each loss "
            "(retain_graph=True) and read the parameters' grad, or use strategy='ddp'"
        )
    if "SparseCPU" in text or "SparseCUDA" in text:
        return f"{doing} has sparse gradients (nn.Embedding(sparse=True)), which cannot be reduced to shards: set sparse=False, or use strategy='ddp'"
    return ""
