"""Checkpoints: made and read by one process, or as runs write them; manifests that are damaged with care; and a full disk."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import Callback, Fit, TrainModule
from engine.checkpoint.manifest import RANK, SHARED
from engine.checkpoint.reader import Source, empty_tensor
from engine.checkpoint.storage_paths import split_path
from support.internals import checkpoint_source, new_content, new_folder, new_writer, open_checkpoint, save_request


def save(directory: Path | str, value: float = 1.0, **changes: Any) -> Any:
    place, name = split_path(directory)
    return new_writer().save(new_folder(place.root), new_content(value, **changes), save_request(name))


def source_of(directory: Path, model: Any = None, optimizer: Any = None) -> Source:
    """What a strategy is given to load from: these states, written and opened."""
    save(directory, model=model or {}, optimizers={} if optimizer is None else {"0": optimizer})
    return checkpoint_source(open_checkpoint(directory))


def record_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file: its size, and the CRC-32 of each 64 MiB."""
    content = path.read_bytes()
    return {
        "bytes": len(content),
        "crc32": [f"{zlib.crc32(content[low : low + 2**26]):08x}" for low in range(0, max(1, len(content)), 2**26)],
    }


def resummed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A changed manifest whose own checksum is right: what an attacker would write."""
    rest = {name: value for name, value in manifest.items() if name != "crc32"}
    return {**rest, "crc32": f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"}


@dataclass
class Read:
    model: dict[str, Tensor]
    optim: Any
    shared: Any
    own: Any
    manifest: dict[str, Any]


def read(directory: Path | str) -> Read:
    """Everything, checked."""
    place, name = split_path(directory)  # while it is there, a copy of what it has fetched is
    with open_checkpoint(place.fetch(name)) as checkpoint:
        weights = checkpoint_source(checkpoint)
        model = checkpoint.tensors("model").whole_tensors()
        model |= {alias: model[name] for alias, name in weights.aliases.items()}
        return Read(
            model,
            weights.read_optim(weights.optim, empty_tensor),
            checkpoint.tree(SHARED),
            checkpoint.tree(RANK.format(0)),
            checkpoint.manifest,
        )


class Tied(TrainModule):
    """A linear model of 6 to 4 to 6 features whose output is tied to its input; the loss is the mean of its squares."""

    def __init__(self, width: int = 4, *, scale: float = 1.0, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.ModuleDict(
            {"embed": nn.Linear(6, width, bias=False), "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 6)}
        )
        self.model["up"] = nn.Linear(6, width, bias=False)
        self.model["up"].weight = self.model["embed"].weight
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model["head"](self.model["norm"](self.model["embed"](x) + self.model["up"](x))) * self.scale
        return y

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


class Saves(Callback):
    """Saves at the training's end, or after the steps that ``scores`` has, under ``prefix`` and the step's number."""

    def __init__(self, name: str | None = None, scores: dict[int, float] | None = None) -> None:
        self.name, self.scores = name, scores or {}

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step in self.scores:
            run.save_checkpoint(score={"monitor": "val", "mode": "min", "value": self.scores[run.step]})

    def on_train_end(self, run: Any, module: Any) -> None:
        if not self.scores:
            run.save_checkpoint(self.name)


def tied_batches(count: int = 2) -> list[Tensor]:
    """Batches for :class:`Tied`."""
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def train_and_save(root: Path | str, module: TrainModule, data: Sequence[Any] | None = None, **settings: Any) -> Path:
    """Train, save, and return the checkpoint's directory."""
    scores, name = settings.pop("scores", None), settings.pop("name", None)
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "root_dir": root,
        "callbacks": Saves(name, scores),
        "seed": 1,
    }
    result = Fit(**{**defaults, **settings}).run(module, tied_batches() if data is None else data)
    assert result.folder is not None
    return sorted((result.folder / "checkpoints").iterdir())[-1]


def save_on_two_ranks(root: str, strategy: str = "fsdp") -> None:
    """One step of :class:`Tied` on each rank of a job, saved in ``root``."""
    torch.manual_seed(0)
    train_and_save(root, Tied(scale=2.0), tied_batches(4), devices="auto", strategy=strategy, max_steps=1)


def full_disk(*_: Any) -> None:
    """Stands for a write when nothing is left of the disk."""
    raise OSError(errno.ENOSPC, "No space left on device")
