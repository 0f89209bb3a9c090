"""``examples/gpt.py`` in ``Fit`` beside the same model, optimizer, clipping and schedule in a bare loop; interleaved.

python tests/benchmarks/gpt.py --all                                  # on a GPU: everything below, with the model that fits it
python tests/benchmarks/gpt.py --all --tiny                           # the same in seconds, anywhere: proves that it runs
python tests/benchmarks/gpt.py --size gpu --precision bf16-mixed      # one row
python tests/benchmarks/gpt.py --steps 20 --rounds 3                  # anywhere

``--all``: fp32, bf16, fp8, each plain and with compiled blocks: tokens per second, MFU (of the vendor's number for the device and precision),
and the peak of the allocated bytes, of both loops; then what a save costs, in the background and blocking.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, SIZES, Size, Sources, Throughput

from callbacks.throughput_monitor import peak_of
from engine import FP8, Callback, Fit
from engine.utils import accelerator

TINY = Size(layers=2, heads=2, width=32, context=32, batch_size=4, lr=1e-3, max_steps=100)
PRECISIONS = ("32-true", "bf16-mixed", "fp8-mixed")
SAVES = 3
"""Saves of each kind; the first of the background ones allocates its buffers and is not counted."""


@dataclass(frozen=True)
class Job:
    """What both loops train."""

    size: Size
    data: Sources
    device: torch.device
    precision: str
    compiled: bool
    steps: int
    warm: int

    @property
    def emulates(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    peak_bytes: int | None
    """Of the device's allocator; ``None`` on a CPU."""


def bare(job: Job) -> float:
    """Tokens per second of a hand-written loop."""
    torch.manual_seed(0)
    size, device, precision = job.size, job.device, job.precision
    model: Any = GPT(size, job.steps).to(device)
    if precision.startswith("fp8"):
        in_fp8(model, job.emulates)
    if job.compiled:
        for block in model.blocks():
            block.compile()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "fp8-mixed": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    began, step = 0.0, 0
    while step < job.steps:
        for batch in job.data.train_dataloader():
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model._loss(batch)
            scaler.scale(loss.sum / loss.count).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step == job.warm:
                began = now(device)
            if step == job.steps:
                break
    return (job.steps - job.warm) * size.batch_size * size.context / (now(device) - began)


def in_fp8(model: GPT, emulate: bool) -> None:
    """The blocks by torchao itself; the output layer is tied to the embedding."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda m, name: name != "head"
    )


def ours(job: Job) -> float:
    """Tokens per second of ``Fit``."""
    throughput = Throughput(job.size.batch_size * job.size.context, after=job.warm)
    trained(job, throughput)
    return throughput.tokens_per_s


def trained(job: Job, callback: Callback) -> None:
    torch.manual_seed(0)
    fp8 = job.precision.startswith("fp8")
    with tempfile.TemporaryDirectory() as root:
        fit = Fit(
            accelerator=job.device.type, devices=1, precision=FP8(emulate=job.emulates) if fp8 else job.precision,
            compile="blocks" if job.compiled else False, max_steps=job.steps, gradient_clip_val=1.0, val_every=None,
            callbacks=[callback], root_dir=root,
        )  # fmt: skip
        fit.run(GPT(job.size, job.steps), job.data.train_dataloader())


class Saves(Callback):
    """Saves in the background and blocking, in turn, and measures how much longer the steps take."""

    def __init__(self, device: torch.device, every: int, folder: Path) -> None:
        self.device, self.every, self.folder = device, every, folder
        self.plain: list[float] = []
        self.blocking: list[float] = []
        self.stalls: list[float] = []
        self._began: float | None = None
        self._call: float | None = None
        self._count = 0

    @property
    def checkpoints_in(self) -> Path:
        return self.folder

    def setup(self, run: Any, module: nn.Module, stage: str) -> None:
        run.checkpoints_at(self.folder)

    def on_train_batch_end(self, run: Any, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        ended = now(self.device)
        if self._began is not None:
            took = ended - self._began
            if self._call is not None:  # the step after the start of a save in the background
                self.stalls.append(self._call + max(0.0, took - statistics.median(self.plain)))
                self._call = None
                run.wait_for_checkpoint()
            else:
                self.plain.append(took)
        self._began = now(self.device)
        if run.step and run.step % self.every == 0 and self._count < 2 * SAVES:
            background = self._count % 2 == 0
            run.save_checkpoint(asynchronous=background)
            took, self._count = now(self.device) - self._began, self._count + 1
            if background:
                self._call = took
            else:
                self.blocking.append(took)
            self._began = now(self.device)


def saves(job: Job) -> dict[str, float]:
    """Seconds (medians) of a step, and of what a save adds to it."""
    every = 4
    job = replace(job, steps=every * (2 * SAVES + 1), warm=0)
    with tempfile.TemporaryDirectory() as folder:
        found = Saves(job.device, every, Path(folder) / "saves")
        trained(job, found)
    stall, blocking = statistics.median(found.stalls[1:]), statistics.median(found.blocking)
    return {
        "step_s": statistics.median(found.plain),
        "stall_s": stall,
        "blocking_s": blocking,
        "ratio": stall / blocking,
    }


def now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def measured(run: Callable[[Job], float], job: Job) -> Measured:
    if job.device.type == "cpu":
        return Measured(run(job), None)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    rate = run(job)
    return Measured(rate, torch.accelerator.max_memory_allocated())


def compared(job: Job, rounds: int) -> dict[str, Any]:
    """Both loops, in turn."""
    found: dict[str, list[Measured]] = {"bare": [], "fit": []}
    for index in range(rounds):
        contenders = [("bare", bare), ("fit", ours)]
        for name, run in contenders if index % 2 else contenders[::-1]:
            found[name].append(measured(run, job))
    rates = {name: [each.tokens_per_s for each in runs] for name, runs in found.items()}
    peaks = {name: [each.peak_bytes for each in runs if each.peak_bytes is not None] for name, runs in found.items()}
    most = peak_of(job.device, job.precision)
    rate = statistics.median(rates["fit"])
    return {
        "device": accelerator.name(job.device) if job.device.type != "cpu" else "cpu",
        "precision": job.precision,
        "compiled": job.compiled,
        "tokens_per_s": rates,
        "fit_over_bare": statistics.median(f / b for f, b in zip(rates["fit"], rates["bare"], strict=True)),
        "mfu": rate * flops_per_token(job) / most if most else None,
        "peak_bytes": {name: max(values) for name, values in peaks.items() if values},
    }


def flops_per_token(job: Job) -> float:
    """Of forward and backward pass, counted."""
    model = GPT(job.size, 1).to(job.device)
    batch = next(iter(job.data.train_dataloader())).to(job.device)
    with FlopCounterMode(display=False) as counter:
        model._loss(batch).sum.backward()
    return counter.get_total_flops() / (job.size.batch_size * job.size.context)


def missing(precision: str, device: torch.device) -> str | None:
    """Why this machine cannot train in it."""
    if not precision.startswith("fp8"):
        return None
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 9):
        return "needs compute capability 8.9"
    return None


def line(row: dict[str, Any]) -> str:
    name = f"{row['precision']}{' compiled' if row['compiled'] else ''}"
    if "left_out" in row:
        return f"{name:20s} left out: {row['left_out']}"
    bare_rate, fit_rate = (statistics.median(row["tokens_per_s"][each]) for each in ("bare", "fit"))
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    peaks = row["peak_bytes"]
    memory = f"{peaks['bare'] / 2**20:,.0f} / {peaks['fit'] / 2**20:,.0f} MiB" if peaks else "-"
    return f"{name:20s} {bare_rate:14,.0f} {fit_rate:14,.0f} {row['fit_over_bare']:10.4f} {mfu:>8s}   {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit beside a bare loop: tokens per second of the byte-level GPT.")
    parser.add_argument("--all", action="store_true", help="all precisions, plain and compiled, and the cost of saves")
    parser.add_argument("--tiny", action="store_true", help="a model and runs of seconds, to see that everything works")
    parser.add_argument("--size", choices=SIZES, help="default: gpu with --all on one, else laptop")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--warm", type=int, help="steps before the clock starts")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kind = accelerator.device_type("auto")
    device = accelerator.device(kind, 0)
    size = TINY if args.tiny else SIZES[args.size or ("gpu" if args.all and kind != "cpu" else "laptop")]
    steps, warm = args.steps or (8 if args.tiny else 60), args.warm if args.warm is not None else 2 if args.tiny else 10
    data = Sources(size.context, size.batch_size)
    data.setup("fit")
    cases = [(p, c) for p in PRECISIONS for c in (False, True)] if args.all else [(args.precision, args.compile)]
    rows = []
    if not args.json:
        print(
            f"{'':20s} {'bare tokens/s':>14s} {'Fit tokens/s':>14s} {'Fit / bare':>10s} {'MFU':>8s}   peak memory, bare / Fit"
        )
    for precision, compiled in cases:
        reason = missing(precision, device)
        if reason is not None:
            rows.append({"precision": precision, "compiled": compiled, "left_out": reason})
        else:
            job = Job(size, data, device, precision, compiled, steps, warm)
            rows.append(compared(job, args.rounds or (1 if args.tiny else 5)))
        if not args.json:
            print(line(rows[-1]), flush=True)
    saved = saves(Job(size, data, device, cases[0][0], False, steps, warm)) if args.all else None
    if args.json:
        print(json.dumps({"rows": rows, "saves": saved}))
    elif saved is not None:
        print(
            f"a save in the background holds the training for {saved['stall_s'] * 1e3:.1f} ms, a blocking one for {saved['blocking_s'] * 1e3:.1f} ms "
            f"({saved['ratio']:.1%}); a step takes {saved['step_s'] * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
