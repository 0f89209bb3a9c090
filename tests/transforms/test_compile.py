"""Compiled models train as those that are not, whole or block by block, under every strategy that allows it."""

from __future__ import annotations

import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn

from engine import Engine, Fit, MeshParallel, TrainModule

EAGER = {"backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 2)
        self.losses: list[float] = []

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs.detach().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(setting: Any, strategy: Any = "single", **more: Any) -> list[float]:
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch's compiler asks for it
    module = Net()
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    with tempfile.TemporaryDirectory() as root:
        Fit(accelerator="cpu", strategy=strategy, seed=3, root_dir=root, compile=setting, **more).run(module, batches)
    return module.losses


def rank_runs() -> Any:
    strategies = {"ddp": "ddp", "fsdp": "fsdp", "tp": MeshParallel(tp=2), "pp": MeshParallel(pp=2)}
    found = {}
    for name, strategy in strategies.items():
        settings = [False, {**EAGER, "blocks": True}] + [EAGER] * (name != "pp")
        found[name] = [train(setting, strategy) for setting in settings]
        found[name].append(train({**EAGER, "blocks": True}, strategy, activation_checkpointing="full"))
    with pytest.raises(
        ValueError, match=r"compile=True under MeshParallel: its stages are on several ranks.*use compile='blocks'"
    ):
        train(True, strategies["pp"])
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    return ranks_of_file(__file__, 2, timeout=300)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "pp"])
def test_the_same_losses_under_every_strategy(found: Any, name: str) -> None:
    for rank in found["runs"]:
        plain, *others = rank[name]
        for other in others:
            assert other == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("setting", [EAGER, {**EAGER, "blocks": True}, {**EAGER, "fullgraph": True, "dynamic": False}])
def test_the_same_losses_on_one_process(setting: Any) -> None:
    assert train(setting) == pytest.approx(train(False), rel=1e-5)
    assert train(setting, precision="bf16-mixed") == pytest.approx(
        train(False, precision="bf16-mixed"), rel=0.02
    )  # 2^-8, rounded elsewhere


@pytest.mark.parametrize("setting", [EAGER, {**EAGER, "blocks": True}])
def test_a_compiled_model_of_an_own_loop_computes_in_half_precision(setting: Any) -> None:
    outputs = []
    for compile in (False, setting):
        torch.manual_seed(0)
        engine = Engine(accelerator="cpu", strategy="single", precision="bf16-mixed", compile=compile)
        model = engine.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        for _ in range(2):
            out = model(torch.ones(2, 4))
        outputs.append(out)
        assert not torch.is_autocast_enabled("cpu")
        pickle.dumps(model)
    assert outputs[1].dtype == torch.float32
    assert torch.equal(*outputs)
    assert torch.equal(outputs[1], outputs[1].bfloat16().float())


def test_blocks_share_one_compilation() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = Engine(accelerator="cpu", compile={"backend": backend, "blocks": True}).prepare(Net())
    model(torch.randn(4, 8))
    assert len(compiled) == 2  # of four blocks: the first one's input needs no gradient
    assert list(model.state_dict()) == list(Net().state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # torch's own, at an import
@pytest.mark.parametrize("setting", [True, "blocks"])
def test_with_the_compiler_itself(setting: Any, tmp_path: Path) -> None:
    assert train(setting) == pytest.approx(train(False), rel=1e-4)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ValueError, match="compile='blocks': Linear has no repeated blocks"):
        Engine(accelerator="cpu", compile="blocks").prepare(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ("block", ValueError, "did you mean 'blocks'"),
        ({"mod": "max-autotune"}, ValueError, "compile has the key 'mod', which is unknown; did you mean 'mode'"),
        (2, TypeError, "is of type int"),
    ],
)
def test_wrong_settings(setting: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fit(compile=setting)
