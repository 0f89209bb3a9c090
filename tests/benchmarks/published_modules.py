"""Modules that others have published, trained by Lightning and by ``engine.interop.lightning``: are the final weights the same?

    python tests/benchmarks/published_modules.py [--python VENV/bin/python ...] [--sources FOLDER] [--json] [NAME ...]

Each entry (``published_entries.py``: packages; ``lightning_demos.py``: Lightning's demos, its examples and what its documentation
shows) trains twice, each time in a process of its own: with the real Lightning, and with ``engine.interop.lightning`` in its place
(``as_lightning.py``); nothing else differs. Packages of ``changed_import_entries.py``, on Lightning or Accelerate, and with ``--change-imports``
all packages, are loaded with their import statements changed (``changed_imports.py``); nothing is borrowed there. The table shows the
optimizer steps that were counted and the largest absolute difference between the final weights.

Two documented differences are taken out of the comparison, on both sides alike: shuffled loaders read their data in order (the order is a function
of (seed, epoch) here, and of global random numbers there), and the random numbers of a step are seeded with its number (the loaders draw from the
global generator there). An entry that shows another documented difference names it.

Packages need not fit into one virtual environment: give an interpreter each with ``--python``; the first that has the package runs the entry.
``--sources`` is a folder with checkouts of repositories whose examples are not in their packages, each under its own name: ``pytorch-lightning``,
``lightly``, ``segmentation_models.pytorch``. Nothing is downloaded while entries run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import as_lightning  # noqa: E402
import changed_import_entries  # noqa: E402
import changed_imports  # noqa: E402
import lightning_demos  # noqa: E402
import published_entries  # noqa: E402
from entry import Entry  # noqa: E402

ENTRIES = {
    entry.name: entry
    for entry in (*published_entries.ENTRIES, *lightning_demos.ENTRIES, *changed_import_entries.ENTRIES)
}
LIBRARIES = ("lightning", "engine")
EQUAL = 1e-5
LIMIT_S = 120


@dataclass
class Outcome:
    """What the two trainings of an entry gave."""

    entry: str
    group: str
    package: str
    steps: dict[str, int]
    """Optimizer steps by library; a library that failed has none."""
    difference: float
    """The largest absolute difference of two weights; NaN if a side failed."""
    note: str

    @property
    def equal(self) -> bool:
        return self.difference <= EQUAL


class Steps:
    """Counts optimizer steps and seeds the random numbers of each with its number."""

    def __init__(self) -> None:
        self.count = 0
        self.fresh = True
        register_optimizer_step_post_hook(self.stepped)
        torch.nn.modules.module.register_module_forward_pre_hook(self.forward)

    def stepped(self, *_: Any) -> None:
        self.count += 1
        self.fresh = True
        torch.manual_seed(self.count)

    def forward(self, module: torch.nn.Module, _: Any) -> None:
        if self.fresh and module.training and torch.is_grad_enabled():
            self.fresh = False
            torch.manual_seed(self.count)


class InOrder(torch.utils.data.SequentialSampler):
    """In the place of ``RandomSampler``: the data in order."""

    def __init__(self, data_source: Any, *_: Any, **__: Any) -> None:
        super().__init__(data_source)


def read_in_order() -> None:
    """``DataLoader(shuffle=True)`` reads its data in order, and so does a ``RandomSampler`` that a package makes."""
    torch.utils.data.dataloader.RandomSampler = InOrder  # type: ignore[misc, assignment, attr-defined]
    torch.utils.data.RandomSampler = InOrder  # type: ignore[misc, assignment]
    torch.utils.data.sampler.RandomSampler = InOrder  # type: ignore[misc, assignment]


def train(name: str, finder: as_lightning.Finder | None, out: Path) -> None:
    """Train one entry; write the final weights to a file."""
    random.seed(0)
    torch.manual_seed(0)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(0)
    steps = Steps()
    module = ENTRIES[name].train()
    weights = {
        key: value.detach().clone() for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)
    }
    borrowed = sorted(finder.borrowed) if finder is not None else []
    torch.save({"weights": weights, "steps": steps.count, "borrowed": borrowed}, out)


def worker(names: list[str], library: str, out: Path, change: bool) -> None:
    """Train each entry in a fork of this process, which has imported the library, in a folder of its own; write ``NAME.LIBRARY.pt`` and ``.log``."""
    finder = None
    if library == "engine" and change:
        import_module(changed_import_entries.INSTEAD)
    else:
        finder = as_lightning.install() if library == "engine" else None
        import_module("lightning.pytorch")
    read_in_order()
    torch.set_num_threads(1)
    for name in names:
        process = os.fork()
        if process == 0:
            status = 1
            with open(out / f"{name}.{library}.log", "w") as log, tempfile.TemporaryDirectory() as folder:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                os.chdir(folder)
                signal.alarm(LIMIT_S)
                try:
                    if library == "engine" and change:
                        changed_imports.install(ENTRIES[name].modules)
                    train(name, finder, out / f"{name}.{library}.pt")
                    status = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
        os.waitpid(process, 0)


@cache
def interpreter(modules: tuple[str, ...], pythons: tuple[str, ...]) -> str | None:
    """The first interpreter that has these modules."""
    check = "import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))"
    for python in pythons:
        if subprocess.run([python, "-c", check, *modules], capture_output=True, check=False).returncode == 0:
            return python
    return None


def start(
    names: list[str], library: str, python: str, out: Path, sources: Path | None, change: bool
) -> subprocess.Popen[bytes]:
    """A worker for these entries, under way."""
    command = [python, __file__, *names, "--worker", str(out), "--library", library, *["--change-imports"] * change]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if sources is not None:
        environment["PUBLISHED_SOURCES"] = str(sources)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def result(name: str, library: str, out: Path) -> dict[str, Any]:
    """What a worker wrote, or ``{"error": the last lines of its log}``."""
    file, log = out / f"{name}.{library}.pt", out / f"{name}.{library}.log"
    if file.exists():
        return dict(torch.load(file))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return {"error": "\n".join(lines[-14:]) or f"no result within {LIMIT_S} s"}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest absolute difference, and the name of the weight that has it."""
    if a.keys() != b.keys():
        return math.inf, f"other weights: {sorted(a.keys() ^ b.keys())[:4]}"
    worst, where = 0.0, ""
    for key, value in a.items():
        if value.shape != b[key].shape:
            return math.inf, f"{key} has the shapes {tuple(value.shape)} and {tuple(b[key].shape)}"
        if value.numel() == 0:
            continue
        same = torch.nan_to_num(
            value.double() - b[key].double(), nan=0.0 if value.isnan().equal(b[key].isnan()) else math.inf
        )
        most = same.abs().max().item()
        if most > worst:
            worst, where = most, key
    return worst, where


def compare(entry: Entry, out: Path, show: bool) -> Outcome:
    """Both trainings of an entry."""
    results = {library: result(entry.name, library, out) for library in LIBRARIES}
    notes = [entry.note] if entry.note else []
    for library, found in results.items():
        if "error" in found:
            notes.append(f"{library}: {found['error'].splitlines()[-1][:300]}")
            if show:
                print(f"--- {entry.name} with {library}\n{found['error']}", file=sys.stderr)
    steps = {library: found["steps"] for library, found in results.items() if "steps" in found}
    worst = math.nan
    if len(steps) == len(LIBRARIES):
        worst, where = difference(results["lightning"]["weights"], results["engine"]["weights"])
        if worst > EQUAL:
            notes.append(f"largest at {where}" if math.isfinite(worst) else where)
        if len(set(steps.values())) > 1:
            notes.append("other numbers of steps")
        if results["engine"]["borrowed"]:
            notes.append(f"from Lightning: {', '.join(results['engine']['borrowed'])}")
    return Outcome(entry.name, entry.group, entry.package, steps, worst, "; ".join(notes))


def line(outcome: Outcome) -> str:
    steps = [str(outcome.steps.get(library, "failed")) for library in LIBRARIES]
    return f"{outcome.package:28} {outcome.entry:34} {steps[0]:>7} {steps[1]:>7}  {outcome.difference:9.2e}  {outcome.note}"


def summary(outcomes: list[Outcome]) -> list[str]:
    """Counts by group."""
    lines = []
    for group in dict.fromkeys(outcome.group for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.group == group and "lightning" in outcome.steps]
        ran = [outcome for outcome in mine if "engine" in outcome.steps]
        equal = [outcome for outcome in ran if outcome.equal and outcome.steps["engine"] > 0]
        packages = [len({outcome.package for outcome in some}) for some in (mine, ran, equal)]
        lines.append(
            f"{group}: {len(mine)} entries of {packages[0]} packages that Lightning trains; {len(ran)} of {packages[1]} run unchanged, "
            f"{len(equal)} of {packages[2]} with weights equal to {EQUAL:g}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="parts of the names of entries, packages or groups; all by default"
    )
    parser.add_argument("--python", action="append", default=[], help="an interpreter to look for packages in")
    parser.add_argument("--sources", type=Path, default=None, help="a folder with checkouts of repositories")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--errors", action="store_true", help="print the last lines of failed trainings")
    parser.add_argument("--change-imports", action="store_true", help="change the import statements of all packages")
    parser.add_argument("--list", action="store_true", help="print the names of the entries")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.names, args.library, args.worker, args.change_imports)
        return 0
    wanted = [
        entry
        for entry in ENTRIES.values()
        if not args.names or any(part in f"{entry.group}/{entry.package}/{entry.name}" for part in args.names)
    ]
    if args.list:
        print("\n".join(f"{entry.group:9} {entry.package:28} {entry.name}" for entry in wanted))
        return 0
    sources = args.sources.resolve() if args.sources else None
    places: dict[tuple[str, bool], list[Entry]] = {}
    for entry in wanted:
        python = interpreter(entry.modules, (*args.python, sys.executable))
        if python is None or (entry.source and not (sources and (sources / entry.source).exists())):
            missing = entry.package if python is None else entry.source
            print(f"left out: {entry.name}: {missing} is not there", file=sys.stderr)
        else:
            places.setdefault((python, args.change_imports or entry.group == changed_import_entries.GROUP), []).append(
                entry
            )
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for (python, change), entries in places.items():
            names = [entry.name for entry in entries]
            workers = [start(names, library, python, Path(folder), sources, change) for library in LIBRARIES]
            for each in workers:
                each.wait()
            for entry in entries:
                outcomes.append(compare(entry, Path(folder), args.errors))
                if not args.json:
                    print(line(outcomes[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        print(*summary(outcomes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
