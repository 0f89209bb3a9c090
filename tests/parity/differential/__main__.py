"""``python -m tests.parity.differential --cases 2000``, or ``--minutes 60``: a table of strategies, cases and mismatches, and reproducers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .cases import STRATEGIES, wanted_values
from .pool import ROOT, Pools
from .search import Search, reproducer

CHUNK = 25
"""Cases of one strategy in a row."""


def main() -> int:
    """The exit status: 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.differential", description=__doc__)
    parser.add_argument("--cases", type=int, default=None, help="so many in all")
    parser.add_argument("--minutes", type=float, default=None, help="for so long")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="of " + ", ".join(STRATEGIES))
    parser.add_argument("--seed", type=int, default=0, help="another one draws other cases")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a case hangs")
    parser.add_argument("--shrink", type=float, default=60, help="seconds to shrink a mismatch")
    parser.add_argument("--without", default="", help="leave out cases with such values: data=stream,body=complex")
    parser.add_argument(
        "--with",
        dest="axes",
        default="",
        help="only cases in which fields have such values: stop=early, or stop (any but the simplest)",
    )
    parser.add_argument("--first", action="store_true", help="end at the first mismatch")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose library is tested")
    given = parser.parse_args()
    names = given.strategies.split(",")
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown:
        parser.error(f"unknown strategies: {', '.join(unknown)}; possible: {', '.join(STRATEGIES)}")
    try:
        wanted = wanted_values(text for text in given.axes.split(",") if text)
    except ValueError as error:
        parser.error(str(error))
    without = [(name, value) for name, _, value in (text.partition("=") for text in given.without.split(",") if text)]
    minutes = given.minutes if given.minutes is not None else None if given.cases else 10.0
    deadline = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with Pools(given.tree, given.timeout) as pools:
        searches = [Search(name, pools, given.shrink, deadline, without, report, wanted) for name in names]
        rounds, total = 0, given.cases or sys.maxsize
        while time.monotonic() < deadline and sum(s.ran for s in searches) < total:
            for index, search in enumerate(searches):
                left = total - sum(s.ran for s in searches)
                if left <= 0 or time.monotonic() > deadline:
                    break
                search.run(min(CHUNK, left), given.seed * 1_000_003 + rounds * 101 + index)
                if given.first and search.found:
                    break
            rounds += 1
            counts = ", ".join(f"{s.strategy} {s.ran}/{s.mismatches}" for s in searches)
            report(f"after round {rounds} (cases/mismatches): {counts}")
            if given.first and any(s.found for s in searches):
                break
    print(f"{'strategy':<12}{'cases':>8}{'mismatches':>12}")
    for search in searches:
        print(f"{search.strategy:<12}{search.ran:>8}{search.mismatches:>12}")
    print(f"{'all':<12}{sum(s.ran for s in searches):>8}{sum(s.mismatches for s in searches):>12}")
    for search in searches:
        for verdict in search.found:
            print(f"\n{reproducer(verdict)}")
    return int(any(search.found for search in searches))


if __name__ == "__main__":
    sys.exit(main())
