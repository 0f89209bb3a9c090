"""Other libraries' implementations of the loss, used only when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.losses.chunks import Form
from engine.utils.errors import nearest


@dataclass(frozen=True)
class Backend:
    """An implementation, and the arguments of ``linear_cross_entropy`` that it takes beside the tensors and ``ignore_index``."""

    package: str
    """The name to import."""
    installs: str
    """The name to install."""
    takes: tuple[str, ...]


BACKENDS = {
    "torch": Backend("torch", "torch>=2.13", ("chunk",)),
    "liger": Backend("liger_kernel", "liger-kernel", ("label_smoothing", "z_loss", "softcap")),
    "cut_cross_entropy": Backend("cut_cross_entropy", "cut-cross-entropy", ("softcap",)),
}


def check(name: Any, requested: dict[str, Any]) -> None:
    """Check that a backend exists, takes the arguments that differ from their defaults, and is installed.

    Raises:
        ValueError: it does not exist, or lacks an argument.
        ImportError: it is not installed.
    """
    who = f"linear_cross_entropy(backend={name!r})"
    if name not in BACKENDS:
        raise ValueError(
            f"{who} is unknown{nearest(str(name), BACKENDS)}; possible: {', '.join(map(repr, BACKENDS))}, or leave it out"
        )
    backend = BACKENDS[name]
    lacking = [argument for argument in requested if argument not in backend.takes]
    if lacking:
        raise ValueError(f"{who} does not have {lacking[0]}={requested[lacking[0]]!r}: leave out one of the two")
    if find_spec(backend.package) is None or (name == "torch" and not hasattr(F, "linear_cross_entropy")):
        raise ImportError(
            f'{who}: it is not installed: pip install "{backend.installs}", or leave backend out', name=backend.package
        )


def summed_loss(
    name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: Form, chunk: int | None
) -> Tensor:
    """The sum of the rows' losses by a backend that :func:`check` has found.

    Raises:
        ValueError: the vocabulary is sharded, or torch's backend would add up in half precision.
    """
    if form.group is not None:
        raise ValueError(
            f"linear_cross_entropy(backend={name!r}) takes whole weights, and tensor parallel has sharded this one: leave backend out"
        )
    if name == "torch" and form.dtype.itemsize < 4:
        raise ValueError(
            f"linear_cross_entropy(backend='torch') in {form.dtype} adds losses up in that format: leave backend out, or compute in fp32"
        )
    hidden, weight = hidden.to(form.dtype), weight.to(form.dtype)
    bias = None if bias is None else bias.to(form.dtype)
    if name == "torch":
        chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)  # type: ignore[attr-defined, unused-ignore]
        loss: Tensor = F.linear_cross_entropy(  # type: ignore[attr-defined, unused-ignore]
            hidden, weight, targets, linear_bias=bias, reduction="sum", ignore_index=form.ignore_index, options=chunks
        )
        return loss
    if name == "liger":
        function = import_module("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
        options = form.ignore_index, form.z_loss, form.label_smoothing, "sum", form.softcap
        return function.apply(hidden, weight, targets, bias, None, *options)[0]
    cut = import_module("cut_cross_entropy").linear_cross_entropy
    return cut(
        hidden, weight, targets, bias=bias, ignore_index=form.ignore_index, softcap=form.softcap, reduction="sum"
    )
