"""Who does not plan pays nothing for planning."""

from __future__ import annotations

import subprocess
import sys

from support.ranks import clean_environment

HEAVY = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "sympy",
    "rich",
    "engine.planning.plan",
    "engine.planning.tracing",
)


def test_fit_is_imported_without_what_plans() -> None:
    script = f"import sys; from engine import Fit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


PLANS = """
import sys
import torch
from torch import nn
from engine import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

Fit(strategy="fsdp").plan(Net(), [torch.zeros(2, 4)] * 4, world_size=2)
print([name for name in sys.modules if "deepspeed" in name.split(".")])
"""


def test_only_a_plan_of_deepspeed_imports_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANS], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
