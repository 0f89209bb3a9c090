"""The same batches in every epoch, for ``overfit_batches``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from engine import CombinedLoader, Fit, TrainModule
from engine.data.overfit_order import in_order

pytestmark = pytest.mark.filterwarnings("ignore:overfit_batches. DataLoader is read")
DATA = torch.arange(10.0)


class Reads(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append({k: v.tolist() for k, v in batch.items()} if isinstance(batch, dict) else batch.tolist())
        return self.w * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


def run(root: Path, loader: Any, val: Any = None, **settings: Any) -> Reads:
    module = Reads()
    Fit(accelerator="cpu", devices=1, root_dir=root, max_epochs=2, num_sanity_val_steps=0, **settings).run(
        module, loader, val
    )
    return module


LOADERS = {
    "shuffled": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "weighted": lambda: DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)),
    "in order": lambda: DataLoader(DATA, batch_size=2),
    "ready batches": lambda: DataLoader(DATA.reshape(5, 2), batch_size=None, shuffle=True),
    "list": lambda: list(DATA.reshape(5, 2)),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("given", "count"), [(2, 2), (0.4, 2), (1, 1), (1.0, 5)])
def test_the_first_batches_in_every_epoch(tmp_path: Path, name: str, given: float, count: int) -> None:
    loader = LOADERS[name]()
    before = getattr(loader, "sampler", None)
    module = run(tmp_path, loader, LOADERS[name](), overfit_batches=given)
    assert module.seen == module.validated == 2 * [[2.0 * i, 2.0 * i + 1] for i in range(count)]
    assert getattr(loader, "sampler", None) is before  # the user's loader stays as it is


def test_members_of_a_combination(tmp_path: Path) -> None:
    module = run(tmp_path, {"a": LOADERS["shuffled"](), "b": LOADERS["list"]()}, overfit_batches=1)
    assert module.seen == 2 * [{"a": [0.0, 1.0], "b": [0.0, 1.0]}]
    same = CombinedLoader([LOADERS["in order"](), LOADERS["list"]()])
    assert in_order(same) is same


def test_batches_of_a_class_of_ones_own_are_refused(tmp_path: Path) -> None:
    class Own(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_sampler=Own(RandomSampler(DATA), 2, False))
    with pytest.raises(
        ValueError, match="overfit_batches needs the same batches in every epoch, and Own makes those of DataLoader"
    ):
        run(tmp_path, loader, overfit_batches=1)


def test_other_runs_are_shuffled(tmp_path: Path) -> None:
    module = run(tmp_path, LOADERS["shuffled"](), seed=1)
    assert module.seen[:5] != module.seen[5:]
    assert sorted(x for batch in module.seen for x in batch) == sorted(2 * DATA.tolist())
