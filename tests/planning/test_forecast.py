"""A plan's view of a whole run: its steps, samples and checkpoints, beside a real run and hand computations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Fit, Packed, TokenBudget, TrainModule

WIDTH = 6


class Net(TrainModule):
    """A linear layer, a batch norm, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.register_buffer("mask", torch.ones(100), persistent=False)
        self.register_buffer("table", torch.ones(50))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def rows(count: int, size: int, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(count, WIDTH)), batch_size=size, **options)


def bytes_in(folder: Path) -> int:
    found = 0
    for file in folder.glob("**/*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
        found += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return found


@pytest.mark.usefixtures("checkpoints_in_folders")
def test_the_bytes_of_a_checkpoint_are_those_of_a_real_one(tmp_path: Path) -> None:
    fit = Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path, callbacks=[ModelCheckpoint()], log_every_n_steps=0)
    plan = fit.plan(Net(), rows(8, 4), world_size=1, device="cpu")
    fit.run(Net(), rows(8, 4))
    (folder,) = (tmp_path / "checkpoints").glob("step=*")
    assert plan.checkpoint_bytes == bytes_in(folder / "model") + bytes_in(folder / "optim")
    assert plan.checkpoint_files == len([file for file in folder.rglob("*") if file.is_file()])


def test_each_stage_of_batch_sizes_has_its_time() -> None:
    """Epochs of 40 rows: 3 steps of 8, one of 16; then 16, 16 and the 8 that are left."""
    sizes: Any = {0: 8, "24 samples": 16}
    fit = Fit(accelerator="cpu", max_epochs=2, global_batch_size=sizes, log_every_n_steps=0)
    plan = fit.plan(Net(), rows(40, 4), world_size=1, device="cpu")
    stages = plan.as_json()["data"]["stages"]
    assert [(stage["start"], stage["steps"], stage["samples_per_step"]) for stage in stages] == [
        ("the start", 3, 8),
        ("24 samples", 1 + 3, 16),
    ]
    assert stages[1]["step_s"] == pytest.approx(2 * stages[0]["step_s"]) == pytest.approx(plan.step_seconds)
    assert (
        plan.total_seconds
        == pytest.approx(sum(stage["seconds"] for stage in stages))
        == pytest.approx(5.5 * plan.step_seconds)
    )
    assert "from 24 samples" in str(plan)
    json.dumps(plan.as_json())


class Reads(Net):
    """Notes the shapes of its rows of tokens; a plan copies the module."""

    shapes: ClassVar[set[tuple[int, ...]]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shapes.add(tuple(batch["input_ids"].shape))
        return self.net(batch["input_ids"].float().mean().expand(2, WIDTH)).square().mean()


def test_the_longest_rows_of_a_schedule_are_planned_and_batches_of_a_budget() -> None:
    fit = Fit(accelerator="cpu", max_epochs=1, log_every_n_steps=0)
    documents = [[1, 2, 3, 4]] * 6
    budget = TokenBudget([4] * 6, 8)
    loaders: dict[Any, Any] = {
        (2, 4): DataLoader(Packed(documents, {0: 2, "8 samples": 4}), batch_size=2),
        (2, 1): DataLoader(
            documents, batch_sampler=budget, collate_fn=lambda rows: {"input_ids": torch.ones(len(rows), 1)}
        ),  # type: ignore[arg-type]
    }
    for shape, loader in loaders.items():
        Reads.shapes.clear()
        fit.plan(Reads(), loader, world_size=1, device="cpu")
        assert Reads.shapes == {shape}


@pytest.mark.parametrize("above", [0, 1])
def test_the_files_of_a_small_checkpoint_are_those_of_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    """It is joined up to a size."""
    fit = Fit(accelerator="cpu", max_steps=1, root_dir=tmp_path, callbacks=[ModelCheckpoint()], log_every_n_steps=0)
    plan = fit.plan(Net(), rows(8, 4), world_size=1, device="cpu")
    if above:
        monkeypatch.setattr("engine.checkpoint.manifest.JOINED_BYTES", plan.checkpoint_bytes - 1)
    fit.run(Net(), rows(8, 4))
    (folder,) = (tmp_path / "checkpoints").glob("step=*")
    assert plan.checkpoint_files == len([file for file in folder.rglob("*") if file.is_file()])


@pytest.mark.parametrize(
    ("drop_last", "settings", "steps", "samples"),
    [
        (False, {}, 3, 103),  # 103 samples in steps of 2 ranks x 20
        (True, {}, 2, 80),
        (False, {"limit_train_batches": 1}, 1, 40),
        (False, {"accumulate_grad_batches": 2}, 2, 103),
    ],
)
def test_samples_and_steps_of_an_epoch(drop_last: bool, settings: dict[str, Any], steps: int, samples: int) -> None:
    fit = Fit(strategy="ddp", accelerator="cpu", max_epochs=2, **settings)
    loader = rows(103, 20, drop_last=drop_last)
    data = fit.plan(Net(), loader, world_size=2, device="cpu").as_json()["data"]
    assert (data["steps_per_epoch"], data["samples_per_epoch"], data["steps"]) == (steps, samples, 2 * steps)


def test_the_command_line_and_python_take_the_same_texts() -> None:
    plan = Fit(accelerator="cpu").plan(
        Net(), rows(8, 4), world_size=1, device="cpu", memory_limit="1KB", storage="1kB/s", price=2, network="1GB/s"
    )
    assert (plan.memory_bytes, plan.storage, plan.fits) == (1000, 1000.0, False)
    assert plan.device.within.bandwidth == 1e9
    for price in (float("inf"), "much"):
        with pytest.raises(ValueError, match=f"price={price!r}: give what one device costs"):
            Fit().plan(Net(), rows(8, 4), world_size=1, price=price)  # type: ignore[arg-type]
    for seconds in (float("nan"), "long"):
        with pytest.raises(ValueError, match=f"seconds={seconds!r}: give after how many seconds"):
            Fit().search_plans(Net(), rows(8, 4), world_size=1, seconds=seconds)  # type: ignore[arg-type]


def test_a_search_is_over_its_own_ranks() -> None:
    fit = Fit(accelerator="cpu", devices=2, strategy="ddp")  # two processes, were it to run here
    found = fit.search_plans(Net(), rows(8, 4), world_size=1, device="cpu", largest=4, first=True)
    assert found.world_size == 1
    assert found.best is not None


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


@pytest.mark.parametrize(("device", "own"), [("h100", True), ("a100-80gb", False), ("cpu", False)])
def test_fp8_is_a_devices_own_where_it_has_it(device: str, own: bool) -> None:
    batches = [[torch.zeros(32, 32)] for _ in range(2)]
    plan = Fit(precision="fp8-mixed").plan(Wide(), batches, world_size=1, device=device)
    products = {each.name for each in plan.worst.operations if each.dtype.startswith("float8") and each.flops}
    assert products == ({"aten._scaled_mm"} if own else set())
    # Two layers: forward, and the gradients of weights and inputs (torchao computes that of the data too), each 2 x 32 x 32 x 32.
    assert plan.worst.flops == 6 * 2 * 32**3
