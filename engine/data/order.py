"""The order of an epoch's samples: a function of seed and epoch, or that of a user's sampler, drawn with a seed for the epoch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from engine.data.data_states import has_state_dict
from engine.data.deal import WindowRanges
from engine.data.drawn import Drawn, DrawnDataset
from engine.data.sampler_entries import SamplerEntries, collected
from engine.data.user_loaders import is_a, presharded
from engine.distributed.collectives import broadcast_object, gather_json
from engine.distributed.group import Group
from engine.utils.log import logger, warn_once
from engine.utils.seed import isolated, seed_everything

LARGE = 2**22
"""The number of samples from which on a shuffle is computed (:class:`FeistelIndices`): a list of this size takes 32 MiB, and 0.1 s per rank and
epoch."""

_LARGE_BEFORE = 2**24
"""The number that checkpoints mean by ``"feistel"`` alone."""
NEVER = sys.maxsize
"""The number of samples from which on a shuffle is computed, where each is stored."""
_ENDLESS = 10_000_000
"""A sampler without a length that yields more indices than this, and than ten epochs have, counts as endless."""
_SHARDS = (
    ("num_replicas", "rank"),
    ("num_processes", "process_index"),
    ("world_size", "rank"),
    ("_world_size", "_rank"),
)
"""Pairs of attributes by which samplers declare the number of shards and the index of their shard."""
_WORD = 0xFFFFFFFF
_BLOCK = 8192
"""The number of entries of a computed shuffle that are computed at once."""
_AHEAD = 4096
"""Entries of a computed shuffle that are computed together where one is asked for: the next ones mostly follow, and one takes as long as hundreds."""


def kind_of_shuffles(computed_from: int) -> str:
    """The text by which a loader's state tells from how many samples on shuffles are computed."""
    return "feistel" if computed_from == _LARGE_BEFORE else f"feistel from {computed_from}"


def read_kind_of_shuffles(kind: str | None) -> int:
    """The number of samples from which on shuffles are computed, as a loader's state tells; ``None``: they are stored.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind is None:
        return NEVER
    words = kind.split()
    if words == ["feistel"]:
        return _LARGE_BEFORE
    if words[:2] == ["feistel", "from"] and len(words) == 3 and words[2].isdecimal():
        return int(words[2])
    raise ValueError(f"the data's order has the unknown kind {kind!r}: a newer version saved it")


# -- the indices of an epoch ------------------------------------------------------------------------------------------------------------------


def mixed(seed: int, epoch: int) -> int:
    """Mix two numbers into a 63-bit seed (splitmix64's finalizer), so that seeds 0, 1, 2 and epochs 0, 1, 2 never share an order."""
    z = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def epoch_of_repetition(epoch: int, number: int) -> int:
    """The epoch (< 2**31) whose order is used by repetition ``number`` within ``epoch``: first ``epoch`` itself, then none that is near it."""
    return (epoch + number * 1_000_003) % 2**31


def permutation(units: int, seed: int, epoch: int) -> Tensor:
    """The shuffled order of an epoch. Shape ``(units,)``, int64; the same on every rank and at every world size."""
    generator = torch.Generator(device="cpu").manual_seed(mixed(seed, epoch))
    return torch.randperm(units, generator=generator, device="cpu")


class StoredIndices(Sequence[Any]):
    """An epoch's indices in memory: a range, a tensor, or the entries of a sampler."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        entry = self.items[index]
        if isinstance(self.items, Tensor):
            return entry.tolist()  # indices as datasets expect them: plain numbers
        return list(entry) if isinstance(index, slice) else entry

    def size_of(self, number: int) -> int:
        """The number of samples in entry ``number``, a batch."""
        return self.items.size_of(number) if hasattr(self.items, "size_of") else len(self[number])

    def pieces(self, windows: Iterable[WindowRanges]) -> Iterator[list[Any]]:
        """Yield the entries of each micro-batch of this rank."""
        items, plain = self.items, not isinstance(self.items, Tensor)
        for ranges, _ in windows:
            for part in ranges:
                piece = items[part.start : part.stop]
                yield list(piece) if plain else piece.tolist()


class FeistelIndices:
    """A shuffle of any size that is never stored: each index is a function of (seed, epoch) and its position.

    An alternating Feistel network permutes all numbers with as many bits as ``size - 1``. A result that is not below ``size`` goes
    through the network again until it is (cycle walking; less than twice on average). See Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002. All products stay below 2**62, so that int64 gives the same on every platform.

    Args:
        size: the numbers of ``range(size)`` are permuted.
        count: only this many entries are used, from the first on; ``None``: all.

    Raises:
        ValueError: ``size`` is negative or above 2**62, or ``count`` is above ``size``.
    """

    def __init__(self, size: int, seed: int, epoch: int, count: int | None = None) -> None:
        self.size, self.count = size, size if count is None else count
        if not 0 <= self.count <= size <= 2**62:
            raise ValueError(
                f"a permutation of {size} numbers with {self.count} used: size must be 0 to 2**62, and count at most size"
            )
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._masks = (1 << (bits - bits // 2)) - 1, (1 << (bits // 2)) - 1
        key = mixed(seed, epoch)
        rounds = 8 if bits >= 16 else 16  # halves of few bits need more rounds
        self._keys = [mixed(key, number) & _WORD for number in range(rounds)]
        self._ahead: tuple[int, list[int]] = 0, []
        """A position, and the entries from there on that were computed together."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        """An entry, or the list of entries of a slice."""
        positions = range(self.count)[index]
        if not isinstance(positions, range):
            return self._entries_ahead(positions, positions + 1)[0]
        if not positions:
            return []
        if positions.step == 1 and len(positions) <= _AHEAD:
            return self._entries_ahead(positions.start, positions.stop)
        return self.entries_at(torch.arange(positions.start, positions.stop, positions.step, device="cpu")).tolist()

    def _entries_ahead(self, low: int, high: int) -> list[int]:
        first, entries = self._ahead
        if not first <= low < high <= first + len(entries):
            first = low
            entries = self.entries_at(torch.arange(low, min(low + _AHEAD, self.count), device="cpu")).tolist()
            self._ahead = first, entries
        return entries[low - first : high - first]

    def size_of(self, number: int) -> int:
        """Raise an error: the entries are samples, not batches."""
        raise TypeError(f"entry {number} of a computed shuffle is an index, and has no size")

    def entries_at(self, positions: Tensor) -> Tensor:
        """The entries at ``positions``. Shapes ``[n]``, int64, on the CPU."""
        entries = self._network(positions)
        outside = (entries >= self.size).nonzero().squeeze(1)
        while outside.numel():
            again = self._network(entries[outside])
            entries[outside] = again
            outside = outside[again >= self.size]
        return entries

    def pieces(self, windows: Iterable[WindowRanges]) -> Iterator[list[int]]:
        """Yield the entries of each micro-batch of this rank. Those of several micro-batches are computed at once, at the cost of one."""
        parts: list[range] = []
        waiting = 0
        for ranges, _ in windows:
            parts += ranges
            waiting += sum(map(len, ranges))
            if waiting >= _BLOCK:
                yield from self._split(parts)
                parts, waiting = [], 0
        yield from self._split(parts)

    def _split(self, parts: list[range]) -> Iterator[list[int]]:
        if parts:
            positions = torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
            yield from (piece.tolist() for piece in self.entries_at(positions).split([len(part) for part in parts]))

    def _network(self, numbers: Tensor) -> Tensor:
        """Permute numbers of the network's number of bits."""
        high, low = numbers >> self._low_bits, numbers & self._masks[1]
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            high = high ^ _scrambled(low, even).bitwise_and_(self._masks[0])
            low = low ^ _scrambled(high, odd).bitwise_and_(self._masks[1])
        return (high << self._low_bits).bitwise_or_(low)


def _scrambled(half: Tensor, key: int) -> Tensor:
    """Hash numbers below 2**32 with a key; only the low 32 bits of the result are valid."""
    x = half ^ key
    x.bitwise_xor_(x >> 15).mul_(0x2C1B3C6D).bitwise_and_(_WORD)
    x.bitwise_xor_(x >> 12).mul_(0x297A2D39)
    return x.bitwise_xor_(x >> 15)


# -- the orders -------------------------------------------------------------------------------------------------------------------------------


class SampleOrder:
    """The order of a loader's units (samples, or batches of a batch sampler) in each epoch. :func:`order_for` creates an order, a feed owns it.

    Implementations: :class:`SequentialOrder`, :class:`ShuffledOrder`, :class:`DrawOrder` and :class:`UserSamplerOrder`.

    Args:
        sampler: the user's sampler.
        seed: the seed of random orders.
        sharded: whether each rank has its own order, because its sampler or dataset is a shard already.
    """

    drawn_by_all_ranks = False
    """True if :meth:`draw` is a collective."""
    feistel = False
    """True if the order is computed index by index (:class:`FeistelIndices`)."""

    def __init__(self, sampler: Any, group: Group, seed: int, sharded: bool) -> None:
        self.sampler, self.group, self.seed, self.sharded = sampler, group, seed, sharded
        self.lengths: list[int | None] = []

    def agree(self, problem: str) -> None:
        """Agree on rank 0's seed, and exchange lengths. A collective.

        Args:
            problem: what is wrong with this rank's sampler; empty if nothing is.

        Raises:
            ValueError: some rank has a ``problem``, or ranks that should have the same data differ in length; on all ranks.
        """
        rows = gather_json(self.group, {"problem": problem, "seed": self.seed, "units": self._units()})
        for rank, row in enumerate(rows):
            if row["problem"]:
                raise ValueError(f"rank {rank}: {row['problem']}")
        self.lengths = [row["units"] for row in rows]
        if self.sharded:
            return
        self.seed = rows[0]["seed"]
        if not self.drawn_by_all_ranks and len(set(self.lengths)) > 1:
            raise ValueError(
                f"the ranks' datasets have {', '.join(map(str, self.lengths))} samples: every rank must have the whole data, which is divided here "
                "(if each rank has its own shard, set presharded = True on the dataset)"
            )

    def length(self) -> int | None:
        """The number of units in an epoch, if sharded on the rank with the most; ``None`` if a user's sampler does not tell."""
        if not self.sharded:
            return self._units()
        return None if None in self.lengths else max(length for length in self.lengths if length is not None)

    def _units(self) -> int | None:
        return len(self.sampler)

    def draw(self, epoch: int, at_most: int | None = None) -> StoredIndices | FeistelIndices:
        """Draw the epoch's order. Of a sampler without a length, draw at most ``at_most`` units."""
        raise NotImplementedError

    def units_of_ranks(self, length: int) -> tuple[int, ...]:
        """The number of units on each rank, when they are sharded; ``length``: that of this rank. A collective."""
        return tuple(gather_json(self.group, length))

    def state(self, over: bool) -> dict[str, Any] | None:
        """The state that is needed, besides the epoch, to draw the latest order again or, with ``over``, the next one; ``None``: none is needed."""
        return None

    def enter(self, state: dict[str, Any] | None) -> None:
        """Let the next :meth:`draw` continue from a result of :meth:`state`."""


class SequentialOrder(SampleOrder):
    """The order of the dataset: 0, 1, 2, ..."""

    def __init__(self, source: Any, sampler: Any, group: Group, seed: int, sharded: bool) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.source = source

    def _units(self) -> int:
        return len(self.source)

    def draw(self, epoch: int, at_most: int | None = None) -> StoredIndices:
        return StoredIndices(range(len(self.source)))


class ShuffledOrder(SampleOrder):
    """A permutation that is a function of (seed, epoch), or its first ``count`` entries."""

    def __init__(
        self,
        source: Any,
        sampler: Any,
        group: Group,
        seed: int,
        sharded: bool,
        computed_from: int,
        count: int | None = None,
    ) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.source, self.count = source, count
        self.feistel = len(source) >= computed_from

    def _units(self) -> int:
        return len(self.source) if self.count is None else self.count

    def draw(self, epoch: int, at_most: int | None = None) -> StoredIndices | FeistelIndices:
        if self.feistel:
            return FeistelIndices(len(self.source), self.seed, epoch, self.count)
        return StoredIndices(permutation(len(self.source), self.seed, epoch))


class DrawOrder(SampleOrder):
    """The order of data that orders itself, such as a mixture, whose sources continue from epoch to epoch.

    Args:
        unseeded: the user's dataset or batch sampler, which has ``seeded(seed, shuffle)`` as in :class:`engine.data.drawn.Drawn`.
        shuffle: whether the loader asks for a random order.
    """

    def __init__(self, unseeded: Any, sampler: Any, group: Group, seed: int, shuffle: bool) -> None:
        super().__init__(sampler, group, seed, sharded=False)
        self.unseeded, self.shuffle = unseeded, shuffle
        self.source: Drawn | DrawnDataset = unseeded
        """The copy that draws with the seed on which the ranks have agreed."""

    def agree(self, problem: str) -> None:
        super().agree(problem)
        self.source = self.unseeded.seeded(self.seed, self.shuffle)

    def _units(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # a stream is not drawn

    def draw(self, epoch: int, at_most: int | None = None) -> StoredIndices:
        return StoredIndices(self.source.draws(epoch))

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Let the draws continue after those of a checkpoint, which may have been of other sources, sizes or weights; the log names each change."""
        assert isinstance(self.source, DrawnDataset)
        changes = self.source.changes_since(state)
        self.source.continue_from(state)
        for change in changes if self.group.is_main else ():
            logger.info("%s", change)


class UserSamplerOrder(SampleOrder):
    """The unchanged order of a user's sampler.

    The whole order is drawn when an epoch starts, with a seed for this epoch: global random state and the sampler's generators
    are seeded for that, and restored. Every rank draws, and rank 0's order is used if they differ. A resume draws the same order again: with the
    sampler's ``state_dict`` if it has one, with ``set_epoch`` if it has that, else by drawing all earlier passes first.

    Args:
        randomly_seeded: whether torchdata created the sampler's generator with a random seed, which the engine's seed replaces.
    """

    drawn_by_all_ranks = True

    def __init__(
        self,
        sampler: Any,
        loader: DataLoader[Any],
        group: Group,
        seed: int,
        sharded: bool,
        randomly_seeded: bool,
    ) -> None:
        super().__init__(sampler, group, seed, sharded)
        self.drawn_by_all_ranks = not sharded
        self.dataset: Any = loader.dataset
        self.generators = [
            (generator, seed if randomly_seeded else seed_of(generator)) for generator in generators_of(sampler)
        ]
        self.epoch_listeners = [part for part in nested_samplers(sampler) if callable(getattr(part, "set_epoch", None))]
        self.stateful = has_state_dict(sampler)
        plain = type(sampler).__module__.split(".")[0] in ("torch", "builtins")
        self.replayed = not (plain or self.epoch_listeners or self.stateful)
        self.passes = self.epoch = 0
        self._sampler_state_before: Any = None
        self._checksum: int | None = None
        self._drawn: SamplerEntries | None = None
        self._state_to_enter: dict[str, Any] | None = None

    def _units(self) -> int | None:
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def draw(self, epoch: int, at_most: int | None = None) -> StoredIndices:
        state, self._state_to_enter = self._state_to_enter, None
        indices = self._pass(epoch, at_most) if state is None else self._order_at_saved_state(state, epoch, at_most)
        return StoredIndices(indices if self.sharded or self.group.cpu is None else self._agreed_order(indices))

    def state(self, over: bool) -> dict[str, Any] | None:
        if self._drawn is None or self._state_to_enter is not None:
            return self._state_to_enter
        return {
            "passes": self.passes - 1,
            "epoch": self.epoch,
            "print": self._fingerprint(),
            "before": self._sampler_state_before,
            "now": copy.deepcopy(self.sampler.state_dict()) if self.stateful else None,
            "over": over,
            "world_size": self.group.world_size if self.sharded else None,
        }

    def enter(self, state: dict[str, Any] | None) -> None:
        self._state_to_enter = state

    def _pass(self, epoch: int, at_most: int | None) -> SamplerEntries:
        """Draw one pass of the sampler with the epoch's seed."""
        self._sampler_state_before = copy.deepcopy(self.sampler.state_dict()) if self.stateful else None
        with isolated(), reseeded(self.generators, epoch):
            seed_everything(mixed(self.seed, epoch) % 2**32)
            for listener in self.epoch_listeners:
                listener.set_epoch(epoch)
            has_length = self._units() is not None
            self._drawn = collected(self.sampler) if has_length else self._draw_without_length(at_most)
        self._checksum, self.epoch = None, epoch
        self.passes += 1
        return self._drawn

    def _draw_without_length(self, at_most: int | None) -> SamplerEntries:
        """Draw all indices of a sampler without a length, or the first ``at_most``; an endless one without ``at_most`` is an error."""
        bound = at_most if at_most is not None else max(_ENDLESS, 10 * len(self.dataset))
        indices = collected(itertools.islice(self.sampler, bound + (at_most is None)))
        if at_most is None and len(indices) > bound:
            raise ValueError(
                f"{type(self.sampler).__name__} has no length, and yielded more than {bound} indices for {len(self.dataset)} samples: an "
                "endless sampler needs an epoch's length: Fit(limit_train_batches=...), or .limit = ... (micro-batches per rank) of a prepared loader"
            )
        return indices

    def _order_at_saved_state(self, state: dict[str, Any], epoch: int, at_most: int | None) -> SamplerEntries:
        """The sample order that was in use when ``state`` was saved, or the next epoch's if that epoch was finished.

        Args:
            epoch: the epoch of the result.
            at_most: the maximum number of indices to draw from a sampler without a length.
        """
        saved_epoch = state["epoch"]
        if self.replayed:
            for number in range(self.passes, state["passes"]):
                self._pass(number, at_most)
        indices = self._pass(saved_epoch, at_most)
        if self.stateful:
            if not indices.has_checksum(state["print"]) and state["before"] is not None:
                self.sampler.load_state_dict(copy.deepcopy(state["before"]))
                indices = self._pass(saved_epoch, at_most)
            if state["now"] is not None and not _equal_states(state["now"], self.sampler.state_dict()):
                self.sampler.load_state_dict(copy.deepcopy(state["now"]))
            self._sampler_state_before = state["before"]
        self.passes = state["passes"] + 1
        resharded = self.sharded and state["world_size"] != self.group.world_size
        if not resharded and not indices.has_checksum(state["print"]):
            warn_once(
                f"{type(self.sampler).__name__} yields a different order after resuming, in epoch {saved_epoch}: samples may be repeated or "
                "left out. Let its order follow from its arguments, set_epoch(epoch) and seeded generators, or give it state_dict and load_state_dict"
            )
        elif resharded and not state["over"]:
            warn_once(
                f"{type(self.sampler).__name__} divides the data itself, and is resumed on {self.group.world_size} rank(s) where there were "
                f"{state['world_size']}: in this epoch samples may be repeated or left out unless each rank takes every n-th index"
            )
        return self._pass(epoch, at_most) if state["over"] else indices

    def _agreed_order(self, indices: SamplerEntries) -> SamplerEntries:
        """The order that all ranks use: rank 0's, if they have drawn different ones. A collective.

        Raises:
            ValueError: the orders have no index in common, so they must be shards, of which only rank 0's would be used; on all ranks.
        """
        if len(set(map(tuple, gather_json(self.group, [self._fingerprint(), len(indices)])))) == 1:
            return indices
        first: SamplerEntries = broadcast_object(self.group, indices if self.group.is_main else None)
        common = self.group.is_main or not first.is_disjoint(indices)
        if not any(gather_json(self.group, common)[1:]):
            raise ValueError(
                f"{type(self.sampler).__name__} yields different samples on each rank, without declaring that it divides the data. If it does, set "
                "presharded = True on it (or have it keep num_replicas and rank); else seed it alike on all ranks"
            )
        return first

    def _fingerprint(self) -> int:
        """A checksum of the latest order."""
        if self._checksum is None:
            assert self._drawn is not None
            self._checksum = self._drawn.checksum()
        return self._checksum


def order_for(
    sampler: Any, loader: DataLoader[Any], group: Group, seed: int, computed_from: int = LARGE
) -> SampleOrder:
    """Create the order of a loader's sampler. A collective.

    torch's own sequential, random and distributed samplers (not subclasses) are replaced by orders that are functions of (seed, epoch); any
    other sampler is used unchanged.

    Args:
        sampler: yields indices of the dataset, or whole batches of them.
        computed_from: the number of samples from which on a shuffle is computed rather than stored.

    Raises:
        ValueError: the sampler divides the data for another number of processes.
    """
    order, problem = _order_and_problem(sampler, loader, group, seed, computed_from)
    order.agree(problem)
    return order


def _order_and_problem(
    sampler: Any, loader: DataLoader[Any], group: Group, seed: int, computed_from: int
) -> tuple[SampleOrder, str]:
    """The order of a loader's sampler, and what is wrong with the sampler on this rank (empty if nothing is)."""
    is_presharded = presharded(loader) or getattr(sampler, "presharded", False) is True
    if hasattr(sampler, "seeded"):
        return DrawOrder(sampler, sampler, group, seed, True), _length_mismatch(sampler, loader.dataset)
    if hasattr(loader.dataset, "seeded"):
        return _draw_order(sampler, loader, group, seed, is_presharded)
    if type(sampler) is SequentialSampler:
        return SequentialOrder(sampler.data_source, sampler, group, seed, is_presharded), ""
    if type(sampler) is DistributedSampler and not is_presharded:
        problem = (
            ""
            if sampler.num_replicas in (1, group.world_size, _processes())
            else _shard_mismatch(sampler, sampler.num_replicas, sampler.rank, group)
        )
        if sampler.shuffle:
            return ShuffledOrder(sampler.dataset, sampler, group, sampler.seed, False, computed_from), problem
        return SequentialOrder(sampler.dataset, sampler, group, seed, False), problem
    # Without a user's generator, torchdata's sampler creates one with a random seed.
    randomly_seeded = (
        type(sampler) is not RandomSampler
        and is_a(sampler, RandomSampler)
        and sampler.generator is not loader.generator
    )
    if is_a(sampler, RandomSampler) and not sampler.replacement:
        units, count = len(sampler.data_source), sampler.num_samples
        if count == units or (units >= computed_from and count < units):
            users_generator = None if randomly_seeded else sampler.generator
            order_seed = seed if users_generator is None else users_generator.initial_seed()
            return ShuffledOrder(
                sampler.data_source,
                sampler,
                group,
                order_seed,
                is_presharded,
                computed_from,
                None if count == units else count,
            ), ""
    replicas, rank = _shard(sampler)
    is_sharded = is_presharded or replicas > 1
    is_mismatch = replicas > 1 and (replicas, rank) != (group.world_size, group.rank)
    problem = _shard_mismatch(sampler, replicas, rank, group) if is_mismatch else ""
    return UserSamplerOrder(sampler, loader, group, seed, is_sharded, randomly_seeded), problem


def _draw_order(
    sampler: Any, loader: DataLoader[Any], group: Group, seed: int, is_presharded: bool
) -> tuple[DrawOrder, str]:
    """The order of a dataset that orders itself, and what is wrong with the sampler: only torch's own, over all samples, leave the order to it."""
    dataset: Any = loader.dataset
    kind, problem = type(dataset).__name__, ""
    shuffle = sampler.shuffle if type(sampler) is DistributedSampler else is_a(sampler, RandomSampler)
    if type(sampler) is DistributedSampler:
        seed = sampler.seed if shuffle else seed
        if sampler.num_replicas not in (1, group.world_size, _processes()):
            problem = _shard_mismatch(sampler, sampler.num_replicas, sampler.rank, group)
    elif shuffle and not sampler.replacement and sampler.num_samples == len(dataset):
        # Without a user's generator, torchdata's sampler creates one with a random seed.
        if sampler.generator is not None and (type(sampler) is RandomSampler or sampler.generator is loader.generator):
            seed = sampler.generator.initial_seed()
    elif type(sampler) is not SequentialSampler:
        problem = (
            f"{kind} decides itself which sample comes when, and {type(sampler).__name__} asks for another order: leave the sampler out and give "
            f"DataLoader(shuffle=True) or False; the length of an epoch is that of the {kind}"
        )
    if is_presharded:
        problem = (
            f"a {kind} is divided among the ranks by its draws, and this one is declared as divided already: leave presharded out, and give every "
            "rank all of the data"
        )
    return DrawOrder(dataset, sampler, group, seed, shuffle), problem


def _length_mismatch(sampler: Any, dataset: Any) -> str:
    """The error message for a batch sampler that was made from the lengths of other data; empty if it fits, or cannot tell."""
    if hasattr(dataset, "seeded"):
        return (
            f"{type(dataset).__name__} decides itself which sample comes when, and so does {type(sampler).__name__}: give batch_size=, and mix "
            "sources whose samples have one length"
        )
    lengths = getattr(sampler, "lengths", None)
    if lengths is None or not hasattr(dataset, "__len__") or len(lengths) == len(dataset):
        return ""
    return (
        f"{type(sampler).__name__} has the lengths of {len(lengths)} samples, and {type(dataset).__name__} has {len(dataset)}: give the lengths of "
        "this dataset, in its order"
    )


def _shard(sampler: Any) -> tuple[int, int]:
    """The shard that a sampler, or a sampler inside it, declares: (number of shards, index); (1, 0) if none does."""
    for part in nested_samplers(sampler):
        for names in _SHARDS:
            shard = tuple(getattr(part, name, None) for name in names)
            if all(isinstance(value, int) for value in shard):
                return shard  # type: ignore[return-value]
    return 1, 0


def _shard_mismatch(sampler: Any, replicas: int, rank: int, group: Group) -> str:
    """The error message for a sampler with another number of shards, or another index, than this rank needs."""
    return (
        f"{type(sampler).__name__} yields shard {rank} of {replicas}, but this is rank {group.rank} of {group.world_size} that see different data: "
        f"create it with {group.world_size} shards (engine.data_group.world_size) and this rank's index, or pass a plain sampler, which is divided"
    )


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _equal_states(first: Any, second: Any) -> bool:
    """True if two states are equal, including the tensors in them."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _equal_states(value, second[name]) for name, value in first.items()
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_equal_states, first, second))
    return bool(first == second)


# -- the random number generators that samplers keep as attributes ----------------------------------------------------------------------------


def nested_samplers(sampler: Any) -> list[Any]:
    """The sampler, and all samplers that are attributes of it or of one another."""
    samplers = [sampler]
    for part in samplers:
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, Sampler) and not any(value is listed for listed in samplers):
                samplers.append(value)
    return samplers


def generators_of(sampler: Any) -> list[Any]:
    """The random number generators of a sampler, and of the samplers inside it."""
    kinds = _generator_classes()
    return [
        value
        for part in nested_samplers(sampler)
        for value in getattr(part, "__dict__", {}).values()
        if isinstance(value, kinds)
    ]


def _generator_classes() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")  # if numpy was never imported, no generator is numpy's
    return torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ())


def seed_of(generator: Any) -> int:
    """A number that depends on how the user has seeded this generator."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    fresh = copy.deepcopy(generator)
    if isinstance(fresh, random.Random):
        return fresh.getrandbits(63)
    return int(fresh.integers(2**63 - 1) if hasattr(fresh, "integers") else fresh.randint(2**31))


@contextlib.contextmanager
def reseeded(generators: list[tuple[Any, int]], epoch: int) -> Iterator[None]:
    """Seed the generators from the user's seeds and the epoch inside the block, and restore them afterwards."""
    with contextlib.ExitStack() as stack:
        for generator, seed in generators:
            new = mixed(seed, epoch)
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
                generator.manual_seed(new)
            elif isinstance(generator, random.Random):
                stack.callback(generator.setstate, generator.getstate())
                generator.seed(new)
            elif hasattr(generator, "bit_generator"):
                stack.callback(setattr, generator.bit_generator, "state", generator.bit_generator.state)
                generator.bit_generator.state = type(generator.bit_generator)(new).state
            else:
                stack.callback(generator.set_state, generator.get_state())
                generator.seed(new % 2**32)
        yield
