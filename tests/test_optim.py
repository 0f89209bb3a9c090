"""Which parameters of a model ``engine.optim.split`` gives to Muon."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from engine import optim


class Layer(nn.Module):
    """A layer as in BERT, whose inner modules are called ``output``, with its own position bias and a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
        self.norm, self.gain = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.position_bias, self.mix = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.eye(8))


class GPT(nn.Module):
    def __init__(self, head: nn.Module | None, name: str = "head") -> None:
        super().__init__()
        self.wte, self.pos = nn.Embedding(16, 8), nn.Parameter(torch.zeros(4, 8))
        self.time_embed = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8))
        self.layers = nn.ModuleList([Layer(), Layer()])
        if head is not None:
            self.add_module(name, head)


def tied() -> GPT:
    model = GPT(nn.Linear(8, 16, bias=False), "unusual")
    model.unusual.weight = model.wte.weight  # type: ignore[union-attr]
    return model


def names(model: nn.Module, parameters: Any) -> list[str]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return [by_id[id(p)] for p in parameters]


HIDDEN = [
    f"layers.{i}.{name}"
    for i in range(2)
    for name in ("mix", "attention.in_proj_weight", "attention.out_proj.weight", "output.weight")
]


@pytest.mark.parametrize(
    "model",
    [GPT(nn.Linear(8, 16)), GPT(nn.Linear(8, 16), "unusual"), GPT(None), tied()],
    ids=["head", "last", "none", "tied"],
)
def test_matrices_of_a_transformer_are_those_of_its_layers(model: nn.Module) -> None:
    matrices, (decayed, plain) = optim.split(model)
    assert names(model, matrices) == HIDDEN
    assert {"wte.weight", "pos", "time_embed.0.weight"} <= set(names(model, decayed["params"]))
    assert "weight_decay" not in decayed
    assert plain["weight_decay"] == 0.0
    assert {p.ndim for p in plain["params"]} == {1}
    chosen = [*matrices, *decayed["params"], *plain["params"]]
    assert sorted(map(id, chosen)) == sorted(id(p) for p in model.parameters())  # each once


def test_the_last_layer_of_a_perceptron_and_convolutions_are_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    model[2].bias.requires_grad_(False)
    with caplog.at_level(logging.INFO):
        matrices, rest = optim.split(model)
    assert names(model, matrices) == ["2.weight", "4.weight"]
    assert [names(model, group["params"]) for group in rest] == [
        ["0.weight", "6.weight"],
        ["0.bias", "4.bias", "6.bias"],
    ]
    assert "2 matrices of hidden layers; the rest: 0.weight, 6.weight" in caplog.text
    torch.optim.Muon(matrices)
    assert [group["weight_decay"] for group in torch.optim.AdamW(rest, weight_decay=0.1).param_groups] == [0.1, 0.0]


def test_names_choose_further_parameters() -> None:
    model = GPT(None)
    matrices, _ = optim.split(model, rest=["*.mix", "*.attention.*"])
    assert names(model, matrices) == ["layers.0.output.weight", "layers.1.output.weight"]
    with pytest.raises(ValueError, match=r"engine\.optim\.split\(rest=\.\.\.\): no parameter is called 'mixx'"):
        optim.split(model, rest="mixx")


def test_only_modules_can_be_split() -> None:
    with pytest.raises(TypeError, match=r"engine\.optim\.split\(\) got generator: give the model itself"):
        optim.split(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]


def test_families_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 32,
    }
    configs = {
        "LlamaForCausalLM": transformers.LlamaConfig(**small, num_key_value_heads=1),
        "GPT2LMHeadModel": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8),
        "BertForSequenceClassification": transformers.BertConfig(**small),
    }
    counts = {
        "LlamaForCausalLM": 2 * 7,
        "GPT2LMHeadModel": 2 * 4,
        "BertForSequenceClassification": 2 * 6 + 1,
    }  # the pooler
    for name, config in configs.items():
        model = getattr(transformers, name)(config)
        matrices = names(model, optim.split(model).matrices)
        assert len(matrices) == counts[name]
        assert not [found for found in matrices if "emb" in found or "head" in found or "classifier" in found]
