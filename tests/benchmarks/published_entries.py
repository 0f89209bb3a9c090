"""Modules of published packages, each with a short training on synthetic data: entries of ``published_modules.py``."""

from __future__ import annotations

from typing import Any

import torch
from entry import QUIET, Entries, definitions
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ENTRIES = Entries()
LIGHTLY = "lightly/examples/pytorch_lightning"
SEGMENTATION = "segmentation_models.pytorch/examples"


def fit(module: Any, *data: Any, library: str = "lightning.pytorch", **options: Any) -> nn.Module:
    """Train with the ``Trainer`` of the Lightning that the package imports."""
    from importlib import import_module

    import_module(library).Trainer(**QUIET | {"max_epochs": 2} | options).fit(module, *data)
    return module


def table(count: int = 32, features: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, features, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


# -- lightly -------------------------------------------------------------------------------------------------------------------------


def views(count: int, size: int = 32) -> Any:
    """Batches of lightly's loaders: views of the images, labels, file names."""
    images = [torch.randn(3, size, size) for _ in range(2 * count)]
    return DataLoader([((images[2 * i], images[2 * i + 1]), 0, f"{i}.png") for i in range(count)], batch_size=4)


def lightly_example(name: str, loader: Any, *arguments: Any) -> nn.Module:
    module = definitions(f"{LIGHTLY}/{name.lower()}.py")[name](*arguments)
    return fit(module, loader, library="pytorch_lightning")


def lightly(name: str) -> Any:
    return ENTRIES.add("lightly", "lightly", source=f"{LIGHTLY}/{name}.py")


@lightly("simclr")
def lightly_simclr() -> nn.Module:
    return lightly_example("SimCLR", views(8))


@lightly("byol")
def lightly_byol() -> nn.Module:
    return lightly_example("BYOL", views(8))


@lightly("moco")
def lightly_moco() -> nn.Module:
    return lightly_example("MoCo", views(8))


@lightly("simsiam")
def lightly_simsiam() -> nn.Module:
    return lightly_example("SimSiam", views(8))


@lightly("barlowtwins")
def lightly_barlowtwins() -> nn.Module:
    return lightly_example("BarlowTwins", views(8))


@lightly("vicreg")
def lightly_vicreg() -> nn.Module:
    return lightly_example("VICReg", views(8))


@lightly("dino")
def lightly_dino() -> nn.Module:
    return lightly_example("DINO", views(8, 64))


@ENTRIES.add("lightly", "lightly")
def lightly_linear_classifier() -> nn.Module:
    from lightly.utils.benchmarking import LinearClassifier

    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16))
    data = [(torch.randn(3, 8, 8), i % 10) for i in range(32)]
    loader = DataLoader(data, batch_size=4)
    module = LinearClassifier(backbone, batch_size_per_device=4, feature_dim=16, num_classes=10, topk=(1,), freeze_model=True)
    return fit(module, loader, loader, library="pytorch_lightning")


# -- segmentation_models_pytorch -----------------------------------------------------------------------------------------------------


@ENTRIES.add("segmentation-models-pytorch", "segmentation_models_pytorch", source=f"{SEGMENTATION}/binary_segmentation_intro.ipynb")
def segmentation_pet_model() -> nn.Module:
    names = definitions(f"{SEGMENTATION}/binary_segmentation_intro.ipynb")
    names["T_MAX"] = 8
    data = [{"image": torch.rand(3, 64, 64), "mask": (torch.rand(1, 64, 64) > 0.5).float()} for _ in range(8)]
    loader = DataLoader(data, batch_size=2)
    module = names["PetModel"]("FPN", "resnet18", in_channels=3, out_classes=1, encoder_weights=None)
    return fit(module, loader, loader, library="pytorch_lightning")


@ENTRIES.add("segmentation-models-pytorch", "segmentation_models_pytorch", source=f"{SEGMENTATION}/camvid_segmentation_multiclass.ipynb")
def segmentation_camvid_model() -> nn.Module:
    names = definitions(f"{SEGMENTATION}/camvid_segmentation_multiclass.ipynb")
    names["T_MAX"] = 8
    data = [(torch.rand(3, 64, 64), torch.randint(0, 5, (64, 64))) for _ in range(8)]
    loader = DataLoader(data, batch_size=2)
    module = names["CamVidModel"]("Unet", "resnet18", in_channels=3, out_classes=5, encoder_weights=None)
    return fit(module, loader, loader, library="pytorch_lightning")
