"""Checksums of tensors' values."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PLAIN = (torch.float32, torch.int64, torch.float64, torch.int32, torch.uint8, torch.bool)
"""Types of values that numpy has, too."""


def checksum(tensor: Tensor, before: int = 0) -> int:
    """The CRC-32 of a dense tensor's bytes, after that of what came ``before``. Waits for the tensor's device."""
    if tensor.device.type == "cpu" and tensor.dtype in _PLAIN and not tensor.requires_grad and not tensor.is_neg():
        return zlib.crc32(tensor.contiguous().numpy(), before)  # type: ignore[arg-type]  # a third of the time for a small one
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(bits.numpy(), before)  # type: ignore[arg-type]


def sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements, taken as integers, on its device; 0 for classes of tensors without bits of their own. Shape ``()``, int64."""
    integers = _INTEGERS.get(tensor.element_size(), torch.uint8)
    if hasattr(tensor, "__tensor_flatten__"):
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return tensor.detach().contiguous().reshape(-1).view(integers).sum(dtype=torch.int64)
