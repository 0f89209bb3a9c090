"""Packed rows: documents that transformers would let see each other are refused by every door, and those that it keeps apart are trained exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers
from tiny_llama import llama
from torch import Tensor, nn

from engine import Engine, Fit, TrainModule
from engine.compat.transformers.packed_rows import PackedRowsGuard
from engine.data.packed_rows import note_restarts, noted_restarts, starts_again
from engine.huggingface import HFModule

LENGTHS = (3, 5, 4)
TOKENS = torch.arange(1, 1 + sum(LENGTHS))[None]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
STARTS = [0, 3, 8]


def labels() -> Tensor:
    targets = TOKENS.clone()
    targets[0, STARTS] = -100
    return targets


def batch(**more: Any) -> dict[str, Any]:
    return {"input_ids": TOKENS, "position_ids": POSITIONS, "labels": labels(), **more}


def fit() -> Fit:
    return Fit(accelerator="cpu", devices=1, max_steps=1, num_sanity_val_steps=0)


class Own(TrainModule):
    """Calls the model as its ``options`` say."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model, self.options = llama(), options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, **self.options).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outer(nn.Module):
    """Gives the decoder its arguments by their places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, tokens: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        return self.inner.model(tokens, mask, positions).last_hidden_state.sum()


MASK = torch.ones_like(TOKENS)


def test_packed_rows_that_are_kept_apart_have_the_gradient_of_the_documents() -> None:
    module = HFModule(llama(), optimizer="sgd", lr=1.0, scheduler=None)
    bare = copy.deepcopy(module.model)
    fit().run(module, [batch()])
    total = torch.zeros(())
    for start, length in zip(STARTS, LENGTHS, strict=True):
        logits = bare(input_ids=TOKENS[:, start : start + length], use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, TOKENS[0, start + 1 : start + length], reduction="sum")
    (total / (sum(LENGTHS) - len(LENGTHS))).backward()
    for parameter, expected in zip(module.model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected - expected.grad, rtol=1e-5, atol=1e-6)


def in_own_loop(rows: dict[str, Any]) -> None:
    model, loader = Engine(accelerator="cpu").prepare(llama(), [rows])
    for prepared_rows in loader:
        model(**prepared_rows)


DOORS = {
    "HFModule": lambda rows: fit().run(HFModule(llama()), [rows]),
    "Fit": lambda rows: fit().run(Own(), [rows]),
    "validate": lambda rows: fit().validate(HFModule(llama()), [rows]),
    "Engine": in_own_loop,
    "place_model": lambda rows: Engine(accelerator="cpu").place_model(llama())(**rows),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("danger", ["mask", "cache"])
def test_every_door_refuses_documents_that_would_see_each_other(door: str, danger: str) -> None:
    more = {"attention_mask": MASK} if danger == "mask" else {"use_cache": True}
    named = "2-D attention_mask" if danger == "mask" else "use_cache=False"
    with pytest.raises(ValueError, match=f"LlamaModel got position_ids that start again.*{named}"):
        DOORS[door](batch(**more))


def test_the_cache_of_the_configuration_counts_unless_the_call_has_none() -> None:
    assert llama().config.use_cache
    with pytest.raises(ValueError, match=r"set LlamaModel\.config\.use_cache = False"):
        fit().run(Own(), [batch()])
    fit().run(Own(use_cache=False), [batch()])
    module = Own()
    module.model.model.gradient_checkpointing = True  # switches the cache off
    fit().run(module, [batch()])


def test_arguments_by_place_and_a_decoder_called_directly() -> None:
    engine = Engine(accelerator="cpu")
    model = engine.prepare(Outer())
    with pytest.raises(ValueError, match="2-D attention_mask"):
        model(TOKENS, MASK, POSITIONS)
    [guard] = [hook for hook in model.inner.model._forward_pre_hooks.values() if isinstance(hook, PackedRowsGuard)]
    engine = Engine(accelerator="cpu")
    engine.prepare(model)
    assert [*model.inner.model._forward_pre_hooks.values()].count(guard) == 1


def test_padded_rows_generation_and_encoders_are_not_refused() -> None:
    model = llama()
    Engine(accelerator="cpu").place_model(model)
    left = torch.tensor([[0, 0, 1, 1, 1]])
    positions = (left.cumsum(-1) - 1).masked_fill(left == 0, 1)
    model(input_ids=TOKENS[:, :5], attention_mask=left, position_ids=positions)
    model(
        input_ids=TOKENS[:, :5], position_ids=torch.tensor([[0, 1, 2, 0, 0]])
    )  # what follows is padding, and no document
    model.generate(input_ids=TOKENS[:, :5], attention_mask=left, max_new_tokens=3, do_sample=False)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32
    )
    bert = transformers.BertModel(config)
    Engine(accelerator="cpu").place_model(bert)
    bert(input_ids=TOKENS, attention_mask=MASK, position_ids=POSITIONS)


@pytest.mark.parametrize("family", ["GPT2", "Qwen2", "Mistral", "Gemma"])
def test_other_decoders(family: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    more = {} if family == "GPT2" else {"num_key_value_heads": 1, "intermediate_size": 8, "head_dim": 4}
    config = getattr(transformers, f"{family}Config")(**sizes, **more)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    Engine(accelerator="cpu").place_model(model)
    with pytest.raises(ValueError, match="2-D attention_mask"):
        model(**batch(attention_mask=MASK), use_cache=False)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(**batch())
    model(**batch(), use_cache=False)


def test_positions_on_a_device_have_a_note_from_before_the_copy() -> None:
    for positions, again in ((POSITIONS, True), (torch.arange(12)[None], False)):
        rows = {"input_ids": TOKENS, "position_ids": positions}
        moved = {name: tensor.to("meta") for name, tensor in rows.items()}
        note_restarts(rows, moved)
        assert noted_restarts(moved["position_ids"]) is again
        assert noted_restarts(positions) is None
    made_there = {"position_ids": torch.empty(1, 12, dtype=torch.long, device="meta")}
    note_restarts(made_there, made_there)
    assert noted_restarts(made_there["position_ids"]) is None
    note_restarts(TOKENS, TOKENS)


@pytest.mark.parametrize(
    ("positions", "mask", "again"),
    [
        ([[0, 1, 2, 3]], None, False),
        ([[0, 1, 0, 1]], None, True),
        ([[2, 3, 2, 3]], None, True),
        ([[0, 0, 1, 2]], None, True),
        ([[0, 1, 5, 6]], None, False),
        ([[0, 1, 0, 0]], None, False),
        ([[1, 1, 0, 1]], [[0, 0, 1, 1]], False),
        ([[0, 1, 0, 1]], [[1, 1, 1, 1]], True),
        ([[0, 1, 0, 1]], [[9, 1, 1, 1, 1]], True),
        ([[0, 1, 2, 3], [0, 1, 0, 1]], None, True),
        ([[0]], None, False),
        ([[[0, 1, 0, 1]]] * 3, None, False),
    ],
)
def test_positions_that_start_again(positions: list[Any], mask: list[Any] | None, again: bool) -> None:
    assert starts_again(torch.tensor(positions), None if mask is None else torch.tensor(mask)) is again
