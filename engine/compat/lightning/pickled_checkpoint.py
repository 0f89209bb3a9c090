"""Checkpoints in Lightning's format, one pickled dict. Wherever a checkpoint is expected, a file that Lightning wrote can be given; only the tensors
and plain values in it are read. Our checkpoints can be written in this format, for programs that ``torch.load`` a file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.catalog import open_path
from engine.checkpoint.files import stable_name
from engine.checkpoint.manifest import MANIFEST, SHARED
from engine.checkpoint.one_file import is_one_file
from engine.checkpoint.reader import Source, empty_tensor, weights_folder
from engine.compat.foreign_checkpoints.conversion import convert
from engine.compat.foreign_checkpoints.untrusted_files import check_pickles
from engine.compat.lightning.plugins import reader
from engine.utils.paths import expanded


def is_pickle(path: Any) -> bool:
    """Whether ``path`` is a local file, but not a one-file checkpoint of this library."""
    return path is not None and "://" not in str(path) and Path(expanded(path)).is_file() and not is_one_file(path)


FILE = "{}.pt"
"""Format of the name of the pickle that ``ModelCheckpoint.pickles`` writes beside a checkpoint folder."""


def check_complete(path: Any) -> None:
    """Refuse to resume from a pickle that was written beside its checkpoint folder.

    Raises:
        ValueError: ``path`` is such a file, which lacks the optimizers; the message names the folder that has them.
    """
    folder = Path(expanded(str(path)).removesuffix(FILE.format("")))
    if is_pickle(path) and str(folder) != str(path) and (folder / MANIFEST).is_file():
        raise ValueError(
            f"fit(ckpt_path={str(path)!r}): this file has weights, hyperparameters and counters, no optimizers; give the whole checkpoint, {folder}"
        )


@contextmanager
def readable(path: Any, plugins: Any = None) -> Iterator[Any]:
    """Yield ``path``, or, if it is a file of Lightning's, a temporary checkpoint converted from it.

    Raises:
        ValueError: the file contains other objects than tensors and plain values.
    """
    if not is_pickle(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-") as parent:
        if (io := reader(plugins)) is not None:
            torch.save(io.load_checkpoint(path, map_location="cpu"), path := Path(parent) / "read.ckpt")
        yield convert(path, Path(parent) / "step=00000000", trust_pickle=True).path


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """Load a checkpoint as the dict that a file of Lightning's contains. ``weights_only`` has no effect.

    Raises:
        pickle.UnpicklingError: the file contains other objects than tensors and plain values.
    """
    if is_pickle(path_or_url):
        with stable_name(path_or_url) as file:
            check_pickles(path_or_url, file)
            loaded: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
        return loaded
    return as_dict(path_or_url, map_location)


def as_dict(path: str | Path, map_location: Any = None, weights: str | None = None) -> dict[str, Any]:
    """Read the checkpoint at ``path``, or the newest one in this folder, as a dict: ``state_dict`` on ``map_location`` (by default the CPU),
    ``epoch``, ``global_step``, ``hyper_parameters`` and the entries that ``on_save_checkpoint`` added.

    ``weights``: as in :func:`engine.checkpoint.export.export_checkpoint`.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or it is damaged.
        ValueError: the checkpoint has no such ``weights``.
    """
    with open_path(path, ("model", "state", *weights_folder(weights))) as checkpoint:
        source, shared, counters = (
            Source(checkpoint, weights),
            checkpoint.tree(SHARED) or {},
            checkpoint.manifest.get("counters") or {},
        )
        tensors = {name: empty_tensor(source.stored(name)) for name in source.names if name not in source.extra}
        source.read_model(tensors)
    device = torch.device("cpu" if map_location is None else map_location)
    return {
        **(shared.get("user") or {}),
        "epoch": counters.get("epoch", 0),
        "global_step": counters.get("step", 0),
        "state_dict": {name: tensor.to(device) for name, tensor in tensors.items()},
        "hyper_parameters": dict(shared.get("hparams", {})),
    }


def write_checkpoint(file: Path, path: str | Path, weights: str | None = None) -> None:
    """Write the checkpoint at ``path`` to ``file`` as one pickle; see :func:`write`. ``weights``: as in :func:`as_dict`."""
    with open_path(path, ("state",)) as checkpoint:
        name = (checkpoint.tree(SHARED) or {}).get("hparams_name")
    content = as_dict(path, weights=weights)
    write(file, content["state_dict"], content["epoch"], content["global_step"], content["hyper_parameters"], name)


def write(file: Path, weights: Mapping[str, Any], epoch: int, step: int, hparams: Any, hparams_name: Any) -> None:
    """Pickle weights and counters as a file that Lightning can read. An existing ``file`` is replaced only once the new one is complete.

    Args:
        hparams: the module's hyperparameters; ``hparams_name``: the argument of its constructor that takes all of them, if there is one.
    """
    content = {"epoch": epoch, "global_step": step, "pytorch-lightning_version": "2.6.0", "state_dict": dict(weights)}
    if hparams:
        content |= {"hparams_name": hparams_name or "kwargs", "hyper_parameters": dict(hparams)}
    written = file.with_name(f".{file.name}.partial")
    torch.save(content, written)
    os.replace(written, file)
