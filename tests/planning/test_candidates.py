"""A search of a run whose strategy, precision or recomputation is given: that comes first, and the others keep what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine import DDP, Fit, MeshParallel, TrainModule
from engine.planning.candidates import Layout, layouts_with, users_strategy

PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Net(TrainModule):
    """Without a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(kw_only=True)
class Theirs(DDP):
    """A strategy that no search knows."""


def reported(world_size: int = 2, **settings: Any) -> tuple[list[Any], Any]:
    """The candidates in the order in which they were tried."""
    seen: list[Any] = []
    fit = Fit(accelerator="cpu", **settings)
    rows = [torch.ones(4, 16)] * 8
    found = fit.search_plans(Net(), rows, world_size=world_size, device="h100", first=True, report=seen.append)
    return seen, found


def test_an_object_is_tried_first_as_it_is() -> None:
    strategy = MeshParallel(tp=2, plan=PLAN, reshard_after_forward=False)
    seen, found = reported(
        4, strategy=strategy, precision="bf16-true", activation_checkpointing="full", accumulate_grad_batches=3
    )
    first = seen[0]
    assert first.fits
    settings = first.candidate.settings
    assert settings.pop("strategy") is strategy
    assert settings == {"precision": "bf16-true", "activation_checkpointing": "full", "accumulate_grad_batches": 3}
    assert first.candidate.micro_batch == 4
    assert found.global_batch == 4 * 3 * 2  # two ranks see the same samples
    assert first.plan.job.axes == {"dp_shard": 2, "tp": 2}
    assert {(str(each.candidate.precision), each.candidate.activation_checkpointing) for each in seen} == {
        ("bf16-true", "full")
    }
    notes = " ".join(found.notes)
    assert "precision=bf16-true was given" in notes
    assert "others keep reshard_after_forward, plan where they have it" in notes


def test_others_keep_its_options() -> None:
    strategy = MeshParallel(tp=2, plan=PLAN, reshard_after_forward=False)
    wanted = users_strategy(strategy, "code", 4)
    assert wanted is not None
    assert wanted.brings_plan
    mesh = wanted.with_its_options(Layout({"name": "mesh", "dp_shard": 1, "tp": 4}, 1, 4))
    assert str(mesh) == f"MeshParallel(reshard_after_forward=False, dp_shard=1, tp=4, plan={PLAN})"
    assert (mesh.degree("tp"), mesh.degree("pp")) == (4, 1)
    assert str(wanted.with_its_options(Layout("fsdp", 4, 4))) == "FSDP(reshard_after_forward=False)"
    assert wanted.with_its_options(Layout("ddp", 4, 1)).strategy == "ddp"


def test_a_mapping_stays_one_that_can_be_typed() -> None:
    wanted = users_strategy(Fit(strategy={"name": "fsdp", "min_size": 100}).settings.strategy, "code", 4)
    assert wanted is not None
    kept = wanted.with_its_options(Layout({"name": "fsdp", "dp_replicate": 2}, 4, 2))
    assert kept.strategy == {"name": "fsdp", "dp_replicate": 2, "min_size": 100}


def test_the_same_in_other_words_is_not_tried_twice() -> None:
    wanted = users_strategy(MeshParallel(tp=2, plan=PLAN), "code", 4)
    assert wanted is not None
    own = Layout(wanted.as_written, 2, 4, is_requested=True, sizes=(("dp_shard", 2), ("tp", 2)))
    others = [Layout({"name": "mesh", "dp_shard": 4 // tp, "tp": tp}, 4 // tp, 4) for tp in (2, 4)]
    assert [each.degree("tp") for each in layouts_with(own, wanted, others)] == [2, 4]


def test_nobody_asked() -> None:
    assert users_strategy("auto", "code", 4) is None
    assert users_strategy("ddp", "default", 4) is None
    assert users_strategy("ddp", "code", 4) is not None


def test_a_class_of_the_users_own() -> None:
    strategy = Theirs(bucket_cap_mb=1.0)
    seen, found = reported(2, strategy=strategy)
    assert seen[0].candidate.layout.strategy is strategy
    assert seen[0].fits
    assert "its own settings are not varied" in " ".join(found.notes)


def test_what_is_refused_says_why_and_the_search_goes_on() -> None:
    seen, found = reported(2, strategy=MeshParallel(tp=2, plan={"layers.*.missing": "colwise"}))
    assert seen[0].verdict == "refused"
    assert "no such module" in seen[0].reason
    assert found.best is not None


def test_a_global_batch_that_is_given_finds_the_window() -> None:
    rows = torch.utils.data.DataLoader(torch.ones(64, 16), batch_size=4)  # type: ignore[arg-type]
    fit = Fit(accelerator="cpu", strategy="ddp", global_batch_size=32)
    found = fit.search_plans(Net(), rows, world_size=2, device="h100", first=True)
    assert found.best is not None
    assert found.best.candidate.window == 4
    assert "accumulate_grad_batches" not in found.as_json()["candidates"][0]["fit"]
