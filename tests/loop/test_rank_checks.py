"""check=True: differences between ranks are named before the first step."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from support.ranks import ROOT, ranks_of_file, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import Callback, CheckError, Fit, TrainModule
from engine.distributed.comparison import fingerprint


class Net(TrainModule):
    def __init__(self, out: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, out)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0][:, :3].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Spoil(Callback):
    """Changes a weight on one rank after the ranks have been made equal."""

    def on_fit_start(self, run: Any, module: Any) -> None:
        if run.rank == 1:
            with torch.no_grad():
                module.layer.weight[0, 1] += 1e-7


class Rate(Callback):
    def on_fit_start(self, run: Any, module: Any) -> None:
        run.optimizers[0].param_groups[0]["lr"] *= 1 + run.rank


def attempt(
    width: int = 3, samples: int = 16, dtype: torch.dtype = torch.float32, *callbacks: Callback, out: int = 1
) -> str:
    data = TensorDataset(torch.ones(samples, width, dtype=dtype))
    fit = Fit(max_epochs=2, accelerator="cpu", check=True, callbacks=list(callbacks), log_every_n_steps=0)
    try:
        return f"step {fit.run(Net(out), DataLoader(data, 4)).step}"
    except (CheckError, ValueError) as error:
        return str(error)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(__import__("os").environ["RANK"])


def rank_fine() -> str:
    return attempt()


def rank_models() -> str:
    return attempt(out=1 + rank())


def rank_parameters() -> str:
    return attempt(3, 16, torch.float32, Spoil())


def rank_optimizers() -> str:
    return attempt(3, 16, torch.float32, Rate())


def rank_samples() -> str:
    return attempt(samples=16 + 8 * rank())


def rank_width() -> str:
    return attempt(width=3 + rank())


def rank_dtype() -> str:
    return attempt(dtype=[torch.float32, torch.float64][rank()])


@pytest.fixture(scope="module")
def by_rank() -> dict[str, list[str]]:
    return ranks_of_file(__file__, 2)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fine", ["step 4"]),
        (
            "models",
            ["the models differ", "layer.weight: rank 0 has torch.float32, [1, 3], rank 1 has torch.float32, [2, 3]"],
        ),
        (
            "parameters",
            [
                "the parameters differ",
                "layer.weight: rank 0 has torch.float32, [1, 3], checksum",
                "rank 1 has torch.float32, [1, 3], ",
            ],
        ),
        (
            "optimizers",
            ["the optimizers differ", "optimizer 0, group 0: rank 0 has {'lr': 0.1", "rank 1 has {'lr': 0.2"],
        ),
        ("samples", ["the ranks' datasets have 16, 24 samples"]),  # without a check, too
        (
            "width",
            [
                "the first batches differ",
                "tensor 0: rank 0 has torch.float32, [batch, 3], cpu, rank 1 has torch.float32, [batch, 4], cpu",
            ],
        ),
        ("dtype", ["the first batches differ", "tensor 0: rank 0 has torch.float32", "rank 1 has torch.float64"]),
    ],
)
def test_two_ranks(by_rank: dict[str, list[str]], name: str, parts: list[str]) -> None:
    for text in by_rank[name]:  # every rank reports it
        for part in parts:
            assert part in text


OTHER_VERSION = """
import os, sys
if os.environ["RANK"] == "1" and not os.environ["PYTHONPATH"].startswith(sys.argv[1]):
    path = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": path})
sys.path[:0] = sys.argv[2:]
import test_rank_checks
report(test_rank_checks.attempt())
"""


def test_another_version_of_this_library(tmp_path: Path) -> None:
    for package in ("engine", "callbacks"):
        copytree(ROOT / package, tmp_path / package)
    with (tmp_path / "engine" / "loop" / "train.py").open("a") as file:
        file.write("# a later version\n")
    for ran in run_ranks(OTHER_VERSION, 2, tmp_path, Path(__file__).parents[1], Path(__file__).parent):
        assert "the versions differ" in ran.value
        assert "engine and callbacks: rank 0 has checksum" in ran.value


def test_alone() -> None:
    assert attempt() == "step 8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_fingerprint(dtype: torch.dtype) -> None:
    value = torch.zeros(2, 3, dtype=dtype)
    other = value.clone()
    assert fingerprint(value) == fingerprint(other) == fingerprint(value.t().contiguous().t())
    other[1, 2] = 1
    assert fingerprint(value) != fingerprint(other)
    assert fingerprint(value) != fingerprint(value.reshape(3, 2))
    assert fingerprint(torch.empty(0, dtype=dtype)).startswith(str(dtype))
