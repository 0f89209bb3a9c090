"""Blocks whose forward pass runs twice leave behind what a loop without recomputation leaves: running statistics, power iterations, metrics."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from engine import Engine, Fit, TrainModule
from engine.transforms.recompute import recompute


class Decaying(nn.Module):
    """Its buffer is another tensor after each pass, and decides what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.level = self.level * 0.5
        return x * (1 + self.level)


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.decaying = spectral_norm(nn.Linear(4, 4)), norm, Decaying()
        self.mean = torchmetrics.MeanMetric()
        self.register_buffer("mask", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decaying(self.norm(self.linear(x) @ self.mask))
        self.mean.update(y.detach())
        return torch.tanh(y)


def norms() -> list[nn.Module]:
    return [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
    ]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.Sequential(*(Block(norm) for norm in norms())), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.layers(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> list[Tensor]:
    return [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def state(module: nn.Module) -> dict[str, list[float]]:
    found = {
        name: value.double().flatten().tolist()
        for name, value in module.state_dict().items()
        if not hasattr(value, "placements")
    }
    metrics = {
        name: [m.compute().item(), m.update_count]
        for name, m in module.named_modules()
        if isinstance(m, torchmetrics.Metric)
    }
    return found | metrics


def bare(batches: list[Tensor]) -> dict[str, list[float]]:
    """The same training by a loop that computes nothing twice."""
    module = Net()
    optimizer = module.configure_optimizers()
    for batch in batches:
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(module)


def fitted(setting: Any) -> dict[str, list[float]]:
    module = Net()
    with tempfile.TemporaryDirectory() as root:
        Fit(accelerator="cpu", root_dir=root, activation_checkpointing=setting).run(module, data())
    return state(module)


@pytest.mark.parametrize("setting", ["full", "selective", 2])
def test_buffers_and_metrics_are_updated_once(setting: Any) -> None:
    found, expected = fitted(setting), bare(data())
    assert found["layers.0.norm.num_batches_tracked"] == [4.0]
    assert found == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks() -> None:
    def trained(setting: Any, compiled: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        engine = Engine(accelerator="cpu", activation_checkpointing=setting, compile=compiled)
        model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in data():
            engine.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    torch._dynamo.reset()
    found, expected = trained("full", {"blocks": True, "backend": "aot_eager"}), trained(None, False)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def gradients_and_state(block: nn.Module, again: int = 1) -> list[Tensor]:
    block.zero_grad()
    x = torch.ones(3, 4, requires_grad=True)
    block(x)  # its graph is dropped
    loss = block(x).square().sum()
    for _ in range(again):
        loss.backward(retain_graph=True)
    block.eval()
    loss = block(x).square().sum()
    block.train()
    loss.backward()
    return [x.grad, *(p.grad for p in block.parameters()), *(b.clone() for b in block.buffers())]


@pytest.mark.parametrize("again", [1, 2])
def test_graphs_that_are_dropped_kept_or_of_eval_mode(again: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(nn.BatchNorm1d(4)), Block(nn.BatchNorm1d(4)))
    plain = copy.deepcopy(model)
    recompute(model, "full")
    for _ in range(3):
        torch.testing.assert_close(
            gradients_and_state(model[0], again), gradients_and_state(plain[0], again), rtol=0, atol=0
        )
    twin = copy.deepcopy(model)
    torch.testing.assert_close(gradients_and_state(twin[0]), gradients_and_state(plain[0]), rtol=0, atol=0)


class EveryThird(nn.Module):
    """A buffer that most passes leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.count += 1
        return x * self.weight


def test_a_buffer_that_changes_later() -> None:
    model = nn.Sequential(EveryThird(), EveryThird())
    recompute(model, "full")
    for step in range(9):
        model[0].changes = step % 3 == 2
        model(torch.ones(2, 4)).sum().backward()
    assert model[0].count.item() == 3


def test_a_constant_mask_is_copied_once() -> None:
    model = nn.Sequential(Block(nn.BatchNorm1d(4)), Block(nn.BatchNorm1d(4)))
    recompute(model, "full")
    copied: list[int] = []
    mask, clone = model[0].mask, Tensor.clone

    class Watched(Tensor):
        def clone(self, *args: Any, **kwargs: Any) -> Tensor:
            copied.append(1)
            return clone(torch.ones(4, 4))

    model[0]._buffers["mask"] = mask.as_subclass(Watched)
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()
    assert len(copied) == 1
