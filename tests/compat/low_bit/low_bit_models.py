"""Tiny models over quantized weights, with optimizers whose states are quantized, and trainings of them that are resumed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint
from engine import Callback, Fit, TrainModule

WIDTH = 64
DATA = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


class LowRank(nn.Module):
    """A frozen layer, and beside it two matrices of rank 4 that are trained (LoRA)."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) * 0.02), nn.Parameter(torch.zeros(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return out


def base_layer(kind: str) -> nn.Module:
    """A linear layer: ``plain``, ``nf4``, ``nf4 double``, ``nf4 in TYPE``, ``int8``, ``torchao CONFIG`` (frozen), or ``qat``, which is trained."""
    layer: Any = nn.Linear(WIDTH, WIDTH, bias=False)
    if kind == "qat":
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        parent = nn.Sequential(layer)
        config = QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare")
        quantize_(parent, config)
        return parent[0]
    layer.weight.requires_grad_(False)
    if kind.startswith("nf4"):
        return nf4(layer, "double" in kind, getattr(torch, kind.partition(" in ")[2] or "uint8"))
    if kind == "int8":
        import bitsandbytes

        quantized = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
        quantized.load_state_dict({"weight": layer.weight.detach()})
        quantized.to("cpu")
        return quantized
    if kind.startswith("torchao"):
        import torchao.quantization

        parent = nn.Sequential(layer)
        torchao.quantization.quantize_(parent, getattr(torchao.quantization, kind.split()[1])())
        return parent[0]
    assert kind == "plain", kind
    return layer


def nf4(layer: Any, double: bool = False, storage: torch.dtype = torch.uint8) -> nn.Module:
    """The layer in 4 bits of bitsandbytes, quantized on the CPU."""
    import bitsandbytes

    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compute_dtype=torch.float32,
        compress_statistics=double,
        quant_type="nf4",
        quant_storage=storage,
    )
    quantized.load_state_dict({"weight": layer.weight.detach()})
    quantized.to("cpu")
    return quantized


class Net(TrainModule):
    """Two residual layers over ``kind``, trained by an optimizer of :func:`optimizer_of`."""

    def __init__(self, kind: str = "plain", optimizer: str = "AdamW", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.optimizer = optimizer
        self.layers = nn.ModuleList(LowRank(base_layer(kind)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.optimizer, [p for p in self.parameters() if p.requires_grad])


def optimizer_of(name: str, parameters: Sequence[nn.Parameter]) -> Any:
    """An optimizer of torch, ``torchao NAME`` or ``bitsandbytes NAME``, which quantizes the state of every matrix."""
    package, _, quantized = name.rpartition(" ")
    if package == "torchao":
        import torchao.optim

        return getattr(torchao.optim, quantized)(parameters, lr=1e-2, block_size=64)
    if package == "bitsandbytes":
        import bitsandbytes

        return getattr(bitsandbytes.optim, quantized)(parameters, lr=1e-2, min_8bit_size=64)
    return getattr(torch.optim, quantized)(parameters, lr=1e-2)


def trained(
    root: Path,
    module: Net,
    steps: int,
    strategy: str = "single",
    resume: Any = None,
    callbacks: Sequence[Callback] = (),
    validates: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train to a step and return the whole state on rank 0; saves every two steps."""
    size = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    fit = Fit(
        strategy=strategy,
        accelerator="cpu",
        devices="auto" if "WORLD_SIZE" in os.environ else 1,
        max_steps=steps,
        seed=0,
        global_batch_size=8,
        gradient_clip_val=1.0,
        root_dir=root,
        val_every="1 steps" if validates else None,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(every="2 steps"), *callbacks],
        **settings,
    )
    validation = [DataLoader(DATA, batch_size=size)] if validates else []
    fit.run(module, DataLoader(DATA, batch_size=size), *validation, resume=resume)
    return {name: value.detach().clone() for name, value in fit.state_dict(module).items()}


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor: quantized values may be kept as floats, among which NaN is not equal to itself."""
    return value.contiguous().reshape(-1).view(torch.uint8)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def cell(root: Path, kind: str, optimizer: str, strategy: str) -> dict[str, Any]:
    """Train to step 4; train to step 2 and resume to 4. Return whether all bits are equal, and the trained weights; or the error, and its step."""
    module = Net(kind, optimizer)
    root = root / f"{kind} {optimizer} {strategy}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the other libraries
            whole = trained(root / "whole", module, 4, strategy)
            trained(root / "resumed", Net(kind, optimizer), 2, strategy)
            resumed = trained(root / "resumed", Net(kind, optimizer), 4, strategy, resume="auto")
    except (ValueError, TypeError) as error:
        return {"error": str(error), "steps": module.run.step if module.attached else 0}
    weights = {n: v.flatten()[:8].tolist() for n, v in whole.items() if n.endswith((".a", ".b", "head.weight"))}
    return {"equal": same(whole, resumed), "weights": weights}
