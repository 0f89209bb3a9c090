"""fp8 by the chip itself: compute capability 8.9 and later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine import FP8, Callback, Engine, Fit, TrainModule

ROUNDING = 2.0**-4
"""See tests/transforms/test_float8.py."""

pytest.importorskip("torchao")
capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = pytest.mark.skipif(capability < (8, 9), reason="needs a device of compute capability 8.9")
hopper = pytest.mark.skipif(capability < (9, 0), reason="scales by rows need compute capability 9.0")


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(256, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(3)
        )
        self.head = nn.Linear(128, 256)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def batches(count: int = 30, length: int = 65) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (16, length), generator=generator) ** 2 % 256 for _ in range(count)]


def train(precision: Any, root: Path, data: Any = None, **settings: Any) -> Tensor:
    """The loss of each step. Shape ``[steps]``."""
    module = Net()
    Fit(
        accelerator="cuda", devices=1, precision=precision, gradient_clip_val=1.0, seed=1, root_dir=root, **settings
    ).run(module, data or batches())
    return torch.stack(module.losses).cpu()


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs() / other.abs()).max().item()


@pytest.mark.parametrize(
    "recipe", ["tensorwise", pytest.param("rowwise", marks=hopper), pytest.param("rowwise_with_gw_hp", marks=hopper)]
)
def test_losses_are_close_to_those_of_bf16(recipe: str, tmp_path: Path) -> None:
    half, found = train("bf16-mixed", tmp_path), train(FP8(recipe=recipe), tmp_path)
    assert found[-1] < found[0]
    assert 0 < apart(found, half) < ROUNDING


def test_emulation_gives_nearly_the_same(tmp_path: Path) -> None:
    assert apart(train("fp8", tmp_path), train(FP8(emulate=True), tmp_path)) < ROUNDING / 4


def test_any_number_of_rows(tmp_path: Path) -> None:
    """16 * 7 tokens, then 3 * 5: products over rows that do not divide by 16."""
    assert train("fp8", tmp_path, [*batches(2, 8), batches(1, 6)[0][:3]]).isfinite().all()


def test_products_are_made_in_fp8() -> None:
    engine = Engine(accelerator="cuda", precision="fp8-mixed")
    linear = engine.prepare(nn.Linear(64, 128))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        engine.backward(linear(torch.randn(32, 64, device="cuda", requires_grad=True)).mean())
    assert (
        sum(event.name == "aten::_scaled_mm" for event in profile.events()) == 3
    )  # output, gradient of the input, gradient of the weight


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled(tmp_path: Path) -> None:
    assert apart(train("fp8", tmp_path, compile=True), train("fp8", tmp_path)) < ROUNDING / 4


class Waits(Callback):
    """torch raises when the host waits for the device."""

    def on_train_batch_start(self, run: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 2 else "default")

    def on_train_end(self, run: Any, module: nn.Module) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, run: Any, module: nn.Module, exception: BaseException) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_never_waits(tmp_path: Path) -> None:
    data = [batch.pin_memory() for batch in batches()]
    assert len(train("fp8", tmp_path, data, callbacks=Waits(), log_every_n_steps=0)) == 30
