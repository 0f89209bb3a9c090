"""Everything that only CUDA has (and ROCm, which torch calls CUDA, too). The rest of the library asks :mod:`engine.utils.accelerator`."""

from __future__ import annotations

from typing import Any

import torch

_MKLDNN: Any = torch.backends.mkldnn  # torch's annotations lack its parts


def convolution_search() -> bool:
    """Whether cuDNN tries its algorithms and keeps the fastest. Other devices' libraries choose without being asked."""
    return bool(torch.backends.cudnn.benchmark)


def set_convolution_search(value: bool) -> None:
    """Set what :func:`convolution_search` returns from now on; no effect on devices without cuDNN."""
    torch.backends.cudnn.benchmark = value


Products = tuple[str | None, str, str]


def products() -> Products:
    """How products of float32 matrices are computed: torch's common setting, and its two parts, which can be set one by one.

    The parts lie under ``torch.backends.cuda``. The common setting is ``None`` where the parts have been set by themselves: torch
    then refuses to name one.
    """
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:
        common = None
    return common, torch.backends.cuda.matmul.fp32_precision, _MKLDNN.matmul.fp32_precision


def set_products(before: Products) -> None:
    """Restore what :func:`products` returned."""
    common, gpu, cpu = before
    torch.set_float32_matmul_precision(common or "highest")
    torch.backends.cuda.matmul.fp32_precision = gpu  # after the common setting, which overwrites both
    _MKLDNN.matmul.fp32_precision = cpu


def uses_tf32() -> bool:
    """Whether products of float32 matrices are computed in TF32, whichever of torch's settings said so."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def toolkit() -> str:
    """The toolkit that torch was built with: ``"CUDA 12.8"``, ``"ROCm 6.4"``, or nothing. Only these two have versions besides torch's."""
    hip, cuda = torch.version.hip, torch.version.cuda
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
