"""``fit`` in this process, in a directory with its own module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.cli.main import main

NET = '''
from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import torch
from torch.utils.data import DataLoader

from engine import Callback, DataModule, TrainModule


class Kind(Enum):
    PLAIN = 1
    FANCY = 2


@dataclass
class Options:
    """How it is trained.

    Args:
        lr: the learning rate.
    """

    lr: float = 1.0
    names: tuple[str, ...] = ()


class Net(TrainModule):
    """One weight, whose gradient is the mean of the batch.

    The rest of its documentation.
    """

    def __init__(self, start: float = 0.0, options: Options = Options(), optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
                 kind: Kind = Kind.PLAIN, layer: torch.nn.Module | None = None, fail: str = "", nap: float = 0.0, extra=None):
        """
        Args:
            start: the weight at the beginning.
        """
        super().__init__()
        if fail == "init":
            raise ValueError("bad luck in __init__")
        self.w = torch.nn.Parameter(torch.full((1,), start))
        self.random = torch.nn.Parameter(torch.rand(1), requires_grad=False)
        self.options, self.optimizer, self.kind, self.layer, self.fail, self.nap = options, optimizer, kind, layer, fail, nap

    def forward(self, batch):
        return self.w * batch

    def training_step(self, batch, batch_idx):
        if self.fail == "step":
            raise ValueError("bad luck in training_step")
        if self.fail == "log":
            self.log("loss", torch.ones(3))
        if self.fail == "torch":
            torch.nn.functional.linear(batch, torch.ones(3, 3))
        time.sleep(self.nap)
        return self(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).mean())

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("mean", batch.mean())
        self.log("weight", self.w.mean())

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        out = self(batch)
        if self.kind is Kind.FANCY:
            return {"out": out, "name": [f"sample {int(value)}" for value in batch]}
        return out

    def configure_optimizers(self):
        return self.optimizer([self.w], lr=self.options.lr)


def numbers(batch_size: int = 4, count: int = 8):
    """0, 1, 2, ..., as [batch_size, 1]."""
    return DataLoader(torch.arange(float(count)).reshape(-1, 1), batch_size)


class Numbers(DataModule):
    def __init__(self, batch_size: int = 4, count: int = 8, several: bool = False):
        super().__init__()
        self.loader = numbers(batch_size, count)
        self.several = several

    def train_dataloader(self):
        return self.loader

    val_dataloader = train_dataloader

    def test_dataloader(self):
        return [self.loader, self.loader] if self.several else self.loader

    predict_dataloader = test_dataloader


class Tell(Callback):
    """Writes a file at the first step's end."""

    def __init__(self, path: str, text: str = "a step"):
        self.path, self.text = path, text

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        with open(self.path, "w") as file:
            file.write(self.text)
'''


@dataclass
class Ended:
    """How a command has ended."""

    status: int
    out: str
    err: str


Fit = Callable[..., Ended]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory with ``net.py`` in it, and nothing of it left in this process afterwards."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def fit(here: Path, capfd: pytest.CaptureFixture[str]) -> Fit:
    """Run ``fit`` with these arguments in this process."""

    def run(*arguments: str) -> Ended:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capfd.readouterr()
        return Ended(status, out, err)

    return run
