"""Batch norm on two real processes: ``sync_batchnorm=True`` computes as one process with the whole batch; evaluation uses one set of buffers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from engine import FSDP, Callback, Engine, Fit, Loss, TrainModule

SAMPLES = 13  # on two ranks with batches of 2: 4, 4, 4, and one that leaves the second rank with a repeated batch


class Net(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.first = nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4, momentum=momentum)
        self.flat, self.second, self.out = nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(self.conv(x)))
        return self.out(torch.tanh(self.second(self.flat(x.flatten(1)))))


def data(dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 3, 3, generator=generator, dtype=torch.float64) * 3 + 7
    return TensorDataset(x.to(dtype), torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64).to(dtype))


def state(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in model.state_dict().values()])


def bare(dtype: torch.dtype, epochs: int = 2, **options: Any) -> Tensor:
    model, (x, y) = Net(**options).to(dtype), data(dtype).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for low in (0, 4, 8):  # the last sample alone has no variance: it goes with the last four
            rows = slice(low, low + 4 if low < 8 else SAMPLES)
            loss = (model(x[rows]) - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return state(model)


def ours(dtype: torch.dtype, strategy: Any = "ddp", epochs: int = 2, **options: Any) -> Tensor:
    """The same global batches: rank 0 has (2, 2, 3) samples of them, rank 1 (2, 2, 2)."""
    engine = Engine(accelerator="cpu", strategy=strategy, sync_batchnorm=True)
    model = Net(**options).to(dtype)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x, y = data(dtype).tensors
    cuts = [(slice(0, 2), slice(2, 4)), (slice(4, 6), slice(6, 8)), (slice(8, 11), slice(11, 13))]
    for _ in range(epochs):
        for cut in cuts:
            own = cut[engine.process_index]
            engine.backward(Loss((model(x[own]) - y[own]).square().sum(), len(x[own])))
            optimizer.step()
            optimizer.zero_grad()
    plain = engine.unwrap_model(model)
    whole = engine.get_state_dict(model)
    engine.release()
    assert "ranks" not in vars(plain.second) or strategy != "ddp"
    return torch.cat([t.flatten().double() for t in whole.values()]) if engine.is_main_process else torch.empty(0)


def apart(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


# -- what runs on each of two ranks -----------------------------------------------------------------------------------------------


def rank_exact() -> Any:
    found = {}
    for name, dtype, strategy, options in (
        ("fp64", torch.float64, "ddp", {}),
        ("fp32", torch.float32, "ddp", {}),
        ("average", torch.float64, "ddp", {"momentum": None}),
        ("fsdp", torch.float64, FSDP(), {}),
    ):
        whole = ours(dtype, strategy, **options)
        found[name] = apart(whole, bare(dtype, **options)) if torch.distributed.get_rank() == 0 else 0.0
    return found


class Trained(TrainModule):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.seen = (net or Net()).double(), []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", (self.net(x) - y).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Weigh(Trained):
    """The last global batch of an epoch has one sample: rank 1 repeats one at weight 0, which no statistic may see."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 1)))
        torch.manual_seed(4)
        for parameter in self.net.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)


def rank_repeated() -> Any:
    module, expected = Weigh(), Weigh()
    settings: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "seed": 1}
    Fit(**settings, sync_batchnorm=True).run(module, DataLoader(data(torch.float64), batch_size=2))
    optimizer = expected.configure_optimizers()
    x, y = data(torch.float64).tensors
    for _ in range(2):
        for low in range(0, SAMPLES, 4):
            (expected.net(x[low : low + 4]) - y[low : low + 4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    plain = type(module.net[1]) is nn.BatchNorm1d
    return [apart(state(module), state(expected)), plain]


class Watch(Callback):
    def __init__(self, save_at: int = 0) -> None:
        self.save_at, self.values, self.path = save_at, {}, ""

    def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
        if run.step == self.save_at and not self.path:
            self.path = str(run.save_checkpoint())

    def on_log(self, run: Any, module: Any, values: Any, step: int) -> None:
        if "val" in values:
            self.values[step] = values["val"]


def rank_evaluation() -> Any:
    """A value that is logged is that of rank 0's buffers, which are saved; validation does not change what comes after it."""
    data64, found = data(torch.float64), {}
    train = TensorDataset(*(t[:12] for t in data64.tensors))
    for name in ("ddp", "fsdp"):

        def run(watch: Watch, name: str = name, resume: Any = None, **more: Any) -> Any:
            module = Trained()
            settings: dict[str, Any] = {
                "accelerator": "cpu",
                "strategy": name,
                "seed": 1,
                "num_sanity_val_steps": 0,
                "root_dir": f"{ROOT}/{name}",
            }
            fit = Fit(**settings, max_steps=4, callbacks=watch, **more)
            fit.run(module, DataLoader(train, batch_size=2), DataLoader(data64, batch_size=2), resume=resume)
            return fit, module

        undisturbed, resumed, silent = Watch(save_at=2), Watch(), Watch()
        fit, module = run(undisturbed, val_every="2 steps")
        run(resumed, resume=undisturbed.path, val_every="2 steps")
        run(silent, val_every="4 steps")
        restored = Trained.load_from_checkpoint(undisturbed.path) if name == "ddp" else None
        expected = undisturbed.values[2]
        if restored is not None:
            x, y = data64.tensors
            expected = (restored.net.eval()(x) - y).square().mean().item()
        found[name] = [
            abs(undisturbed.values[2] - expected),
            abs(resumed.values[2] - undisturbed.values[2]),
            abs(resumed.values[4] - undisturbed.values[4]),
            abs(silent.values[4] - undisturbed.values[4]),
            abs(fit.validate(module, DataLoader(data64, batch_size=2))[0]["val"] - undisturbed.values[4]),
        ]
    return found


def rank_own_loop() -> Any:
    engine = Engine(accelerator="cpu")
    model = engine.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    model(torch.full((2, 2), float(engine.process_index)) + torch.eye(2))
    plain = engine.unwrap_model(model)
    before = engine.gather(plain[0].running_mean).view(2, 2)
    engine.share_buffers(model)
    after = engine.gather(plain[0].running_mean).view(2, 2)
    return [torch.equal(before[0], before[1]), torch.equal(after[0], before[0]), torch.equal(after[1], before[0])]


def rank_layers() -> Any:
    """Classes, copies, pickles; and what cannot be synchronised."""
    engine = Engine(accelerator="cpu", sync_batchnorm=True)
    net = Net()
    model = engine.prepare(net)
    inside = [isinstance(net.first, nn.BatchNorm1d), "ranks" in vars(net.first)]
    model(torch.randn(2, 3, 3)).sum().backward()
    copied = copy.deepcopy(net).eval()
    alike = torch.equal(copied(torch.ones(2, 3, 3)), net.eval()(torch.ones(2, 3, 3)))
    engine.release()
    restored = [type(net.first) is nn.BatchNorm1d, len(pickle.dumps(net)) > 0]

    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    message = ""
    try:
        Engine(accelerator="cpu", sync_batchnorm=True).prepare(nn.Sequential(nn.Linear(2, 2), Own(2)))
    except ValueError as error:
        message = str(error)

    class Nothing(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    none = ""
    try:
        Fit(accelerator="cpu", sync_batchnorm=True, seed=1).run(
            Nothing(), DataLoader(data(torch.float64), batch_size=2)
        )
    except ValueError as error:
        none = str(error)
    return [inside, alike, restored, message, none]


ROOT = Path.cwd()  # the ranks run in the test's temporary directory


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return ranks_of_file(__file__, 2)


def test_it_trains_as_one_process_with_the_whole_batch(found: Any) -> None:
    for rank in found["exact"]:
        assert rank["fp64"] < 1e-12
        assert rank["average"] < 1e-12
        assert rank["fsdp"] < 1e-12
        assert rank["fp32"] < 1e-4  # digits of fp32: a mean of 7 and small batches


def test_a_repeated_batch_is_in_no_statistic(found: Any) -> None:
    for distance, plain in found["repeated"]:
        assert distance < 1e-12
        assert plain


def test_evaluation_uses_the_buffers_that_are_saved(found: Any) -> None:
    for rank in found["evaluation"]:
        assert {name: distances for name, distances in rank.items() if max(distances) > 1e-12} == {}


def test_buffers_in_a_loop_of_ones_own(found: Any) -> None:
    assert found["own_loop"] == [[False, True, True]] * 2


def test_layers_stay_what_they_are(found: Any) -> None:
    for inside, alike, restored, message, none in found["layers"]:
        assert inside == [True, True]
        assert alike
        assert restored == [True, True]
        assert "sync_batchnorm=True: 1 (Own) is a batch norm with its own forward pass" in message
        assert "training_step returned None on rank" in none


def test_one_process_needs_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    Engine(accelerator="cpu", sync_batchnorm=True).prepare(model)
    assert type(model[0]) is nn.BatchNorm1d
