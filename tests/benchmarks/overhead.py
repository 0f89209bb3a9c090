"""What a trainer adds to a step of a bare PyTorch loop, on one CPU thread, with its peers measured beside it.

    python tests/benchmarks/overhead.py [--rounds 15] [--steps 1000] [--case plain] [--no-peers] [--json] [--check]

For every case (plain, one log, ..., DDP on two processes) and every contender:

    check that 20 steps give the bare loop's weights        # the same work, or it is left out and named
    for each round:                                         # every contender once, each round starting with another one
        a short run and a long run from nothing             # their difference holds no start-up
        us a step = (long - short) / (long steps - short steps)
        over = us a step - the bare loop's of this round
    report the median of the rounds                     # "bare again" is a contender too: the error of all this

One process is timed by processor time (``measure.Watch`` says why). The DDP cases run in two processes started by torchrun, by
the wall clock; bare DDP and the contenders take turns in the same processes. Two busy cores need many rounds for a steady ratio.
With ``--check`` the exit status is 1 when a bound is missed or a peer is ahead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bare
import ours
import peers
import torch
import torch.distributed as dist
from cases import DDP_CASES, LOCAL_CASES, Case, named
from measure import Sample, Watch, machine, measure, tell
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bound:
    """What ``Fit`` may cost in a case: microseconds over the bare loop, or a ratio to it."""

    case: str
    limit: float
    ratio: bool = False


BOUNDS = (Bound("plain", 8), Bound("one log", 15), Bound("twenty logs", 60), Bound("DDP 83 k", 1.03, ratio=True))
PROMISED = "Fit"


@dataclass(frozen=True)
class Verdict:
    held: bool
    text: str


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Each bound against its case, and ``Fit`` against every peer in every case."""
    verdicts = []
    mine = {sample.case: sample for sample in samples if sample.contender == PROMISED}
    for bound in BOUNDS:
        if (found := mine.get(bound.case)) is None:
            continue
        value = found.ratio if bound.ratio else found.over_us
        shown = (
            f"{value:.3f}x, at most {bound.limit:.2f}x"
            if bound.ratio
            else f"{value:+.1f} us, at most +{bound.limit:g} us"
        )
        low, high = found.over_quartiles_us
        detail = f"quartiles {low:+.1f} to {high:+.1f}, fastest runs {found.fastest_over_us:+.1f} us"
        verdicts.append(Verdict(value <= bound.limit, f"{bound.case}: {shown} ({detail})"))
    for case, found in mine.items():
        rivals = [sample for sample in samples if sample.case == case and sample.kind == "peer"]
        ahead = [f"{rival.contender} ({rival.over_us:+.1f} us)" for rival in rivals if rival.over_us <= found.over_us]
        if rivals:
            place = f"behind {', '.join(ahead)}" if ahead else "ahead of every peer"
            verdicts.append(Verdict(not ahead, f"{case}: {found.over_us:+.1f} us, {place}"))
    return verdicts


def local(args: argparse.Namespace, cases: Sequence[Case]) -> tuple[list[Sample], dict[str, str]]:
    """The cases of this list, in this process."""
    found, absent = ([], {}) if args.no_peers else peers.installed()
    others = [bare.load_again(), ours.load_fit(), ours.load_engine(), *found]
    distributed = dist.is_initialized()
    samples, wrong = measure(
        cases,
        bare.load(),
        others,
        rounds=args.rounds,
        steps=args.steps,
        watch=Watch(time.perf_counter, dist.barrier) if distributed else Watch(),
        tell=tell if not distributed or dist.get_rank() == 0 else lambda line: None,
    )
    return samples, absent | wrong


def worker(args: argparse.Namespace) -> None:
    """One of the two DDP processes: measures its cases; rank 0 writes what it saw to the file ``args.worker``."""
    dist.init_process_group("gloo")
    samples, left_out = local(args, named(DDP_CASES, args.case))
    if dist.get_rank() == 0:
        Path(args.worker).write_text(
            json.dumps({"samples": [asdict(sample) for sample in samples], "left_out": left_out})
        )
    dist.barrier()
    # A trainer may have closed the group at its own exit handler's request; closing twice is an error.
    if dist.is_initialized():
        dist.destroy_process_group()


def two_processes(args: argparse.Namespace) -> tuple[list[Sample], dict[str, str]]:
    """The DDP cases, measured by two processes under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "samples.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += [
            f"--rounds={args.rounds}",
            f"--steps={args.steps}",
            f"--worker={found}",
            *(f"--case={name}" for name in args.case),
        ]
        subprocess.run(command + ["--no-peers"] * args.no_peers, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        content = json.loads(found.read_text())
    return [Sample(**sample) for sample in content["samples"]], content["left_out"]


def table(samples: Sequence[Sample]) -> Table:
    """A row a case: the bare loop's step, then what each contender adds to it."""
    contenders = list(dict.fromkeys(sample.contender for sample in samples if sample.contender != "bare"))
    result = Table(title="Time of a step over the bare loop's, microseconds (and ratio)")
    for column in ("case", "bare", *contenders):
        result.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for case in dict.fromkeys(sample.case for sample in samples):
        row = {sample.contender: sample for sample in samples if sample.case == case}
        cells = [f"{row[name].over_us:+.1f} ({row[name].ratio:.2f}x)" if name in row else "-" for name in contenders]
        result.add_row(case, f"{row['bare'].step_us:.1f}", *cells)
    return result


def show(report: dict[str, Any], samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> None:
    # A pipe has no width of its own and rich would fold the table to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(samples))
    for name, reason in report["left_out"].items():
        console.print(f"[yellow]left out[/]  {name}: {reason}", highlight=False)
    for verdict in verdicts:
        console.print(f"[{'green]held  ' if verdict.held else 'red]MISSED'}[/]  {verdict.text}", highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in report["machine"].items()), highlight=False)


def arguments() -> argparse.Namespace:
    names = [case.name for case in LOCAL_CASES + DDP_CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="times that everyone is measured (15)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of a long run (1000)")
    parser.add_argument("--case", action="append", default=[], choices=names, help="only this case; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="measure this library only")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed or a peer is ahead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    torch.set_num_threads(1)
    # Advice of the peers (few workers, no GPU, ...) would be printed once a run.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.worker:
        worker(args)
        return 0
    samples, left_out = local(args, named(LOCAL_CASES, args.case)) if named(LOCAL_CASES, args.case) else ([], {})
    if named(DDP_CASES, args.case):
        more, reasons = two_processes(args)
        samples, left_out = samples + more, left_out | reasons
    verdicts = judge(samples)
    report: dict[str, Any] = {
        "machine": machine(),
        "clock": "processor time; DDP: wall",
        "rounds": args.rounds,
        "steps": args.steps,
    }
    report["left_out"] = left_out
    if args.json:
        report |= {
            "samples": [asdict(sample) for sample in samples],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        print(json.dumps(report, indent=2))
    else:
        show(report, samples, verdicts)
    return int(args.check and not all(verdict.held for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
