"""Random numbers that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.compat.accelerate.state import PartialState
from engine.distributed.collectives import broadcast
from engine.distributed.group import Group
from engine.utils.accelerator import module
from engine.utils.seed import seed_everything


def share_states(group: Group, kinds: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give generators the main process's state: ``"torch"``, a device's (``"cuda"``), or ``"generator"``, the one that is given."""
    for kind in map(str, kinds):
        if kind == "generator":
            if generator is not None:
                generator.set_state(broadcast(group, generator.get_state()))
        elif kind == "torch":
            torch.set_rng_state(broadcast(group, torch.get_rng_state()))
        else:
            numbers = module(kind)
            numbers.set_rng_state(broadcast(group, numbers.get_rng_state()))


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, plus the rank if ``device_specific``; the order of data prepared from now on depends on it too."""
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give generators the main process's state: see :func:`share_states`."""
    share_states(PartialState().group, rng_types, generator)
