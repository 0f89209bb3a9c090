"""Accelerate's names for loaders."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from engine.compat.accelerate import padded_loaders
from engine.compat.accelerate.padded_loaders import DispatchedLoader as DataLoaderDispatcher
from engine.compat.accelerate.padded_loaders import PaddedLoader as DataLoaderShard
from engine.compat.accelerate.padded_shards import BatchSamplerShard as BatchSamplerShard
from engine.compat.accelerate.padded_shards import IterableDatasetShard as IterableDatasetShard
from engine.compat.accelerate.padded_shards import SeedableRandomSampler as SeedableRandomSampler
from engine.compat.accelerate.state import GradientState, PartialState

__all__ = ["DataLoaderDispatcher", "DataLoaderShard", "prepare_data_loader", "skip_first_batches"]


def prepare_data_loader(
    dataloader: Any, device: Any = None, num_processes: int | None = None, process_index: int | None = None,
    split_batches: bool = False, put_on_device: bool = False, rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None, even_batches: bool = True, slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False, data_seed: int | None = None, non_blocking: bool = False,
    use_stateful_dataloader: bool = False, torch_device_mesh: Any = None,
) -> DataLoaderShard:  # fmt: skip
    """Prepare a loader that distributes data as Accelerate does, with padding."""
    state = PartialState()
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True requires put_on_device=True")
    n = state.num_processes if num_processes is None else num_processes
    rank = state.process_index if process_index is None else process_index
    options: dict[str, Any] = {"split_batches": split_batches, "even_batches": even_batches}
    options["device"] = device if put_on_device else None
    options |= {"dispatch": dispatch_batches, "slice_fn": slice_fn_for_dispatch, "rng_types": rng_types or ()}
    options |= {"seedable": use_seedable_sampler, "seed": data_seed}
    active_loaders = GradientState().dataloader_references
    return padded_loaders.padded(dataloader, state.group, active_loaders, processes=(n, rank), **options)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader that skips the first batches of ``dataloader``, which is a prepared loader or a ``DataLoader``."""
    if isinstance(dataloader, DataLoader):
        dataloader = DataLoaderShard(dataloader, PartialState().group, GradientState().dataloader_references)
    return dataloader.skipping(num_batches)
