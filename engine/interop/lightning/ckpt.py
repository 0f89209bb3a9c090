"""One-file checkpoints, for programs that move a file: written where ``trainer.save_checkpoint(path)`` asks for one.

The file is a zip archive, without compression, of a checkpoint's folder (``manifest.json``, ``model/*.safetensors``, ...): opening it runs no code.
Lightning's own files are pickles; of those only tensors and plain values are read, and on request they are written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.convert import convert
from engine.checkpoint.directory import SHARED
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.reader import Source, whole
from engine.checkpoint.user_paths import opened
from engine.loop.module_calls import save_at
from engine.loop.snapshot import content


@contextmanager
def readable(path: Any) -> Iterator[Any]:
    """What checkpoints are read from: ``path`` itself, or a one-file checkpoint as a folder, which is removed afterwards.

    Raises:
        ValueError, DamagedCheckpoint: the file holds other objects than tensors and plain values, or cannot be read.
    """
    if path is None or "://" in str(path) or not Path(path).is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-") as parent:
        folder = Path(parent) / "step=00000000"
        if _is_ours(path):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        yield folder if folder.exists() else convert(path, folder, trust_pickle=True).path


def _is_ours(path: Any) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return MANIFEST in archive.namelist()


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as the dict that Lightning's files hold: weights, hyperparameters, counters and what ``on_save_checkpoint`` added.

    Of Lightning's own files it is what they hold, tensors and plain values only, whatever ``weights_only`` is.

    Raises:
        pickle.UnpicklingError: such a file holds other objects.
        FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
    """
    if Path(path_or_url).is_file() and not _is_ours(path_or_url):
        loaded: dict[str, Any] = torch.load(path_or_url, map_location=map_location, weights_only=True)
        return loaded
    with readable(path_or_url) as path, opened(path, ("model", "state")) as found:
        source, shared, counters = Source(found), found.tree(SHARED) or {}, found.manifest["counters"]
        weights = {name: whole(source.stored(name)) for name in source.names if name not in source.extra}
        source.read_model(weights)
    device = torch.device("cpu" if map_location is None else map_location)
    return {
        **(shared.get("user") or {}),
        "epoch": counters["epoch"],
        "global_step": counters["step"],
        "state_dict": {name: tensor.to(device) for name, tensor in weights.items()},
        "hyper_parameters": dict(shared.get("hparams", {})),
    }


def save(run: Any, path: Path, weights_only: bool, pickle: bool) -> None:
    """Write one file; all ranks call this together. See :meth:`engine.interop.lightning.Trainer.save_checkpoint`."""
    path = path.absolute()  # a name alone would be one of the run's own checkpoints
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.partial")
    if pickle:
        weights = run.engine.get_state_dict(run.module)
        if run.is_main_process:
            torch.save(_lightnings(run.module, run.state.epoch, run.step, weights), written)
    else:
        folder = path.with_name(f".{path.name}.folder")
        save_at(run, folder, lambda run, score: replace(content(run), optim={}) if weights_only else content(run))
        if run.is_main_process:
            with zipfile.ZipFile(written, "w") as archive:
                for each in sorted(folder.rglob("*")):
                    archive.write(each, each.relative_to(folder))
            shutil.rmtree(folder)
    if run.is_main_process:
        os.replace(written, path)
    run.engine.wait_for_everyone()


def pickle_beside(folder: Path, module: Any) -> Path:
    """Write the weights of a checkpoint's ``folder``, a ``module``'s, in Lightning's form beside it; by the main process.

    A file of an earlier folder of this name is replaced.
    """
    file, found = folder.with_name(f"{folder.name}.pt"), load(folder)
    written = file.with_name(f".{file.name}.partial")
    torch.save(_lightnings(module, found["epoch"], found["global_step"], found["state_dict"]), written)
    os.replace(written, file)
    return file


def _lightnings(module: Any, epoch: int, step: int, weights: dict[str, Any]) -> dict[str, Any]:
    """Lightning's form of a checkpoint with weights only."""
    hyperparameters = {"hparams_name": module.hparams_name or "kwargs", "hyper_parameters": dict(module.hparams)}
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights,
        **(hyperparameters if module.hparams else {}),
    }
