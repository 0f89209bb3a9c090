"""One case from start to verdict."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from typing import Any

from .cases import STRATEGIES, Case
from .compare import differences
from .pool import Failed, Pools
from .reference import expected


def run_case(case: Case, pools: Pools) -> list[str]:
    """What is wrong with the case, a line each; nothing when the library trains it as the loop does."""
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        try:
            return _verdict(case, pools, root)
        except Failed as error:
            return [] if _may_refuse(case) and error.alike and is_ours(str(error)) else [str(error)]


def _may_refuse(case: Case) -> bool:
    """Whether a case is odd enough for the library to refuse it: exact, or an error of its own on all ranks."""
    return bool(case.conditional or case.again or case.configured or case.noisy)


def is_ours(text: str) -> bool:
    """Whether a traceback ends in an error that the library raises itself, and not in one of torch's or gloo's."""
    frames = re.findall(r'^  File "([^"]+)".*\n    (.*)', text, re.MULTILINE)
    return bool(frames) and "/engine/" in frames[-1][0] and frames[-1][1].startswith("raise ")


def _verdict(case: Case, pools: Pools, root: str) -> list[str]:
    given: dict[str, Any] = {"case": dataclasses.asdict(case), "root": root}
    orders = pools.run(1, {**given, "orders": True}) if case.data in ("shuffled", "drawn", "distributed") else [{}]
    random = {int(epoch): order for epoch, order in orders[0].items()}
    _check_orders(case, random)
    wanted = expected(case, random)
    if case.none and not wanted.steps:
        return []  # an error of the library's, which has no result: no batch had a loss
    parts = 2 if 0 < case.resume < wanted.steps else 1
    names = [case.strategy, case.second][:parts]
    runs = [
        pools.run(STRATEGIES[name].world, {**given, "part": part, "parts": parts}) for part, name in enumerate(names)
    ]
    return differences(case, wanted, runs)


def _check_orders(case: Case, random: dict[int, list[int]]) -> None:
    """A shuffled order has each sample once, and each epoch has its own."""
    if case.data == "drawn":
        return
    for epoch, order in random.items():
        if sorted(order) != list(range(case.samples)):
            raise Failed(f"the order of epoch {epoch} is not a permutation of {case.samples} samples: {order}")
    if case.samples > 11 and len({tuple(order) for order in random.values()}) < len(random):
        raise Failed(f"epochs have the same order: {random}")


def check(case: Case) -> None:
    """Run one case in separate processes, and print what is wrong with it: the last line of a reproducer."""
    with Pools() as pools:
        print("\n".join(run_case(case, pools)) or "as expected")
