"""Internal objects that several test files build: a class that is renamed costs one line here, and not one in each of them.

At most 25 functions, which only construct. Beside them a new test file imports internals of the module that it is named after, and of no other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.callback import Callback
from engine.checkpoint import manifest
from engine.checkpoint.content import Content
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.reader import Source
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.storage_paths import storage_of
from engine.checkpoint.writer import CheckpointWriter, SaveRequest
from engine.config.resolve import Resolved, resolve
from engine.data.deal import Deal
from engine.distributed.environments import Environment, detect
from engine.distributed.group import Group
from engine.distributed.join import join
from engine.loop.hooks import Hooks
from engine.loop.logbook import Logbook
from engine.loop.timing import Intervals
from engine.metrics.recorder import Recorder
from engine.module import TrainModule
from engine.step.position import Share
from engine.step.window import Window
from engine.strategies import Single
from engine.strategies.base import Strategy
from engine.utils import log


def group_of_one(device: torch.device | str = "cpu") -> Group:
    """The group of a process without a launcher."""
    return Group(Environment("single"), torch.device(device))


def group_of_job(timeout_s: float = 300) -> Group:
    """The group of the job that this process is a rank of, joined."""
    return join(detect(os.environ), torch.device("cpu"), timeout=timedelta(seconds=timeout_s))


def new_writer() -> CheckpointWriter:
    """What one process writes checkpoints with."""
    return CheckpointWriter(group_of_one())


def new_folder(root: Path | str) -> CheckpointFolder:
    """The folder ``root`` of checkpoints of one process."""
    return CheckpointFolder(group_of_one(), storage_of(root))


def save_request(name: str, **options: Any) -> SaveRequest:
    """What asks a writer for the checkpoint ``name``."""
    return SaveRequest(name, **options)


def write_folders() -> None:
    """Let small checkpoints of this process have the files of large ones."""
    manifest.JOINED_BYTES = -1


def new_content(value: float = 1.0, **changes: Any) -> Content:
    """The content of a small checkpoint: two tied weights of ``value``, a bias, the state of an optimizer and numbers that JSON lacks."""
    tied = torch.full((2, 3), value)
    fields: dict[str, Any] = {
        "model": {"head.weight": tied, "body.weight": tied, "body.bias": torch.zeros(2)},
        "optimizers": {
            "0": {
                "state": {"w": {"step": torch.tensor(3.0)}},
                "param_groups": [{"betas": (0.9, 0.999), "params": ["w"]}],
            }
        },
        "shared": {"scheduler": {"best": math.inf}},
        "of_rank": {"rng": torch.arange(4)},
        "facts": {"step": 3, "metrics": {"loss": math.nan}},
    }
    return Content(**fields | changes)


def open_checkpoint(directory: Path) -> Opened:
    """A checkpoint, verified and open for reading."""
    return Opened(directory)


def checkpoint_source(checkpoint: Opened) -> Source:
    """The object that a strategy loads weights and optimizer states from."""
    return Source(checkpoint)


def resolved_settings(
    code: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    sections: Sequence[str] = (),
) -> Resolved:
    """The settings of a run, each with its origin."""
    return resolve(code, environ, file, overrides, sections)


def new_deal(units: int, batch: int, window: int = 1, world_size: int = 1, rank: int = 0) -> Deal:
    """The part of an epoch that a rank gets."""
    return Deal(units, batch, window, world_size, rank)


def new_share(size: int, divisor: float, alone: float, last: bool) -> Share:
    """The weight of a micro-batch."""
    return Share(size, divisor, alone, last)


def new_window(size: int = 1, strategy: Strategy | None = None) -> Window:
    """The window of an engine of one process that accumulates ``size`` micro-batches."""
    strategy = strategy or Single()
    strategy.connect(group_of_one())
    return Window(size, strategy)


def new_recorder(**options: Any) -> Recorder:
    """The recorder of one process, which keeps values for the epoch alone."""
    return Recorder(group_of_one(), **{"on_step": False, "on_epoch": True, **options})


def new_hooks(callbacks: Sequence[Callback], module: TrainModule) -> Hooks:
    """The hooks of a run of ``module`` that has no folder yet."""
    intervals = Intervals(resolve({}, {}, None, (), ()).settings)
    return Hooks(callbacks, module, new_writer(), Logbook(module, new_recorder(), intervals))


def forget_warnings(patch: pytest.MonkeyPatch) -> None:
    """Let this test see warnings that appear once for the first time."""
    patch.setattr(log, "_said", set())
