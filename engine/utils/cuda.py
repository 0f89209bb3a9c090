"""Everything that only CUDA (and ROCm, which torch calls by the same name) has. The rest of the library asks :mod:`engine.utils.accelerator`."""

from __future__ import annotations

import torch


def convolution_search() -> bool:
    """Whether cuDNN tries its algorithms and keeps the fastest. Other devices' libraries choose without being asked."""
    return bool(torch.backends.cudnn.benchmark)


def set_convolution_search(value: bool) -> None:
    """As :func:`convolution_search`, from now on; nothing happens on devices without cuDNN."""
    torch.backends.cudnn.benchmark = value


def toolkit() -> str:
    """What torch was built with: ``"CUDA 12.8"``, ``"ROCm 6.4"``, or nothing. Only these two have versions of their own beside torch's."""
    hip, cuda = torch.version.hip, torch.version.cuda
    return f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else ""
