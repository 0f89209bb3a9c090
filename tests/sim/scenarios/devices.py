"""What the library asks a device that a package has added to torch, and how it gets on without float64."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import simulated as sim
import torch
from support.toys import Weight, fit, ones
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from callbacks import GradientNorm, ModelCheckpoint, SpikeGuard
from engine import Device, Engine, Loss
from engine.cli.env import collect
from engine.config.settings import Settings
from engine.utils import accelerator
from engine.utils.seed import capture, restore, seed_everything


def its_names_and_what_it_can_do() -> None:
    assert [accelerator.device_type(name) for name in ("auto", "gpu", "sim")] == ["sim"] * 3
    assert (accelerator.count("sim", "auto"), Settings(accelerator="SIM").accelerator) == (2, "sim")
    with pytest.raises(RuntimeError, match=r"sees 2 sim device\(s\) on this machine; use 'sim' or 'gpu' or 'auto'"):
        accelerator.device_type("cuda")
    device = accelerator.device("sim", 1)
    assert device == torch.device("sim", 1)
    assert torch.accelerator.current_device_index() == 1
    can = Device(device).capabilities
    assert all(can[name] for name in ("float64", "bf16-mixed", "16-mixed", "streams", "pinned memory", "fused AdamW"))
    assert accelerator.collectives_backend(device) == "simccl"
    before = Device(device).memory()["allocated"]
    kept = torch.empty(2**20, dtype=torch.uint8, device=device)
    assert Device(device).memory()["allocated"] - before == kept.numel()
    shown = collect({"FIT_ACCELERATOR": "sim"})
    assert shown["errors"] == []
    assert {"sim:0", "sim:1"} <= set(shown["devices"])
    assert shown["devices"]["collectives"] == "simccl for sim"


def its_random_numbers_are_in_the_state() -> None:
    device = torch.device("sim", 0)
    seed_everything(3)
    first = torch.rand(4, device=device).tolist()
    state = capture()
    second = torch.rand(4, device=device).tolist()
    restore(state)
    assert torch.rand(4, device=device).tolist() == second != first
    seed_everything(3)
    assert torch.rand(4, device=device).tolist() == first


def a_step_does_not_wait_for_trials() -> None:
    """What the device can do is tried when things are prepared."""
    engine = Engine(accelerator="sim", on_nonfinite="skip", accumulate_grad_batches=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = engine.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    batch, count = torch.ones(2, 2, device=engine.device), torch.tensor(2, device=engine.device)
    sim.clear()
    for _ in range(2):
        with engine.accumulate(model):
            engine.backward(Loss(model(batch).sum(), count))
            optimizer.step()
            optimizer.zero_grad()
    assert sim.training_waits() == [], "\n".join(map(str, sim.training_waits()))


class _NoFloat64(TorchDispatchMode):
    """As an Apple GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.device.type == "sim" and each.dtype == torch.float64:
                raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return out


class _Logs(Weight):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", self.w.detach().sum() * 0 + 1000.0 + batch_idx, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        return Loss(loss * len(batch), torch.tensor(len(batch), device=batch.device))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def without_float64() -> None:
    can = accelerator.computes_in
    accelerator.computes_in = lambda device, dtype: (
        (device.type, dtype) != ("sim", torch.float64) and can(device, dtype)
    )
    accelerator.wide.cache_clear()
    for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "16-mixed"}):
        every = [SpikeGuard(sigmas=100), GradientNorm()]
        with tempfile.TemporaryDirectory() as folder, _NoFloat64():
            run = fit(folder, accelerator="sim", callbacks=every, log_every_n_steps=50, **settings)
            assert run.run(_Logs(), ones(600)).metrics["x_epoch"] == 1000 + 599 / 2
    assert sim.races() == [], sim.races()
    with tempfile.TemporaryDirectory() as folder, _NoFloat64():  # the epoch's sums go through a checkpoint
        for steps in (400, 600):
            run = fit(folder, accelerator="sim", max_steps=steps, callbacks=ModelCheckpoint(every="400 steps"))
            found = run.run(_Logs(), ones(600), resume="auto")
    assert found.metrics["x_epoch"] == 1000 + 599 / 2
    with pytest.raises(ValueError, match=r"precision='64-true': sim:0.* lacks float64"):
        Engine(accelerator="sim", precision="64-true")
