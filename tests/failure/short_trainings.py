"""Short trainings one after the other in one process of each rank, with DataLoader workers that are forked beside gloo's threads.

On CPython before 3.11.10 a worker may hang in its ``fork``; ``test_short_trainings.py`` runs 60 trainings. To hunt for longer::

    fit launch --nproc 2 tests/failure/short_trainings.py --minutes 30
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from engine import Engine, Fit, TrainModule

WORKERS = 2


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor] | Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch if isinstance(batch, Tensor) else batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows(IterableDataset[Tensor]):
    """16 rows, divided among the workers."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        yield from (torch.full((4,), float(row)) for row in range(worker.id, 16, worker.num_workers))


def train(index: int, root: str) -> None:
    """One training of two epochs: over an iterable dataset, or over a shuffled one with indices, in turn."""
    data: Dataset[object] = TensorDataset(torch.ones(16, 4)) if index % 2 else Rows()
    loader = DataLoader(data, batch_size=4, num_workers=WORKERS, shuffle=True if index % 2 else None)
    fit = Fit(
        accelerator="cpu",
        strategy="ddp",
        max_epochs=2,
        callbacks=[],
        root_dir=root,
        timeout="120 s",
        start_timeout="120 s",
    )
    fit.run(Net(), loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=300)
    parser.add_argument("--minutes", type=float, help="train for so long, rather than so often")
    arguments = parser.parse_args()
    group = Engine(accelerator="cpu").group
    end = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    count = 0
    with tempfile.TemporaryDirectory() as root:
        more = torch.ones(1)
        while more:
            train(count, f"{root}/{count}")
            count += 1
            more = torch.tensor([float(count < arguments.trainings if end is None else time.monotonic() < end)])
            dist.broadcast(more, 0)  # rank 0's clock decides
            if group.is_main and count % 50 == 0:
                print(f"{count} trainings", flush=True)
    if group.is_main:
        print(f"{count} trainings without a hang", flush=True)
    if "TEST_REPORT" in os.environ:
        Path(os.environ["TEST_REPORT"]).write_text(json.dumps(count))


if __name__ == "__main__":
    main()
