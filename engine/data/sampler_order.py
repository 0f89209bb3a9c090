"""The order that a user's sampler asks for."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from engine.data import permutation as permutations
from engine.data.permutation import Permutation
from engine.data.sampler import Window, mixed, permutation
from engine.data.sampler_generators import nested, randoms, reseeded, seed_of
from engine.data.stream_position import presharded, stateful
from engine.distributed.collectives import broadcast_object, gather_json
from engine.distributed.group import Group
from engine.utils.log import warn_once
from engine.utils.seed import isolated, seed_everything

_ENDLESS = 10_000_000
_SHARDS = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("world_size", "rank"),
    ("_world_size", "_rank"),
)


class Listed(Sequence[Any]):
    """An order that is stored in memory: a list, a range or a tensor of indices."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items[index]
        if isinstance(self.items, torch.Tensor):
            return found.tolist()  # indices as datasets expect them: plain numbers
        return list(found) if isinstance(index, slice) else found

    def pieces(self, windows: Iterable[Window]) -> Iterator[list[Any]]:
        """The entries of each micro-batch."""
        items, plain = self.items, not isinstance(self.items, torch.Tensor)
        for own, _ in windows:
            for part in own:
                piece = items[part.start : part.stop]
                yield list(piece) if plain else piece.tolist()


class Order:
    """An order of units (samples, or batches of a batch sampler) for each epoch.

    Args:
        sampler: the user's.
        sharded: each rank has its own order, because its sampler or its dataset is a shard already.
        seed: of random orders.
    """

    together = False
    """Whether :meth:`draw` is a collective."""
    feistel = False
    """Whether a :class:`Permutation` computes it index by index."""

    def __init__(self, sampler: Any, group: Group, seed: int, sharded: bool) -> None:
        self.sampler, self.group, self.seed, self.sharded = sampler, group, seed, sharded
        self.lengths: list[int | None] = []

    def agree(self, problem: str) -> None:
        """Agree on one seed, and exchange lengths over the ranks. A collective.

        Raises:
            ValueError: ``problem`` on some rank, or ranks whose data should be the same differ in length; on all ranks.
        """
        everyone = gather_json(self.group, {"problem": problem, "seed": self.seed, "units": self._units()})
        for rank, theirs in enumerate(everyone):
            if theirs["problem"]:
                raise ValueError(f"rank {rank}: {theirs['problem']}")
        self.lengths = [theirs["units"] for theirs in everyone]
        if self.sharded:
            return
        self.seed = everyone[0]["seed"]
        if not self.together and len(set(self.lengths)) > 1:
            raise ValueError(
                f"the ranks' datasets have {', '.join(map(str, self.lengths))} samples: every rank must have the whole data, which is divided here "
                "(if each rank has its own shard, set presharded = True on the dataset)"
            )

    def length(self) -> int | None:
        """Units in an epoch, on the rank with most when they are sharded; ``None`` when a user's sampler does not say."""
        if not self.sharded:
            return self._units()
        return None if None in self.lengths else max(length for length in self.lengths if length is not None)

    def _units(self) -> int | None:
        return len(self.sampler)

    def draw(self, epoch: int, most: int | None = None) -> Listed | Permutation:
        """The order of the epoch; for an endless sampler the first ``most`` units."""
        raise NotImplementedError

    def everywhere(self, length: int) -> tuple[int, ...]:
        """The number of units on each rank, when they are sharded. A collective."""
        return tuple(gather_json(self.group, length))

    def state(self, over: bool) -> dict[str, Any] | None:
        """The state needed besides the epoch to draw the latest order again; ``over``: to draw the one after it."""
        return None

    def enter(self, state: dict[str, Any] | None) -> None:
        """Let the next :meth:`draw` continue from :meth:`state`."""


class Sequential(Order):
    """0, 1, 2, ..."""

    def __init__(self, source: Any, sampler: Any, group: Group, seed: int, sharded: bool) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.source = source

    def _units(self) -> int:
        return len(self.source)

    def draw(self, epoch: int, most: int | None = None) -> Listed:
        return Listed(range(len(self.source)))


class Shuffled(Order):
    """A permutation that is a function of (seed, epoch), or the first ``count`` entries of one."""

    def __init__(
        self, source: Any, sampler: Any, group: Group, seed: int, sharded: bool, feistel: bool, count: int | None = None
    ) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.source, self.count = source, count
        self.feistel = feistel and len(source) >= permutations.LARGE

    def _units(self) -> int:
        return len(self.source) if self.count is None else self.count

    def draw(self, epoch: int, most: int | None = None) -> Listed | Permutation:
        if self.feistel:
            return Permutation(len(self.source), self.seed, epoch, self.count)
        return Listed(permutation(len(self.source), self.seed, epoch))


class Drawn(Order):
    """The unchanged order of a user's sampler.

    It is drawn as a whole when an epoch starts, under a seed of this epoch: global random numbers and the sampler's generators
    are seeded for that and restored. Every rank draws, and rank 0's order is used if they differ. Resuming draws the same order: by the
    sampler's ``state_dict`` if it has one, by ``set_epoch`` if it has that, else by also drawing all earlier passes.
    """

    together = True

    def __init__(
        self, sampler: Any, loader: DataLoader[Any], group: Group, seed: int, sharded: bool, made: bool
    ) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.together = not sharded
        self.dataset: Any = loader.dataset
        self.randoms = [(own, seed if made else seed_of(own)) for own in randoms(sampler)]
        self.told = [each for each in nested(sampler) if callable(getattr(each, "set_epoch", None))]
        self.stateful = stateful(sampler)
        plain = type(sampler).__module__.split(".")[0] in ("torch", "builtins")
        self.replayed = not (plain or self.told or self.stateful)
        self.passes = self.epoch = 0
        self._before: Any = None
        self._print: int | None = None
        self._own: list[Any] | None = None
        self._entering: dict[str, Any] | None = None

    def _units(self) -> int | None:
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def draw(self, epoch: int, most: int | None = None) -> Listed:
        entering, self._entering = self._entering, None
        found = self._pass(epoch, most) if entering is None else self._again(entering, epoch, most)
        return Listed(found if self.sharded or self.group.cpu is None else self._shared(found))

    def state(self, over: bool) -> dict[str, Any] | None:
        if self._own is None or self._entering is not None:
            return self._entering
        return {
            "passes": self.passes - 1,
            "epoch": self.epoch,
            "print": self._fingerprint(),
            "before": self._before,
            "now": copy.deepcopy(self.sampler.state_dict()) if self.stateful else None,
            "over": over,
            "world_size": self.group.world_size if self.sharded else None,
        }

    def enter(self, state: dict[str, Any] | None) -> None:
        self._entering = state

    def _pass(self, epoch: int, most: int | None) -> list[Any]:
        self._before = copy.deepcopy(self.sampler.state_dict()) if self.stateful else None
        with isolated(), reseeded(self.randoms, epoch):
            seed_everything(mixed(self.seed, epoch) % 2**32)
            for each in self.told:
                each.set_epoch(epoch)
            self._own = list(self.sampler) if self._units() is not None else self._some(most)
        self._print, self.epoch = None, epoch
        self.passes += 1
        return self._own

    def _some(self, most: int | None) -> list[Any]:
        """All indices of a sampler without a length, which may be endless."""
        bound = most if most is not None else max(_ENDLESS, 10 * len(self.dataset))
        found = list(itertools.islice(self.sampler, bound + (most is None)))
        if most is None and len(found) > bound:
            raise ValueError(
                f"{type(self.sampler).__name__} has no length, and yielded more than {bound} indices for {len(self.dataset)} samples: an "
                "endless sampler needs an epoch's length: Fit(limit_train_batches=...), or .limit = ... (micro-batches per rank) of a prepared loader"
            )
        return found

    def _again(self, state: dict[str, Any], epoch: int, most: int | None) -> list[Any]:
        """The order at which ``state`` was saved, or the one after it."""
        kept = state["epoch"]
        if self.replayed:
            for number in range(self.passes, state["passes"]):
                self._pass(number, most)
        found = self._pass(kept, most)
        if self.stateful:
            if self._fingerprint() != state["print"] and state["before"] is not None:
                self.sampler.load_state_dict(copy.deepcopy(state["before"]))
                found = self._pass(kept, most)
            if state["now"] is not None and not _same(state["now"], self.sampler.state_dict()):
                self.sampler.load_state_dict(copy.deepcopy(state["now"]))
            self._before = state["before"]
        self.passes = state["passes"] + 1
        moved = self.sharded and state["world_size"] != self.group.world_size
        if self._fingerprint() != state["print"] and not moved:
            warn_once(
                f"{type(self.sampler).__name__} yields another order after the resume than before in epoch {kept}: samples may be repeated or "
                "left out. Let its order follow from its arguments, set_epoch(epoch) and seeded generators, or give it state_dict and load_state_dict"
            )
        elif moved and not state["over"]:
            warn_once(
                f"{type(self.sampler).__name__} divides the data itself, and is resumed on {self.group.world_size} rank(s) where there were "
                f"{state['world_size']}: in this epoch samples may be repeated or left out unless each rank takes every n-th index"
            )
        return self._pass(epoch, most) if state["over"] else found

    def _shared(self, found: list[Any]) -> list[Any]:
        """Rank 0's order, if the ranks have drawn different ones.

        Raises:
            ValueError: they have nothing in common: they look like shards, of which only rank 0's would be used; on all ranks.
        """
        if len(set(map(tuple, gather_json(self.group, [self._fingerprint(), len(found)])))) == 1:
            return found
        first = list(broadcast_object(self.group, found if self.group.is_main else None))
        common = self.group.is_main or not _apart(first, found)
        if not any(gather_json(self.group, common)[1:]):
            raise ValueError(
                f"{type(self.sampler).__name__} yields different samples on each rank, without declaring that it divides the data. If it does, set "
                "presharded = True on it (or have it keep num_replicas and rank); else seed it alike on all ranks"
            )
        return first

    def _fingerprint(self) -> int:
        if self._print is None:
            assert self._own is not None
            try:
                data = torch.tensor(self._own, dtype=torch.int64).numpy().tobytes()
            except (TypeError, ValueError, RuntimeError):  # batches of a batch sampler, or keys that are not numbers
                data = repr(self._own).encode()
            self._print = zlib.crc32(data)
        return self._print


def order_for(sampler: Any, loader: DataLoader[Any], group: Group, seed: int, feistel: bool = True) -> Order:
    """The order of a loader's sampler. A collective.

    torch's own sequential, random and distributed samplers (the very classes) have orders that are functions of (seed, epoch); any other is
    used unchanged.

    Args:
        sampler: yields indices of the dataset, or whole batches of them.
        feistel: whether shuffles of :data:`engine.data.permutation.LARGE` samples and more are computed rather than stored.

    Raises:
        ValueError: the sampler divides the data for another number of processes.
    """
    order, problem = _found(sampler, loader, group, seed, feistel)
    order.agree(problem)
    return order


def _found(sampler: Any, loader: DataLoader[Any], group: Group, seed: int, feistel: bool) -> tuple[Order, str]:
    divided = presharded(loader) or getattr(sampler, "presharded", False) is True
    if type(sampler) is SequentialSampler:
        return Sequential(sampler.data_source, sampler, group, seed, divided), ""
    if type(sampler) is DistributedSampler and not divided:
        problem = (
            ""
            if sampler.num_replicas in (1, group.world_size, _processes())
            else _misfit(sampler, sampler.num_replicas, sampler.rank, group)
        )
        if sampler.shuffle:
            return Shuffled(sampler.dataset, sampler, group, sampler.seed, False, feistel), problem
        return Sequential(sampler.dataset, sampler, group, seed, False), problem
    # torchdata's creates a generator with a random seed when the user gave none.
    made = (
        type(sampler) is not RandomSampler
        and is_a(sampler, RandomSampler)
        and sampler.generator is not loader.generator
    )
    if is_a(sampler, RandomSampler) and not sampler.replacement:
        units, count = len(sampler.data_source), sampler.num_samples
        if count == units or (feistel and units >= permutations.LARGE and count < units):
            own = seed if sampler.generator is None or made else sampler.generator.initial_seed()
            return Shuffled(
                sampler.data_source, sampler, group, own, divided, feistel, None if count == units else count
            ), ""
    replicas, rank = _shard(sampler)
    shared = divided or replicas > 1
    misfit = replicas > 1 and (replicas, rank) != (group.world_size, group.rank)
    return Drawn(sampler, loader, group, seed, shared, made), _misfit(sampler, replicas, rank, group) if misfit else ""


def is_a(item: Any, kind: type) -> bool:
    """Whether its class is exactly this one of torch, or torchdata's version of it (which is not imported here)."""
    own = type(item)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.startswith("torchdata."))


def _shard(sampler: Any) -> tuple[int, int]:
    """The shard of the data that a sampler, or one inside it, declares: (number of shards, index)."""
    for each in nested(sampler):
        for names in _SHARDS:
            found = tuple(getattr(each, name, None) for name in names)
            if all(isinstance(value, int) for value in found):
                return found  # type: ignore[return-value]
    return 1, 0


def _misfit(sampler: Any, replicas: int, rank: int, group: Group) -> str:
    return (
        f"{type(sampler).__name__} yields shard {rank} of {replicas}, but this is rank {group.rank} of {group.world_size} that see different data: "
        f"create it with {group.world_size} shards (engine.data_group.world_size) and this rank's index, or pass a plain sampler, which is divided"
    )


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _apart(first: list[Any], other: list[Any]) -> bool:
    """Whether two orders have no index in common."""

    def flat(items: list[Any]) -> set[Any]:
        return {index for item in items for index in (item if isinstance(item, (list, tuple)) else (item,))}

    try:
        return not flat(first) & flat(other)
    except TypeError:
        return False


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal, tensors in them included."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
