"""Weights that bitsandbytes or torchao have quantized: what they need so that they can be trained through, compared, sharded and saved."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.checkpoint.tensor_files import is_dtensor
from engine.distributed.comparison import check_alike
from engine.distributed.group import Group
from engine.transforms.blocks import user_module
from engine.utils.checksums import checksum

_BITSANDBYTES = ("Params4bit", "Int8Params")
"""The classes of bitsandbytes' parameters."""


def keep_trainable(model: nn.Module) -> None:
    """Keep the layout of bitsandbytes' weights in 4 bits when the model is evaluated.

    On CPUs with bf16 instructions a layer repacks its weights in evaluation, for inference. It would keep them so in the training that follows,
    in which no gradient would pass it.
    """
    for _, layer in _layers(model):
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_dtype(model: nn.Module, dtype: torch.dtype | None, reason: str) -> None:
    """Check that quantized weights are not converted to ``dtype``: they are stored as numbers of another type, whose bits are what counts.

    Args:
        dtype: to which floating-point weights are converted; ``None``: they are not.
        reason: what converts them, for the error.

    Raises:
        ValueError: some would be; the message names one.
    """
    for name, layer in _layers(model) if dtype is not None else ():
        for key, weight in layer.named_parameters(recurse=False):
            stored = weight.dtype
            if getattr(weight, "bnb_quantized", False) and stored.is_floating_point and stored != dtype:
                raise ValueError(
                    f"{name}.{key} ({type(weight).__name__}) has its 4 bits in numbers of type {stored}, which {reason} would convert to "
                    f"{dtype}: quantize with quant_storage={dtype} (bnb_4bit_quant_storage), or leave it out, which takes torch.uint8"
                )


def compare(group: Group, model: nn.Module) -> None:
    """Compare the scales of quantized weights over the ranks: strategies send parameters, which mean nothing with the scales of others. A collective,
    where the model has such weights.

    Raises:
        CheckError: ranks differ; raised on all ranks, with the differences.
    """
    sums = {
        f"{name}.{key}": checksum(value) for name, layer in _layers(model) for key, value in _statistics(layer).items()
    }
    if sums:
        advice = "All ranks must quantize the same weights: load the model from the same files, or build it from the same seed"
        check_alike(group, "scales of quantized weights", sums, advice)


def keep_scales(module: nn.Module) -> None:
    """Let checkpoints contain the scales of bitsandbytes' weights in 4 bits that were sharded: the layer looks for them at its weight."""
    for layer in module.modules() if "bitsandbytes" in sys.modules else ():
        weight, scales = layer._parameters.get("weight"), vars(layer).get("quant_state")
        if scales is not None and weight is not None and is_dtensor(weight):
            weight.quant_state = scales  # type: ignore[attr-defined]


def of_torchao(model: nn.Module) -> list[str]:
    """The names of the weights that torchao has quantized, each with its class: ``"fc.weight (Int8Tensor)"``."""
    return [
        f"{name} ({type(p.data).__name__})"
        for name, p in user_module(model).named_parameters()
        if type(p.data).__module__.startswith("torchao.quantization")
    ]


def check_not_cut(name: str, module: nn.Module) -> None:
    """Check that a module that a tensor-parallel plan cuts has no quantized weights.

    Raises:
        ValueError: it has.
    """
    if any(True for _ in _layers(module)) or of_torchao(module):
        raise ValueError(
            f"the tensor parallel plan cuts {name!r}, whose weights are quantized in blocks, with scales that a part would not have: leave it out of "
            "the plan, or use strategy='fsdp', which takes weights in 4 bits of bitsandbytes"
        )


def check_saved(module: nn.Module, strategy: str) -> None:
    """Check that checkpoints of ``module`` contain no weights that torchao has quantized.

    Args:
        strategy: the name of the strategy's class, for the error.

    Raises:
        ValueError: there are some.
    """
    if not (quantized := of_torchao(module)):
        return
    saved = module.state_dict(keep_vars=True)
    if names := [text for text in quantized if text.partition(" ")[0] in saved]:
        raise ValueError(
            f"{type(module).__name__} under {strategy}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: a checkpoint has plain tensors, "
            "which weights that torchao has quantized are not. Save only what is trained: HFModule does that for a model of peft. Or quantize with "
            "bitsandbytes (Linear4bit, Linear8bitLt)"
        )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of bitsandbytes in a model, with their names."""
    for name, layer in user_module(model).named_modules() if "bitsandbytes" in sys.modules else ():
        if any(type(p).__name__ in _BITSANDBYTES for p in layer._parameters.values()):
            yield name, layer


def _statistics(layer: nn.Module) -> dict[str, Tensor]:
    """Return what a layer saves besides its parameters and buffers: scales and the description of its format."""
    members = {*layer._parameters, *layer._buffers}
    state = layer.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if key not in members and isinstance(value, Tensor)}
