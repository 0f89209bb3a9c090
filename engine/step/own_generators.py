"""Random generators that an optimizer has as attributes of its own: their states, for checkpoints and comparisons."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def own_generators(optimizer: Optimizer, prefix: str = "") -> dict[str, Any]:
    """The generators of torch, numpy and ``random`` among an optimizer's attributes, by name; also in lists, dicts and optimizers that it wraps."""
    return dict(_generators(optimizer, prefix))


def _generators(optimizer: Optimizer, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield from _generators(value, f"{prefix}{name}.")
        elif name not in ("state", "param_groups"):
            items = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value)
                if isinstance(value, (list, tuple))
                else ()
            )
            yield from ((f"{prefix}{name}[{key!r}]", item) for key, item in items if _is_generator(item))
            if _is_generator(value):
                yield f"{prefix}{name}", value


def _is_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def state_of(generator: Any) -> Tensor | str:
    """The state of a generator: a tensor of torch's, JSON text of others."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    state = generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state(legacy=False)
    return json.dumps(state, default=lambda array: array.tolist())  # numpy's states have arrays


def set_state(generator: Any, state: Tensor | str) -> None:
    """Restore what :func:`state_of` returned."""
    if isinstance(generator, torch.Generator):
        assert isinstance(state, Tensor)
        generator.set_state(state.cpu())
        return
    assert isinstance(state, str)
    content = json.loads(state)
    if isinstance(generator, random.Random):
        version, numbers, gauss = content
        generator.setstate((version, tuple(numbers), gauss))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = content
    else:
        generator.set_state(content)
