"""Loaders that yield the same batches in every epoch: ``overfit_batches`` trains on the first ones of them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from engine.data.combined_loaders import CombinedLoader
from engine.data.prepared_loader import PreparedLoader
from engine.data.stream_position import altered
from engine.utils.log import warn_once


def in_order(loader: Any) -> Any:
    """The loader itself if its order is fixed, else a copy that reads the dataset in order, with a warning.

    Raises:
        ValueError: a user's class makes its batches.
    """
    if isinstance(loader, PreparedLoader):
        loader = loader.loader
    if isinstance(loader, CombinedLoader):
        members = [in_order(member) for member in loader.members]
        if all(member is own for member, own in zip(members, loader.members, strict=True)):
            return loader
        named = dict(zip(loader.loaders, members, strict=True)) if isinstance(loader.loaders, dict) else members
        return CombinedLoader(named, loader.mode)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if type(sampler) is SequentialSampler:
        return loader
    if batches is not None and type(batches) is not BatchSampler:
        raise ValueError(
            f"overfit_batches needs the same batches in every epoch, and {type(batches).__name__} makes those of {type(loader).__name__}: "
            "give a DataLoader with batch_size= and shuffle=False, or a list of batches"
        )
    warn_once(
        f"overfit_batches: {type(loader).__name__} is read in the dataset's order, not in that of {type(sampler).__name__}"
    )
    order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    if batches is None:
        return altered(loader, sampler=order)
    return altered(loader, sampler=order, batch_sampler=BatchSampler(order, batches.batch_size, batches.drop_last))
