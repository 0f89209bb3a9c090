"""The cost of packing documents, of batches within a budget of tokens, and of reading tokens from a file, beside peers where they are installed.

    python tests/benchmarks/packing.py [--rounds 5] [--documents 58720] [--samples 10000000] [--check]

Processor time in one process: the least of the rounds, in each of which everything that is compared runs once. Documents have the lengths of a
lognormal distribution with a long tail, as the functions of Python's standard library have (mean 85, largest 4,911). With ``--check`` the program
fails above a bound: packing 1/15 of TRL's, or 0.6 us a document without TRL; padding of a budget 6 %, the slowest of 8 ranks 1.03 times the mean,
the order of an epoch ten times ``torch.randperm``; a sample of a file 1.05 times a memory map that is written by hand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from engine import TokenBudget, TokenFile
from engine.data.packing import best_fit_decreasing

ROW, BUDGET, SAMPLE, BATCH, BATCHES = 2048, 16_384, 1024, 32, 100
WITHOUT_TRL_US = 0.6


def lengths_of(count: int) -> Any:
    lengths = numpy.random.default_rng(0).lognormal(3.95, 1.0, count).astype(numpy.int64) + 1
    return numpy.minimum(lengths, 4911)


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


class MemoryMap(Dataset[dict[str, torch.Tensor]]):
    """A memory map that is written by hand, whose labels are the next tokens."""

    def __init__(self, path: Path) -> None:
        self.tokens = numpy.memmap(path, dtype=numpy.uint16, mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SAMPLE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * SAMPLE
        tokens = torch.from_numpy(self.tokens[start : start + SAMPLE + 1].astype(numpy.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def read_batches(dataset: Any) -> None:
    """Read batches as a ``DataLoader`` does."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()
    for number in range(BATCHES):
        start = number * BATCH % (len(order) - BATCH)
        indices = order[start : start + BATCH]
        if hasattr(dataset, "__getitems__"):
            dataset.__getitems__(indices)
        else:
            for index in indices:
                dataset[index]


def trl_packing(lengths: Any) -> Callable[[], Any] | None:
    if not (find_spec("trl") and find_spec("datasets")):
        return None
    import datasets
    from trl import pack_dataset

    documents = datasets.Dataset.from_dict({"input_ids": [numpy.zeros(int(n), numpy.int32) for n in lengths]})
    return lambda: pack_dataset(documents, ROW, strategy="bfd")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=58_720)
    parser.add_argument("--samples", type=int, default=10_000_000, help="samples of the epoch that is ordered")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    lengths = lengths_of(options.documents)
    rows = numpy.minimum(lengths, ROW)
    many = TokenBudget(lengths_of(options.samples), BUDGET)
    with tempfile.TemporaryDirectory() as folder:
        flat = numpy.random.default_rng(0).integers(0, 50_257, 4_000_000)
        flat.astype(numpy.uint16).tofile(f"{folder}/tokens.bin")
        TokenFile.write(f"{folder}/tokens.safetensors", [flat])
        file, by_hand = TokenFile(f"{folder}/tokens.safetensors", SAMPLE), MemoryMap(Path(folder, "tokens.bin"))
        works: dict[str, tuple[Callable[[], Any], float]] = {
            "Packed, us a document": (lambda: best_fit_decreasing(rows, ROW), 1e6 / len(rows)),
            "TokenFile, us a sample": (lambda: read_batches(file), 1e6 / (BATCH * BATCHES)),
            "memory map, us a sample": (lambda: read_batches(by_hand), 1e6 / (BATCH * BATCHES)),
            "TokenBudget, ms an epoch": (lambda: many.draws(1), 1e3),
            "torch.randperm, ms": (lambda: torch.randperm(options.samples), 1e3),
        }
        packing = trl_packing(rows)
        works |= {} if packing is None else {"TRL, us a document": (packing, 1e6 / len(rows))}
        times = {
            name: min(seconds(work) for _ in range(options.rounds)) * scale for name, (work, scale) in works.items()
        }
    for name, value in times.items():
        print(f"{name:28} {value:10.2f}")
    padding, slowest = balance(lengths)
    print(f"{'padding of TokenBudget':28} {padding:10.3f}\n{'slowest of 8 ranks over mean':28} {slowest:10.3f}")
    trl = times.get("TRL, us a document")
    bounds = {
        "Packed, us a document": WITHOUT_TRL_US if trl is None else trl / 15,
        "TokenFile, us a sample": 1.05 * times["memory map, us a sample"],
        "TokenBudget, ms an epoch": 10 * times["torch.randperm, ms"],
    }
    exceeded = [
        f"{name}: {times[name]:.2f}, at most {bound:.2f}" for name, bound in bounds.items() if times[name] > bound
    ]
    exceeded += [f"padding: {padding:.3f}, at most 0.06"] if padding > 0.06 else []
    exceeded += [f"slowest of 8 ranks: {slowest:.3f} of the mean, at most 1.03"] if slowest > 1.03 else []
    print("\n".join(exceeded) or "within all bounds")
    return 1 if options.check and exceeded else 0


def balance(lengths: Any) -> tuple[float, float]:
    """The share of padding in an epoch, and the tokens of the slowest of 8 ranks over the mean, averaged over steps."""
    batches = TokenBudget(lengths, BUDGET).draws(0)
    tokens = numpy.array([len(batch) * int(lengths[batch].max()) for batch in batches])
    rounds = tokens[: len(tokens) // 8 * 8].reshape(-1, 8)
    return 1 - float(lengths.sum() / tokens.sum()), float(rounds.max(1).mean() / rounds.mean())


if __name__ == "__main__":
    sys.exit(main())
