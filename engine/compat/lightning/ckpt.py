"""Checkpoints in Lightning's form, one pickled dict. Files that Lightning wrote are read wherever a checkpoint is expected, but only the tensors and
plain values in them. Our checkpoints can be written in this form, for programs that ``torch.load`` a file.
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
from engine.compat.convert.convert import convert
from engine.compat.convert.untrusted_files import check_pickles
from engine.compat.lightning.plugins import reader


def is_pickle(path: Any) -> bool:
    """Whether ``path`` is a file, but not one of this library's."""
    return path is not None and "://" not in str(path) and Path(path).is_file() and not is_one_file(path)


FILE = "{}.pt"
"""The file beside a checkpoint's folder that ``ModelCheckpoint.pickles`` asks for."""


def check_complete(path: Any) -> None:
    """Refuse to train on from a file beside its checkpoint.

    Raises:
        ValueError: the file at ``path`` has no optimizers; the message names the folder that has them.
    """
    folder = Path(str(path).removesuffix(FILE.format("")))
    if is_pickle(path) and str(folder) != str(path) and (folder / MANIFEST).is_file():
        raise ValueError(
            f"fit(ckpt_path={str(path)!r}): this file has weights, hyperparameters and counters, no optimizers; give the whole checkpoint, {folder}"
        )


@contextmanager
def readable(path: Any, plugins: Any = None) -> Iterator[Any]:
    """``path``, or a checkpoint converted from a file of Lightning's; ``ValueError``: that holds other objects than tensors and plain values."""
    if not is_pickle(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-") as parent:
        if (io := reader(plugins)) is not None:
            torch.save(io.load_checkpoint(path, map_location="cpu"), path := Path(parent) / "read.ckpt")
        yield convert(path, Path(parent) / "step=00000000", trust_pickle=True).path


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as the dict that Lightning's files hold, whatever ``weights_only`` is; ``pickle.UnpicklingError``: one holds other objects."""
    if is_pickle(path_or_url):
        with stable_name(path_or_url) as file:
            check_pickles(path_or_url, file)
            loaded: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
        return loaded
    return as_dict(path_or_url, map_location)


def as_dict(path: str | Path, map_location: Any = None, weights: str | None = None) -> dict[str, Any]:
    """The checkpoint at ``path``, or the newest one in it: ``state_dict`` on ``map_location`` (by default the CPU), ``epoch``, ``global_step``,
    ``hyper_parameters`` and what ``on_save_checkpoint`` added. ``weights``: as in :func:`engine.checkpoint.export.export_checkpoint`.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
        ValueError: there are no such ``weights``.
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
    """Pickle the checkpoint at ``path`` into ``file``, see :func:`write`; ``weights``: as in :func:`as_dict`."""
    with open_path(path, ("state",)) as checkpoint:
        name = (checkpoint.tree(SHARED) or {}).get("hparams_name")
    content = as_dict(path, weights=weights)
    write(file, content["state_dict"], content["epoch"], content["global_step"], content["hyper_parameters"], name)


def write(file: Path, weights: Mapping[str, Any], epoch: int, step: int, hparams: Any, hparams_name: Any) -> None:
    """Pickle the dict of :func:`as_dict`, with what Lightning expects in its own files; an existing ``file`` is replaced at the end.

    Args:
        hparams: the module's; ``hparams_name``: the constructor's argument that takes all of them, if there is one.
    """
    content = {"epoch": epoch, "global_step": step, "pytorch-lightning_version": "2.6.0", "state_dict": dict(weights)}
    if hparams:
        content |= {"hparams_name": hparams_name or "kwargs", "hyper_parameters": dict(hparams)}
    written = file.with_name(f".{file.name}.partial")
    torch.save(content, written)
    os.replace(written, file)
