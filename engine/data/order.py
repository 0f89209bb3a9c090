"""The order that a user's sampler asks for, as a function of (seed, epoch)."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from engine.data.sampler import mixed, permutation
from engine.distributed.collectives import broadcast_object
from engine.distributed.group import Group
from engine.seed import isolated, seed_everything


class Order:
    """The order that a user's sampler asks for, as a function of (seed, epoch)."""

    def __init__(self, sampler: Any, loader: DataLoader[Any], group: Group, seed: int) -> None:
        dataset: Any = loader.dataset
        self.group, self.seed, self.sampler = group, seed, sampler
        plain = is_a(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
        self.count = len(dataset)
        # torchdata's makes itself a generator of a random seed when the user gave none.
        made = type(sampler) is not RandomSampler and is_a(sampler, RandomSampler) and sampler.generator is not loader.generator
        if isinstance(sampler, DistributedSampler):
            self.kind, self.seed, self.count = ("shuffled" if sampler.shuffle else "sequential"), sampler.seed, len(sampler.dataset)  # type: ignore[arg-type]
        elif type(sampler) is SequentialSampler:
            self.kind = "sequential"
        elif plain:
            self.kind = "shuffled"
            if sampler.generator is not None and not made:
                self.seed = sampler.generator.initial_seed()
        else:
            self.kind = "drawn"
            self.randoms = [(own, seed if made else _seed_of(own)) for own in _randoms(sampler)]

    def draw(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """The order of the epoch; the same on every rank."""
        if self.kind == "sequential":
            return range(self.count)
        if self.kind == "shuffled":
            return permutation(self.count, self.seed, epoch)
        # A sampler of the user's own: drawn on rank 0 under a seed of this epoch, so that resuming draws the same again.
        with isolated(), _reseeded(self.randoms, epoch):
            seed_everything(mixed(self.seed, epoch) % 2**32)
            if callable(getattr(self.sampler, "set_epoch", None)):
                self.sampler.set_epoch(epoch)
            drawn = list(self.sampler) if self.group.is_main else None
        return list(broadcast_object(self.group, drawn))

    def length(self) -> int | None:
        """Units in an epoch; ``None`` when a sampler of the user's own does not say."""
        if self.kind != "drawn":
            return self.count
        try:
            return len(self.sampler)
        except TypeError:
            return None


def is_a(item: Any, kind: type) -> bool:
    """Whether its class is just this one of torch's, or torchdata's rewriting of it (which nothing here imports)."""
    own = type(item)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata."))


def _randoms(item: Any, seen: tuple[int, ...] = ()) -> list[Any]:
    """The generators of random numbers that a sampler, or one inside of it, keeps for itself."""
    found: list[Any] = []
    for value in getattr(item, "__dict__", {}).values():
        if isinstance(value, _kinds()):
            found.append(value)
        elif isinstance(value, Sampler) and id(value) not in seen:
            found += _randoms(value, (*seen, id(item)))
    return found


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")  # without it nobody has one of its generators
    return torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ())


def _seed_of(own: Any) -> int:
    """A number that tells this generator, as the user made it, from others."""
    if isinstance(own, torch.Generator):
        return own.initial_seed()
    fresh = copy.deepcopy(own)
    if isinstance(fresh, random.Random):
        return fresh.getrandbits(63)
    return int(fresh.integers(2**63 - 1) if hasattr(fresh, "integers") else fresh.randint(2**31))


@contextlib.contextmanager
def _reseeded(randoms: list[tuple[Any, int]], epoch: int) -> Iterator[None]:
    """Inside, generators have a seed of their user's and the epoch; afterwards they are as the user left them."""
    with contextlib.ExitStack() as stack:
        for own, seed in randoms:
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
