"""Weights of the model besides those that are trained, such as moving averages: a checkpoint's folder ``weights``, by name.

::

    weights/rank=00000.safetensors      what this rank wrote; a tensor is called <name of the weights>/<name in the model>
    weights/weights.json                {<name of the weights>: {"aliases": names in the model that share a tensor}}

They need not cover the whole model: the rest is that of the trained weights. The manifest names the weights with which the score was measured
(``scored_with``); checkpoints of versions before that do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.checkpoint.manifest import WEIGHTS
from engine.checkpoint.model_state import split


def packed(weights: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors to write, each once, by folder and name, and the JSON value beside them.

    Args:
        weights: ``{name of the weights: {name in the model: tensor}}``.

    Raises:
        TypeError: a tensor cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    tree: dict[str, Any] = {}
    for name, own in weights.items():
        found, packed_tree = split(own)
        tensors |= {f"{WEIGHTS}/{name}/{key}": tensor for key, tensor in found.items()}
        tree[name] = {"aliases": packed_tree["aliases"]}
    return tensors, tree
