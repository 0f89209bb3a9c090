"""Which samples each step of a case has: written from the documented contract, with plain lists.

Global batch ``i`` of an epoch is ``order[i * G:(i + 1) * G]``, dealt in full micro-batches, a round of all ranks after the other; what is
left of a short one goes out as evenly as it goes. Batches that stay whole are dealt one by one, and a stream in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cases import SAMPLED, STRATEGIES, Case
from .models import given_order, kept, ready_batches

Round = list[list[int]]
"""The numbers of the samples in one micro-batch of every rank; empty where a rank has none."""
Step = list[Round]


def order_of(case: Case, epoch: int, random: dict[int, list[int]]) -> list[int]:
    """The order of the samples; ``random`` has that of epochs where it is drawn."""
    if case.data in ("shuffled", "drawn", "distributed"):
        return random[epoch]
    if case.data in ("subset", "repeats"):
        return given_order(case)
    return list(range(case.samples // 2 + 1 if case.data == "front" else case.samples))


def steps(case: Case, strategy: str, epoch: int, random: dict[int, list[int]]) -> Iterator[Step]:
    """The steps of an epoch, as the ranks of that strategy have them."""
    ranks, units = STRATEGIES[strategy].data, case.units_at(epoch)
    items = [[i] for i in order_of(case, epoch, random)] if case.data in SAMPLED else ready_batches(case)
    size = case.batch if case.data in SAMPLED else 1
    used = len(items) - len(items) % (size * ranks) if case.drop_last else len(items)
    if case.limit:
        used = min(used, case.limit * size * ranks)
    for low in range(0, used, size * units):
        mine = items[low : min(low + size * units, used)]
        if len(mine) == size * units or case.data == "stream":
            parts = [mine[at : at + size] for at in range(0, len(mine), size)]
            rounds = [parts[at : at + ranks] for at in range(0, len(parts), ranks)]
            rounds[-1] += [[]] * (ranks - len(rounds[-1]))
        else:
            rounds = _short(mine, size, ranks)
        numbers = [[[i for item in part for i in item] for part in each] for each in rounds]
        yield [[kept(part) for part in each] for each in numbers] if case.filtered else numbers


def _short(items: list[list[int]], size: int, ranks: int) -> list[list[list[list[int]]]]:
    """Full rounds first; what is left goes out evenly, the larger parts to the first ranks."""
    full = len(items) // (size * ranks) * ranks
    parts = [items[j * size : (j + 1) * size] for j in range(full)]
    least, more = divmod(len(items) - full * size, ranks)
    at = full * size
    for rank in range(ranks if least or more else 0):
        count = least + (rank < more)
        parts.append(items[at : at + count])
        at += count
    return [parts[at : at + ranks] for at in range(0, len(parts), ranks)]
