"""Going on from a checkpoint on two ranks: parameter groups that were added, checkpoints of the other door, and what is refused on all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Callback, Engine, Fit, TrainModule

COUNT = 16
PER_RANK = 2
"""Samples of a micro-batch; a step has those of both ranks."""


def loader(count: int = COUNT, per_rank: int = PER_RANK) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count * 4)).reshape(count, 4) / 40), batch_size=per_rank)


class Net(TrainModule):
    """``head`` is trained from the second epoch on, when ``gradual``."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, schedule: Any = None, gradual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(not gradual)
        self.optimizer, self.schedule, self.gradual = optimizer, schedule, gradual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch[0])).square().mean()

    def forward(self, batch: Any) -> Tensor:
        return self.training_step(batch, 0)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.net.parameters() if self.gradual else self.parameters(), lr=0.1)
        return [optimizer], [] if self.schedule is None else [self.schedule(optimizer)]


class Unfreeze(Callback):
    done = False

    def add(self, run: Any, module: Any) -> None:
        if run.epoch >= 1 and not self.done:
            self.done = True
            module.head.requires_grad_(True)
            run.optimizers[0].add_param_group({"params": list(module.head.parameters()), "lr": 0.01})

    def on_train_epoch_start(self, run: Any, module: Any) -> None:
        self.add(run, module)

    def on_load_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.add(run, module)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def decays(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def run(
    root: Path, strategy: str, module: Net, *callbacks: Any, data: Any = None, resume: Any = None, **settings: Any
) -> list[Any]:
    """The weights afterwards, or how it has ended."""
    fit = Fit(
        accelerator="cpu", devices="auto", strategy=strategy, root_dir=root, seed=3, callbacks=callbacks, **settings
    )
    try:
        fit.run(module, loader() if data is None else data, resume=resume)
    except (ValueError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return [value.tolist() for value in fit.state_dict(module, everywhere=True).values()]


def loop(folder: Path, strategy: str, begin: int, end: int) -> list[Any]:
    """Steps of a user's own loop, saved at their end."""
    engine, module = Engine(accelerator="cpu", strategy=strategy, seed=3), Net()
    model, optimizer, data = engine.prepare(module, module.configure_optimizers()[0][0], loader())
    if begin:
        engine.load_state(folder)
    done = begin
    while done < end:
        for batch in data:
            engine.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == end:
                break
    engine.save_state(folder.with_name("of-the-loop"))
    state = engine.get_state_dict(model)
    return [value.tolist() for value in state.values()] if engine.is_main_process else []


def saves(root: str) -> list[Any]:
    return run(Path(root), "ddp", Net(), ModelCheckpoint(every=1, save_top_k=-1), max_epochs=1)


def test_a_global_batch_that_changes_with_the_ranks_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_of(saves, 2, tmp_path)
    saved = tmp_path / "checkpoints" / "step=00000002"
    for settings in ({"global_batch_size": 4}, {"accumulate_grad_batches": 2}):
        run(tmp_path / "same", "auto", Net(), resume=saved, max_epochs=2, **settings)
        assert "global batch" not in caplog.text
    run(tmp_path / "other", "auto", Net(), resume=saved, max_epochs=2)
    assert "was 4 on 2 rank(s), and is 2 on the 1 of this run" in caplog.text
    assert "Fit(global_batch_size=4) keeps it" in caplog.text


def everything(root: str, strategy: str) -> dict[str, Any]:
    base, found = Path(root), {}
    keep = ModelCheckpoint(every=2, save_top_k=-1)
    run(base / "gradual", strategy, Net(gradual=True), Unfreeze(), keep, max_epochs=3)
    for step in (4, 6, 8):  # the end of the first epoch, inside the second, its end
        place = base / "gradual" / "checkpoints" / f"step={step:08d}"
        found[f"groups {step}"] = run(
            base / f"from-{step}", strategy, Net(gradual=True), Unfreeze(), resume=place, max_epochs=3
        )
    run(base / "run", strategy, Net(schedule=None), ModelCheckpoint(every=2, save_top_k=-1), max_steps=6)
    place = base / "run" / "checkpoints" / "step=00000006"
    found["loop from run"] = loop(place, strategy, 6, 10)
    found["run from loop"] = run(base / "b", strategy, Net(), resume=place.with_name("of-the-loop"), max_steps=12)
    found["optimizer"] = run(base / "c", strategy, Net(torch.optim.SGD), resume=place, max_steps=8)
    found["scheduler"] = run(base / "d", strategy, Net(schedule=steps), ModelCheckpoint(), max_steps=6)
    found["scheduler"] = run(
        base / "e", strategy, Net(schedule=decays), resume=base / "d" / "checkpoints" / "step=00000006", max_steps=8
    )
    found["length"] = run(base / "f", strategy, Net(), data=loader(COUNT + 8), resume=place, max_steps=8)
    first = os.environ["RANK"] == "0"
    found["one rank's optimizer"] = run(
        base / "g", strategy, Net() if first else Net(torch.optim.SGD), resume=place, max_steps=8
    )
    return found


def bare(end: int, gradual: bool = False) -> list[Any]:
    """One process with the batches of both ranks side by side."""
    module = Net(gradual=gradual)
    optimizer = module.configure_optimizers()[0][0]
    data = list(loader(per_rank=2 * PER_RANK))
    for step in range(end):
        if gradual and step == len(data):
            module.head.requires_grad_(True)
            optimizer.add_param_group({"params": list(module.head.parameters()), "lr": 0.01})
        optimizer.zero_grad()
        module.training_step(data[step % len(data)], 0).backward()
        optimizer.step()
    return [value.tolist() for value in module.state_dict().values()]


def close(found: Any, expected: Any) -> bool:
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-5) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks(tmp_path: Path, strategy: str) -> None:
    one, two = ranks_of(everything, 2, tmp_path, strategy, timeout=240)
    for name in ("groups 4", "groups 6", "groups 8", "run from loop"):
        assert one[name] == two[name]
        assert close(one[name], bare(12, "groups" in name)), (name, one[name])
    assert close(one["loop from run"], bare(10))
    for name, message in (
        ("optimizer", "the state of AdamW for optimizer 0, which is SGD"),
        ("scheduler", "another scheduler (StepLR) for scheduler 0, which is ExponentialLR"),
        ("length", "of the 16 samples or batches of an epoch, and the data now has 24"),
    ):
        for rank in (one, two):
            assert rank[name][0] == "ValueError", rank[name]
            assert message in rank[name][1]
    assert two["one rank's optimizer"][0] == "ValueError"
    assert one["one rank's optimizer"][0] == "RankError", one["one rank's optimizer"]
    assert "rank 1 failed with ValueError" in one["one rank's optimizer"][1]
