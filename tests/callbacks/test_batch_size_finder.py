from __future__ import annotations

import weakref

import pytest
import torch
from support.ranks import run_ranks
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callbacks import find_batch_size
from engine import DataModule, Fit, TrainModule

DATA = TensorDataset(torch.ones(40, 1))


class Limited(TrainModule):
    """Runs out of memory with more than ``limit`` samples."""

    def __init__(self, limit, error=torch.OutOfMemoryError, message="CUDA out of memory. Tried to allocate 2 GiB"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.limit, self.error, self.message = limit, error, message
        self.tried = []

    def training_step(self, batch, batch_idx):
        self.tried.append(len(batch[0]))
        activations = (self.weight * batch[0]).requires_grad_()
        if len(batch[0]) > self.limit:
            KEPT.append(weakref.ref(activations))
            raise self.error(self.message)
        return activations.mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def __deepcopy__(self, memo):
        other = Limited(self.limit, self.error, self.message)
        other.tried = self.tried  # shared, to be seen here
        return other


KEPT: list[weakref.ref] = []


@pytest.fixture
def fit(tmp_path):
    KEPT.clear()
    return Fit(accelerator="cpu", devices=1, root_dir=tmp_path, max_epochs=7, limit_train_batches=1)


def loader(size=4):
    return DataLoader(DATA, batch_size=size, shuffle=True)


@pytest.mark.parametrize(
    ("limit", "mode", "expected"),
    [(11, "binsearch", 11), (11, "power", 8), (1, "binsearch", 1), (1, "power", 1)],
)
def test_the_size_that_fits(fit, limit, mode, expected):
    module = Limited(limit)
    assert find_batch_size(module, loader(), fit=fit, mode=mode) == expected
    fitting = [size for size in module.tried if size <= limit]
    assert fitting.count(expected) >= 3  # steps of the trial with the result


def test_failed_attempts_are_halved_and_their_memory_is_freed(fit):
    module = Limited(11)
    own = loader()
    assert find_batch_size(module, own, fit=fit, init_val=32, steps_per_trial=1) == 11
    # 32 and 16 fail, 8 fits, then the interval (8, 16) is halved.
    assert module.tried == [32, 16, 8, 12, 10, 11]
    assert len(KEPT) == 3
    assert all(each() is None for each in KEPT)
    assert own.batch_size == own.batch_sampler.batch_size == 4
    assert not list(fit.settings.root_dir.iterdir())


@pytest.mark.parametrize(
    ("error", "message"),
    [(MemoryError, ""), (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")],
)
def test_other_errors_of_memory(fit, error, message):
    assert find_batch_size(Limited(5, error, message), loader(), fit=fit) == 5


def test_other_errors_are_errors(fit):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        find_batch_size(Limited(5, RuntimeError, "mat1 and mat2 shapes cannot be multiplied"), loader(), fit=fit)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        find_batch_size(Limited(0), loader(), fit=fit)


def test_no_more_than_the_data(fit):
    assert find_batch_size(Limited(10_000), loader(), fit=fit, init_val=16) == 40
    assert find_batch_size(Limited(10_000), loader(), fit=fit, max_trials=2) == 4


def test_a_sampler_of_the_users(fit):
    class Every(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(0, 40, 2))

        def __len__(self):
            return 20

    own = DataLoader(DATA, batch_size=4, sampler=Every())
    assert find_batch_size(Limited(10_000), own, fit=fit, init_val=10) == 20
    assert find_batch_size(Limited(5), own, fit=fit) == 5


class Data(DataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def setup(self, stage):
        self.there = True

    def train_dataloader(self):
        return DataLoader(DATA, batch_size=self.batch_size)


def test_a_data_module(fit):
    data = Data(4)
    assert find_batch_size(Limited(5), data, fit=fit) == 5
    assert find_batch_size(Limited(3), datamodule=data, fit=fit) == 3
    assert data.batch_size == data.hparams.batch_size == 4
    assert "there" not in vars(data)


def test_hyperparameters_of_a_data_module(fit):
    class ByName(Data):
        def __init__(self, size):
            DataModule.__init__(self)
            self.save_hyperparameters()

        def train_dataloader(self):
            return DataLoader(DATA, batch_size=self.hparams.size)

    data = ByName(4)
    assert find_batch_size(Limited(3), datamodule=data, fit=fit, batch_arg_name="size") == 3
    assert data.hparams.size == 4


def test_a_module_with_data_of_its_own(fit):
    class WithData(Limited):
        batch_size = 4

        def train_dataloader(self):
            return DataLoader(DATA, batch_size=self.batch_size)

        def __deepcopy__(self, memo):
            other = type(self)(self.limit)
            other.batch_size = self.batch_size
            return other

    module = WithData(5)
    assert find_batch_size(module, fit=fit) == 5
    assert module.batch_size == 4


def test_a_window_that_depends_on_the_batch_size(tmp_path):
    fit = Fit(accelerator="cpu", devices=1, root_dir=tmp_path, global_batch_size=16)
    assert find_batch_size(Limited(5), loader(), fit=fit) == 5


def test_batch_sizes_that_cannot_be_changed(fit):
    class Fixed(Data):
        def train_dataloader(self):
            return DataLoader(DATA, batch_size=4)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(1)])

    for data in ([torch.ones(2, 1)], DataLoader(DATA, batch_size=None), DataLoader(Stream(), batch_size=2)):
        with pytest.raises(ValueError, match="cannot change the batch size of"):
            find_batch_size(Limited(5), data, fit=fit)
    with pytest.raises(ValueError, match="Data has no 'bs'"):
        find_batch_size(Limited(5), Data(4), fit=fit, batch_arg_name="bs")
    with pytest.raises(ValueError, match="has batch_size=4 where 2 was set"):
        find_batch_size(Limited(5), Fixed(4), fit=fit)
    with pytest.raises(ValueError, match="needs a DataLoader"):
        find_batch_size(Limited(5), fit=fit)
    with pytest.raises(ValueError, match="mode='linear'"):
        find_batch_size(Limited(5), loader(), mode="linear")
    with pytest.raises(ValueError, match="init_val=0"):
        find_batch_size(Limited(5), loader(), init_val=0)


SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from callbacks import find_batch_size
from engine import Fit, TrainModule

class Limited(TrainModule):  # rank 1 has less memory
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def training_step(self, batch, batch_idx):
        if len(batch[0]) > (9 if os.environ["RANK"] == "0" else 3):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (self.weight * batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

loader = DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=2)
module, fit = Limited(), Fit(accelerator="cpu", strategy="ddp", root_dir=sys.argv[1])
found = find_batch_size(module, loader, fit=fit)
result = fit.run(module, loader)  # the same processes train afterwards
try:
    find_batch_size(module, loader, fit=Fit(accelerator="cpu", strategy="fsdp", root_dir=sys.argv[1]))
except ValueError as error:
    refused = str(error)
report([found, result.step, float(module.weight), "not with FSDP" in refused])
"""


def test_two_ranks_find_what_fits_on_both(tmp_path):
    for rank in run_ranks(SCRIPT, 2, tmp_path):
        assert rank.value == [3, 10, 1.0 - 10, True]
