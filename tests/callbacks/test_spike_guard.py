from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from callbacks import CSVLogger, ModelCheckpoint, SpikeGuard
from engine import Callback, Fit, TrainModule
from engine.utils import accelerator

BAD = {25: 1e4, 26: -3e5, 33: 1e4}
"""Batches (by number) whose targets are multiplied by this."""


def data(count=40, bad=BAD):
    """Batches of inputs [4, 3] and targets [4, 1]; with ``bad=None`` those of BAD are not there at all."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for i in range(count):
        inputs = torch.randn(4, 3, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(4, 1, generator=generator)
        if bad is None and i in BAD:
            continue
        batches.append((inputs, targets * (bad or {}).get(i, 1.0)))
    return batches


class Linear(TrainModule):
    def __init__(self, optimizer="adam"):
        super().__init__()
        torch.manual_seed(1)
        self.net, self.kind = nn.Linear(3, 1), optimizer

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self):
        kinds = {
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
            "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        }
        optimizer = kinds[self.kind](self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Steps(Callback):
    """The steps done after each batch."""

    def __init__(self):
        self.done = []

    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        self.done.append(run.step)


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


@pytest.fixture
def train(tmp_path):
    def run(module, batches, *callbacks, resume=None, root="run", **settings):
        fit = Fit(
            accelerator="cpu",
            devices=1,
            root_dir=tmp_path / root,
            log_every_n_steps=10,
            callbacks=callbacks,
            **settings,
        )
        return fit.run(module, batches, resume=resume)

    return run


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("adam", {}), ("fused", {"gradient_clip_val": 0.5}), ("sgd", {"on_nonfinite": "raise"})],
)
@pytest.mark.parametrize("monitor", ["loss", "grad_norm", ("loss", "grad_norm")])
def test_bad_batches_leave_no_trace(train, optimizer, settings, monitor):
    guarded, clean, plain = Linear(optimizer), Linear(optimizer), Linear(optimizer)
    guard = SpikeGuard(monitor)
    result = train(guarded, data(), guard, **settings)
    expected = train(clean, data(bad=None), root="clean", **settings)
    train(plain, data(), root="plain", **settings)
    assert weights(guarded) == weights(clean)  # to the last bit
    assert weights(plain) != weights(clean)
    assert result.step == expected.step == 37
    assert guard.spikes == result.metrics["spikes"] == 3


def test_a_device_without_float64_guards_in_float32(train, monkeypatch):
    monkeypatch.setattr(accelerator, "wide", lambda device: torch.float32)
    guarded, clean = Linear(), Linear()
    train(guarded, data(), guard := SpikeGuard(("loss", "grad_norm")))
    train(clean, data(bad=None), root="clean")
    assert weights(guarded) == weights(clean)
    assert guard.state_dict()["history"].dtype == torch.float32


def test_windows_of_several_micro_batches(train):
    guarded, clean = Linear(), Linear()
    train(guarded, data(), guard := SpikeGuard(warmup_steps=8), accumulate_grad_batches=2)
    without = [batch for i, batch in enumerate(data()) if i // 2 not in (12, 13, 16)]
    train(clean, without, root="clean", accumulate_grad_batches=2)
    assert guard.spikes == 3  # the windows (24, 25), (26, 27) and (32, 33)
    assert weights(guarded) == weights(clean)


class Scripted(TrainModule):
    """Its loss is the batch's value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return batch.mean() + self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_the_limit_is_that_of_the_rolling_window(train):
    generator = torch.Generator().manual_seed(4)
    values = (torch.randn(120, generator=generator, dtype=torch.float64) * 0.3 + 2).tolist()
    kept, expected = [], []
    for value in values:
        window = kept[-10:]
        spike = len(kept) >= 5 and value > statistics.fmean(window) + 1.5 * statistics.stdev(window)
        expected.append(not spike)
        if not spike:
            kept.append(value)
    assert 5 < expected.count(False) < 30
    steps = Steps()
    guard = SpikeGuard("loss", window=10, sigmas=1.5, warmup_steps=5, patience=50)
    train(Scripted(), [torch.tensor([value], dtype=torch.float64) for value in values], guard, steps)
    assert [now > before for before, now in zip([0, *steps.done], steps.done, strict=False)] == expected


def test_a_resumed_run_equals_the_uninterrupted_one(train, tmp_path):
    whole, first, second = Linear(), Linear(), Linear()
    train(whole, data(), SpikeGuard(warmup_steps=15), root="whole")
    train(first, data(), SpikeGuard(warmup_steps=15), ModelCheckpoint(every=12), max_steps=12)
    guard = SpikeGuard(warmup_steps=15)
    result = train(second, data(), guard, ModelCheckpoint(every=12), resume="last")
    assert weights(second) == weights(whole)
    assert (guard.spikes, result.step) == (3, 37)
    # 24 batches were accepted by 25; a window that had started empty at step 12 would have no verdict on the first.
    steps = Steps()
    train(Linear(), data()[12:], SpikeGuard(warmup_steps=15), steps, root="empty")
    assert steps.done[13] == 14


def test_a_spike_that_is_an_error(train):
    module, clean = Linear(), Linear()
    with pytest.raises(RuntimeError, match=r"step after step 25 is more than 6 standard deviations"):
        train(module, data(bad={25: 1e4}), SpikeGuard(action="raise"), ModelCheckpoint())
    train(clean, data(25, bad=None), root="clean")
    assert weights(module) == weights(clean)
    # The step before was saved, and a resumed run continues behind the bad batch.
    again = Linear()
    guard = SpikeGuard(action="raise")
    assert train(again, data(bad={25: 1e4}), guard, ModelCheckpoint(), resume="last").step == 39


def test_back_to_the_last_checkpoint(train):
    module, expected = Linear("sgd"), Linear("sgd")
    guard, steps = SpikeGuard(action="rollback", warmup_steps=5), Steps()
    batches = data(20, bad={13: 1e4})
    train(module, batches, guard, steps, ModelCheckpoint(every=5))
    # Steps 11 to 13 are undone; batches 14 to 19 follow on the weights of step 10. The scheduler goes back, the counter does not.
    train(expected, batches[:10] + batches[14:], root="expected")
    assert weights(module) == weights(expected)
    assert steps.done[12:15] == [13, 13, 14]
    assert guard.spikes == 1


def test_back_to_the_one_before_a_checkpoint_that_was_removed(train):
    class Removes(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            if run.step == 12:
                run.finish_checkpoints()
                run.checkpoints.folder.remove(["step=00000010"])

    module, expected = Linear("sgd"), Linear("sgd")
    guard = SpikeGuard(action="rollback", warmup_steps=5)
    batches = data(20, bad={13: 1e4})
    train(module, batches, guard, Removes(), ModelCheckpoint(every=5, save_top_k=3))
    train(expected, batches[:5] + batches[14:], root="expected")
    assert weights(module) == weights(expected)


def test_no_checkpoint_to_go_back_to_yet(train, caplog):
    module, clean = Linear(), Linear()
    train(module, data(20, bad={13: 1e4}), SpikeGuard(action="rollback", warmup_steps=5), ModelCheckpoint())
    assert "no checkpoint has been saved yet" in caplog.text
    batches = data(20, bad={})
    train(clean, batches[:13] + batches[14:], root="clean")
    assert weights(module) == weights(clean)


def test_spikes_in_a_row_end_the_run(train):
    bad = dict.fromkeys(range(25, 40), 10000.0)
    with pytest.raises(RuntimeError, match=r"4 steps in a row after step 25 were left out \(patience=4\)"):
        train(Linear(), data(bad=bad), SpikeGuard(patience=4))
    train(Linear(), data(bad=dict.fromkeys((25, 26, 27, 29, 30, 31), 10000.0)), SpikeGuard(patience=4), root="few")


def test_what_is_not_finite(train):
    batches = data(bad={3: float("nan"), 25: float("inf")})
    module, clean = Linear(), Linear()
    train(module, batches, guard := SpikeGuard())
    train(clean, [b for i, b in enumerate(data(bad={})) if i not in (3, 25)], root="clean")
    assert guard.spikes == 2
    assert weights(module) == weights(clean)
    skipping, other = Linear(), SpikeGuard()
    train(skipping, batches, other, root="skip", on_nonfinite="skip")
    assert weights(skipping) == weights(clean)
    assert other.spikes == 0  # they were on_nonfinite's
    with pytest.raises(FloatingPointError, match="on_nonfinite='raise'"):
        train(Linear(), batches, SpikeGuard(), root="raise", on_nonfinite="raise")


def test_a_spike_is_not_an_overflow(train):
    class Small(Linear):  # the scaled gradient of a bad batch fits into fp16
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) / 1000.0

    scales = []

    class Scale(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            scales.append(run.engine.scaler.state_dict()["scale"])

    train(Small("sgd"), data(bad={25: 20.0}), guard := SpikeGuard(), Scale(), precision="16-mixed")
    assert guard.spikes == 1
    assert scales[25] == scales[24]


def test_the_metric_is_logged(train, tmp_path):
    train(Linear(), data(), SpikeGuard(), CSVLogger(), max_epochs=1)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        found = {row["step"]: row["spikes"] for row in csv.DictReader(file)}
    assert found == {"1": "0.0", "10": "0.0", "20": "0.0", "30": "2.0", "37": "3.0"}


def test_what_cannot_be_guarded(train):
    class ByHand(Linear):
        automatic_optimization = False

    class Own(Linear):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(ValueError, match="automatic_optimization = False"):
        train(ByHand(), data(), SpikeGuard())
    with pytest.raises(ValueError, match="Own overrides optimizer_step"):
        train(Own(), data(), SpikeGuard())
    with pytest.raises(ValueError, match="needs checkpoints to go back to: add a ModelCheckpoint"):
        train(Linear(), data(), SpikeGuard(action="rollback"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"monitor": "val_loss"}, "monitor='val_loss'"),
        ({"action": "stop"}, "action='stop'"),
        ({"window": 1}, "window=1"),
        ({"sigmas": 0}, "sigmas=0"),
        ({"patience": 0}, "patience=0"),
    ],
)
def test_arguments_that_are_not_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        SpikeGuard(**arguments)


SCRIPT = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/callbacks"]
import torch
from callbacks import ModelCheckpoint, SpikeGuard
from engine import Fit
from test_spike_guard import Linear, data, weights

def train(batches, name, *callbacks, **settings):
    module = Linear()
    # Rank r has batches r, r + 2, ...
    fit = Fit(accelerator="cpu", strategy=settings.pop("strategy", "ddp"), root_dir=f"{sys.argv[2]}/{name}", callbacks=callbacks, **settings)
    result = fit.run(module, batches)
    return fit.state_dict(module, everywhere=True), result.step

batches = data(60)
without = [b for i, b in enumerate(batches) if i // 2 not in (12, 13, 16)]  # the steps of which one rank's batch is bad
found = {}
for strategy in sys.argv[3:]:
    guard = SpikeGuard("loss", warmup_steps=8)  # each rank sees another loss, and one gradient norm
    a, b = train(batches, "a", guard, strategy=strategy), train(without, "b", strategy=strategy)
    found[strategy] = [all(torch.equal(a[0][k], b[0][k]) for k in b[0]), a[1], b[1], guard.spikes]
if "ddp" in sys.argv:
    guard = SpikeGuard(action="rollback", warmup_steps=8)
    a = train(batches[:32], "c", guard, ModelCheckpoint(every=6))
    b = train(batches[:24] + batches[28:32], "d")
    found["rollback"] = [all(torch.equal(a[0][k], b[0][k]) for k in b[0]), guard.spikes]
report(found)
"""


def test_two_ranks_leave_out_the_same_steps(tmp_path):
    for rank in run_ranks(SCRIPT, 2, Path(__file__).parents[1], tmp_path, "ddp"):
        assert rank.value == {"ddp": [True, 27, 27, 3], "rollback": [True, 2]}


@pytest.mark.slow
def test_two_ranks_with_a_sharded_model(tmp_path):
    for rank in run_ranks(SCRIPT, 2, Path(__file__).parents[1], tmp_path, "fsdp"):
        assert rank.value == {"fsdp": [True, 27, 27, 3]}
