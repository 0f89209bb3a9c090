"""A step of Muon under strategies that shard, with whole tensors and on shards as torch does it: processor time, collectives and bytes.

    python tests/benchmarks/whole_tensors.py [--width 512] [--layers 4] [--rounds 5] [--check] [--write]

Two processes on gloo, in one run. For each strategy the same matrices with the same gradients are stepped in turn by the optimizer as ``Engine``
prepares it, and by the class itself, whose operations torch then distributes (``DTensor``). Printed are, for a rank and step, the least processor
time of the rounds, the number of collectives, and the bytes that a rank sends in them (rings). With ``--check`` the program fails
unless whole tensors take two collectives under ``fsdp`` and ``tp``, one where work is divided under ``ddp``, at most 1.02 times the bytes of the
chapter's formula, and less processor time than torch's way. ``--write`` puts the counts into the table of ``engine/strategies/README.md``; a test
keeps that true. Muon of the package ``dion`` is measured where it is installed and runs on the CPU.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import DDP, FSDP, Engine, MeshParallel, launch, optim

RANKS = 2
SENT = {"allreduce": 2 * (RANKS - 1) / RANKS, "alltoall": 1.0, "broadcast": 1.0}
"""The part of a collective's bytes that a rank sends; of all others (N-1)/N."""
KINDS = ("allgather", "allreduce", "alltoall", "broadcast", "reducescatter", "scatter")
"""Names of collectives; what waits for one is none."""
CHAPTER = Path(__file__).resolve().parents[2] / "engine" / "strategies" / "README.md"
OPTIMIZERS = ("AdamW", "Muon", "Adafactor", "Muon, divide_work=True", "Muon on shards, as torch does it")
STRATEGIES = ("ddp", "fsdp", "tp")
SIZES = 64, 4
"""Width and layers of the chapter's table; its numbers are proportional to the bytes of the matrices."""


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


class Traffic(TorchDispatchMode):
    """Counts the collectives of a block and their bytes, also of those that a ``DTensor`` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.bytes_sent = 0, 0.0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.partition("::")[2].replace("_", "")
        if operator.namespace in ("c10d", "_c10d_functional") and any(kind in name for kind in KINDS):
            tensors = [t for value in (*args, result) for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            share = next((part for kind, part in SENT.items() if kind in name), (RANKS - 1) / RANKS)
            self.collectives += 1
            self.bytes_sent += share * max(t.numel() * t.element_size() for t in tensors)
        return result


class Measured:
    """An optimizer's step, as it is prepared or as its class does it."""

    def __init__(
        self, strategy: Any, width: int, layers: int, *, divides: bool, is_plain: bool, kind: str = "Muon"
    ) -> None:
        self.engine = Engine(accelerator="cpu", strategy=strategy)
        module = Net(width, layers)
        self.cls = getattr(torch.optim, kind)
        optimizer = self.cls(module.parameters(), lr=0.01)
        if divides:
            optim.whole(optimizer, divide_work=True)
        self.model, _ = self.engine.prepare(module, optimizer)
        self.optimizer, self.is_plain, self.seconds = optimizer, is_plain, float("inf")
        self.collectives, self.bytes_sent = 0, 0.0
        generator = torch.Generator().manual_seed(1)
        for p in module.parameters():
            full = torch.randn(p.shape, generator=generator)
            p.grad = full
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)

    def step(self) -> None:
        if self.is_plain:
            self.cls.step(self.optimizer)
        else:
            self.optimizer.step()

    def measure(self) -> None:
        begin = time.process_time()
        self.step()
        self.seconds = min(self.seconds, time.process_time() - begin)

    def count(self) -> None:
        with Traffic() as traffic:
            self.step()
        self.collectives, self.bytes_sent = traffic.collectives, traffic.bytes_sent


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


def counted() -> dict[str, list[float]]:
    """Collectives and bytes of a step by strategy and optimizer, on this rank."""
    rows: dict[str, list[float]] = {}
    makes = {"ddp": DDP, "fsdp": FSDP, "tp": lambda: MeshParallel(tp=RANKS, dp_shard=1)}
    for strategy in STRATEGIES:
        for name in OPTIMIZERS:
            kind, _, how = name.partition(", " if "divide" in name else " on ")
            case = Measured(
                makes[strategy](),
                *SIZES,
                divides=how.startswith("divide"),
                is_plain=how.startswith("shards"),
                kind=kind,
            )
            case.step()
            case.count()
            case.engine.release()
            rows[f"{strategy}/{name}"] = [case.collectives, case.bytes_sent]
    return rows


def table() -> list[str]:
    """The chapter's table: collectives of a step, and the bytes that a rank sends in it as a part of the bytes of the matrices."""
    ranks = launch.notebook(counted, num_processes=RANKS)
    value_bytes = 4 * 4 * SIZES[0] ** 2 * SIZES[1]
    lines = [f"| optimizer | {' | '.join(f'`{name}`' for name in STRATEGIES)} |", "|---" * (len(STRATEGIES) + 1) + "|"]
    for name in OPTIMIZERS:
        cells = []
        for strategy in STRATEGIES:
            rows = [rank[f"{strategy}/{name}"] for rank in ranks]
            count, sent = rows[0][0], sum(row[1] for row in rows) / RANKS / value_bytes
            cells.append("0" if not count else f"{count:.0f}; {sent:.2f} P")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def written(text: str, rows: list[str]) -> str:
    """The chapter with these rows in the place of those of its table."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| optimizer | `ddp` |"))
    end = next(number for number in range(begin, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:begin], *rows, *lines[end:]]) + "\n"


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
    parser.add_argument(
        "--write", nargs="?", type=Path, const=CHAPTER, help="write the table of this chapter, and measure no time"
    )
    args = parser.parse_args()
    if args.write:
        args.write.write_text(written(args.write.read_text(), table()))
        return
    ranks = launch.notebook(rank, args.width, args.layers, args.rounds, num_processes=RANKS)
    value_bytes = 4 * 4 * args.width**2 * args.layers
    print(
        f"{2 * args.layers} matrices, {value_bytes / 2**20:.1f} MiB of values; a rank and step of Muon on {RANKS} ranks"
    )
    print(f"{'':24}{'processor s':>12}{'collectives':>12}{'MiB sent':>10}")
    rows = {name: [sum(of_rank[name][column] for of_rank in ranks) / RANKS for column in range(3)] for name in ranks[0]}
    for name, (seconds, collectives, sent) in rows.items():
        print(f"{name:24}{seconds:12.3f}{collectives:12.0f}{sent / 2**20:10.2f}")
    print(
        "dion's Muon: not run, " + ("its kernels need a GPU" if find_spec("dion") else "the package is not installed")
    )
    problems = problems_of(rows, value_bytes)
    for problem in problems if args.check else ():
        print(problem)
    raise SystemExit(bool(problems) and args.check)


if __name__ == "__main__":
    main()
