"""Blocks computed again in the backward pass: the same numbers, dropout included, with less kept for it."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine, Fit, MeshParallel, TrainModule
from engine.transforms.recompute import recompute

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, 8).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = x + self.drop(F.gelu(self.out(attended)))
        return out


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 2)
        self.losses: list[float] = []
        self.grads: list[float] = []

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.qkv": "colwise", "layers.*.out": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        for part in self.pipeline_stages():
            x = part(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.grads += [(g.full_tensor() if isinstance(g, DTensor) else g).sum().item() for g in grads]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs.detach().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=False)


def data(count: int = 6) -> list[Tensor]:
    return [torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def train(setting: Any, strategy: Any = "single", **more: Any) -> list[list[float]]:
    module = Net()
    with tempfile.TemporaryDirectory() as root:
        Fit(accelerator="cpu", strategy=strategy, seed=3, root_dir=root, activation_checkpointing=setting, **more).run(
            module, data()
        )
    assert len(module.losses) >= 3
    return [module.losses, module.grads]


def rank_runs() -> Any:
    strategies = {"ddp": "ddp", "fsdp": "fsdp", "tp": MeshParallel(tp=2), "pp": MeshParallel(pp=2)}
    return {
        name: [train(setting, strategy) for setting in (None, "full", "selective", 2)]
        for name, strategy in strategies.items()
    }


def statistics(setting: Any, strategy: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    engine = Engine(accelerator="cpu", strategy=strategy, activation_checkpointing=setting)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + engine.process_index))
        engine.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [b.flatten().tolist() for b in engine.unwrap_model(model).buffers()]


def rank_statistics() -> Any:
    return [[statistics(setting, strategy) for setting in (None, "full")] for strategy in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def found() -> Any:
    return ranks_of_file(__file__, 2)


def test_running_statistics_are_updated_once_on_every_rank(found: Any) -> None:
    for rank in found["statistics"]:
        for plain, again in rank:
            assert again == plain
            assert plain[2] == plain[5] == [2]


def saved(model: nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(data()[0])
    del out
    return sum(kept.values())


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "pp"])
def test_bit_for_bit_under_every_strategy(found: Any, name: str) -> None:
    for rank in found["runs"]:
        plain, *others = rank[name]
        assert all(other == plain for other in others)


@pytest.mark.parametrize("setting", ["full", "selective", 2, True])
def test_bit_for_bit_on_one_process(setting: Any) -> None:
    assert train(setting) == train(None)
    assert train(setting, precision="bf16-mixed") == train(None, precision="bf16-mixed")


class Twice(nn.Module):
    """Runs its one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x))


def test_a_block_that_is_used_twice_under_autocast() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    gradients = {}
    for setting in (None, "full", "selective"):
        model = Twice()
        nn.init.constant_(model.block[0].weight, 0.3)
        nn.init.constant_(model.block[0].bias, 0.1)
        recompute(model, setting)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        loss.backward()
        gradients[setting] = model.block[0].weight.grad
    assert torch.equal(gradients["full"], gradients[None])
    # "selective" adds the gradients of both uses in float32, where autocast adds them in bfloat16.
    torch.testing.assert_close(gradients["selective"], gradients[None], rtol=2**-7, atol=0)


def test_less_is_kept() -> None:
    model = Net()
    found = {}
    for setting in (None, 2, "full"):
        recompute(model, setting)
        found[setting] = saved(model)
    assert found["full"] < 0.3 * found[None]
    assert found["full"] < found[2] < found[None]


class Count(TorchDispatchMode):
    """Operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_what_is_computed_again() -> None:
    model = Net()
    found = {}
    for setting in (None, 2, "selective", "full"):
        recompute(model, setting)
        with Count() as count:
            model(data()[0]).sum().backward()
        found[setting] = count.calls
    # Forward: two linear layers in each of four blocks, and the head.
    assert {setting: calls["aten.addmm.default"] for setting, calls in found.items()} == {
        None: 9,
        2: 9 + 4,
        "selective": 9,
        "full": 9 + 8,
    }
    assert {setting: calls["aten.gelu.default"] for setting, calls in found.items()} == {
        None: 4,
        2: 6,
        "selective": 8,
        "full": 8,
    }


def test_class_names_and_copies_stay() -> None:
    model = Net()
    names = list(model.state_dict())
    Engine(accelerator="cpu", activation_checkpointing="full").prepare(model)
    assert list(model.state_dict()) == names
    assert type(model.layers[0]) is Block
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.layers[0].out.weight.zero_()
        twin.layers[0].out.bias.zero_()
    twin.eval()
    assert torch.equal(twin.layers[0](data()[0]), data()[0])  # its own weights, not the first one's
    twin.train()
    twin(data()[0]).sum().backward()
    assert model.layers[0].out.weight.grad is None


def test_every_second_block() -> None:
    model = Net()
    recompute(model, 2)
    assert ["forward" in vars(layer) for layer in model.layers] == [True, False, True, False]
    recompute(model, None)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_model_without_blocks() -> None:
    with pytest.raises(
        ValueError, match=r"activation_checkpointing='full': Linear has no repeated blocks; define blocks\(self\)"
    ):
        Engine(accelerator="cpu", activation_checkpointing="full").prepare(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ("ful", ValueError, "did you mean 'full'"),
        (0, ValueError, "activation_checkpointing=0 is not possible: give 'full', 'selective', an int n"),
        (0.5, TypeError, "is of type float"),
    ],
)
def test_wrong_settings(setting: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fit(activation_checkpointing=setting)


class KeyCache:
    """Keys and values by layer, as decoders of transformers keep them."""

    def __init__(self, length: int = 0) -> None:
        self.lengths = dict.fromkeys(range(3), length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.lengths[layer_idx]


class CachingLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(4, 4), index

    def forward(self, x: Tensor, past_key_values: KeyCache | None = None, use_cache: bool = False) -> Tensor:
        assert use_cache is (past_key_values is not None)
        out: Tensor = self.linear(x)
        if past_key_values is not None:
            out = out * (1 + past_key_values.get_seq_length(self.layer_idx))
            past_key_values.lengths[self.layer_idx] += 1
        return out


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(CachingLayer(i) for i in range(3))

    def forward(self, x: Tensor, cache: KeyCache) -> Tensor:
        for layer in self.layers:
            x = layer(x, past_key_values=cache, use_cache=True)
        return x


@pytest.mark.parametrize("setting", ["full", "selective", 2])
def test_a_models_own_cache_is_not_filled_twice(setting: Any) -> None:
    gradients = []
    for chosen in (None, setting):
        model, cache = Caching(), KeyCache()
        engine = Engine(accelerator="cpu", activation_checkpointing=chosen)
        prepared = engine.prepare(model)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            engine.backward(prepared(torch.ones(1, 4), cache).square().mean())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_a_cache_with_a_prefix_is_refused() -> None:
    model = Engine(accelerator="cpu", activation_checkpointing="full").prepare(Caching())
    with pytest.raises(ValueError, match="CachingLayer got a cache that has keys and values already"):
        model(torch.ones(1, 4), KeyCache(3))
