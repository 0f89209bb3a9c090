"""One order for what the ranks run in a forward pass, found while they run it.

The ranks tell each other what each of them does next, and one of these steps is the next one of all. A rank that did not ask for it makes it all
the same, as a block that it leaves out. So any ranks find an order, whatever each leaves out, repeats or runs at another place than the others.

A step is the number of a block, where it begins, or the complement of the number, where it ends: ``~3`` ends block 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field


class MergedSteps:
    """The steps that the ranks make in one forward pass, in one order that contains the steps of each rank in its own order.

    Args:
        expected: a guess of the order, which has every block: it decides between ranks that run different blocks next.
        paths: by block, its path in the model: the index of a child of the model, of a child of this one, and so on.
        world_size: the number of ranks.
    """

    def __init__(self, expected: Sequence[int], paths: Mapping[int, Sequence[int]], world_size: int) -> None:
        self.steps: list[int] = []
        self._expected, self._paths = expected, paths
        self._places = {step: index for index, step in reversed(list(enumerate(expected)))}
        self._by_rank: list[list[int]] = [[] for _ in range(world_size)]
        self._open: list[int] = []
        """Blocks that have begun, and have not ended."""
        self._inside: list[list[int]] = [[] for _ in range(world_size)]
        """By rank, the indices of those in ``_open`` that it runs by itself."""

    def add(self, requests: Sequence[int | None]) -> int | None:
        """Choose and add the next step.

        Args:
            requests: by rank, the step that it makes next by itself; ``None``: its pass is at its end.

        Returns:
            The step; ``None``: all are at the end, or blocks run inside of each other in opposite ways.
        """
        chosen = self._chosen(requests)
        if chosen is None:
            return None
        self.steps.append(chosen)
        if chosen >= 0:
            self._open.append(chosen)
        else:
            self._open.pop()
        for rank, step in enumerate(requests):
            if step == chosen:
                self._by_rank[rank].append(step)
                if step >= 0:
                    self._inside[rank].append(len(self._open) - 1)
            while self._inside[rank] and self._inside[rank][-1] >= len(self._open):
                self._inside[rank].pop()
        return chosen

    def _chosen(self, requests: Sequence[int | None]) -> int | None:
        """The innermost block ends once no rank in it wants another step; otherwise the next one of these ranks begins, and of several the one that
        is expected first."""
        if all(step is None for step in requests):
            return None
        depth = max((inside[-1] for inside in self._inside if inside), default=-1)
        innermost = {
            step for step, inside in zip(requests, self._inside, strict=True) if (inside[-1] if inside else -1) == depth
        }
        if depth >= 0 and innermost <= {~self._open[depth], None}:
            return ~self._open[depth]
        begins = [step for step in innermost if step is not None and step >= 0]
        chosen = min(begins, key=lambda step: (self._places[step], step), default=None)
        if chosen is not None and chosen in self._open:
            index = self._open.index(chosen)
            if any(step != chosen for step, inside in zip(requests, self._inside, strict=True) if index in inside):
                return None
        return chosen

    def order(self) -> list[int]:
        """The order for further passes: without places that no rank needs, and with places for expected blocks that no rank has run."""
        root, expected = Place.root(self._without_redundant()), Place.root(self._expected)
        missing = Missing(expected, set(self.steps), self._places, self._paths)
        missing.add_to(root)
        return list(root.steps())

    def _without_redundant(self) -> list[int]:
        """The steps without places of blocks that each rank can do without: one came to a block at a time when another was not there yet."""
        steps, sequences = list(self.steps), {tuple(sequence) for sequence in self._by_rank}
        for number in dict.fromkeys(step for step in self.steps if step >= 0):
            count = max(sequence.count(number) for sequence in sequences)
            while steps.count(number) > count and (shorter := _without_one(steps, number, sequences)) is not None:
                steps = shorter
        return steps


@dataclass
class Place:
    """A block's place in an order, with the places within it."""

    number: int
    inner: list[Place] = field(default_factory=list)

    @classmethod
    def root(cls, steps: Sequence[int]) -> Place:
        """A place for the model itself, with those that are not within another block's."""
        root = cls(-1)
        path = [root]
        for step in steps:
            if step >= 0:
                path[-1].inner.append(cls(step))
                path.append(path[-1].inner[-1])
            else:
                path.pop()
        return root

    def steps(self) -> Iterator[int]:
        """The steps of the places within this one."""
        for place in self.inner:
            yield place.number
            yield from place.steps()
            yield ~place.number

    def all(self) -> Iterator[Place]:
        """Yield this place, and all places within it."""
        yield self
        for place in self.inner:
            yield from place.all()


class Missing:
    """Adds places for blocks that no rank has run.

    Args:
        expected: the expected order.
        run: the steps that some rank has made.
        indices: the indices of steps in the expected order.
        paths: as for :class:`MergedSteps`.
    """

    def __init__(
        self, expected: Place, run: Set[int], indices: Mapping[int, int], paths: Mapping[int, Sequence[int]]
    ) -> None:
        self._expected = {place.number: place for place in expected.all()}
        self._run, self._indices, self._paths = run, indices, paths

    def add_to(self, place: Place) -> None:
        """Add what is missing within this place."""
        for inner in place.inner:
            self.add_to(inner)
        for missing in self._expected[place.number].inner:
            if missing.number not in self._run:
                place.inner = self._with(missing, place.inner)

    def _with(self, missing: Place, places: list[Place]) -> list[Place]:
        """Insert a block into ``places`` beside others of its container: after each place of the one that is expected last before it, and before each
        place of the one that is expected first after it."""
        at = self._indices[missing.number]
        near = {index: self._indices[places[index].number] for index in self._nearest(missing.number, places)}
        last = max((place for place in near.values() if place < at), default=None)
        first = min((place for place in near.values() if place > at), default=None)
        gaps = {index + 1 for index, place in near.items() if place == last}
        gaps |= {index for index, place in near.items() if place == first}
        result = [missing] if 0 in gaps or not places else []
        for gap, neighbour in enumerate(places, start=1):
            result += [neighbour, missing] if gap in gaps else [neighbour]
        return result

    def _nearest(self, number: int, places: Sequence[Place]) -> list[int]:
        """The indices of those in the smallest container that has the block and one of them."""
        depths = [_common(self._paths[number], self._paths[place.number]) for place in places]
        return [index for index, depth in enumerate(depths) if depth == max(depths)]


def _common(path: Sequence[int], other: Sequence[int]) -> int:
    """The length of the paths' common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False)))


def _without_one(steps: list[int], number: int, sequences: Set[Sequence[int]]) -> list[int] | None:
    """The steps without one place of the block, if each rank's ``sequences`` are still among them in their order; otherwise ``None``."""
    for begin in [index for index, step in enumerate(steps) if step == number]:
        end = steps.index(~number, begin)
        shorter = steps[:begin] + steps[end + 1 :]
        if all(_contains(shorter, sequence) for sequence in sequences):
            return shorter
    return None


def _contains(steps: Sequence[int], sequence: Sequence[int]) -> bool:
    """Whether the ``sequence`` is a part of ``steps``, with other steps between."""
    iterator = iter(steps)
    return all(step in iterator for step in sequence)
