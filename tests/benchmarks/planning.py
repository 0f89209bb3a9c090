"""Time and memory of planning itself: Llama 3.1 8B under FSDP2 x tensor parallel on 8 to 1,024 ranks.

    python tests/benchmarks/planning.py [--ranks 8 64 512 1024] [--model 8B] [--check]
    python tests/benchmarks/planning.py --tiny             # a small model, some seconds

Each plan runs in a process of its own: its wall clock and processor time (without the start of Python and torch) and the most memory that the
process had. ``--check``: at most 60 s of processor time and 4 GiB each, and the most ranks take at most 1.5 times as long as the fewest.

    python tests/benchmarks/planning.py --order            # the predicted order of three strategies beside the measured one

``--order`` measures this machine (as ``fit plan --measure``), plans ddp, fsdp and tensor parallel of a small GPT on 4 ranks, and times their
steps over gloo.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
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

from engine import Callback, Fit, MeshParallel, Run

MOST_S, MOST_BYTES, MOST_GROWTH = 60.0, 4 * 2**30, 1.5
ORDER = Size(layers=4, heads=4, width=256, context=128, batch_size=8, lr=1e-3, max_steps=100)
MEASURE = (sys.executable, "-m", "engine.cli.main", "plan", "--measure", "--processes", "4", "--json")
STRATEGIES: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp", "tp": "tp"}


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


class Clock(Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, run: Run, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """The median without the first steps."""
        return median(after - before for before, after in zip(self.ends[4:], self.ends[5:], strict=False))


def data() -> list[torch.Tensor]:
    """Batches of bytes."""
    torch.manual_seed(0)
    return [torch.randint(1, 256, (ORDER.batch_size, ORDER.context + 1), dtype=torch.uint8) for _ in range(160)]


def train_one(name: str) -> float:
    """Seconds of a step of this strategy on 4 gloo ranks; called on each of them."""
    torch.set_num_threads(1)
    clock = Clock()
    fit = Fit(
        strategy=STRATEGIES[name], devices=4, accelerator="cpu", max_steps=24, callbacks=[clock], log_every_n_steps=0, val_every=None,
        root_dir="/tmp/fit-planning-order", seed=0, timeout=None,
    )  # fmt: skip
    fit.run(GPT(ORDER, ORDER.max_steps), data())
    return clock.step_s


def order() -> int:
    """Print predicted and measured seconds of a step, and whether their orders agree."""
    numbers = json.loads(subprocess.run(MEASURE, capture_output=True, text=True, check=True).stdout)
    predicted, timed = {}, {}
    for name, strategy in STRATEGIES.items():
        plan = Fit(strategy=strategy).plan(
            GPT(ORDER, ORDER.max_steps),
            data(),
            world_size=4,
            nodes=1,
            device=numbers["as_device"],
            links=numbers["as_network"],
        )
        predicted[name] = plan.step_seconds
        ran = subprocess.run([sys.executable, __file__, "--train", name], capture_output=True, text=True, check=False)
        if ran.returncode:
            print(ran.stderr, file=sys.stderr)
            return 1
        timed[name] = float(ran.stdout.splitlines()[-1])
    table = Table(title="A step on 4 gloo ranks")
    for column in ("strategy", "predicted", "measured"):
        table.add_column(column, justify="right")
    for name in sorted(STRATEGIES, key=lambda each: predicted[each]):
        table.add_row(name, f"{predicted[name] * 1e3:.1f} ms", f"{timed[name] * 1e3:.1f} ms")
    Console().print(table)
    agree = sorted(predicted, key=lambda name: predicted[name]) == sorted(timed, key=lambda name: timed[name])
    print(f"the orders {'agree' if agree else 'DIFFER'}")
    return 0 if agree else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--model", choices=SHAPES, default="8B")
    parser.add_argument("--tiny", action="store_true", help="a small model on 8 and 64 ranks")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--order", action="store_true", help="predicted and measured order of three strategies")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--train", choices=STRATEGIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(plan_one(options.model, options.one)))
        return 0
    if options.train:
        print(train_one(options.train))
        return 0
    if options.order:
        return order()
    return scale("tiny", [8, 64], options.check) if options.tiny else scale(options.model, options.ranks, options.check)


if __name__ == "__main__":
    sys.exit(main())
