"""Checkpoints of raw loops: everything that was prepared continues where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.stateful import Keeping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from engine import Engine

pytestmark = pytest.mark.usefixtures("no_pickle_is_read")

DATA = TensorDataset(torch.arange(23.0).reshape(23, 1))


class Job:
    """A loop with dropout, a window of two, a scheduler and an object of its own."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.engine = Engine(accelerator="cpu", accumulate_grad_batches=2, **settings)
        self.wrapped, self.optimizer, self.loader, self.scheduler = self.engine.prepare(
            self.model, optimizer, DataLoader(DATA, batch_size=2, shuffle=True), scheduler
        )
        self.seen: list[list[float]] = []
        self.engine.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])

    def run(self, epochs: int, save_at: tuple[int, int] | None = None, place: Path | None = None) -> None:
        for epoch in range(self.loader.epoch, epochs):
            for index, (x,) in enumerate(self.loader):
                with self.engine.accumulate(self.wrapped):
                    self.seen.append(x.flatten().tolist())
                    self.engine.backward(self.wrapped(x / 10).square().mean())
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if (epoch, index) == save_at:
                    self.engine.save_state(place or "", facts={"epoch": epoch})
                    return


@pytest.mark.parametrize("save_at", [(0, 3), (1, 1), (0, 11)])
def test_a_loop_goes_on_to_the_bit(tmp_path: Path, save_at: tuple[int, int]) -> None:
    whole = Job()
    whole.run(2)
    Job().run(2, save_at, tmp_path / "state")
    second = Job(seed=9)
    assert second.engine.load_state(tmp_path / "state")["epoch"] == save_at[0]
    second.run(2)
    assert second.seen == whole.seen
    assert second.scheduler.last_epoch == whole.scheduler.last_epoch
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_flag_without_the_entry_that_it_needs_is_refused(tmp_path: Path) -> None:
    job = Job()
    job.run(1)
    job.optimizer.param_groups[0]["amsgrad"] = True  # Adam would look for an entry that no step has made
    job.engine.save_state(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"optim/optim.json has no 'max_exp_avg_sq' for '0.weight'"):
        Job().engine.load_state(tmp_path / "saved")


def test_other_objects_are_refused(tmp_path: Path) -> None:
    Job().run(1, (0, 1), tmp_path / "state")
    engine = Engine(accelerator="cpu")
    with pytest.raises(ValueError, match=r"unexpected in it: 0\.bias"):
        engine.load_state(tmp_path / "state")
    engine.prepare(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    with pytest.raises(
        ValueError, match=r"\(optimizers, schedulers, loaders\) = \(1, 1, 1\), and \(0, 0, 0\) were prepared"
    ):
        engine.load_state(tmp_path / "state")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        engine.load_state(tmp_path / "other")


def test_several_models(tmp_path: Path) -> None:
    def pair() -> tuple[Engine, Any, Any, Any]:
        engine = Engine(accelerator="cpu")
        one, two = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
        return engine, *engine.prepare(one, two, optimizer)

    engine, one, two, optimizer = pair()
    engine.backward((one(torch.ones(2, 1)) + two(torch.ones(2, 1))).square().mean())
    optimizer.step()
    engine.save_state(tmp_path / "state")
    engine, one_, two_, optimizer_ = pair()
    engine.load_state(tmp_path / "state")
    assert torch.equal(one.weight, one_.weight)
    assert torch.equal(two.weight, two_.weight)
    (group,) = optimizer_.param_groups
    assert all(
        torch.equal(optimizer_.state[p]["momentum_buffer"], q)
        for p, q in zip(group["params"], momenta(optimizer), strict=True)
    )


def momenta(optimizer: Any) -> list[torch.Tensor]:
    return [optimizer.state[p]["momentum_buffer"] for group in optimizer.param_groups for p in group["params"]]


def test_save_model(tmp_path: Path) -> None:
    job = Job()
    (file,) = job.engine.save_model(job.wrapped, tmp_path / "one")
    assert {name: tensor.shape for name, tensor in load_file(file).items()} == {
        name: p.shape for name, p in job.model.named_parameters()
    }
    files = job.engine.save_model(job.wrapped, tmp_path / "many", max_shard_size=40)
    assert len(files) > 1
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="max_shard_size='x'"):
        job.engine.save_model(job.wrapped, tmp_path / "bad", max_shard_size="x")


RANKS = """
import os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from test_states import Job
place, mode, strategy = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
job = Job(strategy=strategy, seed=int(mode == "second"))
if mode == "first":
    job.run(1, (0, 3), place)
else:
    job.engine.load_state(place)
    start = len(job.seen)
    job.run(1)
    job.seen = job.seen[start:]
model = job.engine.get_state_dict(job.wrapped)
report([job.seen, {name: tensor.tolist() for name, tensor in model.items()} if job.engine.is_main_process else None])
"""


def test_other_ranks_and_strategies(tmp_path: Path) -> None:
    """23 samples: two ranks see 16 in two windows before the save; one process continues with the other 7."""
    first = run_ranks(RANKS, 2, Path(__file__).parent, tmp_path / "state", "first", "ddp")
    before = sorted(x for rank in first for batch in rank.value[0] for x in batch)
    for world_size, strategy in ((1, "single"), (2, "fsdp")):
        ran = run_ranks(RANKS, world_size, Path(__file__).parent, tmp_path / "state", "second", strategy)
        after = {x for rank in ran for batch in rank.value[0] for x in batch}
        assert sorted(before + list(after)) == list(map(float, range(23)))


@pytest.mark.parametrize(("kind", "precision"), [("codes", "32-true"), ("masters", "bf16-true")])
def test_states_keep_their_types(tmp_path: Path, kind: str, precision: str) -> None:
    """torch casts every state to the type of its parameter: codes to floats, and masters to half precision."""

    def loop(steps: int, load: bool = False) -> list[float]:
        engine = Engine(accelerator="cpu", precision=precision)
        torch.manual_seed(0)
        plain = nn.Linear(4, 4)
        model, optimizer = engine.prepare(plain, Keeping(plain.parameters(), kind))
        if load:
            engine.load_state(tmp_path / "half")
        for _ in range(steps):
            inputs = torch.linspace(-1, 1, 8, dtype=plain.weight.dtype).view(2, 4)
            engine.backward(model(inputs).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        if steps == 2 and not load:
            engine.save_state(tmp_path / "half")
        return [*plain.weight.flatten().tolist(), *plain.bias.tolist()]

    whole, half = loop(6), loop(2)
    assert loop(4, load=True) == whole != half


def test_masters_follow_another_precision(tmp_path: Path) -> None:
    """A state in the type of its parameter takes that of the resumed run's."""
    for precision, dtype in (("32-true", torch.float32), ("bf16-true", torch.bfloat16)):
        engine = Engine(accelerator="cpu", precision=precision)
        plain = nn.Linear(4, 4)
        model, optimizer = engine.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        if dtype is torch.float32:
            engine.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            engine.save_state(tmp_path / "full")
        else:
            engine.load_state(tmp_path / "full")
        assert optimizer.state[plain.weight]["momentum_buffer"].dtype == dtype
