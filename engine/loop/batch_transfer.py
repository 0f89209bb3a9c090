"""Transfer of batches to the device with hooks of the module or the data module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.utils.log import warn_once
from engine.utils.overrides import overridden
from engine.utils.tree import cast, move

Transfer = Callable[[Any, torch.device, torch.dtype | None], Any]


def transfer_of(module: TrainModule, datamodule: DataModule | None, index: int) -> Transfer | None:
    """The hooks before, after and instead of a batch's transfer, the data module's before the module's; ``None``: there are none.

    Args:
        index: the loader's index, passed to the hooks.
    """
    found = {
        name: _owner(name, module, datamodule)
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    }
    if not any(found.values()):
        return None
    before, transfer, after = (found[name] and getattr(found[name], name) for name in found)
    return partial(_through, before, transfer, after, index)


def _owner(name: str, module: TrainModule, datamodule: DataModule | None) -> Any:
    of_module, of_data = (
        overridden(module, name, TrainModule),
        datamodule is not None and overridden(datamodule, name, DataModule),
    )
    if of_module and of_data:
        warn_once(
            f"both {type(module).__name__} and {type(datamodule).__name__} define {name}: the data module's is called"
        )
    return datamodule if of_data else module if of_module else None


def _through(
    before: Callable[..., Any] | None,
    transfer: Callable[..., Any] | None,
    after: Callable[..., Any] | None,
    index: int,
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Any:
    if before is not None:
        batch = before(batch, index)
    # A user's transfer may leave tensors on the host: only the dtype is changed here.
    batch = move(batch, device, dtype) if transfer is None else transfer(cast(batch, dtype), device, index)
    return batch if after is None else after(batch, index)
