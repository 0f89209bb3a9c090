"""A ``Fit`` whose runs can be resumed, for tests that continue them on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from callbacks import ModelCheckpoint
from engine import Callback, Fit


def resumable_fit(folder: Path | str, *callbacks: Callback, **settings: Any) -> Fit:
    """A ``Fit`` on the CPU with a seed, which saves checkpoints into ``folder``."""
    return Fit(
        accelerator="cpu", seed=3, root_dir=folder, callbacks=[*callbacks, ModelCheckpoint()], check=False, **settings
    )
