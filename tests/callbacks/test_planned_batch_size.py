"""``find_batch_size`` starts with what fits by a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import find_batch_size
from callbacks.batch_size_finder import planned_start
from engine import Fit, TrainModule

WIDTH = 1 << 18
GIB = 2**30


class Limited(TrainModule):
    """Keeps 1 MiB of activations for each sample; a training runs out of memory with more than 700 samples."""

    def __init__(self, tried: list[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.tried = tried

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (rows,) = batch
        if isinstance(self.weight, FakeTensor):  # a plan
            return (rows * self.weight).expand(-1, WIDTH).exp().sum()
        self.tried.append(len(rows))
        if len(rows) > 700:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (rows * self.weight).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Limited:
        copied = type(self)(self.tried)
        if id(self.weight) in memo:
            copied.weight = memo[id(self.weight)]
        return copied


def loader(size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2000, 1)), batch_size=size)


@pytest.fixture
def fit(tmp_path: Any) -> Fit:
    return Fit(accelerator="cpu", devices=1, root_dir=tmp_path)


def test_the_first_trial_is_near_what_the_plan_says(fit: Fit) -> None:
    tried: list[int] = []
    assert find_batch_size(Limited(tried), loader(), fit=fit, memory=2 * GIB, steps_per_trial=1) == 700
    # Of 0.9 * 2048 MiB the context takes 512 and the first segments some; a sample needs 1 MiB for the result and 1 for its gradient.
    assert 600 < tried[0] < 670
    assert len(tried) < 15, "from 2 samples on, doubling alone takes 9 trials"


def test_without_an_accelerator_it_starts_with_two(fit: Fit) -> None:
    tried: list[int] = []
    find_batch_size(Limited(tried), loader(), fit=fit, steps_per_trial=1, max_trials=2)
    assert tried[:2] == [2, 4]


def test_what_cannot_be_planned_starts_with_two(fit: Fit) -> None:
    class Refused(Limited):
        def configure_optimizers(self) -> Any:
            raise ValueError("not in a plan")

    assert planned_start(Refused([]), lambda size: loader(size), None, fit, GIB) == 2


def test_a_given_start_is_kept(fit: Fit) -> None:
    tried: list[int] = []
    find_batch_size(Limited(tried), loader(), fit=fit, init_val=16, memory=2 * GIB, steps_per_trial=1, max_trials=1)
    assert tried == [16]
