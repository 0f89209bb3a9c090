"""transformers' causal language models whose loss is computed without logits: families, trainings, errors where logits are used otherwise."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.ranks import ranks_of_file
from torch import Tensor

from engine import Fit
from engine.huggingface import HFModule
from engine.losses import without_logits

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WHOLE = {**SMALL, "num_key_value_heads": 4}
GPT = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "word_embed_proj_dim": 32, "dropout": 0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SMALL),
    "GPT2": ("GPT2", GPT),  # tied
    "Gemma2": ("Gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 2.0}),
    "Granite": ("Granite", {**SMALL, "logits_scaling": 7.0}),
    "Cohere": ("Cohere", {**SMALL, "logit_scale": 0.3}),
    "Qwen2": ("Qwen2", SMALL),
    "Qwen3": ("Qwen3", {**SMALL, "head_dim": 8}),
    "Phi": ("Phi", WHOLE),  # a bias
    "Mixtral": (
        "Mixtral",
        {**SMALL, "num_local_experts": 2, "output_router_logits": True},
    ),  # adds the loss of its router
    "Mamba": ("Mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
    "OPT": ("OPT", OPT),
    "Mistral": ("Mistral", SMALL),
    "GPTNeoX": ("GPTNeoX", {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}),
}
SLOW = {"Qwen3", "Mistral", "GPTNeoX", "Mamba"}
CAUSAL = {"GPT2": "GPT2LMHeadModel"}


def made(family: str, **changes: Any) -> Any:
    name, arguments = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**arguments, **changes})
    return getattr(transformers, CAUSAL.get(name, f"{name}ForCausalLM"))(config).train()


def batch(rows: int = 3) -> dict[str, Tensor]:
    tokens = torch.randint(5, 97, (rows, 10), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def gradients(model: Any, **arguments: Any) -> list[Tensor]:
    loss = model(**batch(), use_cache=False, **arguments).loss
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def distance(ours: list[Tensor], plain: list[Tensor]) -> float:
    assert len(ours) == len(plain)
    largest = max(float(p.abs().max()) for p in plain[1:])
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest) for a, b in zip(ours, plain, strict=True)
    )


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])
def test_losses_and_gradients_of_a_family_are_those_with_logits(family: str) -> None:
    model = made(family)
    plain = gradients(copy.deepcopy(model))
    assert without_logits(model) is model
    assert distance(gradients(model), plain) < 2e-6
    assert list(model.state_dict()) == list(made(family).state_dict())


def test_arguments_of_the_loss_are_honoured() -> None:
    model = made("Llama")
    plain = copy.deepcopy(model)
    without_logits(model)
    shifted = {"shift_labels": torch.nn.functional.pad(batch()["labels"], (0, 2), value=-100)[:, 2:].contiguous()}
    for arguments in (
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        shifted,
        {"output_hidden_states": True},
    ):
        assert distance(gradients(model, **arguments), gradients(plain, **arguments)) < 2e-6


def test_in_evaluation_there_are_logits() -> None:
    model = without_logits(made("Llama"))
    plain = made("Llama")
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    model.eval(), plain.eval()
    assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    tokens = batch()["input_ids"]
    assert torch.equal(
        model.generate(tokens, max_new_tokens=3, do_sample=False),
        plain.generate(tokens, max_new_tokens=3, do_sample=False),
    )


def test_a_copy_and_a_second_call_are_alike() -> None:
    model = without_logits(without_logits(made("Llama")))
    assert distance(gradients(copy.deepcopy(model)), gradients(model)) == 0.0


USES: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "torch.argmax": lambda logits: torch.argmax(logits, -1),
    "an index": lambda logits: logits[..., :-1, :],
    "softmax": lambda logits: torch.softmax(logits, -1),
    "cross_entropy": lambda logits: torch.nn.functional.cross_entropy(logits, logits),
    "a sum": lambda logits: logits + 1.0,
    "a tensor's sum": lambda logits: torch.ones(1) + logits,
    "a tensor's product": lambda logits: logits * torch.ones(97),
    "a comparison": lambda logits: logits == 0,
    "a negative factor": lambda logits: logits * -1.0,
    "tanh twice": lambda logits: torch.tanh(torch.tanh(logits)),
    "a square": lambda logits: logits.square(),
    "half": lambda logits: logits.half(),
    "a loop": lambda logits: list(logits),
}


@pytest.mark.parametrize("use", USES)
def test_any_other_use_of_logits_is_an_error(use: str) -> None:
    logits = without_logits(made("Llama"))(**batch(), use_cache=False).logits
    with pytest.raises(TypeError, match="without_logits: the logits of a model that trains are used beyond"):
        USES[use](logits)


def test_models_that_do_something_else_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a model of transformers or peft, got Linear"):
        without_logits(torch.nn.Linear(2, 2))
    small = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    with pytest.raises(
        TypeError, match="the loss of BertForMaskedLM is ForMaskedLMLoss, not transformers' ForCausalLMLoss"
    ):
        without_logits(transformers.BertForMaskedLM(transformers.BertConfig(**small)))
    with pytest.raises(TypeError, match="the output layer of LlamaForSequenceClassification is a NoneType"):
        without_logits(transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL)))
    model = made("Llama")
    model.loss_function = lambda **arguments: 0
    with pytest.raises(TypeError, match="the loss of LlamaForCausalLM is <lambda>"):
        without_logits(model)
    model = without_logits(made("Llama"))
    model.config.vocab_size = 90
    with pytest.raises(ValueError, match="the model's vocab_size is 90, and its output layer has 97 classes"):
        model(**batch())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_an_adapter_on_the_output_layer_is_refused_and_one_below_it_is_trained() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        made("Llama"), peft.LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    with pytest.raises(TypeError, match=r"the output layer of LlamaForCausalLM is a Linear, not an nn\.Linear"):
        without_logits(model)
    model = peft.get_peft_model(
        made("Llama"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    )
    plain = gradients(copy.deepcopy(model))
    assert distance(gradients(without_logits(model)), plain) < 2e-6


def trained(
    change: Callable[[Any], HFModule], root: Path, family: str = "Llama", **settings: Any
) -> tuple[dict[str, Tensor], float]:
    module = change(made(family))
    fit = Fit(
        max_epochs=1,
        accelerator="cpu",
        seed=0,
        root_dir=root,
        **{"strategy": "single", "accumulate_grad_batches": 2, **settings},
    )
    rows = batch(12)
    rows["labels"][3:5, 2:] = -100  # micro-batches have other counts
    batches = [{name: value[i : i + 3] for name, value in rows.items()} for i in range(0, 12, 3)]
    result = fit.run(module, batches, batches[:1])
    return {name: value.detach().clone() for name, value in fit.state_dict(module).items()}, result.metrics["val/loss"]


def test_it_trains_in_a_module_in_whatever_order(tmp_path: Path) -> None:
    plain, loss = trained(lambda model: HFModule(model, lr=1e-2, optimizer="sgd"), tmp_path / "plain")

    def later(model: Any) -> HFModule:
        module = HFModule(model, lr=1e-2, optimizer="sgd")
        without_logits(model)
        return module

    for number, change in enumerate((lambda model: HFModule(without_logits(model), lr=1e-2, optimizer="sgd"), later)):
        weights, val_loss = trained(change, tmp_path / str(number))
        assert val_loss == pytest.approx(loss, rel=1e-6)
        assert max(float((weights[name] - value).abs().max()) for name, value in plain.items()) < 1e-6


def rank_trained() -> Any:
    """The weights of a Llama and of a GPT-2, whose output layer is the embedding, under each kind of strategy."""
    weights = {}
    for family, strategy, window in (
        ("Llama", "ddp", 1), ("Llama", "fsdp", 1), ("GPT2", "fsdp", 1), ("Llama", "tp", 2),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            values, _ = trained(
                lambda model: HFModule(without_logits(model), lr=1e-2, optimizer="sgd"),
                Path(folder),
                family,
                strategy=strategy,
                accumulate_grad_batches=window,
            )
        weights[f"{family}, {strategy}"] = {name: value.flatten().tolist() for name, value in values.items()}
    return weights


@pytest.mark.slow
def test_strategies_train_as_one_process_with_logits(tmp_path: Path) -> None:
    ranks = ranks_of_file(__file__, 2)["trained"]
    for family in ("Llama", "GPT2"):
        plain, _ = trained(lambda model: HFModule(model, lr=1e-2, optimizer="sgd"), tmp_path / family, family)
        for name, weights in ranks[0].items():
            if name.startswith(family):
                assert weights.keys() == plain.keys()
                for key, value in plain.items():
                    torch.testing.assert_close(torch.tensor(weights[key]), value.flatten(), rtol=0, atol=2e-6)
