"""Values of parameters that are given them while they have no memory: those of a module that is built as usual, whatever gets its memory first."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from engine.strategies.deferred_init import (
    check_recorded,
    initialiser,
    is_deferred,
    materialise,
    nothing_recorded,
    record_initial_values,
    recorded_further,
    values_recorded,
)
from engine.strategies.recorded_values import has_no_memory


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def scaled() -> nn.Module:
    model = blocks()
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(parameter, std=0.02)
    nn.init.trunc_normal_(model[1].weight, std=0.02)  # type: ignore[arg-type]
    nn.init.orthogonal_(model[2].weight)  # type: ignore[arg-type]
    nn.init.sparse_(model[3].weight.data[:, :3], 0.5)  # type: ignore[union-attr,index]
    return model


def tied() -> nn.Module:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11, bias=False)
    model.embed.weight = model.head.weight
    return model


def own() -> nn.Module:
    model = nn.Module()
    model.scale = nn.Parameter(1e-5 * torch.ones(5))
    model.position = nn.Parameter(torch.randn(1, 7, 3) * 0.02)
    model.one = nn.Parameter(torch.tensor(2.5))
    model.array = nn.Parameter(torch.from_numpy(numpy.random.rand(3)))
    written = torch.empty(3)
    written.numpy()[:] = numpy.random.rand(3)
    model.written = nn.Parameter(written)
    model.kept = nn.Parameter(torch.randperm(9).float())
    model.register_buffer("noise", torch.rand(3))
    return model


def reading() -> nn.Module:
    model = nn.Linear(5, 5)
    if model.weight.abs().max().item() > 0.1:
        model.weight.data[0] = 1
    with torch.no_grad():
        model.weight.mul_(1 / model.weight.std())
        left, values, right = torch.linalg.svd(model.weight)
        model.weight.copy_(left @ torch.diag(values.clamp(max=0.5)) @ right)
    model.register_buffer("norm", model.weight.detach().norm(dim=0))
    model.plain = model.weight.detach().std()
    return model


def copies() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    encoder.copied = copy.deepcopy(encoder.layers[1])  # type: ignore[assignment]
    encoder.loaded = nn.Linear(8, 8)  # type: ignore[assignment]
    encoder.loaded.load_state_dict(nn.Linear(8, 8).state_dict())
    return encoder


def shared_memory() -> nn.Module:
    model = nn.Module()
    weight, base = nn.Parameter(torch.empty(4, 4)), torch.empty(3, 4)
    model.weight = weight
    nn.init.normal_(weight)  # the user's name for what the module has
    model.query, model.key = nn.Parameter(base[0]), nn.Parameter(base[1])
    nn.init.uniform_(base)
    model.weight.data.add_(1)
    model.again = weight
    return model


def data_dependent() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        out = model(torch.randn(16, 4))
        model[3].weight.div_(out.std())  # type: ignore[operator,union-attr]
    return model


def other_types() -> nn.Module:
    half = nn.Linear(4, 4, dtype=torch.bfloat16)
    nn.init.normal_(half.weight)
    model = nn.ModuleList([nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4).double(), half, nn.LSTM(3, 4)])
    model[0].bias.data = torch.rand(4)  # type: ignore[assignment]
    return model


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 5)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    )


def generators() -> nn.Module:
    first = nn.Linear(4, 4)
    nn.init.normal_(first.weight, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(9)
    second = nn.Linear(4, 4)
    second.other = nn.Parameter(torch.zeros(3, device=first.weight.device) + torch.bernoulli(torch.full((3,), 0.5)))
    return nn.ModuleList([first, second])


def state_of(model: nn.Module) -> dict[str, Tensor]:
    plain = {
        f"{prefix}.{name}": value
        for prefix, inner in model.named_modules()
        for name, value in vars(inner).items()
        if isinstance(value, Tensor)
    }
    return {**model.state_dict(), **plain}


@pytest.mark.parametrize(
    "build",
    [blocks, scaled, tied, own, reading, copies, shared_memory, data_dependent, other_types, parametrized, generators],
)
def test_values_are_those_of_a_module_built_as_usual(build: Callable[[], nn.Module]) -> None:
    def built(context: Any) -> tuple[nn.Module, list[float]]:
        torch.manual_seed(0)
        numpy.random.seed(0)
        with context, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build()
        return model, [torch.rand(1).item(), float(numpy.random.rand())]

    (expected, numbers), (model, numbers_after) = built(nullcontext()), built(values_recorded())
    assert numbers_after == numbers
    assert any(map(has_no_memory, model.parameters()))
    modules = list(model.modules())[1:]
    random.Random(0).shuffle(modules)
    for inner in (*modules, model):
        materialise(inner, torch.device("cpu"), initialiser(model))
    assert not is_deferred(model)
    values, wanted = state_of(model), state_of(expected)
    assert values.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(values[name], wanted[name])] == []


def test_a_module_on_the_meta_device_gets_its_values_in_the_order_of_its_modules() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    with torch.device("meta"):
        expected, model = blocks(), blocks()
    torch.manual_seed(0)
    materialise(expected, torch.device("cpu"), initialise)
    torch.manual_seed(0)
    record_initial_values(model, torch.device("cpu"), initialise)
    assert all(map(has_no_memory, model.parameters()))
    for inner in reversed(list(model.children())):
        materialise(inner, torch.device("cpu"), initialise)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_attributes_of_tensors_are_torchs_after_the_block() -> None:
    with values_recorded():
        weight = nn.Linear(2, 2).weight
        assert (weight.is_meta, weight.device.type) == (False, "cpu")
    assert (weight.is_meta, weight.device.type) == (True, "meta")
    assert not {"is_meta", "device", "data", "numpy"} & vars(torch.Tensor).keys()


def test_nothing_is_drawn_for_what_gets_its_values_elsewhere() -> None:
    torch.manual_seed(0)
    with values_recorded():
        with nothing_recorded():
            model = nn.Linear(2, 2)
        number = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(number, torch.rand(1))
    assert model.weight.is_meta


def test_another_recording_goes_on_with_the_values_of_an_earlier_one() -> None:
    torch.manual_seed(0)
    expected = scaled().double()
    torch.manual_seed(0)
    with values_recorded():
        model = scaled()
    with recorded_further(model):
        model.double()
        model[3].bias.data.mul_(2)  # type: ignore[operator,union-attr]
    expected[3].bias.data.mul_(2)  # type: ignore[operator,union-attr]
    check_recorded(model)
    for inner in reversed(list(model.children())):
        materialise(inner, torch.device("cpu"), initialiser(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_values_that_are_lost_after_the_recording_are_an_error() -> None:
    with values_recorded():
        model = blocks()
    check_recorded(model)
    model.double()
    with pytest.raises(
        ValueError, match=r"values of 0.weight, 0.bias, .* and others are lost: .*change it in configure_model"
    ):
        check_recorded(model)


def test_values_that_cannot_be_repeated_are_an_error() -> None:
    with (
        pytest.raises(ValueError, match=r"configure_model reads a parameter in a way .* init_weights\(self, module\)"),
        values_recorded(),
    ):
        nn.Linear(2, 2).weight.detach().numpy()
    source = torch.rand(600, 600)
    with values_recorded():
        model = nn.Linear(600, 600)
        model.weight.data.copy_(source)
    source.add_(1)
    with pytest.raises(ValueError, match=r"has changed since.*init_weights"):
        materialise(model, torch.device("cpu"), initialiser(model))
