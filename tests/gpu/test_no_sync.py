"""Between two log boundaries the host never waits for the device. torch itself watches: its sync debug mode raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import SpikeGuard
from engine import Callback, Fit, Loss, TrainModule

STEPS, BOUNDARY = 100, 50


class Net(TrainModule):
    def __init__(self, weighted: bool, overflow_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.weighted, self.overflow_at = weighted, overflow_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y, reduction="sum" if self.weighted else "mean")
        if batch_idx == self.overflow_at:
            loss = loss * math.inf
        self.log("loss", loss)
        return Loss(loss, (y >= 0).sum()) if self.weighted else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"},
        }


class Watch(Callback):
    """Sync debug mode ``error`` except while values are published, which is what a log boundary is for."""

    def __init__(self) -> None:
        self.boundaries = 0

    def on_train_batch_start(self, run: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        # The first window builds what lasts: optimizer state, the scaler, cached seeds.
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 2 else "default")

    def on_train_batch_end(self, run: Any, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (run.step + run.engine.pending_steps) % BOUNDARY == 0:
            torch.cuda.set_sync_debug_mode("default")

    def on_log(self, run: Any, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        self.boundaries += 1

    def on_train_epoch_end(self, run: Any, module: nn.Module) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, run: Any, module: nn.Module, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 64, generator=generator).pin_memory(),
            torch.randint(10, (32,), generator=generator).pin_memory(),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_hundred_steps_with_a_log_each(precision: str, clip: float | None, weighted: bool, tmp_path: Any) -> None:
    watch = Watch()
    fit = Fit(
        accelerator="cuda",
        devices=1,
        precision=precision,
        gradient_clip_val=clip,
        log_every_n_steps=BOUNDARY,
        callbacks=[watch],
        root_dir=tmp_path,
    )
    result = fit.run(Net(weighted), batches())
    assert watch.boundaries >= 1
    assert result.epoch == 1
    # 16-mixed begins with a loss scale of 65536, which may cost the first steps.
    assert result.step == STEPS or (precision == "16-mixed" and result.step >= STEPS - 10)


def test_a_skipped_step_leaves_counter_and_scheduler_alone(tmp_path: Any) -> None:
    """The verdict comes a step late on a device; what it says is the same."""
    rates: list[float] = []

    class Rates(Callback):
        def on_train_end(self, run: Any, module: nn.Module) -> None:
            rates.append(run.optimizers[0].param_groups[0]["lr"])

    fit = Fit(accelerator="cuda", devices=1, precision="16-mixed", callbacks=[Rates()], root_dir=tmp_path)
    result = fit.run(Net(False, overflow_at=7), batches(20))
    assert result.step == 19
    assert rates == [pytest.approx(1e-3 * 0.99**19)]


def test_nonfinite_raises_and_keeps_the_parameters(tmp_path: Any) -> None:
    module = Net(False, overflow_at=3)
    with pytest.raises(FloatingPointError, match="not finite"):
        Fit(accelerator="cuda", devices=1, on_nonfinite="raise", root_dir=tmp_path).run(module, batches(10))
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_a_spike_guard_decides_on_the_device(tmp_path: Any) -> None:
    fit = Fit(
        accelerator="cuda",
        devices=1,
        log_every_n_steps=BOUNDARY,
        callbacks=[guard := SpikeGuard(), Watch()],
        root_dir=tmp_path / "calm",
    )
    assert fit.run(Net(False), batches()).step == STEPS
    assert guard.spikes == 0
    # A loss that is not finite is a spike as well: the step is left out, and the run equals one without its batch.
    bad, clean = Net(False, overflow_at=30), Net(False)
    fit = Fit(accelerator="cuda", devices=1, callbacks=[guard := SpikeGuard()], root_dir=tmp_path / "bad")
    assert fit.run(bad, batches(40)).step == 39
    assert guard.spikes == 1
    Fit(accelerator="cuda", devices=1, root_dir=tmp_path / "clean").run(clean, [*batches(40)[:30], *batches(40)[31:]])
    assert all(torch.equal(a, b) for a, b in zip(bad.parameters(), clean.parameters(), strict=True))
