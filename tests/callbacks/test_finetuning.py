"""``BaseFinetuning`` and ``BackboneFinetuning``: what is trained when, with which learning rate, after a resume, on two ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callbacks import EMA, BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from engine import TrainModule

STEPS = 3  # batches of an epoch


class Net(TrainModule):
    """A backbone with batch norm, and a head; ``lrs`` has the learning rates of each step's groups."""

    def __init__(self, given: str = "all") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = given
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.lrs: list[list[float]] = []
        self.trace: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.lrs.append([group["lr"] for group in self.optimizers().param_groups])
        return (self.head(self.backbone(batch)) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.head(self.backbone(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trace.append(self.backbone[0].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        groups: dict[str, Any] = {
            "all": self.parameters(),
            "trained": filter(lambda p: p.requires_grad, self.parameters()),
            "named": list(self.named_parameters()),
            "two": [{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 0.003}],
        }
        return torch.optim.AdamW(groups[self.given.partition("+")[0]], lr=0.1)


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture
def data() -> list[Tensor]:
    return [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


def same(first: nn.Module, second: nn.Module) -> bool:
    there = second.state_dict()
    return all(torch.equal(value, there[name]) for name, value in first.state_dict().items())


@pytest.mark.parametrize("given", ["all", "trained", "named"])
def test_the_backbone_is_trained_from_its_epoch_on_with_its_own_rate(make_fit, data, given):
    module = Net(given)
    start = module.backbone[0].weight.detach().clone()
    make_fit(callbacks=[BackboneFinetuning(2, lambda epoch: 3.0)], max_epochs=6).run(module, data)
    assert all(torch.equal(weight, start) for weight in module.trace[: 2 * STEPS])
    assert not torch.equal(module.trace[2 * STEPS], start)
    # 0.1 * 0.1, then three times as much each epoch, until it is the head's.
    assert [rates[0] for rates in module.lrs] == [0.1] * 6 * STEPS
    expected = [0.01] * STEPS + [0.03] * STEPS + [0.09] * STEPS + [0.1] * STEPS
    for rates, rate in zip(module.lrs[2 * STEPS :], expected, strict=True):
        assert rates[1:] == pytest.approx([rate] * (len(rates) - 1))


def bare(data: list[Tensor]) -> Net:
    """The training of the test below as a plain loop."""
    module = Net()
    module.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": module.head.parameters(), "lr": 0.1}, {"params": module.backbone.parameters(), "lr": 0.02}]
    )
    module.train()
    for epoch in range(3):
        if epoch == 1:
            module.backbone.requires_grad_(True)
        module.backbone[1].eval().requires_grad_(False)
        for batch in data:
            (module.head(module.backbone(batch)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return module


def test_it_is_a_plain_loop_with_frozen_batch_norms(make_fit, data):
    module = Net()
    callback = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.02, train_bn=False)
    make_fit(callbacks=[callback], max_epochs=3, val_every=2).run(module, data, data[:1])
    expected = bare(data)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name])
    assert module.backbone[1].num_batches_tracked == 0


def test_batch_norms_are_trained_from_the_start_by_default(make_fit, data):
    module = Net()
    make_fit(callbacks=[BackboneFinetuning(5)]).run(module, data)
    assert module.backbone[1].num_batches_tracked == STEPS
    assert not torch.equal(module.backbone[1].weight, torch.ones(4))
    assert torch.equal(module.trace[0], module.trace[-1])


def test_a_group_of_configure_optimizers_keeps_its_rate_and_schedule(make_fit, data):
    plain, module = Scheduled("two"), Scheduled("two")
    make_fit(max_epochs=3).run(plain, data)
    make_fit(callbacks=[BackboneFinetuning(1)], max_epochs=3).run(module, data)
    assert module.lrs == plain.lrs

    asked = Scheduled("two")
    make_fit(callbacks=[BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.005)], max_epochs=3).run(
        asked, data
    )
    assert [rates[0] for rates in asked.lrs] == [rates[0] for rates in plain.lrs]
    assert [rates[1] for rates in asked.lrs[STEPS:]] == [0.005] * 2 * STEPS


@pytest.mark.parametrize("given", ["all", "trained", "two"])
@pytest.mark.parametrize("step", [2, 4, 7])
def test_a_resumed_run_ends_as_an_uninterrupted_one(make_fit, data, tmp_path, given, step):
    def callbacks() -> list[Any]:
        callback = BackboneFinetuning(1, backbone_initial_lr=0.001, train_bn=False)
        return [callback, EMA(0.5), ModelCheckpoint(every="1 steps", save_top_k=-1)]

    module, other = Net(given), Net(given)
    whole = make_fit(callbacks=callbacks(), max_epochs=3).run(module, data)
    middle = whole.last_checkpoint.parent / f"step={step:08d}"
    make_fit(callbacks=callbacks(), max_epochs=3, root_dir=tmp_path / "again").run(other, data, resume=middle)
    assert same(module, other)
    assert other.lrs == module.lrs[step:]


class Gradual(BaseFinetuning):
    """As people write it for Lightning."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[0], optimizer, lr=0.01)
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, train_bn=True)


@pytest.mark.parametrize("step", [2, 4, 7])
def test_groups_that_were_added_are_there_before_the_optimizers_state(make_fit, data, tmp_path, step):
    module, other = Net("trained"), Net("trained")
    many = ModelCheckpoint(every="1 steps", save_top_k=-1)
    whole = make_fit(callbacks=[Gradual(), many], max_epochs=3).run(module, data)
    assert [module.lrs[i] for i in (0, STEPS, 2 * STEPS)] == [[0.1], [0.1, 0.01], [0.1, 0.01, 0.01]]
    assert module.backbone[1].num_batches_tracked == STEPS
    middle = whole.last_checkpoint.parent / f"step={step:08d}"
    make_fit(callbacks=[Gradual()], max_epochs=3, root_dir=tmp_path / "again").run(other, data, resume=middle)
    assert same(module, other)
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in module.parameters()]


def test_it_can_join_a_run_that_resumes(make_fit, data, tmp_path):
    whole = make_fit(callbacks=[ModelCheckpoint()], max_epochs=1).run(Net(), data)
    module = Net()
    again = make_fit(callbacks=[BackboneFinetuning(2)], max_epochs=3, root_dir=tmp_path / "again")
    again.run(module, data, resume=whole.last_checkpoint)
    assert torch.equal(module.trace[0], module.trace[STEPS - 1])
    assert not torch.equal(module.trace[0], module.trace[-1])


def test_a_backbone_of_configure_model(make_fit, data):
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.backbone

        def configure_model(self) -> None:
            self.backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    module = Late()
    make_fit(callbacks=[BackboneFinetuning(1)], max_epochs=2).run(module, data)
    assert torch.equal(module.trace[0], module.trace[STEPS - 1])
    assert not torch.equal(module.trace[0], module.trace[-1])


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (Net(), BackboneFinetuning(backbone="encoder"), "Net has no submodule 'encoder'; it has backbone, head"),
        (
            Scheduled(),
            BackboneFinetuning(),
            "has added a parameter group, and LinearLR was made for 1: give all groups in configure_optimizers",
        ),
        (Scheduled("trained"), BackboneFinetuning(), "has added a parameter group, and LinearLR was made for 1"),
    ],
    ids=["no backbone", "shared", "left out"],
)
def test_what_is_wrong_before_the_first_step(make_fit, data, module, callback, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_fit(callbacks=[callback]).run(module, data)
    assert not module.trace


class Later(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.02)


class Decays(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)]


def test_a_group_that_is_added_later_decays_with_the_others(make_fit, data, tmp_path):
    whole = Decays("trained")
    make_fit(callbacks=[Later(), ModelCheckpoint("1 epochs", save_top_k=-1)], max_epochs=4).run(whole, data)
    assert whole.lrs[::STEPS] == [[0.1], [0.1, 0.02], [0.05, 0.01], [0.025, 0.005]]
    checkpoint = next(tmp_path.rglob("step=00000006"))
    again = Decays("trained")
    make_fit(callbacks=[Later()], max_epochs=4).run(again, data, resume=checkpoint)
    assert again.lrs[::STEPS] == whole.lrs[2 * STEPS :: STEPS]
    assert same(again, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unfreeze_backbone_at_epoch": -1}, "unfreeze_backbone_at_epoch=-1"),
        ({"backbone_initial_lr": 0}, "backbone_initial_lr=0"),
        ({"lambda_func": 2.0}, "lambda_func=2.0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        BackboneFinetuning(**options)
