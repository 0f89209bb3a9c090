"""Transfer of batches to the device with hooks of the module or the data module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.utils.log import warn_once
from engine.utils.overrides import overridden_methods
from engine.utils.tree import cast, move

Transfer = Callable[[Any, torch.device, torch.dtype | None], Any]

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""The methods of a module or a data module around a batch's transfer, in their order."""


def transfer_of(module: TrainModule, datamodule: DataModule | None, index: int) -> Transfer | None:
    """The hooks before, after and instead of a batch's transfer, the data module's before the module's; ``None``: there are none.

    Args:
        index: the loader's index, passed to the hooks.
    """
    of_module = overridden_methods(module, HOOKS, TrainModule)
    of_data = overridden_methods(datamodule, HOOKS, DataModule)
    for name in sorted(of_module & of_data):
        warn_once(
            f"both {type(module).__name__} and {type(datamodule).__name__} define {name}: the data module's is called"
        )
    if not of_module and not of_data:
        return None
    owners: list[Any] = [datamodule if name in of_data else module if name in of_module else None for name in HOOKS]
    before, transfer, after = [owner and getattr(owner, name) for owner, name in zip(owners, HOOKS, strict=True)]
    return partial(_through, before, transfer, after, index)


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
