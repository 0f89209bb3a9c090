"""Loaders that pad the last global batch with samples of the first, and read one batch ahead to know when the data ends.

The engine's own loaders (:mod:`engine.data.loader`) never pad; these are for comparisons with trainers that do.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from engine.compat.accelerate.padded_shards import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from engine.compat.accelerate.utils.random import share_states
from engine.data.loader import PreparedLoader
from engine.data.user_loaders import altered
from engine.distributed.collectives import broadcast_object
from engine.distributed.group import Group
from engine.utils.tree import batch_size, leaves, map_tensors, move


class Loader:
    """A prepared loader with Accelerate's attributes for its position; other attributes are those of the wrapped loader.

    Args:
        reading: the loaders that are being iterated over, the innermost last; the loader adds itself during a pass.
        rng_types: the random generators that get the main process's state at the start of each pass.
    """

    synchronized_generator: torch.Generator | None = None

    def __init__(self, loader: Any, group: Group, reading: list[Any], rng_types: Iterable[Any] = ()) -> None:
        self.base_dataloader, self.group, self.reading, self.rng_types = loader, group, reading, list(rng_types)
        self._batches_given = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapped loader, for ``isinstance(loader, DataLoader)`` in scripts and annotations that are checked."""
        loader = self.base_dataloader
        return type(loader.loader if isinstance(loader, PreparedLoader) else loader)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copied, (type(self), vars(self))

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        share_states(self.group, self.rng_types, self.synchronized_generator)
        self._batches_given, batches = self._first(), self._batches()
        self.reading.append(self)
        try:
            for batch in batches:
                self._batches_given += 1
                yield batch
        finally:
            batches.close()
            self.reading.remove(self)

    def _first(self) -> int:
        """The index within its epoch of the next pass's first batch."""
        return int(self.base_dataloader.skipped)

    def _batches(self) -> Any:
        return iter(self.base_dataloader)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch is the last one.

        Raises:
            RuntimeError: the data has no length, so that its end is unknown until it is reached.
        """
        if self.base_dataloader.length is None:
            raise RuntimeError(
                "end_of_dataloader of data without a length: Accelerator(rules='accelerate') reads a batch ahead to know it"
            )
        return bool(self._batches_given == self.base_dataloader.length)

    @property
    def remainder(self) -> int:
        """The number of samples of the last global batch to keep; 0 means all, because nothing is padded."""
        return 0

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a full global batch."""
        return int(self.batch_sampler.batch_size) * self.group.world_size

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the dataset."""
        return len(self.dataset)

    def skipping(self, num_batches: int) -> Any:
        """A loader that skips the epoch's first ``num_batches`` batches, counted from its start even after ``load_state`` has restored a position."""
        loader: PreparedLoader = self.base_dataloader
        loader.restart()
        return Loader(loader.skipping(num_batches), self.group, self.reading, self.rng_types)


def _copied(kind: type[Loader], content: dict[str, Any]) -> Loader:
    """A copied or unpickled loader."""
    loader = object.__new__(kind)
    vars(loader).update(content)
    return loader


@dataclass
class Position:
    """The epoch of a padded loader, and what the order of its pass is drawn from. A loader that skips batches shares it with the one that it
    comes from, so that the skipped pass counts as that one's own."""

    iteration: int = 0
    """The epoch of the next pass, or of the current one."""
    start: int = 0
    """The index of the next pass's first batch."""
    resumes: bool = False
    """Whether the next pass draws the same order as before a checkpoint."""
    torch_state: Tensor | None = None
    generator_state: Tensor | None = None


class PaddedLoader(Loader):
    """A loader that keeps the user's order, pads the last global batch with samples of the first, and reads one batch ahead."""

    end_of_dataloader: Any = False
    remainder: Any = -1
    iteration: Any = property(
        attrgetter("position.iteration"), lambda self, epoch: setattr(self.position, "iteration", epoch)
    )

    def __init__(
        self, loader: Any, group: Group, reading: list[Any], rng_types: Iterable[Any] = (), *, device: Any = None
    ) -> None:
        super().__init__(loader, group, reading, rng_types)
        self.device, self.skip_batches, self.position = device, 0, Position()
        self.synchronized_generator = getattr(_sampler(loader) or loader.dataset, "generator", None)

    @property
    def total_batch_size(self) -> int:
        sampler = self.batch_sampler or self.sampler
        shard_size, split = int(sampler.batch_size), getattr(sampler, "split_batches", False)
        return shard_size if split else shard_size * int(getattr(sampler, "num_processes", 1))

    def __len__(self) -> int:
        return len(self.base_dataloader) - self.skip_batches

    def _first(self) -> int:
        return max(self.position.start, self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next pass."""
        self.iteration = epoch
        for part in (self.batch_sampler, _sampler(self.base_dataloader), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _batches(self) -> Any:
        """Yield the batches of a pass; record the random state that their order is drawn from, and whether a batch is the last."""
        self.end_of_dataloader, self.remainder = False, -1
        with contextlib.suppress(TypeError, AttributeError):  # a stream has no length
            if not self.drop_last:
                self.remainder = self.total_dataset_length % self.total_batch_size
        self.set_epoch(self.iteration)
        position, generator = self.position, self.synchronized_generator
        with torch.random.fork_rng(devices=()) if position.resumes else contextlib.nullcontext():
            if position.resumes and position.torch_state is not None:  # draw the same order as before the checkpoint
                torch.set_rng_state(position.torch_state)
            position.torch_state = torch.get_rng_state()
            position.generator_state = None if generator is None else generator.get_state()
            batches, start = self._read(), self._first()
            ahead = next(itertools.islice(batches, start, None), None)
        position.start, position.resumes = 0, False
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            self.end_of_dataloader = ahead is None
            yield batch
        self.iteration += 1

    def _read(self) -> Iterator[Any]:
        for batch in self.base_dataloader:
            yield batch if self.device is None else move(batch, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the number of its batches that were given out, and the random states that its order was drawn from."""
        position, generator = self.position, self.synchronized_generator
        active = next((loader for loader in reversed(self.reading) if _stands_at(loader, position)), None)
        ended = active is not None and active.end_of_dataloader
        if active is not None and not ended:
            order = {"torch": position.torch_state, "generator": position.generator_state}
            return {"epoch": position.iteration, "given": active._batches_given, **order}
        generator_state = None if generator is None else generator.get_state()
        return {"epoch": position.iteration + ended, "given": 0, "torch": None, "generator": generator_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from :meth:`state_dict`."""
        position, order = self.position, state["torch"]
        position.iteration, position.start, position.resumes = state["epoch"], state["given"], order is not None
        position.torch_state = order
        if self.synchronized_generator is not None and state["generator"] is not None:
            self.synchronized_generator.set_state(state["generator"])

    def restart(self) -> None:
        """Start the next pass at the beginning of its epoch."""
        self.position.start = 0

    def skipping(self, num_batches: int) -> Any:
        loader = copy.copy(self)
        loader.skip_batches = num_batches
        self.restart()
        return loader


def _stands_at(loader: Loader, position: Position) -> bool:
    """Whether a loader of either rule has this very position."""
    return issubclass(type(loader), PaddedLoader) and loader.position is position


class DispatchedLoader(PaddedLoader):
    """A loader whose main process reads each global batch and broadcasts it; each process takes its slice."""

    def __init__(self, *args: Any, split_batches: bool, slice_fn: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.split_batches, self.slice_fn = split_batches, slice_fn or _sliced

    def __len__(self) -> int:
        batches_per_step = 1 if self.split_batches else self.group.world_size
        steps, remainder = divmod(len(self.base_dataloader), batches_per_step)
        return steps + (remainder > 0 and not self.drop_last)

    def _global_batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield the global batches and whether each is the last; yields nothing on other processes than the main one."""
        batches, batches_per_step = iter(self.base_dataloader), 1 if self.split_batches else self.group.world_size
        if not self.group.is_main:
            return
        following: list[Any] = list(itertools.islice(batches, batches_per_step))
        while following and (len(following) == batches_per_step or not self.drop_last):
            current, following = following, list(itertools.islice(batches, batches_per_step))
            last = not following or (len(following) < batches_per_step and self.drop_last)
            try:
                yield concatenated(current), last
            except RuntimeError as error:
                raise RuntimeError(
                    "dispatch_batches: the batches of one step have different shapes; use dispatch_batches=False or split_batches=True"
                ) from error

    def _read(self) -> Iterator[Any]:
        """Yield this process's slices of the global batches; the last one is padded to divide evenly."""
        group, global_batches, first = self.group, self._global_batches(), None
        while sent := broadcast_object(group, next(global_batches, None)):
            batch, last = sent
            size, n = int(batch_size(batch) or 0), group.world_size
            rows, remainder = divmod(size, n)
            first = _sliced(batch, slice(0, n)) if first is None else first
            if last and remainder and not self.drop_last:
                batch, rows = concatenated([batch, first]), rows + 1
            rank_rows = slice(group.rank * rows, (group.rank + 1) * rows)
            rank_batch = self.slice_fn(batch, rank_rows, process_index=group.rank, num_processes=n)
            if last:
                self.remainder = size
            yield move(rank_batch, group.device)


def _sampler(loader: Any) -> Any:
    """The sampler that determines the order of samples in a ``DataLoader``; ``None`` if there is none."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


def padded(
    loader: Any,
    group: Group,
    reading: list[Any],
    *,
    processes: tuple[int, int],
    device: torch.device | None = None,
    split_batches: bool = False,
    dispatch: bool = False,
    even_batches: bool = True,
    slice_fn: Any = None,
    seedable: bool = False,
    seed: int | None = None,
    rng_types: Iterable[Any] = (),
) -> PaddedLoader:
    """Wrap a user's ``DataLoader`` as a padded loader.

    Args:
        processes: the number of processes, and the index of this one.
        device: where to move the batches; ``None`` leaves them where they are.
        split_batches, even_batches: see :class:`engine.compat.accelerate.padded_shards.BatchSamplerShard`.
        dispatch: the main process reads the data, and ``slice_fn(batch, slice, process_index=, num_processes=)`` takes each process's part.
        seedable: let a shuffled order depend only on ``seed`` and the epoch.

    Raises:
        ValueError: batches cannot be split evenly.
    """
    n, rank = processes
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    if split_batches and (size is None or size % n):
        raise ValueError(f"split_batches=True: batch_size={size} must be a multiple of {n} processes")
    shared = n > 1 and not dispatch
    if isinstance(loader.dataset, IterableDataset):
        loader = _stream_shard(loader, n, rank, split_batches) if shared else loader
    else:
        name = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
        batches = _seeded(getattr(loader, name), seedable, seed, shared)
        if shared:
            batches = BatchSamplerShard(batches, n, rank, split_batches, even_batches)
        loader = altered(loader, **{name: batches})
    if dispatch:
        return DispatchedLoader(loader, group, reading, rng_types, split_batches=split_batches, slice_fn=slice_fn)
    return PaddedLoader(loader, group, reading, rng_types, device=device)


def _stream_shard(loader: Any, n: int, rank: int, split: bool) -> Any:
    """A copy of a stream's loader that reads only this process's samples; ``split``: batches are split over the processes."""
    data = loader.dataset
    # a dataset of the package ``datasets``
    if not split and getattr(data, "n_shards", 0) >= n and hasattr(data, "shard"):
        return altered(loader, dataset=data.shard(num_shards=n, index=rank))
    shard = IterableDatasetShard(data, loader.batch_size, loader.drop_last, n, rank, split)
    process_batch = loader.batch_size // n if split else loader.batch_size
    sampler = BatchSampler(loader.sampler, process_batch, loader.drop_last)
    return altered(loader, dataset=shard, batch_size=process_batch, batch_sampler=sampler)


def _seeded(batches: Any, seedable: bool, seed: int | None, shared: bool) -> Any:
    """The batch sampler, or a copy whose random sampler has a seed (``seedable``) or a generator that all ranks can synchronize (``shared``)."""
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and seedable:
        options = {
            "replacement": sampler.replacement,
            "num_samples": sampler._num_samples,
            "generator": sampler.generator,
        }
        sampler = SeedableRandomSampler(sampler.data_source, data_seed=seed, **options)
    elif shared and not seedable and getattr(sampler, "generator", 0) is None:
        sampler = copy.copy(sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    if sampler is getattr(batches, "sampler", None):
        return batches
    batches = copy.copy(batches)
    batches.sampler = sampler
    return batches


def concatenated(trees: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of the same structure leaf by leaf along ``dim``."""
    other_leaves = [iter(leaves(tree)) for tree in trees[1:]]
    return map_tensors(
        lambda tensor: torch.cat([tensor, *(next(leaves_of_tree) for leaves_of_tree in other_leaves)], dim=dim),
        trees[0],
    )


def _sliced(batch: Any, part: slice, **processes: Any) -> Any:
    return map_tensors(lambda tensor: tensor[part], batch)


def split_over(loader: Any, num_processes: int) -> Any:
    """A copy of the loader with the batch size of one process, for ``split_batches`` under exact rules: the loader's own batch is the global one.

    Raises:
        ValueError: the batch size is not a multiple of the number of processes, or only a custom batch sampler knows it.
    """
    size = loader.batch_size
    if size is None or size % num_processes:
        raise ValueError(
            f"split_batches=True: batch_size={size} of the DataLoader must be a multiple of {num_processes} processes"
        )
    process_batch = size // num_processes
    return altered(
        loader, batch_size=process_batch, batch_sampler=BatchSampler(loader.sampler, process_batch, loader.drop_last)
    )
