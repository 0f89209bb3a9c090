"""How many floating point operations a second a device can do, as its vendor says; only devices whose number is certain."""

from __future__ import annotations

import re

import torch

from engine import Device

KINDS = ("fp64", "fp32", "tf32", "fp16", "bf16")

# Dense matrix multiplications (without sparsity) at the boost clock of the full power limit, in 1e12 operations a second. The first pattern that
# is found in the device's name counts.
_TERA: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA H100 datasheet (2023), and H200 datasheet (2024): half of the numbers "with sparsity".
    (r"H100 PCIe", {"fp64": 51, "fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756}),
    (r"H100 NVL", {"fp64": 60, "fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5}),
    (r"H100|H200|GH200", {"fp64": 67, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}),
    # NVIDIA A100 datasheet (2021); A800 has the same cores.
    (r"A100|A800", {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}),
    # NVIDIA A30 datasheet (2022).
    (r"\bA30\b", {"fp64": 10.3, "fp32": 10.3, "tf32": 82, "fp16": 165, "bf16": 165}),
    # NVIDIA A10 datasheet (2022); A10G is another chip, and not in the table.
    (r"\bA10\b", {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}),
    # NVIDIA L40S and L4 datasheets (2023): half of the numbers "with sparsity".
    (r"L40S", {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362}),
    (r"\bL4\b", {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121}),
    # NVIDIA V100 and T4 datasheets (2020, 2019); neither has tf32 or bf16 in hardware.
    (r"V100-SXM", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
    (r"V100-PCIE", {"fp64": 7, "fp32": 14, "fp16": 112}),
    (r"\bT4\b", {"fp32": 8.1, "fp16": 65}),
    # NVIDIA Ada architecture whitepaper (2023), fp16 with fp32 accumulation, which torch uses.
    (r"RTX 4090\b(?! D| Laptop)", {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}),
    # NVIDIA Ampere GA102 whitepaper (2021), with fp32 accumulation.
    (r"RTX 3090\b(?! Ti)", {"fp32": 35.6, "tf32": 35.6, "fp16": 71.2, "bf16": 71.2}),
    # AMD Instinct MI300X and MI250X datasheets (2023, 2021); torch sees each of the two dies of an MI250X as a device.
    (r"MI300X", {"fp64": 163.4, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4}),
    (r"MI250X", {"fp64": 47.9, "fp32": 47.9, "fp16": 191.5, "bf16": 191.5}),
)


def known_peak(device_name: str, kind: str) -> float | None:
    """Operations a second of the device of this name; ``None`` if it is not known.

    Args:
        device_name: as ``engine.Device(device).name`` gives it.
        kind: of :data:`KINDS`.
    """
    for pattern, peaks in _TERA:
        if re.search(pattern, device_name):
            return peaks[kind] * 1e12 if kind in peaks else None
    return None


def peak_of(device: torch.device, precision: str) -> float | None:
    """Operations a second of ``device`` in matrix multiplications of a precision such as ``"bf16-mixed"``; ``None``: not known (always on a CPU,
    and for fp8, where only some multiplications are in 8 bits)."""
    kind = {"64": "fp64", "32": "fp32", "16": "fp16", "bf16": "bf16"}.get(precision.partition("-")[0])
    if kind == "fp32" and Device(device).tf32:
        kind = "tf32"
    return None if kind is None else known_peak(Device(device).name, kind)
