"""Models without memory for their parameters until they are cut up."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn

from engine import FSDP, Engine, Fit, MeshParallel, Strategy, TrainModule
from engine.strategies.deferred_init import initialiser, is_deferred, materialise, parameters_deferred


class Deep(TrainModule):
    """Built in ``configure_model``: 24 layers, 404 MiB at the default width."""

    def __init__(self, width: int = 2100, layers: int = 24) -> None:
        super().__init__()
        self.width, self.depth = width, layers
        self.peaks: list[int] = []

    def configure_model(self) -> None:
        self.peaks.append(peak())
        self.layers = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.depth)))

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {f"layers.{i}": "rowwise" if i % 2 else "colwise" for i in range(self.depth)}

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.peaks.append(peak())
        self.strategy = self._context.engine.strategy  # type: ignore[union-attr]
        self.first = {name: value.clone() for name, value in self.strategy.model_state(self).items()}


def peak() -> int:
    """The most memory that this process has held so far (bytes)."""
    status = Path("/proc/self/status").read_text()  # getrusage counts what the process that started this one had
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def fit(module: Deep, strategy: str | Strategy, ranks: int, precision: str = "32-true") -> Any:
    batches = [torch.randn(4, module.width, generator=torch.Generator().manual_seed(i)) for i in range(2 * ranks)]
    with tempfile.TemporaryDirectory() as root:
        settings: dict[str, Any] = {"accelerator": "cpu", "max_steps": 1, "seed": 1, "root_dir": root}
        return Fit(strategy=strategy, precision=precision, **settings).run(module, batches)


def four_peaks() -> Any:
    """Bytes over the start that this rank has held when training begins, and those of the whole model."""
    module = Deep()
    fit(module, "fsdp", 4)
    before, after = module.peaks
    return [after - before, sum(p.numel() * p.element_size() for p in module.parameters())]


def two_values() -> Any:
    """How far a step's weights are from those of one process that starts with the same ones."""
    found = {}
    for name, strategy in {"fsdp": FSDP(), "tp": MeshParallel(tp=2), "pp": MeshParallel(pp=2)}.items():
        module = Deep(8, 4)
        ranks = 2 if name == "fsdp" else 1
        fit(module, strategy, ranks)
        trained = module.strategy.model_state(module)
        if module.global_rank or not trained:
            continue
        alone = Deep(8, 4)
        alone.configure_model()
        alone.load_state_dict(module.first)
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(ranks)]
        optimizer = alone.configure_optimizers()
        alone.training_step(torch.cat(batches), 0).backward()
        optimizer.step()
        spread = max((module.first[k] - trained[k]).abs().max().item() for k in trained)
        found[name] = [max((alone.state_dict()[k] - trained[k]).abs().max().item() for k in trained), spread]
    return found


class Scaled(Deep):
    """Values that ``configure_model`` gives in a second pass; the first layer shares its weight with the last."""

    def configure_model(self) -> None:
        super().configure_model()
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.layers[0].weight = self.layers[-1].weight
        self.register_buffer("noise", torch.randn(3))


class OnMeta(Deep):
    def configure_model(self) -> None:
        with torch.device("meta"):
            super().configure_model()

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Initialized(Deep):
    """``init_weights`` is called by the run."""

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)


def two_first_values() -> Any:
    """By module, the parameters and buffers that are not those with which DDP starts, and whether rank 0's random numbers are others."""
    found = {}
    kinds = {"Deep": Deep, "Scaled": Scaled, "OnMeta": OnMeta, "Initialized": Initialized}
    for name, precision in [*((name, "32-true") for name in kinds), ("Scaled", "bf16-true"), ("OnMeta", "64-true")]:
        expected, module = kinds[name](8, 4), kinds[name](8, 4)
        fit(expected, "ddp", 2, precision)
        number = torch.rand(1)
        fit(module, FSDP(blocks=["layers.*"]) if name == "Scaled" else "fsdp", 2, precision)
        others = [name for name, value in module.first.items() if not torch.equal(value, expected.first[name])]
        found[f"{name}, {precision}"] = [others, len(expected.first), torch.equal(number, torch.rand(1))]
    return found


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_whole_model_is_on_no_rank() -> None:
    for held, whole in ranks_of_file(__file__, 4, "four_")["peaks"]:
        assert whole > 400e6
        assert whole / 4 < held < whole / 2


@pytest.mark.parametrize("name", ["fsdp", "tp", "pp"])
def test_it_trains_as_one_that_was_built_whole(two: Any, name: str) -> None:
    distance, moved = two["values"][0][name]
    assert distance < 1e-6
    assert moved > 1e-5


def test_first_values_are_those_of_one_process(two: Any) -> None:
    assert two["first_values"][0] == {
        "Deep, 32-true": [[], 8, True],
        "Scaled, 32-true": [[], 9, True],
        "OnMeta, 32-true": [[], 8, True],
        "Initialized, 32-true": [[], 8, True],
        "Scaled, bf16-true": [[], 9, True],
        "OnMeta, 64-true": [[], 8, True],
    }


# -- on one process ---------------------------------------------------------------------------------------------------------------


def test_shared_parameters_stay_shared_and_buffers_keep_values() -> None:
    with parameters_deferred():
        embed, head, norm = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(4)
        head.weight = embed.weight
        own = nn.Parameter(torch.ones(2))
        first, second = nn.Module(), nn.Module()
        first.a, second.a = own, own
    assert head.weight is embed.weight
    assert first.a is second.a
    assert embed.weight.is_meta
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [1.0] * 4
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_shared_parameter_keeps_its_first_owners_values() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 40), nn.Linear(40, 50)
            self.head.weight = self.embed.weight

    with parameters_deferred():
        model = Tied()
    torch.manual_seed(0)
    materialise(model, torch.device("cpu"), initialiser(model))
    torch.manual_seed(0)
    expected = nn.Embedding(50, 40)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, expected.weight)
    assert 0 < model.head.bias.abs().max() < 0.2  # linear layers' own: up to 1 / sqrt(40)
    assert not is_deferred(model)


def test_init_weights_of_the_module() -> None:
    class Ones(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3))
            self.linear = nn.Linear(2, 2)

        def init_weights(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                nn.init.ones_(parameter)

    with torch.device("meta"):
        model = Ones()
    prepared = Engine(accelerator="cpu").prepare(model)
    assert all(p.eq(1).all() for p in prepared.parameters())


def test_a_module_that_cannot_be_given_values() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with parameters_deferred():
        model = Scale()
    with pytest.raises(
        ValueError, match=r"Scale was built without memory and has no reset_parameters\(\) to give scale values"
    ):
        Engine(accelerator="cpu").prepare(model)
