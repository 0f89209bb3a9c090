"""Models built without memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.strategies.deferred_init import parameters_deferred


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Modules built in this block have parameters without memory; ``prepare`` initializes them, or a checkpoint does."""
    return torch.device("meta") if include_buffers else parameters_deferred()
