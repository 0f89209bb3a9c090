"""How many items a model's loss is a mean over: each kind of loss against a count by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

import transformers
from tiny_llama import llama
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from engine import Loss
from engine.huggingface import CountedLoss, HFModule

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}


def bert(**changes: Any) -> BertConfig:
    return BertConfig(**SMALL, **changes)


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def bart(kind: Any = BartForConditionalGeneration, **changes: Any) -> Any:
    layers = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    return kind(BartConfig(vocab_size=30, d_model=16, max_position_embeddings=16, **layers, **changes))


def ids(*shape: int) -> Tensor:
    return torch.randint(4, 30, shape, generator=torch.Generator().manual_seed(0))


def labelled(*shape: int) -> Tensor:
    """With 2 + 0 labels that count in the first and second row, and the first of each row."""
    labels = ids(*shape)
    labels[0, 3:] = -100
    labels[1, 1:] = -100
    return labels


def of(model: Any, **batch: Any) -> Loss | Tensor:
    model.eval()
    loss_of = CountedLoss(model)
    found = loss_of(model(**batch), batch)
    again = loss_of(model(**batch), batch)  # a second time: what the first batch showed is remembered
    assert type(again) is type(found)
    return found


TOKENS = {"input_ids": ids(3, 6), "labels": labelled(3, 6)}


@pytest.mark.parametrize(
    ("model", "batch", "count", "shift"),
    [
        (lambda: llama(vocab_size=30), TOKENS, 2 + 0 + 5, True),
        (lambda: BertForMaskedLM(bert()), TOKENS, 3 + 1 + 6, False),
        (lambda: BertForTokenClassification(bert(num_labels=30)), TOKENS, 3 + 1 + 6, False),
        (t5, TOKENS, 3 + 1 + 6, False),
        (bart, TOKENS, 3 + 1 + 6, False),
    ],
    ids=["causal", "masked", "token classes", "t5", "bart"],
)
def test_a_mean_over_labels(model: Any, batch: dict[str, Tensor], count: int, shift: bool) -> None:
    torch.manual_seed(0)
    made = model()
    found = of(made, **batch)
    assert isinstance(found, Loss)
    assert float(found.count) == count
    with torch.no_grad():
        logits, labels = made(**batch).logits, batch["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(found.sum.detach(), total)


def test_shifted_labels_that_are_given_count_themselves() -> None:
    given = labelled(3, 6)
    found = of(llama(vocab_size=30), input_ids=TOKENS["input_ids"], labels=given, shift_labels=given)
    assert isinstance(found, Loss)
    assert float(found.count) == 3 + 1 + 6


def test_classes_count_labels_that_are_given() -> None:
    labels = torch.tensor([1, -100, 2])
    found = of(BertForSequenceClassification(bert(num_labels=3)), input_ids=ids(3, 6), labels=labels)
    assert isinstance(found, Loss)
    assert float(found.count) == 2
    assert (
        float(
            of(
                bart(BartForSequenceClassification, num_labels=3), input_ids=_with_end(), labels=torch.tensor([1, 0, 2])
            ).count
        )
        == 3
    )  # type: ignore[union-attr]


def _with_end() -> Tensor:
    found = ids(3, 6)
    found[:, -1] = 2
    return found


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (lambda: BertForSequenceClassification(bert(num_labels=1)), {"labels": torch.tensor([0.5, 1.0, 2.0])}),
        (
            lambda: BertForSequenceClassification(bert(num_labels=4)),
            {"labels": torch.tensor([[0.0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 1]])},
        ),
        (
            lambda: BertForQuestionAnswering(bert()),
            {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 3, 3])},
        ),
        (
            lambda: bart(BartForQuestionAnswering),
            {"start_positions": torch.tensor([0, 1, 2]), "end_positions": torch.tensor([3, 3, 3])},
        ),
        (lambda: bart(BartForSequenceClassification, num_labels=1), {"labels": torch.tensor([0.5, 1.0, 2.0])}),
    ],
    ids=["regression", "several labels", "question answering", "bart's answers", "bart's regression"],
)
def test_a_mean_over_samples_stays_a_scalar(model: Any, labels: dict[str, Tensor]) -> None:
    assert isinstance(of(model(), input_ids=_with_end(), **labels), Tensor)


def test_a_micro_batch_without_labels_counts_for_nothing() -> None:
    model = llama()
    batch = {"input_ids": ids(2, 5), "labels": torch.full((2, 5), -100)}
    found = CountedLoss(model)(model(**batch), batch)
    assert isinstance(found, Loss)
    found.sum.backward()
    assert found.sum.item() == 0
    assert float(found.count) == 0
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_loss_that_is_another_mean_is_an_error_that_asks() -> None:
    model = BertForPreTraining(bert())
    batch = {"input_ids": ids(2, 5), "labels": labelled(2, 5), "next_sentence_label": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=r"BertForPreTraining.*count='samples'"):
        CountedLoss(model)(model(**batch), batch)
    assert isinstance(CountedLoss(model, "samples")(model(**batch), batch), Tensor)
    found = CountedLoss(model, lambda batch: (batch["labels"] != -100).sum())(model(**batch), batch)
    assert isinstance(found, Loss)
    assert float(found.count) == 4
    with pytest.raises(ValueError, match="possible: 'samples'"):
        CountedLoss(model, "tokens")
    with pytest.raises(
        ValueError, match="BertForPreTraining"
    ):  # the sum of two means, without any of transformers' functions
        HFModule(model).loss(model(**batch), batch)


def test_a_batch_without_labels_is_an_error() -> None:
    model = llama()
    with pytest.raises(ValueError, match="has input_ids"):
        CountedLoss(model)(model(input_ids=ids(2, 5)), {"input_ids": ids(2, 5)})


def test_losses_of_two_forward_passes_are_not_mixed_up() -> None:
    model = llama(vocab_size=30)
    loss_of = CountedLoss(model)
    first = model(**TOKENS)
    model(**TOKENS)
    with pytest.raises(ValueError, match="earlier forward pass"):
        loss_of(first, TOKENS)
    assert isinstance(loss_of(model(**TOKENS), TOKENS), Loss)


def test_the_model_is_wrapped_once_and_its_loss_is_its_own() -> None:
    model = llama(vocab_size=30)
    plain = model(**TOKENS).loss
    CountedLoss(model)
    CountedLoss(model)
    assert torch.equal(model(**TOKENS).loss, plain)
    assert model.loss_function.function is transformers.loss.loss_utils.ForCausalLMLoss
