"""Fit: its four methods, limits, and resuming to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from engine import Callback, TrainModule


class Net(TrainModule):
    """Everything that a resume must bring back: dropout, momentum, schedulers of both kinds, a mean over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[tuple[int, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = ((self.net(x) - y) ** 2).mean()
        self.seen.append((self.current_epoch, batch_idx, loss.item()))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", ((self.net(x) - y) ** 2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9), "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
        ]


def loader(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(
        TensorDataset(torch.randn(22, 3, generator=generator), torch.randn(22, 1, generator=generator)),
        batch_size,
        shuffle=True,
    )


class SaveAt(Callback):
    """Saves after these steps, and stops after the last of them when asked to."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, run: Any, *args: Any) -> None:
        if run.step in self.steps:
            run.save_checkpoint()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train(root: Path | str, resume: str | None = None, batch_size: int = 4, **settings: Any) -> tuple[Any, Net]:
    module = Net()
    settings = {"seed": 5, "accumulate_grad_batches": 2, "max_epochs": 3, "log_every_n_steps": 1, **settings}
    return fit(root, **settings).run(module, loader(batch_size), loader(batch_size), resume=resume), module


# 22 samples in micro-batches of 4: 6 of them and 3 steps an epoch, the last micro-batch is short.
@pytest.mark.parametrize("step", [1, 2, 3, 5, 6], ids=lambda step: f"from-step-{step}")
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path, step: int) -> None:
    whole, expected = train(tmp_path / "whole")
    train(tmp_path / "cut", max_steps=step, callbacks=ModelCheckpoint(every=1))
    result, module = train(tmp_path / "cut", resume="last", callbacks=ModelCheckpoint(every=1))
    assert module.seen == expected.seen[2 * step :]
    assert torch.equal(flat(module), flat(expected))
    assert (result.step, result.epoch, result.metrics) == (whole.step, whole.epoch, whole.metrics)


def test_a_checkpoint_made_in_the_middle_of_a_run_is_the_same_place(tmp_path: Path) -> None:
    _, expected = train(tmp_path, callbacks=SaveAt(1, 2, 3, 4))
    for step in (1, 2, 3, 4):
        _, module = train(tmp_path / "b", resume=str(tmp_path / "checkpoints" / f"step={step:08d}"))
        assert module.seen == expected.seen[2 * step :], step
        assert torch.equal(flat(module), flat(expected)), step


def ranks_resume(root: str) -> list[Any]:
    settings: dict[str, Any] = {"devices": "auto", "batch_size": 2}
    _, whole = train(f"{root}/whole", **settings)
    train(f"{root}/cut", max_steps=4, callbacks=ModelCheckpoint(every=1), **settings)
    _, module = train(f"{root}/cut", resume="last", **settings)
    return [flat(whole).tolist(), flat(module).tolist(), module.seen, whole.seen[8:]]


def test_two_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_resume, 2, tmp_path)
    for whole, resumed, seen, expected in (first, second):
        assert whole == resumed == first[0]
        assert seen == expected


def test_a_finished_run_is_not_trained_on(tmp_path: Path) -> None:
    _, module = train(tmp_path, callbacks=ModelCheckpoint(every="1 epochs"))
    result, again = train(tmp_path, resume="last")
    assert again.seen == []
    assert torch.equal(flat(module), flat(again))
    assert result.stop_reason == "max_epochs=3 was reached before, nothing left to train"
    assert (result.status, result.step, result.epoch) == ("completed", 9, 3)


def test_run_can_be_called_again(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, max_epochs=2), Weight()
    results = [trainer.run(module, ones(3), ones(1)) for _ in range(2)]
    assert module.w.item() == -12.0
    assert [(r.step, r.epoch, r.status) for r in results] == [(6, 2, "completed")] * 2
    assert trainer.run(Weight(), ones(2)).step == 4
    assert trainer.test(module, ones(1)) == [{"test": 1.0}]


def test_validate_test_and_predict(tmp_path: Path) -> None:
    module = Weight(2.0)
    batches = [torch.full((1, 1), 1.0), torch.full((3, 1), 5.0)]
    assert fit(tmp_path).validate(module, batches) == [{"val": 8.0}]  # 2 * (1 + 3 * 5) / 4
    assert fit(tmp_path).test(module, batches) == [{"test": 4.0}]
    assert [p.flatten().tolist() for p in fit(tmp_path).predict(module, batches)] == [[2.0], [10.0, 10.0, 10.0]]
    assert module.training
    assert module.w.grad is None


def test_several_loaders(tmp_path: Path) -> None:
    module = Weight(2.0)
    loaders = [DataLoader(torch.tensor([[1.0], [3.0]])), DataLoader(torch.tensor([[5.0]]))]
    assert fit(tmp_path).validate(module, loaders) == [{"val/dataloader_idx_0": 4.0}, {"val/dataloader_idx_1": 10.0}]
    assert fit(tmp_path).test(module, loaders) == [{"test/dataloader_idx_0": 2.0}, {"test/dataloader_idx_1": 5.0}]
    module.predict_step = lambda batch, batch_idx, dataloader_idx: (dataloader_idx, batch.item())  # type: ignore[method-assign,assignment]
    assert fit(tmp_path).predict(module, loaders) == [[(0, 1.0), (0, 3.0)], [(1, 5.0)]]


def ranks_evaluate(root: str) -> list[Any]:
    trainer, data = fit(root, devices="auto"), DataLoader(torch.arange(7.0).reshape(7, 1), batch_size=2)
    return [
        trainer.validate(Weight(1.0), data),
        trainer.test(Weight(1.0), [data, data]),
        [p.flatten().tolist() for p in trainer.predict(Weight(10.0), data)],
    ]


def test_two_ranks_see_every_sample_once_and_predict_in_the_datas_order(tmp_path: Path) -> None:
    first, second = ranks_of(ranks_evaluate, 2, tmp_path)
    assert first == second
    validated, tested, predicted = first
    assert validated == [{"val": 3.0}]
    assert tested == [{"test/dataloader_idx_0": 3.0}, {"test/dataloader_idx_1": 3.0}]
    assert [n for batch in predicted for n in batch] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_weights_of_a_checkpoint_are_tested(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=SaveAt(2)).run(Weight(), ones(3))
    module = Weight(50.0)
    assert fit(tmp_path).validate(module, ones(1), checkpoint="last") == [{"val": -2.0}]
    assert module.w.item() == -2.0


@pytest.mark.parametrize(
    ("settings", "steps", "validations"),
    [
        ({}, 6, 4),
        ({"limit_train_batches": 4, "limit_val_batches": 2}, 4, 2),
        ({"limit_train_batches": 0.5, "limit_val_batches": 0.25}, 3, 1),
        ({"limit_train_batches": 1.0, "limit_val_batches": 1.0}, 6, 4),
        ({"limit_train_batches": 1, "limit_val_batches": 1}, 1, 1),
        ({"limit_train_batches": 100, "limit_val_batches": 0}, 6, 0),
        ({"fast_dev_run": True}, 1, 1),
        ({"fast_dev_run": 2, "max_epochs": 5, "num_sanity_val_steps": 2}, 2, 2),
    ],
)
def test_limits(tmp_path: Path, settings: dict[str, Any], steps: int, validations: int) -> None:
    class Counts(Weight):
        count = 0

        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.count += 1

    module = Counts()
    result = fit(tmp_path, **settings).run(module, ones(6), ones(4))
    assert (result.step, module.w.item(), module.count) == (steps, -steps, validations)


def test_limits_that_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit_train_batches leaves no batch of the 6 that each rank has"):
        fit(tmp_path, limit_train_batches=0.1).run(Weight(), ones(6))
    with pytest.raises(
        ValueError, match=r"limit_train_batches=0.5 is a fraction, but generator has no length: give a number"
    ):
        fit(tmp_path, limit_train_batches=0.5).run(Weight(), (b for b in ones(6)))
    assert fit(tmp_path, limit_train_batches=2).run(Weight(), (b for b in ones(6))).step == 2


def test_no_training_batch_at_all_is_no_training(tmp_path: Path) -> None:
    module = Weight()
    result = fit(tmp_path, limit_train_batches=0).run(module, ones(3), ones(1))
    assert (result.step, module.w.item()) == (0, 0.0)


def test_a_fast_dev_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, fast_dev_run=True, callbacks=ModelCheckpoint(every=1)).run(Weight(), ones(6), ones(4))
    assert not (tmp_path / "checkpoints").exists()


def test_a_schedule_of_windows(tmp_path: Path) -> None:
    class Notes(Weight):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            steps.append((self.current_epoch, self.w.grad.item()))  # type: ignore[union-attr]

    steps: list[tuple[int, float]] = []
    batches = [torch.full((2, 1), float(i)) for i in range(1, 6)]
    result = fit(tmp_path, max_epochs=3, accumulate_grad_batches={1: 2, 2: 5}).run(Notes(), batches)
    assert steps == [*((0, float(i)) for i in range(1, 6)), (1, 1.5), (1, 3.5), (1, 5.0), (2, 3.0)]
    assert result.step == 9


def test_the_window_follows_from_the_global_batch(tmp_path: Path) -> None:
    module = Weight()
    data = DataLoader(torch.arange(1.0, 13.0).reshape(12, 1), batch_size=2)
    assert fit(tmp_path, global_batch_size=6).run(module, data).step == 2
    assert module.w.item() == -(3.5 + 9.5)  # means of 1..6 and 7..12
    for wanted, near in ((5, r"4, 6, or batch_size=1, 5 in the loader"), (1, "2, or batch_size=1 in")):
        with pytest.raises(
            ValueError,
            match=f"global_batch_size={wanted} cannot be divided into batches of 2 on 1 rank.*nearest possible: {near}",
        ):
            fit(tmp_path, global_batch_size=wanted).run(Weight(), data)
    with pytest.raises(ValueError, match="global_batch_size=6 needs a loader with a batch_size; list has none"):
        fit(tmp_path, global_batch_size=6).run(Weight(), ones(3))


def ranks_global_batch(root: str) -> list[Any]:
    data = DataLoader(torch.arange(1.0, 13.0).reshape(12, 1), batch_size=1)
    module = Weight()
    steps = fit(root, devices="auto", global_batch_size=6).run(module, data).step
    try:
        fit(root, devices="auto", global_batch_size=5).run(Weight(), data)
    except ValueError as error:
        return [steps, module.w.item(), str(error)]
    return []


def test_the_global_batch_holds_on_two_ranks(tmp_path: Path) -> None:
    for steps, weight, message in ranks_of(ranks_global_batch, 2, tmp_path):
        assert (steps, weight) == (2, -13.0)
        assert "batches of 1 on 2 rank(s) (2 samples per micro-batch); nearest possible: 4, 6" in message


@pytest.mark.parametrize("limits", [{}, {"max_epochs": 1000}, {"max_steps": 10**6}])
def test_max_time(tmp_path: Path, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("engine.distributed.agreement.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            now[0] += 0.25
            return super().training_step(batch, batch_idx)

    result = fit(tmp_path, max_time="2 s", **limits).run(Slow(), ones(5))
    assert (result.status, result.stop_reason) == ("stopped", "max_time=2 seconds reached")
    assert result.step == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_is_that_without(tmp_path: Path) -> None:
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].p = 0.0  # type: ignore[assignment]  the compiler draws other numbers

    found = []
    for compile_ in (False, True):
        module = Plain()
        fit(tmp_path, compile=compile_, max_epochs=2, seed=3).run(module, loader())
        found.append(flat(module))
        assert list(module.state_dict()) == list(Plain().state_dict())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_settings_come_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIT_MAX_STEPS", "2")
    assert fit(tmp_path).run(Weight(), ones(5)).step == 2
    assert fit(tmp_path, max_steps=3).run(Weight(), ones(5)).step == 3


def test_two_engines_of_two_fits_do_not_mix(tmp_path: Path) -> None:
    class Inner(Callback):
        def on_train_batch_end(self, run: Any, *args: Any) -> None:
            found.append(
                fit(tmp_path / "inner", accumulate_grad_batches=2, log_every_n_steps=1).run(Weight(), ones(4)).step
            )

    found: list[int] = []
    make: Callable[[], Weight] = Weight
    module = make()
    assert fit(tmp_path, callbacks=Inner()).run(module, ones(3)).step == 3
    assert (found, module.w.item()) == ([2, 2, 2], -3.0)
