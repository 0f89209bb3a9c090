"""transformers' models on packed rows, through both doors: one step equals one batch of separate documents."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

import transformers
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from engine import Engine, Fit, Packed, TrainModule
from engine.huggingface import CountedLoss, HFModule, varlen_arguments

VOCABULARY, LENGTH, BATCH = 61, 32, 2
FAMILIES = ("Llama", "GPT2", "Qwen2")
SLOW = ("Mistral", "Gemma", "Phi")


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    more: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 24}
    if family == "GPT2":
        more = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if family == "Gemma":
        more |= {"head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **more, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    return model._from_config(config, attn_implementation="sdpa")


def prose() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTH + 1, (20,), generator=generator)
    return [torch.randint(1, VOCABULARY, (int(length),), generator=generator) for length in lengths]


def separately(family: str) -> list[Tensor]:
    """The weights after a step on each document alone, in a bare loop."""
    model = model_of(family).train()
    total, count = torch.zeros(()), 0
    for text in prose():
        logits = model(input_ids=text[None], use_cache=False).logits[0, :-1]
        total, count = total + F.cross_entropy(logits, text[1:], reduction="sum"), count + len(text) - 1
    (total / count).backward()
    return [(weight - 0.1 * weight.grad).detach() for weight in model.parameters()]


class Own(TrainModule):
    """A step of the user's own, with transformers' own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = CountedLoss(model)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = {name: values for name, values in batch.items() if name != "document_ids"}
        return self.loss(self.model(**batch, use_cache=False), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_fit(module: TrainModule) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = Packed(prose(), LENGTH)
    window = -(-len(rows) // (BATCH * world))
    strategy = "ddp" if world > 1 else "single"
    settings = {"max_steps": 1, "accumulate_grad_batches": window, "num_sanity_val_steps": 0, "check": False}
    Fit(accelerator="cpu", devices=world, strategy=strategy, **settings).run(module, DataLoader(rows, BATCH))


def by_engine(model: nn.Module) -> None:
    rows = Packed(prose(), LENGTH)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    engine = Engine(accelerator="cpu", accumulate_grad_batches=-(-len(rows) // (BATCH * world)))
    loss_of = CountedLoss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.prepare(model.train(), optimizer, DataLoader(rows, BATCH))
    for batch in loader:
        arguments = {name: values for name, values in batch.items() if name != "document_ids"}
        with engine.accumulate(model):
            engine.backward(loss_of(model(**arguments, use_cache=False), arguments))
            optimizer.step()
            optimizer.zero_grad()


DOORS = ("HFModule", "Fit", "Engine")


def stepped(family: str, door: str) -> list[Tensor]:
    model = model_of(family)
    if door == "Engine":
        by_engine(model)
    else:
        by_fit(HFModule(model, optimizer="sgd", lr=0.1, scheduler=None) if door == "HFModule" else Own(model))
    return [weight.detach() for weight in model.parameters()]


def check(family: str, weights: list[Any]) -> None:
    for found, expected in zip(weights, separately(family), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_one_batch_of_separate_documents(family: str, door: str) -> None:
    check(family, stepped(family, door))


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_other_families(family: str) -> None:
    check(family, stepped(family, "HFModule"))


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2, "two_")


def two_steps() -> dict[str, Any]:
    return {
        f"{family} {door}": [weight.tolist() for weight in stepped(family, door)]
        for family, door in zip(FAMILIES, DOORS, strict=True)
    }


def slow_steps() -> dict[str, Any]:
    return {
        f"{family} {door}": [weight.tolist() for weight in stepped(family, door)]
        for family in FAMILIES
        for door in DOORS
    }


@pytest.mark.parametrize("pair", [f"{family} {door}" for family, door in zip(FAMILIES, DOORS, strict=True)])
def test_two_ranks(pair: str, two: Any) -> None:
    check(pair.partition(" ")[0], two["steps"][0][pair])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_pairs_on_several_ranks(ranks: int) -> None:
    for pair, weights in ranks_of_file(__file__, ranks, "slow_")["steps"][0].items():
        check(pair.partition(" ")[0], weights)


def test_the_wrong_ways_are_errors() -> None:
    """A mask of two dimensions in the collate function, and a model's own cache: documents would see each other."""

    def with_mask(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = default_collate(rows)
        return {**batch, "attention_mask": (batch["document_ids"] >= 0).long()}

    loader = DataLoader(Packed(prose(), LENGTH), BATCH, collate_fn=with_mask)
    fit = Fit(accelerator="cpu", devices=1, max_steps=1, num_sanity_val_steps=0)
    for module in (HFModule(model_of("Llama")), Own(model_of("Llama"))):
        with pytest.raises(ValueError, match=r"2-D attention_mask.*gradients would be wrong"):
            fit.run(module, loader)
    engine = Engine(accelerator="cpu")
    model, loader = engine.prepare(model_of("GPT2"), DataLoader(Packed(prose(), LENGTH), BATCH))
    batch = next(iter(loader))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(batch["input_ids"], position_ids=batch["position_ids"])


def test_arguments_of_flash_attention() -> None:
    batch = default_collate(list(Packed(prose(), LENGTH)))
    arguments = varlen_arguments(batch["position_ids"])
    assert arguments["cu_seq_lens_q"] is arguments["cu_seq_lens_k"]
    assert arguments["cu_seq_lens_q"][-1] == batch["position_ids"].numel()
    assert arguments["max_length_q"] == arguments["max_length_k"] == max(map(len, prose()))
    model = copy.deepcopy(model_of("Llama"))
    plain = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    torch.testing.assert_close(model(**plain, **arguments).logits, model(**plain).logits)
