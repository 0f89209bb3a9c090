"""Seeds random generators, and synchronizes them over the ranks."""

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
    """Copy the main process's state to all ranks' generators: ``"torch"``, a device type such as ``"cuda"``, or ``"generator"`` for ``generator``."""
    for kind in map(str, kinds):
        if kind == "generator":
            if generator is not None:
                generator.set_state(broadcast(group, generator.get_state()))
        elif kind == "torch":
            torch.set_rng_state(broadcast(group, torch.get_rng_state()))
        else:
            device_module = module(kind)
            device_module.set_rng_state(broadcast(group, device_module.get_rng_state()))


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch, with the rank added if ``device_specific``; the order of data that is prepared later depends on it too."""
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Copy the main process's state to all ranks' generators; see :func:`share_states`."""
    share_states(PartialState().group, rng_types, generator)
