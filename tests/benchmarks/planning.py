"""Time and memory of planning itself: Llama 3.1 8B under FSDP2 x tensor parallel on 8 to 1,024 ranks.

    python tests/benchmarks/planning.py [--ranks 8 64 512 1024] [--model 8B] [--check]
    python tests/benchmarks/planning.py --published        # all published points, those of 405 billion parameters included: ten minutes
    python tests/benchmarks/planning.py --tiny             # a small model, some seconds

Each plan runs in a process of its own: its wall clock and processor time (without the start of Python and torch) and the most memory that the
process had. ``--check``: at most 60 s of processor time and 4 GiB each, and the most ranks take at most 1.5 times as long as the fewest.

    python tests/benchmarks/planning.py --order            # the predicted order of three strategies beside the measured one

``--order`` plans ddp, fsdp and tensor parallel of a small GPT on 4 ranks, all with the same global batch. On 4 real gloo ranks it then measures
this machine (as ``fit plan --measure``) and some steps of each strategy, in turns, so that other work on the machine slows all of them down alike.
The predictions are made of the medians of the machine's numbers, and compared with the medians of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planning"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, Size
from llama import SHAPES, Llama, tokens
from published import POINTS, planned, reserved_gib, tokens_per_second

from engine import Callback, Fit, MeshParallel, Run
from engine.config.settings import Settings
from engine.launch.script_ranks import joined_group
from engine.planning.device_table import Link
from engine.planning.devices import hardware, linked
from engine.planning.measurement import MachineSpeeds, measure_machine
from engine.planning.plan import Plan

MOST_S, MOST_BYTES, MOST_GROWTH = 60.0, 4 * 2**30, 1.5
ORDER = Size(layers=4, heads=4, width=256, context=32, batch_size=4, lr=1e-3, max_steps=100)
STRATEGIES: dict[str, Any] = {
    name: {"strategy": name, "accumulate_grad_batches": window} for name, window in (("ddp", 1), ("fsdp", 1), ("tp", 4))
}


def plan_one(model: str, ranks: int) -> dict[str, float]:
    """Plan in this process."""
    tp = min(4, ranks // 2, SHAPES[model].kv_heads)
    strategy = MeshParallel(tp=tp, dp_shard=ranks // tp, sequence_parallel=True, loss_parallel=True)
    rows, length = (1, 8192) if model != "tiny" else (2, 32)
    begun, work = time.perf_counter(), time.process_time()
    fit = Fit(strategy=strategy, precision="bf16-mixed", activation_checkpointing="full", gradient_clip_val=1.0)
    plan = fit.plan(Llama(SHAPES[model]), tokens(rows, length), world_size=ranks, device="h100")
    return {
        "wall_s": time.perf_counter() - begun,
        "processor_s": time.process_time() - work,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": plan.peak_bytes,
        "step_s": plan.step_seconds,
    }


def scale(model: str, ranks: list[int], check: bool) -> int:
    """Plan for each number of ranks, in processes of their own, and print the table."""
    table = Table(title=f"Planning Llama {model}, FSDP2 x tensor parallel")
    for column in (
        "ranks",
        "wall clock",
        "processor time",
        "memory of planning",
        "planned: memory of a rank",
        "planned: step",
    ):
        table.add_column(column, justify="right")
    found = []
    for count in ranks:
        command = [sys.executable, __file__, "--one", str(count), "--model", model]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(ran.stderr, file=sys.stderr)
            return 1
        each = json.loads(ran.stdout.splitlines()[-1])
        found.append(each)
        table.add_row(
            f"{count:,}",
            f"{each['wall_s']:.1f} s",
            f"{each['processor_s']:.1f} s",
            f"{each['bytes'] / 2**20:.0f} MiB",
            f"{each['peak_bytes'] / 2**30:.2f} GiB",
            f"{each['step_s']:.3g} s",
        )
    Console().print(table)
    held = all(each["processor_s"] <= MOST_S and each["bytes"] <= MOST_BYTES for each in found)
    flat = found[-1]["processor_s"] <= MOST_GROWTH * found[0]["processor_s"]
    if check:
        print(
            f"at most {MOST_S:g} s and {MOST_BYTES / 2**30:g} GiB: {'yes' if held else 'NO'}; near flat: {'yes' if flat else 'NO'}"
        )
    return 0 if not check or (held and flat) else 1


def published() -> int:
    """Plan each published point, and print both."""
    table = Table(title="Llama 3.1 under torchtitan")
    for column in ("point", "GiB planned", "published", "tokens/s of a GPU planned (bf16)", "published"):
        table.add_column(column, justify="left" if column == "point" else "right")
    for point in POINTS:
        plan = planned(point)
        given = [f"{each:,.1f}" if each else "" for each in (point.gib, point.tokens_per_s)]
        speed = f"{point.name}{' (fp8)' if point.fp8 else ''}"
        table.add_row(speed, f"{reserved_gib(plan):.1f}", given[0], f"{tokens_per_second(plan):,.0f}", given[1])
    Console().print(table)
    return 0


class Clock(Callback):
    """Seconds of each step."""

    def __init__(self, window: int) -> None:
        self.window, self.ends = window, list[float]()

    def on_train_batch_end(self, run: Run, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        """Without the first steps."""
        ends = self.ends[self.window - 1 :: self.window][1:]
        return [after - before for before, after in pairwise(ends)]


def data() -> list[torch.Tensor]:
    """Batches of bytes."""
    torch.manual_seed(0)
    return [torch.randint(1, 256, (ORDER.batch_size, ORDER.context + 1), dtype=torch.uint8) for _ in range(160)]


def on_rank(file: str, repetitions: int) -> None:
    """Called on each of the 4 ranks: measure the machine and train with each strategy in turn, again and again."""
    found = []
    for _ in range(repetitions):
        with joined_group(Settings(strategy="ddp", accelerator="cpu")) as group:
            row: dict[str, Any] = {"machine": asdict(measure_machine(group)), "load": os.getloadavg()[0]}
        for name, settings in STRATEGIES.items():
            clock = Clock(settings["accumulate_grad_batches"])
            fit = Fit(
                **settings, accelerator="cpu", max_steps=8, callbacks=[clock], log_every_n_steps=0, val_every=None,
                root_dir=Path(file).parent, seed=0, timeout=None,
            )  # fmt: skip
            fit.run(GPT(ORDER, ORDER.max_steps), data())
            row[name] = clock.steps
        found.append(row)
    if int(os.environ["RANK"]) == 0:
        Path(file).write_text(json.dumps(found))


def middle(rows: list[Any]) -> Any:
    """The median of numbers, and of those in dicts and lists of one shape."""
    if isinstance(rows[0], dict):
        return {key: middle([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], list):
        return [middle(list(items)) for items in zip(*rows, strict=True)]
    return median(rows) if isinstance(rows[0], (int, float)) else rows[0]


def machine(row: dict[str, Any]) -> MachineSpeeds:
    """What :func:`asdict` was given."""
    links = {name: Link(**row[name]) for name in ("within", "between") if row[name] is not None}
    return MachineSpeeds(**{**row, **links, "memory": int(row["memory"])})


def predicted(plans: dict[str, Plan], row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step of each plan on a machine that has these numbers, as ``--device`` and ``--network`` take them."""
    found = machine(row)
    assert found.as_network is not None
    device = linked(hardware(found.as_device), found.as_network)
    return {name: replace(plan, device=device).step_seconds for name, plan in plans.items()}


def ordered(seconds: dict[str, float]) -> list[str]:
    """The fastest first."""
    return sorted(seconds, key=lambda name: seconds[name])


def order(repetitions: int) -> int:
    """Print predicted and measured seconds of a step, and whether their orders agree."""
    plans = {
        name: Fit(**settings).plan(GPT(ORDER, ORDER.max_steps), data(), world_size=4, nodes=1, device="cpu")
        for name, settings in STRATEGIES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        launch = [sys.executable, "-m", "engine.cli.main", "launch", "--nproc", "4", "--log-dir", folder]
        ranks = [*launch, __file__, "--on-rank", str(file), "--repetitions", str(repetitions)]
        ran = subprocess.run(ranks, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(ran.stdout, ran.stderr, file=sys.stderr)
            return 1
        rows = json.loads(file.read_text())
    numbers = middle([row["machine"] for row in rows])
    forecast = predicted(plans, numbers)
    timed = {name: median(step for row in rows for step in row[name]) for name in STRATEGIES}
    table = Table(title=f"A step of {4 * ORDER.batch_size} samples on 4 gloo ranks")
    for column in ("strategy", "predicted", "measured", "slowest and fastest repetition"):
        table.add_column(column, justify="right")
    for name in ordered(forecast):
        each = [median(row[name]) for row in rows]
        table.add_row(
            name, f"{forecast[name] * 1e3:.0f} ms", f"{timed[name] * 1e3:.0f} ms", f"{max(each) * 1e3:.0f} to {min(each) * 1e3:.0f} ms"
        )  # fmt: skip
    Console().print(table)
    print(f"--device {machine(numbers).as_device} --network {machine(numbers).as_network}")
    alike = sum(
        ordered(predicted(plans, row["machine"])) == ordered({name: median(row[name]) for name in STRATEGIES})
        for row in rows
    )
    loads = [row["load"] for row in rows]
    print(
        f"load of the machine {min(loads):.1f} to {max(loads):.1f}; orders agree in {alike} of {len(rows)} repetitions"
    )
    agree = ordered(forecast) == ordered(timed)
    print(f"the orders {'agree' if agree else 'DIFFER'}")
    return 0 if agree else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--model", choices=SHAPES, default="8B")
    parser.add_argument("--tiny", action="store_true", help="a small model on 8 and 64 ranks")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--order", action="store_true", help="predicted and measured order of three strategies")
    parser.add_argument("--published", action="store_true", help="all published points beside their plans")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=5, help="of --order")
    parser.add_argument("--on-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan_one(options.model, options.one)))
        return 0
    if options.on_rank:
        on_rank(options.on_rank, options.repetitions)
        return 0
    if options.order:
        return order(options.repetitions)
    if options.published:
        return published()
    return scale("tiny", [8, 64], options.check) if options.tiny else scale(options.model, options.ranks, options.check)


if __name__ == "__main__":
    sys.exit(main())
