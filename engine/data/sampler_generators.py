"""Random number generators that samplers keep as attributes."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from engine.data.sampler import mixed


def nested(sampler: Any) -> list[Any]:
    """The sampler, and the samplers that it has as attributes."""
    found = [sampler]
    for each in found:
        for value in getattr(each, "__dict__", {}).values():
            if isinstance(value, Sampler) and not any(value is known for known in found):
                found.append(value)
    return found


def randoms(sampler: Any) -> list[Any]:
    """The random number generators of a sampler, and of those inside it."""
    kinds = _kinds()
    return [
        value
        for each in nested(sampler)
        for value in getattr(each, "__dict__", {}).values()
        if isinstance(value, kinds)
    ]


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")  # without it there are none of its generators
    return torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ())


def seed_of(own: Any) -> int:
    """A number that identifies this generator, as the user created it."""
    if isinstance(own, torch.Generator):
        return own.initial_seed()
    fresh = copy.deepcopy(own)
    if isinstance(fresh, random.Random):
        return fresh.getrandbits(63)
    return int(fresh.integers(2**63 - 1) if hasattr(fresh, "integers") else fresh.randint(2**31))


@contextlib.contextmanager
def reseeded(generators: list[tuple[Any, int]], epoch: int) -> Iterator[None]:
    """Inside the block, generators have a seed from the user's and the epoch; afterwards they are restored."""
    with contextlib.ExitStack() as stack:
        for own, seed in generators:
            new = mixed(seed, epoch)
            if isinstance(own, torch.Generator):
                stack.callback(own.set_state, own.get_state())
                own.manual_seed(new)
            elif isinstance(own, random.Random):
                stack.callback(own.setstate, own.getstate())
                own.seed(new)
            elif hasattr(own, "bit_generator"):
                stack.callback(setattr, own.bit_generator, "state", own.bit_generator.state)
                own.bit_generator.state = type(own.bit_generator)(new).state
            else:
                stack.callback(own.set_state, own.get_state())
                own.seed(new % 2**32)
        yield
