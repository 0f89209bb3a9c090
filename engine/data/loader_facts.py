"""A check that all ranks have given the same loader, of which each reads its part."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from engine.data.combined import CombinedLoader
from engine.data.drawn import DrawnDataset
from engine.data.user_loaders import is_a, presharded, tokens_per_sample
from engine.distributed.collectives import gather_json
from engine.distributed.comparison import check_alike
from engine.distributed.group import Group
from engine.utils.log import warn_once

_SAMPLED = 1 << 16
"""Entries of a list that are compared, at most about as many."""
_HOW = (
    "Each rank reads its part of the same samples, so some would be trained twice and others left out: make the same {} on every rank (if each rank "
    "has its own shard, set presharded = True on the dataset)"
)


def check_loaders_alike(data: Any, group: Group) -> None:
    """Check that the loaders of several ranks are alike. A collective. Warn if the ranks' lists of files differ.

    Samples are not compared, which would read some of them twice.

    Raises:
        CheckError: the loaders differ; raised on all ranks, with the differences.
    """
    check_alike(group, "loaders", facts_of(data), _HOW.format("loader"))
    names_by_rank = gather_json(group, lists_of_names(getattr(data, "dataset", None)))
    first = names_by_rank[0]
    for rank, names in enumerate(names_by_rank):
        for name in first:
            if names.get(name, first[name]) != first[name]:
                warn_once(
                    f"{name} of the dataset has other names, or another order of them, on rank {rank} than on rank 0. "
                    f"{_HOW.format('list')}; os.listdir and glob give no order: sort what they give"
                )


def facts_of(data: Any) -> dict[str, Any]:
    """The facts about a loader that must be equal on all ranks, by name (plain values)."""
    if isinstance(data, CombinedLoader):
        facts: dict[str, Any] = {"kind": "CombinedLoader", "mode": data.mode, "members": _names_in(data.loaders)}
        for index, member in enumerate(data.members):
            facts.update({f"{name} of loader {index}": fact for name, fact in facts_of(member).items()})
        return facts
    if presharded(data):
        return {"kind": "presharded"}
    if isinstance(data, (list, tuple)):
        return {"kind": f"list of {len(data)} batches"}
    if not isinstance(data, DataLoader):
        return {"kind": "iterable"}
    batches = data.batch_sampler
    sizes = {name: getattr(batches, name, getattr(data, name)) for name in ("batch_size", "drop_last")}
    facts = {name: size if isinstance(size, int) else None for name, size in sizes.items()}
    if isinstance(data.dataset, IterableDataset):
        return {"kind": "stream", **facts}
    sampler = data.sampler if batches is None else getattr(batches, "sampler", batches)
    sources: list[Any] = [data.dataset, batches]
    plans = [source.plan_checksum for source in sources if hasattr(source, "plan_checksum")]
    return {
        "kind": "map-style dataset",
        **facts,
        "order": _order_of(sampler),
        "tokens_per_sample": tokens_per_sample(data.dataset),
        **(data.dataset.facts() if isinstance(data.dataset, DrawnDataset) else {}),
        "packing (checksums)": plans,
        "choice of samples (checksums)": _checksums_of_choices(data.dataset),
    }


def lists_of_names(dataset: Any) -> dict[str, int]:
    """Checksums of the names in the lists of files of a map-style dataset, one entry a sample, by attribute. Folders may differ between machines."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return {}
    checksums = {}
    for attribute, values in getattr(dataset, "__dict__", {}).items():
        if isinstance(values, (list, tuple)) and len(values) == len(dataset):
            names = [_name_of(value) for value in _some(values)]
            if names and None not in names:
                checksums[attribute] = _checksum_of(names)
    return checksums


def _name_of(value: Any) -> str | None:
    """The name of a file: a path, or a path with a class, as ``torchvision`` lists them."""
    value = value[0] if isinstance(value, tuple) and value else value
    return os.path.basename(value) if isinstance(value, (str, os.PathLike)) else None


def _names_in(loaders: Any) -> Any:
    """The containers of a combination's members: dicts with the members' names, and lists."""
    if isinstance(loaders, Mapping):
        return {str(name): _names_in(loader) for name, loader in loaders.items()}
    return [_names_in(loader) for loader in loaders] if isinstance(loaders, (list, tuple)) else "loader"


def _order_of(sampler: Any) -> str:
    """The kind of a sampler's order. The orders of samplers of other classes are compared as they are drawn."""
    if type(sampler) is SequentialSampler or (type(sampler) is DistributedSampler and not sampler.shuffle):
        return "as in the data"
    if type(sampler) is DistributedSampler or (is_a(sampler, RandomSampler) and not sampler.replacement):
        return "shuffled"
    return "that of a sampler"


def _checksums_of_choices(dataset: Any) -> list[int]:
    """Checksums of the indices that subsets choose: ``Subset`` (``random_split``), and ``datasets`` after ``train_test_split`` or ``select``."""
    if isinstance(dataset, ConcatDataset):
        return [total for part in dataset.datasets for total in _checksums_of_choices(part)]
    if isinstance(dataset, Subset):
        return [_checksum_of(_some(dataset.indices)), *_checksums_of_choices(dataset.dataset)]
    column = getattr(getattr(dataset, "_indices", None), "column", None)  # a table of Arrow
    return [] if column is None else [_checksum_of(_some(column(0).to_numpy()))]


def _checksum_of(values: Any) -> int:
    values = values.tolist() if hasattr(values, "tolist") else values
    return zlib.crc32("\n".join(map(str, values)).encode())


def _some(values: Sequence[Any]) -> Sequence[Any]:
    """Entries at even distances, about :data:`_SAMPLED` of them."""
    return values[:: -(-len(values) // _SAMPLED) or 1]
