"""One device reaches every collective of its back end, DDP and FSDP2, and saves while it trains; no copy races with a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.ranks import run_script

from engine.cli import self_check_jobs

SAVED = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from callbacks import ModelCheckpoint
from engine import Fit, TrainModule

kind, root = sys.argv[1:]

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

def trained(folder, **settings):
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(160, 64, generator=generator), torch.arange(160) % 10), 16, num_workers=1)
    module = Net()
    fit = Fit(
        accelerator=kind, devices=1, seed=2, log_every_n_steps=3, callbacks=[ModelCheckpoint(every="2 steps")],
        root_dir=f"{root}/{folder}", **settings,
    )
    result = fit.run(module, data, resume="auto")
    return result.step, [p.detach().cpu() for p in module.parameters()]

steps, whole = trained("whole", max_epochs=2)
first, _ = trained("parts", max_steps=11)
total, parts = trained("parts", max_epochs=2)
assert (steps, first, total) == (20, 11, 20)
for one, other in zip(whole, parts, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
"""


def test_every_collective_ddp_and_fsdp_over_one_rank(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = self_check_jobs.Ranks()
    self_check_jobs.single(kind, ranks)
    assert self_check_jobs.one_rank(kind, ranks).startswith("weights differ by ")


def long_on_cpu(test: Callable[..., None]) -> Callable[..., None]:
    return test if torch.cuda.is_available() else pytest.mark.slow(test)


@long_on_cpu
def test_saves_beside_the_training_under_the_sanitizer(kind: str, tmp_path: Path) -> None:
    """torch watches each kernel's and copy's stream, and raises where two use memory without an order between them (on CUDA)."""
    ran = run_script(SAVED, kind, tmp_path, env={"TORCH_CUDA_SANITIZER": "1"} if kind == "cuda" else {})
    assert "CSAN detected" not in ran.stderr
