"""Which device a process computes on."""

from __future__ import annotations

import os

import torch

from engine.utils.errors import nearest

ACCELERATORS = ("auto", "cpu", "cuda", "gpu")


def device_type(accelerator: str) -> str:
    """``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: unknown name.
        RuntimeError: CUDA was requested but is not available.
    """
    if accelerator not in ACCELERATORS:
        raise ValueError(
            f"accelerator={accelerator!r} is unknown{nearest(accelerator, ACCELERATORS)}; possible: {', '.join(ACCELERATORS)}"
        )
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator in ("cuda", "gpu"):
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"accelerator={accelerator!r} was requested, but torch {torch.__version__} sees no CUDA device; use 'cpu' or 'auto'"
            )
        return "cuda"
    return "cpu"


def count(kind: str, devices: int | str) -> int:
    """How many processes a machine runs for ``devices`` (a number, or ``"auto"``: every CUDA device, one process on a CPU).

    Raises:
        ValueError: more CUDA devices than there are.
    """
    there = torch.cuda.device_count() if kind == "cuda" else None
    if devices in ("auto", -1):
        return there or 1
    if there is not None and int(devices) > there:
        raise ValueError(f"devices={devices} was requested, but this machine has {there} CUDA device(s)")
    return int(devices)


def device(kind: str, index: int, *, own: bool = False) -> torch.device:
    """The device of a local rank; it becomes torch's current one.

    Args:
        kind: of :func:`device_type`.
        index: the local rank, or the requested device.
        own: the launcher may hide the other processes' devices: then a single visible device is this process's, whatever its index.

    Raises:
        ValueError: the local rank has no device.
    """
    if kind == "cpu":
        return torch.device("cpu")
    index = visible_index(index, torch.cuda.device_count(), own)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def visible_index(index: int, there: int, own: bool) -> int:
    """The index of a process's device among the ``there`` visible ones; ``own`` and errors as for :func:`device`."""
    if own and there == 1:
        return 0
    if index >= there:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise ValueError(
            f"local rank {index} has no device: this process sees {there} CUDA device(s){hidden}. Start fewer processes per node"
        )
    return index
