"""``python -m tests.failure.campaign --kills 200``: a table of set-ups, kills in each phase, and what was lost. Exit status 1: something was."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .campaign import Campaign
from .setups import SETUPS, TREE, runnable
from .table import table


def main() -> int:
    """The exit status: 1 when something was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.failure.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="so many in all, shared out among the set-ups")
    parser.add_argument("--setups", default=",".join(runnable()), help="of " + ", ".join(SETUPS))
    parser.add_argument("--seed", type=int, default=0, help="another one draws other kills")
    parser.add_argument(
        "--job", type=int, default=None, help="only the job of this number of each set-up: to repeat its kills"
    )
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run beside each other")
    parser.add_argument("--tree", type=Path, default=TREE, help="the tree whose library is tested")
    given = parser.parse_args()
    names = given.setups.split(",")
    unknown = [name for name in names if name not in SETUPS]
    if unknown:
        parser.error(f"unknown set-ups: {', '.join(unknown)}; possible: {', '.join(SETUPS)}")
    if left_out := [name for name in SETUPS if name not in runnable()]:
        print(f"not installed: {', '.join(sorted({SETUPS[n].needs for n in left_out}))}; without {', '.join(left_out)}")
    if given.kills < 1 or given.at_once < 1:
        parser.error("--kills and --at-once must be at least 1")
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    place = Path(tempfile.mkdtemp(prefix="campaign-"))
    campaign = Campaign([SETUPS[name] for name in names], place, given.tree, given.seed, report)
    try:
        campaign.run(given.kills, given.at_once, given.job)
    finally:  # also what was found before Ctrl-C
        print(table(campaign.rows))
    losses = [text for row in campaign.rows for text in row.found.texts]
    print("\n".join(losses) or "nothing was lost")
    if losses:
        print(f"the files of these jobs: {place}")
    else:
        campaign.clean()
    return int(bool(losses))


if __name__ == "__main__":
    sys.exit(main())
