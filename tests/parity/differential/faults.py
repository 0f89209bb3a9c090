"""``python -m tests.parity.differential.faults``: does the search find what it is for? One fault each in copies of the library."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from .cases import wanted_values
from .pool import ROOT, Pools
from .search import Search, Verdict, reproducer


class Fault(NamedTuple):
    """A line of the library, made wrong."""

    what: str
    file: str
    right: str
    wrong: str
    strategies: tuple[str, ...] = ("single", "ddp2")
    seed: int = 5000
    """Of the first random cases: for a fault that needs many, one that shows it early."""
    axes: tuple[str, ...] = ()
    """Values that the cases must have, as ``--with`` takes them: of a fault that only an axis shows, which few cases have."""


FAULTS = {
    "gradients": Fault(
        "each micro-batch weighs the same", "engine/step/position.py",
        "divisor=total / (micro[rank] * world_size) if micro[rank] else 1.0", "divisor=float(len(sizes))",
    ),
    "window": Fault(
        "the first epoch's window holds in all", "engine/loop/loaders.py",
        "self._engine.accumulate_grad_batches = self.window_at(state.epoch)", "self._engine.accumulate_grad_batches = self.window_at(0)",
    ),
    "sampler": Fault(
        "a short window is cut at wrong places", "engine/data/deal.py",
        "edges = [last + r * part + min(r, larger) for r", "edges = [last + r * part + (larger if r else 0) for r",
        ("ddp3", "ddp2"),
    ),
    "metrics": Fault(
        "all values of a mean weigh as the first", "engine/metrics/reductions.py",
        "and len(set(weights)) == 1:", "and weights:",
        seed=6010,
    ),
    "scheduler": Fault(
        "schedules count steps that were skipped", "engine/loop/optimization.py",
        "        if happened:\n            state, logbook = self._state, self._logbook\n            state.step += 1\n",
        "        state, logbook = self._state, self._logbook\n        state.step += happened\n        if state.step:\n",
        axes=("poison", "schedule=step"),
    ),
    "clipping": Fault(
        "the norm is that of the sum", "engine/step/gradients.py",
        "    if divisor is not None:\n        norm = norm / divisor\n", "",
        seed=6028,
    ),
    "scaler": Fault(
        "the window's weight is forgotten where the scale is undone", "engine/step/scaler.py",
        "            inverse = inverse / divisor\n", "            pass\n",
        seed=6013,
    ),
    "ddp sync": Fault(
        "after a micro-batch that is not reduced none is", "engine/strategies/ddp.py",
        "                model.require_backward_grad_sync = enabled\n", "                model.require_backward_grad_sync = False\n",
        ("ddp2",),
    ),
    "resume": Fault(
        "what was logged in the epoch before the save is lost", "engine/loop/run_snapshot.py",
        "recorder.load_state_dicts, [row[\"recorder\"] for row in rows]", "recorder.load_state_dicts, []",
    ),
    "manual optimization": Fault(
        "gradients are averaged for clipping only",
        "engine/loop/steps.py",
        "        else:\n            self._average()\n        run.phases",
        "        run.phases",
        ("ddp2",),
        seed=6010,
    ),
    "random numbers": Fault(
        "a resume draws a random number more", "engine/data/loader.py",
        "with torch.random.fork_rng(devices=()) if begun_before else contextlib.nullcontext():", "with contextlib.nullcontext():",
        ("single",), axes=("dropout", "resume"),
    ),
    "members": Fault(
        "a resume opens a later member before its turn", "engine/data/combined.py",
        "if first is not None and (not start or self._member_of(previous) == self._member_of(first)):", "if first is not None:",
        ("single",), axes=("dropout", "resume", "data=combined"),
    ),
    "batch norm": Fault(
        "statistics are those of each rank", "engine/transforms/batch_norm.py",
        "if enabled and group.world_size > 1 else None", "if enabled and group.world_size > 2 else None",
        ("ddp2",), axes=("sync",),
    ),
    "average": Fault(
        "after a resume the average starts again", "callbacks/weight_averaging.py",
        'int(state["n_averaged"]), state["step"]', '0, state["step"]',
        axes=("average", "resume"),
    ),
    "minimum": Fault(
        "a wish before the minimum is forgotten", "engine/loop/stopping.py",
        "        if self.waiting and self.may_stop:\n", "        if False:\n",
        axes=("stop", "min_steps"),
    ),
    "early stopping": Fault(
        "after a resume the best score is forgotten", "callbacks/early_stopping.py",
        '        self.best_score = state["best_score"]\n', "",
        axes=("stop=early", "resume"),
    ),
    "global batch": Fault(
        "the global batch is that of each rank", "engine/loop/batch_sizes.py",
        "micro_batch = batch * ranks", "micro_batch = batch",
        ("ddp2",), axes=("by_size",),
    ),
    "lists": Fault(
        "a resume switches lists of both kinds of parameters on", "engine/strategies/fsdp.py",
        "            self._switch_off_lists(optimizer)  # a run of another strategy may have saved them switched on\n", "            pass\n",
        ("single", "fsdp2"), axes=("kernel=foreach", "resume", "body=tied"),
    ),
    "epochs": Fault(
        "a schedule of every second epoch steps in each", "engine/loop/train.py",
        "                and (state.epoch + 1) % schedule.frequency == 0\n", "",
        axes=("schedule=epochs",),
    ),
    "compiled": Fault(
        "autocast's hooks are compiled", "engine/engine.py",
        "attach(model, is_whole(self._compile))", "attach(model)",
        ("single",), axes=("compiled", "door=engine", "precision=bf16-mixed"),
    ),
    "pipeline": Fault(
        "each chunk weighs as the whole micro-batch", "engine/strategies/pipelined_passes.py",
        "                divisor /= fraction\n", "                pass\n",
        ("pp2",), axes=("pipeline",),
    ),
    "closure": Fault(
        "gradients of a closure's second evaluation are added to the first's", "engine/loop/closure_step.py",
        "self._zero(self._window[0][1])", "pass",
        axes=("closure=sam",),
    ),
}  # fmt: skip
"""One for each part of what a step is."""


def copied(fault: Fault, place: Path) -> Path:
    """A copy of the tree with the fault.

    Raises:
        ValueError: the line is not in the library any more.
    """
    for name in ("engine", "callbacks", "tests/support", "tests/parity/differential"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = place / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.right)} times what the fault replaces:\n{fault.right}")
    path.write_text(text.replace(fault.right, fault.wrong))
    return place


def find(
    fault: Fault, most: int, without: tuple[tuple[str, str], ...] = (), shrink: float = 30
) -> tuple[int, Verdict | None]:
    """How many cases it took to find the fault (at most about ``most``), and the smallest one."""
    wanted = wanted_values(fault.axes)
    with tempfile.TemporaryDirectory(prefix="fault-") as place, Pools(copied(fault, Path(place)), timeout=30) as pools:
        searches = [
            Search(name, pools, shrink, without=without, wanted=wanted, then=fault.strategies)
            for name in fault.strategies
        ]
        start = 0
        while sum(search.ran for search in searches) < most:
            for search in searches:
                search.run(20, fault.seed + start)
                start += 1
                if search.found:
                    return sum(search.ran for search in searches), search.found[0]
        return sum(search.ran for search in searches), None


def main() -> int:
    """The exit status: 1 when a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.differential.faults", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)}; all by default")
    parser.add_argument("--cases", type=int, default=400, help="give a fault up after so many")
    parser.add_argument("--without", default="", help="leave out cases with such values: data=stream,body=complex")
    given = parser.parse_args()
    without = tuple(
        (name, value) for name, _, value in (text.partition("=") for text in given.without.split(",") if text)
    )
    missed = 0
    for name in given.names:
        began = time.monotonic()
        ran, verdict = find(FAULTS[name], given.cases, without)
        missed += verdict is None
        outcome = f"found after {ran} case(s)" if verdict else f"NOT found in {ran} cases"
        print(f"{name}: {FAULTS[name].what}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
        if verdict:
            print("    " + reproducer(verdict).replace("\n", "\n    "), flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
