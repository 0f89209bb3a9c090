"""Random numbers under Accelerate's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.distributed.random_states import share_states
from engine.interop.accelerate.state import PartialState
from engine.utils.seed import seed_everything


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, plus the rank if ``device_specific``; the order of data prepared from now on depends on it too."""
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    share_states(PartialState().group, rng_types, generator)
