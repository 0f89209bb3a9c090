"""Settings that only CUDA devices have (and ROCm's, which torch also calls CUDA); for all others see :mod:`engine.utils.accelerator`."""

from __future__ import annotations

from typing import Any

import torch

_MKLDNN: Any = torch.backends.mkldnn  # torch's annotations lack its parts


def convolution_search() -> bool:
    """Whether cuDNN tries its convolution algorithms and keeps the fastest. Other devices' libraries have no such setting."""
    return bool(torch.backends.cudnn.benchmark)


def set_convolution_search(value: bool) -> None:
    """Let cuDNN search for the fastest convolution algorithms, or not; no effect on devices without cuDNN."""
    torch.backends.cudnn.benchmark = value


Products = tuple[str | None, str, str]


def products() -> Products:
    """The precision of float32 matrix products: torch's common setting, and those of the GPU and of the CPU, which can also be set one by one.

    The common setting is ``None`` if the other two were set by themselves, because torch then refuses to name one.
    """
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:
        common = None
    return common, torch.backends.cuda.matmul.fp32_precision, _MKLDNN.matmul.fp32_precision


def set_products(before: Products) -> None:
    """Restore the settings that :func:`products` returned."""
    common, gpu, cpu = before
    torch.set_float32_matmul_precision(common or "highest")
    torch.backends.cuda.matmul.fp32_precision = gpu  # after the common setting, which overwrites both
    _MKLDNN.matmul.fp32_precision = cpu


def uses_tf32() -> bool:
    """Whether products of float32 matrices are computed in TF32, by whichever of torch's settings."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def toolkit() -> str:
    """The toolkit that torch was built with: ``"CUDA 12.8"``, ``"ROCm 6.4"``, or ``""``. Other devices' toolkits have no version in torch."""
    hip, cuda = torch.version.hip, torch.version.cuda
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
