"""Modules that are added to a model which is divided among the ranks already, on real processes."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn

from engine import DeepSpeed, Fit, MeshParallel, TrainModule

STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: "fsdp",
    "tp": lambda: MeshParallel(tp=2),
    "pp": lambda: MeshParallel(pp=2),
    "deepspeed 1": lambda: DeepSpeed(stage=1),
    "deepspeed 3": lambda: DeepSpeed(stage=3),
}


class Net(TrainModule):
    """Changes after its first batch, as ``change`` says."""

    def __init__(self, change: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
        self.middle[0].bias.requires_grad_(False)
        self.change = change

    def parallelize(self, mesh: Any, sequence_parallel: bool = False) -> dict[str, Any]:
        return {"first": "colwise", "middle.0": "rowwise"}

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.first, self.middle, self.last]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.middle(self.first(x)))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.change == "module":
            self.middle.append(nn.Linear(4, 4))
        elif self.change == "parameter":
            self.last.scale = nn.Parameter(torch.ones(2))
        elif self.change == "replaced":
            self.last = nn.Linear(4, 2)
        elif self.change == "unfrozen":
            self.middle[0].bias.requires_grad_(True)
        elif self.change == "harmless":
            self.middle[1] = nn.Sequential(nn.ReLU(), nn.Identity())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategy: str, change: str) -> str:
    """What is raised in the second step."""
    root = tempfile.mkdtemp()
    fit = Fit(
        strategy=STRATEGIES[strategy](),
        accelerator="cpu",
        precision="32-true",
        max_steps=3,
        num_sanity_val_steps=0,
        root_dir=root,
    )
    try:
        result = fit.run(Net(change), [torch.ones(4, 4) for _ in range(6)])
    except ValueError as error:
        return str(error)
    return f"{result.step} steps"


def rank_changes() -> Any:
    changes = ("module", "parameter", "replaced", "harmless")
    found = {
        f"{strategy}, {change}": trained(strategy, change) for strategy in ("fsdp", "tp", "pp") for change in changes
    }
    for strategy in ("deepspeed 1", "deepspeed 3"):
        found |= {f"{strategy}, {change}": trained(strategy, change) for change in ("module", "unfrozen", "harmless")}
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return ranks_of_file(__file__, 2)["changes"]


NAMES = {
    "module": "middle.2.weight, middle.2.bias",
    "parameter": "last.scale",
    "replaced": "last.weight, last.bias",
    "unfrozen": "middle.0.bias",
}


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_what_no_rank_would_share_is_refused(found: list[dict[str, str]], strategy: str) -> None:
    for rank in found:
        for case, text in rank.items():
            if case.startswith(strategy + ","):
                change = case.partition(", ")[2]
                assert text == "3 steps" if change == "harmless" else NAMES[change] in text, (case, text)
