"""The batch size with which ``find_batch_size`` starts: the largest that fits by a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from engine import DataModule, Fit, TrainModule

from .trial import log

SMALLEST = 2
"""Where no plan says more."""
_MARGIN = 0.9
"""Of the memory: a start that is a little too small costs a doubling, one that is too large a training that fails."""


def planned_start(
    module: TrainModule,
    sized: Callable[[int], Any],
    datamodule: DataModule | None,
    fit: Fit | None,
    memory: int | None,
) -> int:
    """The largest batch size whose plan fits, by the plans of 2 and 4 samples: memory grows at least as fast beyond them.

    Args:
        module, datamodule, fit: as of ``find_batch_size``.
        sized: the loader, the data module or the module with a batch size.
        memory: bytes of the device; ``None``: of the accelerator.

    Returns:
        :data:`SMALLEST` without an accelerator, and for what cannot be planned.
    """
    fit = Fit() if fit is None else fit
    room = _accelerator_memory(fit) if memory is None else memory
    if room is None:
        return SMALLEST

    def need(size: int) -> Any:
        changed = sized(size)
        own, data, loader = module, datamodule, changed
        if isinstance(changed, TrainModule):
            own, loader = changed, None
        elif isinstance(changed, DataModule):
            data, loader = changed, None
        return fit.plan(own, loader, datamodule=data, world_size=_ranks(fit), device=f"h100,{room}").need

    try:
        low, high = need(SMALLEST), need(2 * SMALLEST)
    except Exception as error:
        log().info("find_batch_size starts with %d: no plan (%s: %s)", SMALLEST, type(error).__name__, error)
        return SMALLEST
    # Of tensors: the allocator's segments hide what few samples add.
    each = (high.tensors - low.tensors) / SMALLEST
    found = SMALLEST if each <= 0 else SMALLEST + int(max(0.0, _MARGIN * room - low.total) / each)
    log().info("find_batch_size starts with %d, by a plan", found)
    return found


def _ranks(fit: Fit) -> int:
    devices = fit.settings.devices
    return (
        devices * fit.settings.num_nodes
        if isinstance(devices, int) and devices > 0
        else int(os.environ.get("WORLD_SIZE", "1"))
    )


def _accelerator_memory(fit: Fit) -> int | None:
    """Bytes of the current accelerator, if it is what ``fit`` trains on."""
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        if fit.settings.accelerator != "cpu" and torch.accelerator.is_available():
            return int(torch.accelerator.get_memory_info()[1])
    return None
