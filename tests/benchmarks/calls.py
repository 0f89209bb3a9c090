"""How many calls a step makes over a bare PyTorch loop's, with the peers beside it: unlike times, the same on every machine.

    python tests/benchmarks/calls.py [--steps 400] [--case plain] [--no-peers] [--json] [--check]
    python tests/benchmarks/calls.py --write           # the table in engine/README.md, for which the peers have to be installed

Calls of Python and C functions are counted by ``sys.setprofile`` (its events ``call`` and ``c_call``) on the thread that trains, in a run of 50
steps and in a longer one: their difference holds no start-up, and its share of log boundaries is that of a long run. The two
processes of the DDP case are started by torchrun. With ``--check`` the exit status is 1 when ``Fit`` makes more calls than ``GOALS`` allow.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import bare
import ours
import peers
import torch
import torch.distributed as dist
from cases import DDP_CASES, LOCAL_CASES, Case, Contender, Work, named
from rich.console import Console
from rich.table import Table

from engine.distributed import agreement

SHORT = 50
CASES = (*LOCAL_CASES, *DDP_CASES[:1])
PROMISED = "Fit"
Counts = dict[str, dict[str, float]]
"""Calls a step, by case and contender."""


def counted(contender: Contender, work: Work) -> int:
    """The calls of one whole run."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event == "call" or event == "c_call":
            count += 1

    sys.setprofile(note)
    try:
        contender.train(work)
    finally:
        sys.setprofile(None)
    return count


def calls(contender: Contender, case: Case, steps: int) -> float:
    """Calls a step."""
    for _ in range(2):  # imports, caches
        contender.train(case.work(5))
    short, long = case.work(SHORT), case.work(SHORT + steps)
    return (counted(contender, long) - counted(contender, short)) / (long.steps - short.steps)


def count_all(cases: Sequence[Case], steps: int, with_peers: bool) -> Counts:
    """The cases of this list, in this process."""
    others = list(peers.installed()[0]) if with_peers else []
    contenders = [bare.load(), ours.load_fit(), ours.load_engine(), *others]
    found: Counts = {}
    for case in cases:
        found[case.name] = {}
        for contender in contenders:
            if contender.can(case):
                try:
                    found[case.name][contender.name] = calls(contender, case, steps)
                except Exception as error:
                    if contender.kind != "peer":
                        raise
                    print(f"left out: {case.name}, {contender.name}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def two_processes(args: argparse.Namespace) -> Counts:
    """The DDP case, counted on rank 0 of two."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += [f"--steps={args.steps}", f"--worker={path}", *["--no-peers"] * args.no_peers]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        found: Counts = json.loads(path.read_text())
    return found


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; rank 0 writes what it counted to the file ``args.worker``."""
    # The ranks check each other's flags about twice a second: in fewer steps where steps are slow, as they are on a busy machine. Counted is a
    # training whose steps are fast.
    agreement.PERIOD_S = 1e6
    dist.init_process_group("gloo")
    found = count_all(DDP_CASES[:1], args.steps, not args.no_peers)
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(found))
    dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def over(found: Counts, case: str) -> float:
    """Calls a step of ``Fit`` over the bare loop's."""
    return found[case][PROMISED] - found[case]["bare"]


GOALS = {
    "plain": ("a plain step", 24, lambda found: over(found, "plain")),
    "one log": ("one self.log", 5, lambda found: over(found, "one log") - over(found, "plain")),
    "twenty logs": ("each of twenty", 5, lambda found: (over(found, "twenty logs") - over(found, "plain")) / 20),
    "DataLoader": ("ready batches of a DataLoader", 35, lambda found: over(found, "DataLoader")),
    "DDP tiny": ("a second DDP rank", 10, lambda found: over(found, "DDP tiny") - over(found, "plain")),
}
"""What a case shows, how many calls it may be at most, and how they follow from the counts."""


def missed(found: Counts) -> list[str]:
    """The goals that are missed, of the cases that were counted."""
    wrong = []
    for case, (what, most, value) in GOALS.items():
        if case in found and "plain" in found and (number := value(found)) > most:
            wrong.append(f"{what}: {number:.1f} calls, at most {most}")
    return wrong


README = Path(__file__).resolve().parents[2] / "engine" / "README.md"
COLUMNS = ("Fit", "Engine", "Fabric", "Accelerate", "Lightning")
"""Contenders in the table of the README."""
ROWS = {
    "plain": ("plain", "{}"),
    "one log": ("one `self.log`", "{} over plain"),
    "twenty logs": ("twenty `self.log`", "{} each"),
    "ten callbacks": ("ten callbacks with two hooks each", ""),
    "accumulate 4": ("four micro-batches", ""),
    "bf16": ("bf16", ""),
    "DataLoader": ("batches of a `DataLoader`", "{}"),
    "DDP tiny": ("DDP, two ranks", "{} over plain"),
}
"""How the README calls a case, and what its goal means."""
TABLE = re.compile(
    r"(?<=\| step \| bare \| `Fit` \| goal \| `Engine` \| Fabric \| Accelerate \| Lightning \|\n)(?:\|.*\n)+"
)
VERSIONS = re.compile(r"\(Python [\d.]+, torch [\d.]+, CPU\)")
MARGIN = 1.1, 3.0
"""What may be counted for a number of the README, times and plus: releases of torch, and runs of another length, differ by less."""


def written(found: Counts, page: str) -> str:
    """The README with these counts of all cases and columns, and with the versions of this process."""
    lines = ["|---" * (len(COLUMNS) + 3) + "|"]
    for case, (label, goal) in ROWS.items():
        counts = found[case]
        fit, *others = (f"{counts[name] - counts['bare']:+,.0f}" if name in counts else "" for name in COLUMNS)
        most = goal.format(GOALS[case][1]) if goal else ""
        lines.append(
            " | ".join(["", label, f"{counts['bare']:,.0f}", fit, most, *others, ""]).replace("  ", " ").strip()
        )
    python, release = platform.python_version_tuple(), torch.__version__.split(".")
    page = VERSIONS.sub(f"(Python {'.'.join(python[:2])}, torch {'.'.join(release[:2])}, CPU)", page, count=1)
    return TABLE.sub(lambda _: "".join(f"{line}\n" for line in lines), page, count=1)


def promised(page: str) -> Iterator[tuple[str, str, float]]:
    """The case, the contender and the number of calls of each cell of the README's table that is this library's or the bare loop's."""
    (rows,) = TABLE.findall(page)
    cases = {label: case for case, (label, _) in ROWS.items()}
    for row in rows.splitlines()[1:]:
        label, bare_calls, fit, _, engine, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        for name, cell in (("bare", bare_calls), ("Fit", fit), ("Engine", engine)):
            if cell:
                yield cases[label], name, float(cell.replace(",", ""))


def above(found: Counts, page: str) -> list[str]:
    """Counts that are higher than the README says, by more than :data:`MARGIN`. Lower ones are welcome."""
    factor, more = MARGIN
    lines = []
    for case, name, number in promised(page):
        if name in found.get(case, {}):
            counted_calls = found[case][name] - (found[case]["bare"] if name != "bare" else 0)
            if counted_calls > number * factor + more:
                lines.append(f"{case}, {name}: {counted_calls:.1f} calls, {README.name} says {number:.0f}")
    return lines


def table(found: Counts) -> Table:
    """A row a case: the bare loop's calls, then what each contender adds."""
    contenders = list(dict.fromkeys(name for row in found.values() for name in row if name != "bare"))
    result = Table(title="Calls a step over the bare loop's")
    for column in ("case", "bare", *contenders):
        result.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for case, row in found.items():
        cells = [f"{row[name] - row['bare']:+.1f}" if name in row else "-" for name in contenders]
        result.add_row(case, f"{row['bare']:.0f}", *cells)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps that are counted (400)")
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--no-peers", action="store_true", help="count this library only")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--write", action="store_true", help="write the table in engine/README.md")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write and (args.case or args.no_peers or set(COLUMNS) & set(peers.installed()[1])):
        parser.error('--write counts all cases and the peers of the table: pip install -e ".[bench]"')
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.worker:
        worker(args)
        return 0
    found = (
        count_all(named(LOCAL_CASES, args.case), args.steps, not args.no_peers) if named(LOCAL_CASES, args.case) else {}
    )
    if named(DDP_CASES[:1], args.case):
        found |= two_processes(args)
    wrong = missed(found)
    if args.write:
        README.write_text(written(found, README.read_text()))
    if args.json:
        print(json.dumps({"calls": found, "missed": wrong}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 180)
        console.print(table(found))
        for line in wrong:
            console.print(f"[red]MISSED[/]  {line}", highlight=False)
    return int(args.check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
