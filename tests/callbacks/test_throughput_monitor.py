"""Rates against what the run is known to have done, and operations against a count by hand."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import ModelCheckpoint, ThroughputMonitor
from callbacks.throughput_monitor import known_peak, peak_of
from engine import Callback, Loss, TrainModule

FLOPS = 2 * 4 * (8 * 16 * 2 + 16 * 3 * 3)
"""A batch of 4 through Linear(8, 16) and Linear(16, 3): 2 operations a weight and sample, for output and weight gradient, in the second layer
for the gradient of its input, too."""


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Seen(Callback):
    """What was logged, by step, and when."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.at: dict[int, float] = {}

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        found = {name.removeprefix("throughput/"): value for name, value in metrics.items() if "throughput/" in name}
        if found:
            self.values[step] = found

    def on_before_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        self.at.setdefault(step, time.perf_counter())


def data(count: int, size: int = 4) -> list[Tensor]:
    return [torch.ones(size, 8) for _ in range(count)]


def test_rates_are_counts_by_the_time_between_two_boundaries(make_fit):
    class Sleeps(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.02)

    before, after = Seen(), Seen()
    make_fit(
        callbacks=[before, ThroughputMonitor(), after, Sleeps()], log_every_n_steps=4, accumulate_grad_batches=2
    ).run(Net(), data(16))
    assert sorted(after.values) == [4, 8]  # the first boundary, step 1, starts the clock
    for step, earlier in ((4, 1), (8, 4)):
        found, steps = after.values[step], step - earlier
        longest, shortest = after.at[step] - before.at[earlier], before.at[step] - after.at[earlier]
        rates = {"steps_per_sec": steps, "samples_per_sec": 8 * steps, "flops_per_sec": 2 * FLOPS * steps}
        for name, count in rates.items():
            assert count / longest <= found[name] <= count / shortest
        assert "mfu" not in found  # nobody knows what this processor can do
        assert "tokens_per_sec" not in found


def test_mfu_is_the_share_of_the_peak_that_was_given(make_fit):
    seen, monitor = Seen(), ThroughputMonitor(peak_flops=1e6)
    make_fit(callbacks=[monitor, seen], log_every_n_steps=3).run(Net(), data(6))
    assert monitor.flops == FLOPS
    assert seen.values[6]["mfu"] == pytest.approx(seen.values[6]["flops_per_sec"] / 1e6)


def test_recomputation_makes_it_hfu(make_fit):
    class Blocks(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    once = 2 * 4 * 8 * 8  # a layer's forward pass, or one of its two gradients
    found = {}
    for name, options in (("mfu", {}), ("hfu", {"activation_checkpointing": "full"})):
        seen, monitor = Seen(), ThroughputMonitor(peak_flops=1e6)
        make_fit(callbacks=[monitor, seen], log_every_n_steps=2, **options).run(Blocks(), data(4))
        found[name] = monitor.flops
        assert [key for key in seen.values[4] if key in ("mfu", "hfu")] == [name]
    assert found["mfu"] == once * (3 + 3 + 2)
    assert found["hfu"] > found["mfu"]


def test_counting_changes_nothing(make_fit):
    class Drops(Net):
        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.BatchNorm1d(16), nn.Linear(16, 3))

    states = []
    for callbacks in ([], [ThroughputMonitor()]):
        module = Drops()
        make_fit(callbacks=callbacks, seed=3).run(
            module, [torch.randn(4, 8, generator=torch.Generator().manual_seed(2))] * 5
        )
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_compiled_model_is_counted_too(make_fit):
    class Compiled(Net):
        def configure_model(self) -> None:
            self.net.compile(backend="aot_eager")

    monitor = ThroughputMonitor()
    make_fit(callbacks=[monitor]).run(Compiled(), data(2))
    assert monitor.flops == FLOPS


def test_a_micro_batch_without_a_loss_is_not_the_one_that_is_counted(make_fit):
    class Skips(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx else None

    monitor = ThroughputMonitor()
    make_fit(callbacks=[monitor], accumulate_grad_batches=2).run(Skips(), data(2))
    assert monitor.flops == FLOPS


def test_manual_optimization_counts_the_whole_step(make_fit):
    class ByHand(Net):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(self.net(batch).mean())
                self.optimizers().step()

    monitor = ThroughputMonitor()
    make_fit(callbacks=[monitor]).run(ByHand(), data(2))
    assert monitor.flops == 2 * FLOPS


def test_an_error_in_the_counted_step_ends_the_count(make_fit):
    class Fails(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            raise ArithmeticError("its own")

    with pytest.raises(ArithmeticError, match="its own"):
        make_fit(callbacks=[ThroughputMonitor()]).run(Fails(), data(2))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_tokens_are_counts_of_losses_or_what_a_function_says(make_fit):
    class Tokens(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return Loss(self.net(batch).sum(), batch.numel())

    for module, monitor in ((Tokens(), ThroughputMonitor()), (Net(), ThroughputMonitor(tokens_fn=lambda b: b.numel()))):
        seen = Seen()
        make_fit(callbacks=[monitor, seen], log_every_n_steps=2).run(module, data(4))
        found = seen.values[4]
        assert found["tokens_per_sec"] == pytest.approx(8 * found["samples_per_sec"])


def test_tokens_of_rows_are_those_of_the_clock(make_fit):
    class Rows(list):
        tokens_per_sample = 16

    class Padded(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return Loss(self.net(batch).sum(), 12 * len(batch))  # a quarter is padding

    for module, share in ((Padded(), 0.25), (Net(), None)):
        seen = Seen()
        rows = DataLoader(Rows(torch.cat(data(4))), batch_size=2)
        make_fit(callbacks=[ThroughputMonitor(), seen], log_every_n_steps=2).run(module, rows)
        found = seen.values[4]
        assert found["tokens_per_sec"] == pytest.approx(16 * found["samples_per_sec"])
        assert found.get("padding") == (None if share is None else pytest.approx(share))


def test_goodput_is_over_kills_and_resumes(make_fit, monkeypatch):
    class Sleeps(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.01)

    def callbacks(seen: Seen) -> list[Callback]:
        return [ThroughputMonitor(), Sleeps(), seen, ModelCheckpoint(every=4)]

    first, second = Seen(), Seen()
    make_fit(callbacks=callbacks(first), log_every_n_steps=2, max_steps=4).run(Net(), data(8))
    assert 0 < first.values[4]["goodput"] <= 1
    later = time.time
    monkeypatch.setattr(time, "time", lambda: later() + 1000)  # nobody trained for 1000 s
    make_fit(callbacks=callbacks(second), log_every_n_steps=2, max_steps=8).run(Net(), data(8), resume="last")
    # 8 steps, 4 of them before the pause: at least 80 ms of more than 1000 s.
    assert 0.08 / 1300 < second.values[8]["goodput"] < 0.1


def test_validation_takes_no_training_time(make_fit):
    class Slow(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            time.sleep(0.5)
            super().validation_step(batch, batch_idx)

    seen = Seen()
    make_fit(callbacks=[ThroughputMonitor(), seen], log_every_n_steps=2, val_every=3, max_epochs=1).run(
        Slow(), data(4), data(1)
    )
    assert set(seen.values) == {2, 4}  # and not at the validation's step
    assert seen.values[4]["steps_per_sec"] > 2 / (seen.at[4] - seen.at[2])


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA A10G", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA L40", "bf16", None),
    ],
)
def test_known_devices(name, kind, expected):
    assert known_peak(name, kind) == expected


def test_a_cpu_has_no_peak():
    assert peak_of(torch.device("cpu"), "bf16-mixed") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"peak_flops": 0}, "must be positive"), ({"peak_flops": 1e12, "count_flops": False}, "MFU needs the count")],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ThroughputMonitor(**arguments)


RANKS = """
import sys
sys.path[:0] = ["tests", "tests/callbacks"]
import torch
from support.toys import fit
from test_throughput_monitor import Net, Seen, data
from callbacks import ThroughputMonitor
from engine import MeshParallel

class Pipe(Net):
    def pipeline_stages(self):
        return list(self.net)

    def forward(self, batch):
        return self.net(batch)

    def training_step(self, batch, batch_idx):
        return self(batch).mean()

from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
found = {}
for name, strategy, module in (
    ("ddp", "ddp", Net()),
    ("tp", MeshParallel(tp=2, plan={"net.0": ColwiseParallel(), "net.1": RowwiseParallel()}), Net()),
    ("pp", MeshParallel(pp=2), Pipe()),
):
    seen, monitor = Seen(), ThroughputMonitor(peak_flops=1e6)
    torch.manual_seed(0)
    fit(sys.argv[1] + name, devices="auto", strategy=strategy, log_every_n_steps=2, callbacks=[monitor, seen]).run(module, data(8))
    last = seen.values[max(seen.values)]
    found[name] = [monitor.flops, last["flops_per_sec"] / last["samples_per_sec"], last["mfu"] * 2e6 / last["flops_per_sec"]]
    found[name + " same"] = last
report(found)
"""


def test_operations_of_all_ranks_under_each_strategy(tmp_path):
    first, second = (rank.value for rank in run_ranks(RANKS, 2, tmp_path))
    for name in ("ddp", "tp", "pp"):
        assert json.dumps(first[f"{name} same"]) == json.dumps(second[f"{name} same"])
        # In total a sample needs as many operations under every strategy, and two devices can do twice as many.
        assert first[name][1:] == pytest.approx([FLOPS / 4, 1.0])
    assert first["ddp"][0] == second["ddp"][0] == FLOPS
    assert first["tp"][0] + second["tp"][0] == first["pp"][0] + second["pp"][0] == FLOPS
