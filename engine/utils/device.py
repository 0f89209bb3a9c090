"""The public view of a device, for callbacks and for users' own code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from engine.utils import accelerator, cuda

_COUNTERS = {
    "allocated": ("memory_allocated", "current_allocated_memory"),
    "reserved": ("memory_reserved", "driver_allocated_memory"),
    "max_allocated": ("max_memory_allocated",),
}
"""Kind of memory -> the functions of device modules that return its bytes; the second names are MPS's."""


@dataclass(frozen=True, slots=True)
class Device:
    """The name and the capabilities of a device, which are tried on the device itself::

        Device(run.device).float64    # False on an Apple GPU

    A capability is tried once in a process, with tensors of a few bytes, which waits for the device: ask before the training starts.
    """

    device: torch.device

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is not the CPU."""
        return self.device.type != "cpu"

    @property
    def name(self) -> str:
        """The vendor's name, such as ``"NVIDIA H100 80GB HBM3"``; the device's type if torch does not know a name."""
        return accelerator.model_name(self.device)

    def described(self) -> str:
        """The accelerator's name, memory and, if it has one, compute capability or architecture, as one line of text."""
        parts = [self.name]
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            properties = accelerator.module(self.device).get_device_properties(self.device)
            parts.append(f"{properties.total_memory / 2**30:.1f} GiB")
            parts.append(
                getattr(properties, "gcnArchName", "") or f"compute capability {properties.major}.{properties.minor}"
            )
        return ", ".join(parts)

    @property
    def float64(self) -> bool:
        """Whether the device has float64."""
        return accelerator.supports_float64(self.device)

    @property
    def wide(self) -> torch.dtype:
        """The widest real dtype of the device: float64, or float32 on devices without."""
        return accelerator.wide(self.device)

    @property
    def tf32(self) -> bool:
        """Whether the device computes products of float32 matrices in TF32 now; see ``matmul_precision``."""
        return self.is_accelerator and cuda.uses_tf32()

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """The capabilities that ``fit env`` shows: name -> whether the device has it."""
        return accelerator.capabilities(self.device)

    def memory(self) -> dict[str, int]:
        """This process's memory on the device in bytes: ``allocated`` to tensors, ``reserved`` by the allocator, and ``max_allocated`` since
        the start, as far as the device reports them; empty on a CPU. Does not wait for the device."""
        if not self.is_accelerator:
            return {}
        owner, sizes = accelerator.module(self.device), {}
        for kind, functions in _COUNTERS.items():
            function = next((getattr(owner, name) for name in functions if hasattr(owner, name)), None)
            with suppress(RuntimeError):
                if function is not None:
                    sizes[kind] = int(_call(function, self.device))
        return sizes

    def utilization(self) -> float | None:
        """Percentage of about the last second in which a kernel ran; ``None`` if the device does not report it."""
        try:
            return float(accelerator.module(self.device).utilization(self.device))
        except (AttributeError, ImportError, RuntimeError):  # ImportError: the package that asks the driver is missing
            return None

    @property
    def allocations(self) -> Any:
        """The device module's recorder of allocations (``torch.cuda.memory``); ``None`` if it has none."""
        recorder = getattr(getattr(torch, self.device.type, None), "memory", None)
        return recorder if hasattr(recorder, "_record_memory_history") and hasattr(recorder, "_dump_snapshot") else None


def _call(function: Any, device: torch.device) -> Any:
    """Call ``function(device)``, or ``function()`` in modules of a single device, whose functions have no argument."""
    try:
        return function(device)
    except TypeError:
        return function()
