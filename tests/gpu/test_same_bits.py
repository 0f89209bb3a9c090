"""On a CUDA device a bare loop, an ``Engine`` loop and ``Fit`` give the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engine import Engine, Fit, TrainModule


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("window", [1, 4])
def test_bare_engine_and_fit(precision: str, window: int, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 32, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(48)]
    bare, raw, fitted = Net(), Net(), Net()

    bare.cuda()
    optimizer = bare.configure_optimizers()
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
    torch.manual_seed(2)
    for index, batch in enumerate(data):
        with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = bare.training_step([t.cuda() for t in batch], index)
        scaler.scale(loss / window).backward()
        if (index + 1) % window == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    engine = Engine(accelerator="cuda", precision=precision, accumulate_grad_batches=window)
    model, stepped = engine.prepare(raw, raw.configure_optimizers())
    torch.manual_seed(2)
    for index, batch in enumerate(engine.prepare_data_loader(data)):
        with engine.accumulate(model):
            with engine.autocast():
                loss = raw.training_step(batch, index)
            engine.backward(loss)
            stepped.step()
            stepped.zero_grad()

    torch.manual_seed(2)
    Fit(accelerator="cuda", devices=1, precision=precision, accumulate_grad_batches=window, root_dir=tmp_path).run(
        fitted, copy.copy(data)
    )
    for a, b, c in zip(bare.parameters(), raw.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
