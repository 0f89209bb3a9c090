"""Accelerate's names for loaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from engine.compat.accelerate import padded_loaders
from engine.compat.accelerate.padded_loaders import DispatchedLoader, PaddedLoader
from engine.compat.accelerate.padded_shards import BatchSamplerShard as BatchSamplerShard
from engine.compat.accelerate.padded_shards import IterableDatasetShard as IterableDatasetShard
from engine.compat.accelerate.padded_shards import SeedableRandomSampler as SeedableRandomSampler
from engine.compat.accelerate.state import GradientState, PartialState
from engine.data.loader import PreparedLoader

__all__ = [
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]


class SkipBatchSampler(BatchSampler):
    """Another batch sampler without its first ``skip_batches`` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    @property
    def total_length(self) -> int:
        """The number of batches with those that are skipped."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batch_sampler, self.skip_batches, None)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches


class _Made(type):
    """The metaclass of the loaders that scripts make themselves: those that ``prepare`` returns count as their instances."""

    like: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or type(instance) in vars(cls).get("like", ())


class DataLoaderShard(PaddedLoader, metaclass=_Made):
    """A loader of this process's own samples; ``kwargs`` are the arguments of ``DataLoader``."""

    like = (padded_loaders.Loader, PaddedLoader)

    def __init__(
        self, dataset: Any, device: Any = None, rng_types: Any = None, synchronized_generator: Any = None, skip_batches: int = 0,
        use_stateful_dataloader: bool = False, _drop_last: bool = False, _non_blocking: bool = False, torch_device_mesh: Any = None,
        iteration: int = 0, **kwargs: Any,
    ) -> None:  # fmt: skip
        loader, reading = DataLoader(dataset, **kwargs), GradientState().dataloader_references
        super().__init__(loader, PartialState().group, reading, rng_types or (), device=device)
        self.synchronized_generator = synchronized_generator or self.synchronized_generator
        self.skip_batches, self.iteration = skip_batches, iteration
        self.use_stateful_dataloader = use_stateful_dataloader


class SkipDataLoader(DataLoaderShard):
    """A loader that skips its first ``skip_batches`` batches; other arguments are those of ``DataLoader``."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)


class DataLoaderDispatcher(DispatchedLoader, metaclass=_Made):
    """A loader that the main process reads, and of whose batches each process gets its slice; ``kwargs`` are the arguments of ``DataLoader``."""

    like = (DispatchedLoader,)

    def __init__(
        self, dataset: Any, split_batches: bool = False, skip_batches: int = 0, use_stateful_dataloader: bool = False,
        _drop_last: bool = False, _non_blocking: bool = False, slice_fn: Any = None, torch_device_mesh: Any = None,
        iteration: int = 0, **kwargs: Any,
    ) -> None:  # fmt: skip
        loader, reading = DataLoader(dataset, **kwargs), GradientState().dataloader_references
        super().__init__(loader, PartialState().group, reading, split_batches=split_batches, slice_fn=slice_fn)
        self.skip_batches, self.iteration = skip_batches, iteration
        self.use_stateful_dataloader = use_stateful_dataloader


def prepare_data_loader(
    dataloader: Any, device: Any = None, num_processes: int | None = None, process_index: int | None = None,
    split_batches: bool = False, put_on_device: bool = False, rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None, even_batches: bool = True, slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False, data_seed: int | None = None, non_blocking: bool = False,
    use_stateful_dataloader: bool = False, torch_device_mesh: Any = None,
) -> PaddedLoader:  # fmt: skip
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
    if not isinstance(dataloader, (padded_loaders.Loader, PreparedLoader)):
        dataloader = PaddedLoader(dataloader, PartialState().group, GradientState().dataloader_references)
    return dataloader.skipping(num_batches)
