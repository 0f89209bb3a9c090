"""The cost of mixing datasets, beside Grain and Hugging Face's datasets where they are installed.

    python tests/benchmarks/mixtures.py [--rounds 5] [--check]

Processor time for a sample, read in batches of 64 from three sources of integers, in one process: the least of the rounds, in each of which
everything that is compared runs once. With ``--check`` the program fails above a bound: at 10^6 samples 1/8 of Grain's mix, or 1.2 us without
Grain; at 10^10 samples twice that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch.utils.data import Dataset

from engine import Mixture

BATCH, BATCHES = 64, 400
WEIGHTS = {"a": 0.7, "b": 0.25, "c": 0.05}
SIZES = {
    "10^6": {"a": 10**6, "b": 10**5, "c": 10**4},
    "10^10": {"a": 10**10, "b": 10**9, "c": 10**7},
}
WITHOUT_GRAIN_US = 1.2


class Integers(Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def ours(size: str) -> Iterator[None]:
    """Read batches of a mixture, as a ``DataLoader`` does, from its middle on."""
    mixture = Mixture({name: Integers(count) for name, count in SIZES[size].items()}, WEIGHTS).seeded(1, True)
    start = len(mixture) // 2
    while True:
        mixture.__getitems__(range(start, start + BATCH))
        start += BATCH
        yield


def grain_mix() -> Iterator[None]:
    import grain

    parts = [grain.MapDataset.range(count).shuffle(seed=1).repeat() for count in SIZES["10^6"].values()]
    mixed = grain.MapDataset.mix(parts, weights=list(WEIGHTS.values()))
    start = 0
    while True:
        for index in range(start, start + BATCH):
            mixed[index]
        start += BATCH
        yield


def hugging_face() -> Iterator[None]:
    import datasets

    parts = [datasets.Dataset.from_dict({"n": range(min(count, 10**5))}) for count in SIZES["10^6"].values()]
    mixed = datasets.interleave_datasets(
        parts, probabilities=list(WEIGHTS.values()), seed=1, stopping_strategy="all_exhausted"
    )
    start = 0
    while True:
        for index in range(start, start + BATCH):
            mixed[index % len(mixed)]
        start += BATCH
        yield


def measured(reading: Iterator[None]) -> float:
    """Microseconds of processor time a sample."""
    next(reading)
    begin = time.process_time()
    for _ in range(BATCHES):
        next(reading)
    return (time.process_time() - begin) / (BATCHES * BATCH) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readers: dict[str, Callable[[], Any]] = {f"Mixture, {size} samples": lambda size=size: ours(size) for size in SIZES}
    readers |= {"Grain, MapDataset.mix": grain_mix} if find_spec("grain") else {}
    readers |= {"datasets, interleave_datasets": hugging_face} if find_spec("datasets") else {}
    readings = {name: reader() for name, reader in readers.items()}
    times: dict[str, list[float]] = {name: [] for name in readings}
    for _ in range(options.rounds):
        for name, reading in readings.items():
            times[name].append(measured(reading))
    least = {name: min(values) for name, values in times.items()}
    for name, value in least.items():
        print(f"{name:32} {value:8.2f} us a sample")
    grain = least.get("Grain, MapDataset.mix")
    bound = WITHOUT_GRAIN_US if grain is None else max(WITHOUT_GRAIN_US, grain / 8)
    exceeded = [
        f"{name}: {least[name]:.2f} us, at most {limit:.2f}"
        for name, limit in (("Mixture, 10^6 samples", bound), ("Mixture, 10^10 samples", 2 * bound))
        if least[name] > limit
    ]
    print("\n".join(exceeded) or f"within {bound:.2f} and {2 * bound:.2f} us")
    return 1 if options.check and exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
