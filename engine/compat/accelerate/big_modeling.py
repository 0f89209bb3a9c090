"""Builds models without allocating memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from engine.compat.accelerate.utils.modeling import load_checkpoint_in_model as load_checkpoint_in_model
from engine.strategies.deferred_init import parameters_deferred


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """Build the modules in this block with parameters on the meta device; ``prepare`` or a checkpoint initializes them."""
    return torch.device("meta") if include_buffers else parameters_deferred()
