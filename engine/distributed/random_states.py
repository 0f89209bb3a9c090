"""Random numbers that all ranks draw alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.distributed.collectives import broadcast
from engine.distributed.group import Group
from engine.utils.accelerator import module


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
