"""Tokens per second of ``examples/gpt.py`` in ``Fit`` beside the same model, optimizer, clipping and schedule in a bare loop; interleaved.

python tests/benchmarks/gpt.py --size gpu --precision bf16-mixed      # on a CUDA machine
python tests/benchmarks/gpt.py --steps 20 --rounds 3                  # anywhere
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, SIZES, Size, Sources, Throughput

from engine import Fit


def bare(size: Size, data: Sources, device: torch.device, precision: str, steps: int, warm: int) -> float:
    """Tokens per second of a hand-written loop."""
    torch.manual_seed(0)
    model: Any = GPT(size, steps).to(device)
    if precision.startswith("fp8"):
        in_fp8(model, emulate=device.type == "cpu")
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "fp8-mixed": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    began, step = 0.0, 0
    while step < steps:
        for batch in data.train_dataloader():
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                total, count = model._loss(batch)
            scaler.scale(total / count).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step == warm:
                began = now(device)
            if step == steps:
                break
    return (steps - warm) * size.batch_size * size.context / (now(device) - began)


def in_fp8(model: GPT, emulate: bool) -> None:
    """The blocks by torchao itself; the output layer is tied to the embedding."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda m, name: name != "head"
    )


def ours(size: Size, data: Sources, device: torch.device, precision: str, steps: int, warm: int) -> float:
    """Tokens per second of ``Fit``."""
    torch.manual_seed(0)
    throughput = Throughput(size.batch_size * size.context, after=warm)
    with tempfile.TemporaryDirectory() as root:
        fit = Fit(
            accelerator=device.type, devices=1, precision=precision, max_steps=steps, gradient_clip_val=1.0, val_every=None,
            callbacks=[throughput], root_dir=root,
        )  # fmt: skip
        fit.run(GPT(size, steps), data.train_dataloader())
    return throughput.tokens_per_s


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit beside a bare loop: tokens per second of the byte-level GPT.")
    parser.add_argument("--size", choices=SIZES, default="laptop")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=10, help="steps before the clock starts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[args.size]
    data = Sources(size.context, size.batch_size)
    data.setup("fit")
    rates: dict[str, list[float]] = {"bare": [], "fit": []}
    for index in range(args.rounds):
        contenders = [("bare", bare), ("fit", ours)]
        for name, run in contenders if index % 2 else contenders[::-1]:
            rates[name].append(run(size, data, device, args.precision, args.steps, args.warm))
    ratio = statistics.median(f / b for f, b in zip(rates["fit"], rates["bare"], strict=True))
    found = {
        "device": str(device),
        "size": args.size,
        "precision": args.precision,
        "tokens_per_s": rates,
        "fit_over_bare": ratio,
    }
    if args.json:
        print(json.dumps(found))
        return
    for name, values in rates.items():
        print(f"{name:5s} {statistics.median(values):12,.0f} tokens/s (from {min(values):,.0f} to {max(values):,.0f})")
    print(f"fit / bare: {ratio:.4f} (median over {args.rounds} rounds; 1 is a loop that costs nothing)")


if __name__ == "__main__":
    main()
