"""``check=True``: before the first step compare what must be the same on all ranks; later, differences give wrong results or hangs."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.data.loader import PreparedLoader
from engine.distributed.collectives import gather, gather_json
from engine.distributed.group import Group
from engine.loop.run import Run
from engine.strategies.base import Strategy
from engine.utils.errors import CheckError
from engine.utils.parameters import is_sharded
from engine.utils.tree import leaves

MOST = 10
"""The number of differences that an error lists."""


def compare_models(run: Run) -> None:
    """Compare versions, and names, dtypes and shapes of the parameters that each rank built, before rank 0's are broadcast.

    Raises:
        CheckError: they differ; raised on all ranks, with what and where.
    """
    group, strategy = run.engine.group, run.engine.strategy
    versions = {"python": platform.python_version(), "torch": torch.__version__, "engine and callbacks": _sources()}
    _agree(group, "versions", versions)
    _agree(group, "models", {name: _parameter_form(strategy, p) for name, p in run.module.named_parameters()})


def compare(run: Run) -> None:
    """Compare parameters, optimizers' settings and loaders over all ranks with an equal part of the model.

    Raises:
        CheckError: they differ; raised on all ranks, with what and where.
    """
    group, strategy = run.engine.data_group, run.engine.strategy
    parameters = run.module.named_parameters()
    _agree(group, "parameters", {name: _parameter_fingerprint(strategy, p) for name, p in parameters})
    _agree(
        group,
        "optimizers",
        {
            f"optimizer {i}, group {j}": _plain(g)
            for i, o in enumerate(run.optimizers)
            for j, g in enumerate(o.param_groups)
        },
    )
    loaders = {"training": run.train_loader} | {f"validation {i}": loader for i, loader in enumerate(run.val_loaders)}
    _agree(group, "loaders", {name: _size(loader) for name, loader in loaders.items() if loader is not None})


def checked(run: Run, batches: Iterator[Any]) -> Iterator[Any]:
    """``batches``; the first one is compared over the ranks and sent around the ranks before it is used.

    Raises:
        CheckError: its structure differs between the ranks, or it came back changed.
    """
    for batch in batches:
        group = run.engine.data_group
        tensors = leaves(batch)
        forms = {
            f"tensor {i}": f"{t.dtype}, [batch{''.join(f', {n}' for n in t.shape[1:])}], {t.device.type}"
            for i, t in enumerate(tensors)
        }
        _agree(group, "first batches", {"structure": type(batch).__name__, "tensors": len(tensors)} | forms)
        for index, tensor in enumerate(tensors):
            _round_trip(group, index, tensor)
        yield batch
        break
    yield from batches


def _round_trip(group: Group, index: int, tensor: Tensor) -> None:
    rows = torch.tensor([len(tensor) if tensor.ndim else 1])
    sizes = gather(group, rows).tolist()
    mine = gather(group, tensor).split(sizes)[group.rank]
    whole = gather_json(group, fingerprint(mine.reshape(tensor.shape)) == fingerprint(tensor))
    if not all(whole):
        raise CheckError(
            f"check=True: tensor {index} of the first batch did not come back unchanged from rank {whole.index(False)}"
        )


def fingerprint(value: Tensor) -> str:
    """dtype, shape and the checksum of all bits."""
    bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype}, {list(value.shape)}, checksum {zlib.crc32(bits):08x}"


def _sources() -> str:
    """The checksum of this library's files: ranks with different ones call different collectives."""
    checksum, root = 0, Path(__file__).parents[2]
    for path in sorted(path for package in ("engine", "callbacks") for path in (root / package).rglob("*.py")):
        checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"checksum {checksum:08x}"


def _parameter_form(strategy: Strategy, parameter: Tensor) -> str:
    """dtype and whole shape."""
    is_lazy = isinstance(parameter, nn.UninitializedParameter)
    return f"{parameter.dtype}, {'not known yet' if is_lazy else list(strategy.whole_shape(parameter))}"


def _parameter_fingerprint(strategy: Strategy, parameter: Tensor) -> str:
    """dtype, whole shape and, where this rank has all values, their checksum."""
    if is_sharded(parameter) or isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
        return _parameter_form(strategy, parameter)
    return fingerprint(parameter)


def _size(loader: PreparedLoader) -> dict[str, Any]:
    data: Any = getattr(loader.loader, "dataset", None)
    return {
        "batches of a rank": loader.length,
        "samples": len(data) if hasattr(data, "__len__") else None,
        "batch size": getattr(loader.loader, "batch_size", None),
    }


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str, type(None), list, tuple)) and name != "params"
    }


def _agree(group: Group, what: str, mine: dict[str, Any]) -> None:
    """Raise unless ``mine`` is equal on all ranks of ``group``."""
    everyone = gather_json(group, {name: str(value) for name, value in mine.items()})
    first, differences = everyone[0], []
    for rank, row in enumerate(everyone):
        for name in dict.fromkeys([*first, *row]):
            if row.get(name) != first.get(name):
                differences.append(
                    f"  {name}: rank 0 has {first.get(name, 'none of that name')}, rank {rank} has {row.get(name, 'none')}"
                )
    if differences:
        more = f"\n  and {len(differences) - MOST} more" if len(differences) > MOST else ""
        listed = "\n".join(differences[:MOST]) + more
        raise CheckError(f"check=True: the {what} differ between the ranks:\n{listed}\nAll ranks must build the same.")
