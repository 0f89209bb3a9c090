"""What a trainer adds before the first step: its import, the command line's ``--help``, the way from ``Fit.run`` to the first step.

    python tests/benchmarks/startup.py [--rounds 5] [--no-peers] [--json] [--check]

Everything is timed in fresh processes that take turns, after one round that is thrown away (it writes the
byte code and fills the page cache); the numbers are medians over the rounds.

- *imports*: inside the process, time of the import statement after ``import torch`` is done.
- *command*: wall-clock time of the whole process.
- *first step*: from ``Fit(...)`` (or the bare loop's first line), with all imports done, to the first call of the network, and to
  the second one, which is when the first step is over. A first optimizer makes torch import ``torch._dynamo`` (about a second);
  this is done beforehand, for everyone.

With ``--check`` the exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

IMPORTS = {
    "torch": "pass",
    "engine": "import engine",
    "Fit, TrainModule, Engine": "from engine import Engine, Fit, TrainModule",
}
PEER_IMPORTS = {
    "accelerate": "from accelerate import Accelerator",
    "lightning": "from lightning.pytorch import LightningModule, Trainer",
    "lightning.fabric": "from lightning.fabric import Fabric",
    "ignite": "from ignite.engine import Engine",
    "torchtnt": "from torchtnt.framework.auto_unit import AutoUnit",
}
TIMED_IMPORT = """
import sys, time
start = time.perf_counter()
import torch
torch_done = time.perf_counter()
exec(sys.argv[1])
print(torch_done - start, time.perf_counter() - torch_done)
"""
FIRST_STEP = ("bare", "Fit")
PEER_FIRST_STEP = {
    "Lightning": "lightning",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Ignite": "ignite",
    "torchtnt": "torchtnt",
}

Values = tuple[float, ...]
Probe = Callable[[], Values]


@dataclass(frozen=True)
class Row:
    """One measured thing: median and range over the rounds, seconds."""

    group: str
    name: str
    seconds: float
    low: float
    high: float
    limit: float | None = None
    """What it may take at most."""

    @property
    def held(self) -> bool:
        return self.limit is None or self.seconds <= self.limit


def row(group: str, name: str, times: Sequence[float], limit: float | None = None) -> Row:
    return Row(group, name, median(times), min(times), max(times), limit)


def fresh(*arguments: str) -> str:
    """What a new Python process with these arguments prints; its error text is raised as ``RuntimeError``."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def take_turns(probes: Mapping[str, Probe], rounds: int) -> tuple[dict[str, list[Values]], dict[str, str]]:
    """Each probe's values by round, one of each a round. A probe that fails in the first, unused round is left out and named."""
    wrong: dict[str, str] = {}
    for name, probe in probes.items():
        try:
            probe()
        except RuntimeError as error:
            wrong[name] = str(error).strip().splitlines()[-1]
    found: dict[str, list[Values]] = {name: [] for name in probes if name not in wrong}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}: {', '.join(found)}", file=sys.stderr, flush=True)
        for name, values in found.items():
            values.append(probes[name]())
    return found, wrong


def timed_import(statement: str) -> Values:
    """Seconds of ``import torch`` and of the statement after it."""
    return tuple(float(value) for value in fresh("-c", TIMED_IMPORT, statement).split())


def imports(rounds: int, with_peers: bool) -> tuple[list[Row], dict[str, str]]:
    statements = IMPORTS | (PEER_IMPORTS if with_peers else {})
    found, wrong = take_turns(
        {name: partial(timed_import, statement) for name, statement in statements.items()}, rounds
    )
    torch_alone = [first for values in found.values() for first, _ in values]
    rows = [row("imports", "import torch", torch_alone)]
    for name, values in found.items():
        if name != "torch":
            rows.append(
                row(
                    "imports", f"+ {statements[name]}", [rest for _, rest in values], 0.10 if name == "engine" else None
                )
            )
    return rows, wrong


def wall(*command: str) -> Values:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return (time.perf_counter() - start,)


def commands(rounds: int) -> tuple[list[Row], dict[str, str]]:
    script = Path(sys.executable).with_name("fit")
    # Not installed, as in a checkout on the path: what the script would run.
    fit = [str(script)] if script.exists() else [sys.executable, "-m", "engine.cli.main"]
    probes = {
        "python -c pass": partial(wall, sys.executable, "-c", "pass"),
        "fit --help": partial(wall, *fit, "--help"),
    }
    found, wrong = take_turns(probes, rounds)
    limits = {"fit --help": 0.3}
    return [
        row("command", name, [value for (value,) in values], limits.get(name)) for name, values in found.items()
    ], wrong


def first_steps(rounds: int, with_peers: bool) -> tuple[list[Row], dict[str, str]]:
    names = [*FIRST_STEP, *(name for name, package in PEER_FIRST_STEP.items() if with_peers and find_spec(package))]

    script = str(Path(__file__).with_name("first_step.py"))

    def probe(name: str) -> Values:
        return tuple(json.loads(fresh(script, name).splitlines()[-1]))

    found, wrong = take_turns({name: partial(probe, name) for name in names}, rounds)
    rows = []
    for name, values in found.items():
        if name == "bare":
            rows.append(row("first step", "bare loop, to its first step", [begins for begins, _ in values]))
            rows.append(row("first step", "bare loop, to that step's end", [ends for _, ends in values]))
            continue
        pairs = list(zip(values, found["bare"], strict=True))
        limit = 0.05 if name == "Fit" else None
        rows.append(
            row("first step", f"+ {name}, to its first step", [mine[0] - base[0] for mine, base in pairs], limit)
        )
        rows.append(
            row("first step", f"+ {name}, to that step's end", [mine[1] - base[1] for mine, base in pairs], limit)
        )
    return rows, wrong


def show(rows: Sequence[Row], left_out: Mapping[str, str]) -> None:
    table = Table(title="Start-up, milliseconds (a leading + means: beyond the first row of the group)")
    for column in ("group", "what", "median", "least", "most", "bound", ""):
        table.add_column(column, justify="left" if column in ("group", "what") else "right", no_wrap=True)
    for one in rows:
        times = [f"{value * 1e3:.1f}" for value in (one.seconds, one.low, one.high)]
        verdict = "" if one.limit is None else "[green]held" if one.held else "[red]MISSED"
        table.add_row(one.group, one.name, *times, "" if one.limit is None else f"{one.limit * 1e3:.0f}", verdict)
    # A pipe has no width of its own and rich would fold the table to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"[yellow]left out[/]  {name}: {reason}", highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that everything is measured (5)")
    parser.add_argument("--no-peers", action="store_true", help="measure this library only")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bound is missed")
    args = parser.parse_args()
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    peers = not args.no_peers
    for group in (imports(args.rounds, peers), commands(args.rounds), first_steps(args.rounds, peers)):
        rows += group[0]
        left_out |= group[1]
    if args.json:
        shown = [asdict(one) | {"held": one.held} for one in rows]
        print(json.dumps({"python": sys.version, "rounds": args.rounds, "left_out": left_out, "rows": shown}, indent=2))
    else:
        show(rows, left_out)
    missing = {"engine", "fit --help", "Fit"} & set(left_out)
    return int(bool(missing) or (args.check and not all(one.held for one in rows)))


if __name__ == "__main__":
    sys.exit(main())
