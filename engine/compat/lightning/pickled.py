"""A checkpoint as one dict, for programs that ``torch.load`` a file: the weights by name, hyperparameters and counters, under Lightning's keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.directory import SHARED
from engine.checkpoint.other_weights import weights_folder
from engine.checkpoint.reader import Source, whole
from engine.checkpoint.user_paths import opened


def as_dict(path: str | Path, map_location: Any = None, weights: str | None = None) -> dict[str, Any]:
    """The checkpoint at ``path``, or the newest one in it: ``state_dict`` on ``map_location`` (by default the CPU), ``epoch``, ``global_step``,
    ``hyper_parameters`` and what ``on_save_checkpoint`` added. ``weights``: as in :func:`engine.checkpoint.export.export_checkpoint`.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
        ValueError: there are no such ``weights``.
    """
    with opened(path, ("model", "state", *weights_folder(weights))) as found:
        source, shared, counters = (
            Source(found, weights),
            found.tree(SHARED) or {},
            found.manifest.get("counters") or {},
        )
        tensors = {name: whole(source.stored(name)) for name in source.names if name not in source.extra}
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
    """:func:`write` of the checkpoint at ``path``; ``weights``: as in :func:`as_dict`."""
    with opened(path, ("state",)) as found:
        name = (found.tree(SHARED) or {}).get("hparams_name")
    content = as_dict(path, weights=weights)
    write(file, content["state_dict"], content["epoch"], content["global_step"], content["hyper_parameters"], name)


def write(file: Path, weights: Mapping[str, Any], epoch: int, step: int, hparams: Any, hparams_name: Any) -> None:
    """Pickle such a dict, with what Lightning expects in its own files; a ``file`` of this name is replaced when it is complete.

    Args:
        hparams: the module's; ``hparams_name``: the constructor's argument that takes all of them, if there is one.
    """
    content = {"epoch": epoch, "global_step": step, "pytorch-lightning_version": "2.6.0", "state_dict": dict(weights)}
    if hparams:
        content |= {"hparams_name": hparams_name or "kwargs", "hyper_parameters": dict(hparams)}
    written = file.with_name(f".{file.name}.partial")
    torch.save(content, written)
    os.replace(written, file)
