"""Averages and fine-tuning on two ranks, under DDP and FSDP: one job for all of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from callbacks import EMA, SWA
from engine import Callback, TrainModule
from engine.checkpoint.catalog import facts

COMMON = """
import sys
from pathlib import Path
import torch
from torch import nn
from callbacks import EMA, SWA, BackboneFinetuning, ModelCheckpoint
from engine import Fit, TrainModule

root, found = Path(sys.argv[1]), {}
"""
AVERAGING = """
class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.validated = []

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", (self.layers(batch[0]) - 1).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


data = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1))), batch_size=2)


class Trace(ModelCheckpoint):
    def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
        state = run.engine.get_state_dict(module)
        self.seen = [*getattr(self, "seen", []), {k: v.clone() for k, v in state.items()}]
        super().on_train_batch_end(run, module, outputs, batch, batch_idx)


def run(name, strategy, resume=None):
    module, trace = Net(), Trace(every="4 steps", save_top_k=-1)
    fit = Fit(accelerator="cpu", strategy=strategy, devices=2, max_epochs=2, num_sanity_val_steps=0, root_dir=root / name,
              callbacks=[EMA(0.8), SWA(None, 1, name="swa"), trace])
    result = fit.run(module, data, data, resume=resume)
    state = fit.state_dict(module, everywhere=True)
    validated = fit.validate(Net(), data, checkpoint="last")[0]["loss"]
    return module, state, trace.seen, result, validated


for strategy in ("ddp", "fsdp"):
    module, state, seen, result, validated = run(strategy, strategy)
    _, again, *_ = run(strategy + "-again", strategy, resume=root / strategy / "checkpoints" / "step=00000004")
    found[strategy] = {
        "resumed": all(torch.equal(value, again[name]) for name, value in state.items()),
        "state": {name: value.tolist() for name, value in state.items()},
        "metric": result.metrics["loss"],
        "validated": validated,
        "mean": module.layers[1].running_mean.tolist(),
    }
    if seen[0]:
        name = "layers.0.weight"
        average = seen[0][name].double()
        for each in seen[1:]:
            average = 0.8 * average + 0.2 * each[name].double()
        found[strategy]["error"] = float((average - state[name]).abs().max())
        found[strategy]["steps"] = len(seen)
"""
FINETUNING = """
class Tuned(TrainModule):
    def __init__(self, given):
        super().__init__()
        torch.manual_seed(0)
        self.given = given
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.head(self.backbone(batch[0])) - 1).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        if self.given == "all":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


short = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(1))), batch_size=int(sys.argv[2]))


def tune(name, strategy, given, resume=None):
    module = Tuned(given)
    fit = Fit(accelerator="cpu", strategy=strategy, max_epochs=3, num_sanity_val_steps=0, root_dir=root / name, seed=3,
              callbacks=[BackboneFinetuning(1), ModelCheckpoint(every="5 steps", save_top_k=-1)])
    fit.run(module, short, short, resume=resume)
    return {name: value.tolist() for name, value in fit.state_dict(module, everywhere=True).items()}


two = int(sys.argv[2]) == 2
for given, strategy in (("head", "ddp"), ("all", "fsdp")):
    found[given] = tune(given, strategy if two else "single", given)
    if two:
        found[given + " again"] = tune(given + "-again", strategy, given, root / given / "checkpoints" / "step=00000005")
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    script = COMMON + AVERAGING + FINETUNING + "report(found)"
    return root, [ran.value for ran in run_ranks(script, 2, root, 2)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_average_and_resume_with_it(two_ranks, strategy):
    _, values = two_ranks
    assert values[0][strategy]["steps"] == 12
    assert values[0][strategy]["error"] < 1e-6
    assert values[0][strategy]["state"] == values[1][strategy]["state"]
    assert values[0][strategy]["mean"] == values[1][strategy]["mean"]
    assert all(value[strategy]["resumed"] for value in values)
    assert all(value[strategy]["validated"] == pytest.approx(value[strategy]["metric"], rel=1e-6) for value in values)


def test_sharded_training_goes_on_with_the_trained_weights_after_validation(two_ranks):
    _, values = two_ranks
    for name, value in values[0]["ddp"]["state"].items():
        other = values[0]["fsdp"]["state"][name]
        torch.testing.assert_close(torch.tensor(value), torch.tensor(other), rtol=1e-4, atol=1e-5)
    assert values[0]["ddp"]["metric"] == pytest.approx(values[0]["fsdp"]["metric"], rel=1e-4)


def test_each_rank_writes_its_part_of_sharded_averages(two_ranks):
    root, _ = two_ranks
    shards = {
        strategy: facts(root / strategy / "checkpoints" / "step=00000008", tensors=True)["tensors"]["weights"]
        for strategy in ("ddp", "fsdp")
    }
    assert shards["fsdp"]["ema/layers.0.weight"]["shards"] == 2
    assert shards["ddp"]["ema/layers.0.weight"]["shards"] == 1
    assert {name.partition("/")[0] for name in shards["fsdp"]} == {"ema", "swa"}


class Small(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_one_process_continues_what_two_began(two_ranks, make_fit):
    root, values = two_ranks
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1))), batch_size=4
    )
    place, module = root / "fsdp" / "checkpoints", Small()

    class Look(Callback):
        def on_train_start(self, run, module):
            self.found = {name: value.clone() for name, value in ema.other_weights(run, module)["ema"].items()}

    look, ema = Look(), EMA(0.8)
    make_fit(callbacks=[ema, SWA(None, 1), look], max_epochs=2).run(module, loader, resume=place / "step=00000008")
    saved = Small.load_from_checkpoint(place / "step=00000008", weights="ema").state_dict()
    assert look.found.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in look.found.items())
    assert ema.n_averaged == 12
    # At the end of the run on two ranks the module had what its last checkpoint has.
    last = Small.load_from_checkpoint(place / "step=00000012", weights="ema").state_dict()
    assert {name: value.tolist() for name, value in last.items()} == values[0]["fsdp"]["state"]


def test_two_ranks_unfreeze_alike_and_equal_one(two_ranks, tmp_path, monkeypatch):
    """Weights are equal on both ranks, to those of one process with the same global batches, and after a resume."""
    _, (first, second) = two_ranks
    scope: dict[str, Any] = {"__name__": "one"}
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "one"), "4"])
    exec(COMMON + FINETUNING, scope)
    one = scope["found"]
    for given in ("all", "head"):
        assert first[given] == second[given] == first[f"{given} again"]
        for name, value in first[given].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(one[given][name]), rtol=1e-5, atol=1e-6)
