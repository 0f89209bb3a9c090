"""Map-style data with ``set_epoch`` is told each epoch, in persistent workers and inside torch's wrappers, too.

A sample has the epoch that the dataset was told when it was read; expected epochs are those of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.toys import Weight, fit
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from callbacks import ModelCheckpoint
from engine import CombinedLoader, Engine
from engine.compat.accelerate.accelerator import Accelerator


class Curriculum(Dataset[int]):
    """Each sample is the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class AtOnce(Curriculum):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self.epoch for _ in indices]


class Flow(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 4


def shows_its_dataset(worker_id: int) -> None:
    assert isinstance(get_worker_info().dataset, Dataset)  # type: ignore[union-attr]
    assert type(get_worker_info().dataset).__module__ != "engine.data.epochs"  # type: ignore[union-attr]


DATA = {
    "plain": Curriculum,
    "read at once": AtOnce,
    "subset": lambda: Subset(Curriculum(), [0, 1, 2, 3]),
    "concatenated": lambda: Subset(ConcatDataset([Curriculum(), Curriculum()]), [0, 3, 4, 7]),
    "stacked": lambda: StackDataset(a=Curriculum(), b=[0, 0, 0, 0]),
    "chained": lambda: ChainDataset([Flow()]),
}


def epochs(loader: Any) -> list[int]:
    """The epochs of a pass's samples, without repetitions."""
    seen = set()
    for batch in loader:
        seen |= set((batch["a"] if isinstance(batch, dict) else batch).flatten().tolist())
    return sorted(seen)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("workers", ["none", "new", "persistent"])
def test_a_dataset_is_told_each_epoch(name: str, workers: str) -> None:
    if workers == "new" and name != "plain":
        return
    options: dict[str, Any] = {} if workers == "none" else {"num_workers": 1, "worker_init_fn": shows_its_dataset}
    loader = Engine(accelerator="cpu", seed=1).prepare(
        DataLoader(DATA[name](), batch_size=2, persistent_workers=workers == "persistent", **options)
    )
    assert [epochs(loader) for _ in range(3)] == [[0], [1], [2]]
    loader.set_epoch(7)
    assert epochs(loader) == [7]
    loader.close()


def test_a_batch_sampler_a_users_sampler_and_ready_batches() -> None:
    engine = Engine(accelerator="cpu", seed=1)
    for options in ({"batch_sampler": [[0, 1], [2]]}, {"sampler": WeightedRandomSampler([1.0] * 4, 4)}):
        loader = engine.prepare(DataLoader(Curriculum(), **options))
        assert [epochs(loader) for _ in range(2)] == [[0], [1]]
    ready = engine.prepare(DataLoader(Curriculum(), batch_size=None))
    assert [[int(batch) for batch in ready] for _ in range(2)] == [[0] * 4, [1] * 4]


def test_members_of_a_combination() -> None:
    pair = CombinedLoader(
        [DataLoader(Curriculum(), batch_size=2), DataLoader(Curriculum(), batch_size=1)], "max_size_cycle"
    )
    mixed = CombinedLoader([DataLoader(Curriculum(), batch_size=2), DataLoader(Flow(), batch_size=2)])
    for data in (pair, mixed):
        loader = Engine(accelerator="cpu", seed=1).prepare(data)
        assert [[sorted(set(torch.cat(batch).tolist())) for batch in loader][-1] for _ in range(2)] == [[0], [1]]


def test_in_a_run_the_epoch_is_trainings(tmp_path: Any) -> None:
    """A validation reads the same dataset, and does not tell it another epoch; a resumed run continues with its own."""
    data, module = Curriculum(), Epochs()
    first = fit(tmp_path, max_epochs=2, val_every=1, seed=1, callbacks=[ModelCheckpoint()])
    first.run(module, DataLoader(data, batch_size=2), DataLoader(Subset(data, [0, 1]), batch_size=2))
    assert module.seen == [[0, 0], [0, 0], [1, 1], [1, 1]]
    module.seen.clear()
    loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    fit(tmp_path, max_epochs=4, seed=1).run(module, loader, resume="last")
    assert module.seen == [[2, 2], [2, 2], [3, 3], [3, 3]]


class Epochs(Weight):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.tolist())
        return (self.w * batch).mean()


def test_through_accelerates_door() -> None:
    for rules in ("exact", "accelerate"):
        loader = Accelerator(cpu=True, rules=rules).prepare(DataLoader(Curriculum(), batch_size=2))
        assert [epochs(loader) for _ in range(2)] == [[0], [1]]
