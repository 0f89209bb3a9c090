"""Peak memory and processor time of a last layer and its cross entropy: plain logits, ``linear_cross_entropy``, torch's own, Liger's and
cut-cross-entropy's. The latter two need Triton and a GPU; where they cannot run the program says so.

    python tests/benchmarks/losses.py [--rounds 2] [--sizes 131072x1024x256 32000x1024x512] [--check]

Each measurement runs in a process of its own on one thread: forward and backward pass in fp32, the least processor time of the rounds, and the peak
of resident memory above that of the inputs. With ``--check`` the program fails where ours takes more than 0.35 of plain's memory at a vocabulary
of at least 100,000, or more than 1.3 of its time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.losses import linear_cross_entropy

WAYS = ("plain", "ours", "recomputed", "torch, default", "torch, in chunks")
MEMORY, TIME, LARGE = 0.35, 1.3, 100_000
PEERS = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
"""Backends of other packages, by name, with the module to import."""


def loss_of(way: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    if way == "plain":
        return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    if way in ("ours", "recomputed"):
        return linear_cross_entropy(hidden, weight, targets, recompute=way == "recomputed").sum
    if way in PEERS:
        return linear_cross_entropy(hidden, weight, targets, backend=way).sum
    options = None if way == "torch, default" else torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def peak_mib() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def measure(way: str, vocabulary: int, rows: int, width: int) -> dict[str, float]:
    """Run one forward and backward pass in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden, weight = (
        (torch.randn(rows, width) * 0.5).requires_grad_(),
        (torch.randn(vocabulary, width) * 0.05).requires_grad_(),
    )
    targets = torch.randint(vocabulary, (rows,))
    loss_of(way, hidden[:2, :8], weight[:10, :8], targets[:2] % 10).backward()  # loads kernels
    hidden.grad = weight.grad = None
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    base, begin = peak_mib(), time.process_time()
    loss = loss_of(way, hidden, weight, targets)
    loss.backward()
    return {"seconds": time.process_time() - begin, "mib": peak_mib() - base, "loss": float(loss.detach())}


def measured(way: str, sizes: tuple[int, ...], rounds: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--sizes", "x".join(map(str, sizes))]
    results = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(rounds)
    ]
    return {name: min(result[name] for result in results) for name in results[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--sizes", nargs="+", default=["131072x1024x256", "32000x1024x512"], help="vocabulary x rows x width"
    )
    parser.add_argument("--way", choices=[*WAYS, *PEERS], help="measure this one, in this process")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    sizes = [tuple(int(size) for size in text.split("x")) for text in options.sizes]
    if options.way:
        print(json.dumps(measure(options.way, *sizes[0])))
        return 0
    exceeded = []
    for size in sizes:
        print(f"vocabulary {size[0]:,}, {size[1]:,} rows of {size[2]}")
        ways = WAYS if hasattr(F, "linear_cross_entropy") else WAYS[:3]
        results = {way: measured(way, size, options.rounds) for way in ways}
        plain = results["plain"]
        for way, result in results.items():
            memory, seconds = result["mib"] / plain["mib"], result["seconds"] / plain["seconds"]
            print(
                f"  {way:18} {result['mib']:8.0f} MiB ({memory:.2f}) {result['seconds']:8.2f} s ({seconds:.2f})   loss {result['loss']:.3f}"
            )
            if way == "ours" and seconds > TIME:
                exceeded.append(f"{size}: {seconds:.2f} of plain's time, at most {TIME}")
            if way == "ours" and size[0] >= LARGE and memory > MEMORY:
                exceeded.append(f"{size}: {memory:.2f} of plain's memory, at most {MEMORY}")
        for way, package in PEERS.items():
            if find_spec(package) is None:
                print(f"  {way:18} not run: {package} is not installed")
                continue
            try:
                result = measured(way, size, options.rounds)
                print(f"  {way:18} {result['mib']:8.0f} MiB        {result['seconds']:8.2f} s")
            except subprocess.CalledProcessError as error:
                print(f"  {way:18} not run: {error.stderr.strip().splitlines()[-1]}")
    print("\n".join(exceeded) or "within all bounds")
    return 1 if options.check and exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
