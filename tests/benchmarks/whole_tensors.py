"""A step of Muon under strategies that shard, with whole tensors and on shards as torch does it: processor time, collectives and bytes.

    python tests/benchmarks/whole_tensors.py [--width 512] [--layers 4] [--rounds 5] [--check]

Two processes on gloo, in one run. For each strategy the same matrices with the same gradients are stepped in turn by the optimizer as ``Engine``
prepares it, and by the class itself, whose operations torch then distributes (``DTensor``). Printed are, for a rank and step, the least processor
time of the rounds, the number of collectives, and the bytes that a rank sends in exchanges of whole tensors. With ``--check`` the program fails
unless whole tensors take two collectives under ``fsdp`` and ``tp``, one where work is divided under ``ddp``, at most 1.02 times the bytes of the
chapter's formula, and less processor time than torch's way.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from engine import DDP, FSDP, Engine, MeshParallel, launch, optim
from engine.strategies.whole_tensors import WholeStep

RANKS = 2


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"up": nn.Linear(width, 2 * width, bias=False), "down": nn.Linear(2 * width, width, bias=False)}
            )
            for _ in range(layers)
        )

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Measured:
    """An optimizer's step, as it is prepared or as its class does it."""

    def __init__(self, strategy: Any, width: int, layers: int, *, divides: bool, is_plain: bool) -> None:
        self.engine = Engine(accelerator="cpu", strategy=strategy)
        module = Net(width, layers)
        optimizer = torch.optim.Muon(module.parameters(), lr=0.01)
        if divides:
            optim.whole(optimizer, divide_work=True)
        self.model, _ = self.engine.prepare(module, optimizer)
        self.optimizer, self.is_plain, self.seconds = optimizer, is_plain, float("inf")
        self.collectives = self.bytes_sent = 0
        generator = torch.Generator().manual_seed(1)
        for p in module.parameters():
            full = torch.randn(p.shape, generator=generator)
            p.grad = full
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)

    def step(self) -> None:
        if self.is_plain:
            torch.optim.Muon.step(self.optimizer)
        else:
            self.optimizer.step()

    def measure(self) -> None:
        begin = time.process_time()
        self.step()
        self.seconds = min(self.seconds, time.process_time() - begin)

    def count(self) -> None:
        with CommDebugMode() as counted:
            self.step()
        self.collectives = sum(counted.get_comm_counts().values())
        whole_steps = vars(self.engine.strategy)["_whole_steps"]
        step: WholeStep | None = whole_steps.step_of(self.optimizer)
        self.bytes_sent = 0 if step is None or self.is_plain else step.bytes_sent


def rank(width: int, layers: int, rounds: int) -> dict[str, list[float]]:
    """What one rank measures."""
    strategies: dict[str, tuple[Any, bool]] = {
        "fsdp": (FSDP, False),
        "tp": (lambda: MeshParallel(tp=RANKS, dp_shard=1), False),
        "ddp, divided": (DDP, True),
        "ddp": (DDP, False),
    }
    rows: dict[str, list[float]] = {}
    for name, (make, divides) in strategies.items():
        both = [Measured(make(), width, layers, divides=divides, is_plain=False)]
        if name in ("fsdp", "tp"):
            both.append(Measured(make(), width, layers, divides=False, is_plain=True))
        for case in both:
            case.step()  # makes states and buffers
        for _ in range(rounds):
            for case in both:
                case.measure()
        for case in both:
            case.count()
            case.engine.release()
            rows[f"{name}{', as torch does it' if case.is_plain else ''}"] = [
                case.seconds,
                case.collectives,
                case.bytes_sent,
            ]
    return rows


def problems_of(rows: dict[str, list[float]], value_bytes: int) -> list[str]:
    """What is above the bounds."""
    bounds = {
        "fsdp": (2, 3 * value_bytes * (RANKS - 1) / RANKS**2),
        "tp": (2, 3 * value_bytes * (RANKS - 1) / RANKS**2),
        "ddp, divided": (1, value_bytes * (RANKS - 1) / RANKS),
    }
    problems = []
    for name, (collectives, sent) in bounds.items():
        seconds, counted, measured = rows[name]
        if counted != collectives or measured > 1.02 * sent:
            problems.append(
                f"{name}: {counted:.0f} collectives, {measured:.0f} bytes; bounds {collectives}, {1.02 * sent:.0f}"
            )
        torchs = rows.get(f"{name}, as torch does it")
        if torchs is not None and seconds > torchs[0]:
            problems.append(f"{name}: {seconds:.3f} s, and {torchs[0]:.3f} s as torch does it")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="matrices are width x 2 width (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="pairs of matrices (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each kind (%(default)s)")
    parser.add_argument("--check", action="store_true", help="fail above the bounds")
    args = parser.parse_args()
    ranks = launch.notebook(rank, args.width, args.layers, args.rounds, num_processes=RANKS)
    value_bytes = 4 * 4 * args.width**2 * args.layers
    print(
        f"{2 * args.layers} matrices, {value_bytes / 2**20:.1f} MiB of values; a rank and step of Muon on {RANKS} ranks"
    )
    print(f"{'':24}{'processor s':>12}{'collectives':>12}{'MiB sent':>10}")
    rows = {name: [sum(of_rank[name][column] for of_rank in ranks) / RANKS for column in range(3)] for name in ranks[0]}
    for name, (seconds, collectives, sent) in rows.items():
        is_counted = name not in ("ddp",) and "torch" not in name
        print(f"{name:24}{seconds:12.3f}{collectives:12.0f}{f'{sent / 2**20:.2f}' if is_counted else '':>10}")
    problems = problems_of(rows, value_bytes)
    for problem in problems if args.check else ():
        print(problem)
    raise SystemExit(bool(problems) and args.check)


if __name__ == "__main__":
    main()
