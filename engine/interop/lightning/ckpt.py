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
from engine.checkpoint.manifest import MANIFEST
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
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if MANIFEST in archive.namelist():
                    archive.extractall(folder)
        yield folder if folder.exists() else convert(path, folder, trust_pickle=True).path


def save(run: Any, path: Path, weights_only: bool, pickle: bool) -> None:
    """Write one file; all ranks call this together. See :meth:`engine.interop.lightning.Trainer.save_checkpoint`."""
    path = path.absolute()  # a name alone would be one of the run's own checkpoints
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.partial")
    if pickle:
        weights = run.engine.get_state_dict(run.module)
        if run.is_main_process:
            torch.save(_lightnings(run, weights), written)
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


def _lightnings(run: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Lightning's form of a checkpoint with weights only."""
    hyperparameters = {
        "hparams_name": run.module.hparams_name or "kwargs",
        "hyper_parameters": dict(run.module.hparams),
    }
    return {
        "epoch": run.state.epoch,
        "global_step": run.step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": weights,
        **(hyperparameters if run.module.hparams else {}),
    }
