"""Trainings on one simulated device: the CPU's numbers bit for bit, no race, no wait between log boundaries, no byte too many."""

from __future__ import annotations

from typing import Any

import simulated as sim
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from trainings import BOUNDARY, ManualNet, Net, Watch, adamw, batches, folder, same, sgd, trained

from callbacks import (
    CSVLogger,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientNorm,
    JSONLLogger,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StragglerMonitor,
    ThroughputMonitor,
)
from engine import Callback, Engine, Fit


def fp32_with_every_kind_of_optimizer() -> None:
    for make in (adamw, sgd):
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            same(lambda make=make, how=how: Net(make(**how)))


def bf16_mixed() -> None:
    same(Net, precision="bf16-mixed")
    same(lambda: Net(adamw(foreach=False)), precision="bf16-mixed", accumulate_grad_batches=3)


def bf16_true() -> None:
    same(lambda: Net(sgd(foreach=True)), precision="bf16-true")


def fp16_mixed() -> None:
    """The CPU has no loss scaler of ours, so the reference is a bare loop on the same device."""
    module = trained("sim", Net(), precision="16-mixed")
    bare = Net()
    bare.to("sim")
    optimizer, scaler = bare.make(bare.parameters()), torch.amp.GradScaler("sim")
    losses = []
    for x, y in batches():
        with torch.autocast("sim", torch.float16):
            loss = (bare.net(x.to("sim")) - y.to("sim")).square().mean(1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert module.losses == losses


def fp16_mixed_leaves_out_a_step_that_overflows() -> None:
    module = Net(overflow_at=7)
    watch = Watch()
    result = Fit(
        accelerator="sim",
        devices=1,
        precision="16-mixed",
        log_every_n_steps=BOUNDARY,
        callbacks=[watch],
        root_dir=folder(),
    ).run(module, batches())
    assert result.step == 19
    watch.quiet()
    assert all(torch.isfinite(weight).all() for weight in module.weights)


def windows_and_clipping() -> None:
    same(Net, batches(10), accumulate_grad_batches=4, max_epochs=2)  # the last window is shorter
    same(Net, accumulate_grad_batches=2, gradient_clip_val=0.1)
    same(lambda: Net(sgd(foreach=True)), gradient_clip_val=0.1)
    same(Net, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def a_weighted_loss() -> None:
    for settings in ({}, {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}):
        same(lambda: Net(weighted=True), batches(10), **settings)
    same(lambda: Net(weighted=True), batches(10), accumulate_grad_batches=3, precision="bf16-mixed")


def a_step_that_is_not_finite_is_skipped() -> None:
    """A run with the bad batch left out has the same weights."""
    data = batches()
    module = trained("sim", Net(overflow_at=7), data, on_nonfinite="skip")
    without = trained("sim", Net(), [*data[:7], *data[8:]])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(module.weights, without.weights, strict=True))


def a_step_that_is_not_finite_raises() -> None:
    module = Net(overflow_at=7)
    try:
        trained("sim", module, on_nonfinite="raise")
    except FloatingPointError as error:
        if "not finite" not in str(error):
            raise
    else:
        raise AssertionError("no error")
    assert all(torch.isfinite(weight).all() for weight in module.weights)
    assert sim.races() == []


class _Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.error(self.net(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("bar", loss * 2, prog_bar=True)
        self.log_dict({f"value_{i}": loss + i for i in range(10)})
        return loss


class _Seen(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, run: Any, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        self.seen.append(dict(metrics))


def metrics() -> None:
    seen: dict[str, list[dict[str, float]]] = {}
    for accelerator in ("cpu", "sim"):
        kept = _Seen()
        Fit(
            accelerator=accelerator,
            devices=1,
            log_every_n_steps=BOUNDARY,
            max_epochs=2,
            callbacks=[kept, watch := Watch()] if accelerator == "sim" else [kept],
            root_dir=folder(),
        ).run(_Measured(), batches(), batches(3))
        seen[accelerator] = kept.seen
    assert len(seen["sim"]) == len(seen["cpu"]) >= 8
    for ours, theirs in zip(seen["sim"], seen["cpu"], strict=True):
        assert ours == theirs, (ours, theirs)
    watch.quiet()


def prefetch_with_workers() -> None:
    data = TensorDataset(torch.randn(160, 8), torch.randn(160, 4))
    for pinned in (False, True):
        loader = DataLoader(data, batch_size=8, num_workers=2, shuffle=True, pin_memory=pinned)
        same(Net, loader, max_epochs=2)


def reserved_memory_stays_over_epochs() -> None:
    class Forgetful(Net):
        def on_train_epoch_start(self) -> None:
            self.kept.clear()

    watch = Watch()
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), batch_size=8, shuffle=True)
    before = torch.Stream("sim").stream_id
    trained("sim", Forgetful(), loader, callbacks=[watch], max_epochs=40, precision="bf16-mixed", gradient_clip_val=1.0)
    assert watch.reserved[3:] == [watch.reserved[3]] * 37, watch.reserved
    assert torch.Stream("sim").stream_id - before <= 4  # not one an epoch


def peak_memory_is_a_bare_loops() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    class Big(Net):
        def __init__(self) -> None:
            super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))
            self.net = build()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.net(batch) - 1).square().mean()
            self.log("loss", loss)
            return loss

    data = [torch.randn(64, 256) for _ in range(8)]
    for precision, window, clip in (("32-true", 1, None), ("bf16-mixed", 1, None), ("32-true", 2, 1.0)):
        net = build().to("sim")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        torch.sim.reset_peak_memory_stats()
        following = data[0].to("sim")
        for step in range(len(data)):
            moved, following = following, data[(step + 1) % 8].to("sim")  # as every loop that prefetches
            with torch.autocast("sim", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = (net(moved) - 1).square().mean() / window
            loss.backward()
            if (step + 1) % window == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        bare = torch.sim.max_memory_allocated()
        del net, optimizer, moved, following, loss
        torch.sim.empty_cache()
        torch.sim.reset_peak_memory_stats()
        trained("sim", Big(), data, precision=precision, accumulate_grad_batches=window, gradient_clip_val=clip)
        peak = torch.sim.max_memory_allocated()
        assert peak <= 1.01 * bare, (precision, window, clip, peak, bare)
        torch.sim.empty_cache()


class _Versions(Callback):
    """The weights at each step's end, before a save begins."""

    def __init__(self) -> None:
        self.at: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_end(self, run: Any, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at[run.step + run.engine.pending_steps] = [parameter.detach().clone() for parameter in module.parameters()]


def asynchronous_saves_hold_the_weights_of_their_step() -> None:
    root, versions, watch = folder(), _Versions(), Watch()
    Fit(
        accelerator="sim",
        devices=1,
        log_every_n_steps=BOUNDARY,
        callbacks=[versions, ModelCheckpoint(every="2 steps", save_top_k=-1), watch],
        root_dir=root,
    ).run(Net(), batches())
    watch.quiet("save_checkpoint")
    saved = sorted(root.rglob("step=*"))
    assert len(saved) >= 10, saved
    for path in saved:
        found = Net.load_from_checkpoint(path)
        expected = versions.at[int(path.name.partition("=")[2])]
        assert all(torch.equal(ours, theirs.cpu()) for ours, theirs in zip(found.weights, expected, strict=True)), path


def asynchronous_saves_do_not_wait() -> None:
    trained("sim", Net(), callbacks=[ModelCheckpoint(every="3 steps")])


def asynchronous_saves_under_fp16_do_not_wait() -> None:
    trained("sim", Net(), callbacks=[ModelCheckpoint(every="3 steps")], precision="16-mixed")


def asynchronous_saves_give_pinned_memory_back() -> None:
    before = sim.pinned_bytes()
    trained("sim", Net(), callbacks=[ModelCheckpoint(every="3 steps")], allowed=("save_checkpoint",))
    assert sim.pinned_bytes() - before <= 4096, sim.pinned_bytes() - before


def weights_that_a_hook_changes_during_a_save_are_an_error_or_whole() -> None:
    """Never a checkpoint with half of the change in it."""

    class Changed(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)

    root = folder()
    try:
        trained(
            "sim", Changed(), callbacks=[ModelCheckpoint(every="2 steps", save_top_k=-1)], quiet=False, root_dir=root
        )
    except RuntimeError as error:
        if "changed" not in str(error):
            raise
    assert sim.races() == [], sim.races()


def resuming_continues_bit_for_bit() -> None:
    saves = {"allowed": ("save_checkpoint",)}
    for settings in (
        {"precision": "bf16-mixed", **saves},
        {"precision": "16-mixed", "gradient_clip_val": 1.0, **saves},
    ):
        root, data = folder(), batches()
        whole = trained("sim", Net(dropout=0.3), data, max_steps=20, **settings)
        trained(
            "sim",
            Net(dropout=0.3),
            data,
            max_steps=8,
            root_dir=root,
            callbacks=[ModelCheckpoint(every="8 steps")],
            **settings,
        )
        torch.sim.manual_seed_all(99)
        rest = trained(
            "sim",
            Net(dropout=0.3),
            data,
            max_steps=20,
            root_dir=root,
            resume="auto",
            callbacks=[ModelCheckpoint(every="8 steps")],
            **settings,
        )
        assert rest.losses == whole.losses[8:]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rest.weights, whole.weights, strict=True))


def manual_optimization() -> None:
    same(ManualNet)
    same(ManualNet, precision="bf16-mixed")


def evaluation_and_prediction() -> None:
    found: dict[str, Any] = {}
    for accelerator in ("cpu", "sim"):
        fit = Fit(
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            root_dir=folder(),
            val_every="5 steps",
            log_every_n_steps=BOUNDARY,
        )
        module = Net()
        fit.run(module, batches(), batches(3))
        predicted = fit.predict(module, batches(4))
        found[accelerator] = (
            fit.validate(module, batches(5)),
            fit.test(module, batches(5)),
            [each.cpu().tolist() for each in predicted],
        )
    assert found["sim"] == found["cpu"]
    assert sim.races() == []


def ten_callbacks_wait_for_nothing() -> None:
    callbacks = [
        RichProgressBar(),
        CSVLogger(),
        JSONLLogger(),
        ModelCheckpoint(every="4 steps"),
        LearningRateMonitor(),
        ThroughputMonitor(),
        DeviceStatsMonitor(),
        StragglerMonitor(),
        GradientNorm(),
        EarlyStopping("loss_step", patience=100),
    ]
    trained("sim", Net(), batches(40), callbacks=callbacks, max_epochs=2, allowed=("save_checkpoint",))


def the_raw_loop() -> None:
    weights = {}
    for accelerator in ("cpu", "sim"):
        engine = Engine(accelerator=accelerator, precision="bf16-mixed", accumulate_grad_batches=2)
        net = Net().net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        data = DataLoader(TensorDataset(torch.ones(40, 8), torch.zeros(40, 4)), batch_size=4)
        net, optimizer, loader = engine.prepare(net, optimizer, data)
        sim.clear()
        for x, y in loader:
            with engine.accumulate():
                loss = (net(x) - y).square().mean()
                engine.backward(loss)
                engine.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert accelerator == "cpu" or x.device.type == "sim"
        assert sim.races() == []
        assert sim.training_waits() == []
        weights[accelerator] = [parameter.detach().cpu() for parameter in net.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights["sim"], weights["cpu"], strict=True))
