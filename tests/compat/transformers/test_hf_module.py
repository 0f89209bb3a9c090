"""``HFModule`` in one process and on ranks that shard it: optimizers, schedules, evaluation, generation, checkpoints, saved models."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internals import open_checkpoint
from support.ranks import clean_environment, ranks_of_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))

from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from tiny_llama import EPOCHS, STEP, Losses, adapted, by_fit, llama, logits_of, model_of, module_of, rows, strategy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from callbacks import EMA, ModelCheckpoint
from engine import Fit, Loss
from engine.checkpoint.export import export_checkpoint
from engine.huggingface import HFModule, parameter_groups

# peft reads an attribute that transformers is renaming.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
WITH_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def fit(root: Path, **settings: Any) -> Fit:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "root_dir": root, "log_every_n_steps": 1, "seed": 0}
    return Fit(**options | settings)


def loader(size: int = 4, count: int | None = None) -> DataLoader[Any]:
    return DataLoader(rows()[:count], batch_size=size)  # type: ignore[arg-type]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(47)} | {"<s>": 47, "</s>": 48, "<unk>": 49}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_weight_decay_leaves_out_what_trainer_leaves_out(tmp_path: Path) -> None:
    model = llama(attention_bias=True)
    decayed = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    names = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")).get_decay_parameter_names(
        model
    )
    assert decayed == {id(p) for name, p in model.named_parameters() if name in names}
    assert [group["weight_decay"] for group in parameter_groups(model, 0.1)] == [0.1, 0.0]
    assert len(parameter_groups(adapted(llama()), 0.1)) == 1  # nothing but matrices is trained


class Rates(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if run.step > len(self.rates):
            self.rates.append(run.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("settings", "options", "steps", "warmup", "total"),
    [
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, {"scheduler": "linear", "warmup": 2}, 6, 2, 6),
        ({"max_epochs": 2, "max_steps": 4}, {"scheduler": "cosine", "warmup": 0.5}, 4, 2, 4),
        ({"max_epochs": 2, "accumulate_grad_batches": {0: 1, 1: 5}}, {"scheduler": "linear"}, 6, 0, 6),
        ({"max_epochs": 1}, {"scheduler": "polynomial", "total_steps": 50, "scheduler_args": {"power": 2.0}}, 5, 0, 50),
        ({"max_epochs": 1}, {"scheduler": "constant_with_warmup", "warmup": 3}, 5, 3, 0),
        ({"max_epochs": 1}, {"scheduler": "cosine", "warmup": 1, "scheduler_args": {"num_cycles": 0.25}}, 5, 1, 5),
    ],
)
def test_the_schedule_is_that_of_transformers_over_the_steps_of_the_run(
    settings: dict[str, Any], options: dict[str, Any], steps: int, warmup: int, total: int, tmp_path: Path
) -> None:
    rates = Rates()
    fit(tmp_path, callbacks=rates, **settings).run(HFModule(llama(), lr=0.5, **options), loader())
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    more = options.get("scheduler_args")
    expected = get_scheduler(options["scheduler"], made, warmup, total, more)
    found = []
    for _ in range(steps):
        made.step()
        expected.step()
        found.append(made.param_groups[0]["lr"])
    assert rates.rates == pytest.approx(found, abs=1e-12)


def stream() -> Iterator[Any]:
    yield from loader()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adamwx"}, "did you mean 'adamw'"),
        ({"scheduler": "cosin"}, "did you mean 'cosine'"),
        ({"scheduler": "constant", "warmup": 3}, "scheduler='constant_with_warmup'"),
        ({"scheduler": "reduce_lr_on_plateau", "warmup": 3}, "has no warm-up"),
        ({"scheduler": "constant", "scheduler_args": {"num_cycles": 2}}, "takes no scheduler_args"),
        ({"warmup": 1.5}, "an int"),
        ({"count": "rows"}, "possible: 'samples'"),
    ],
)
def test_unknown_names_are_errors_before_the_first_step(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        fit(tmp_path).run(HFModule(llama(), **options), loader())


def test_a_schedule_needs_the_number_of_steps(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from rows()

    batches = DataLoader(Endless(), batch_size=4)
    with pytest.raises(ValueError, match="max_steps"):
        fit(tmp_path).run(HFModule(llama()), batches)
    assert fit(tmp_path, max_steps=2).run(HFModule(llama()), batches).step == 2
    with pytest.raises(ValueError, match="requires_grad=False"):
        fit(tmp_path).run(HFModule(llama().requires_grad_(False)), loader())


def test_other_optimizers(tmp_path: Path) -> None:
    module = HFModule(llama(), optimizer="SGD", lr=0.1, scheduler=None, optimizer_args={"momentum": 0.9})
    made = module.configure_optimizers()
    assert type(made) is torch.optim.SGD
    assert made.param_groups[0]["momentum"] == 0.9
    made = HFModule(
        llama(), optimizer=partial(torch.optim.Adam, betas=(0.5, 0.9)), lr=0.1, scheduler=None
    ).configure_optimizers()
    assert made.defaults["betas"] == (0.5, 0.9)
    plateau = HFModule(llama(), scheduler="reduce_lr_on_plateau", scheduler_args={"patience": 0})
    result = fit(tmp_path, max_epochs=2).run(plateau, loader(), loader(count=4))
    assert result.step == 10


def test_evaluation_is_over_tokens_and_its_exponential_is_the_perplexity(tmp_path: Path) -> None:
    module = HFModule(llama())
    found = fit(tmp_path).validate(module, loader(size=3, count=10))[0]
    data = rows()[:10]
    with torch.no_grad():
        logits = module.model(torch.stack([row["input_ids"] for row in data])).logits[:, :-1]
    labels = torch.stack([row["labels"] for row in data])[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert found["val/loss"] == pytest.approx(expected, abs=1e-6)
    assert found["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    several = fit(tmp_path).test(module, [loader(size=3, count=10), loader(size=3, count=4)])
    assert several[0]["test/loss/dataloader_idx_0"] == pytest.approx(expected, abs=1e-6)


def test_fit_takes_the_model_itself(tmp_path: Path) -> None:
    for kind in ("full", "lora"):
        model, same = model_of(kind), model_of(kind)
        fitted = fit(tmp_path, max_epochs=2)
        fitted.run(model, loader())
        fit(tmp_path, max_epochs=2).run(HFModule(same), loader())
        assert torch.equal(logits_of(model), logits_of(same))
        assert set(fitted.state_dict(model)) == {f"model.{name}" for name in model.state_dict()}
        assert fitted.validate(model, loader())[0]["val/loss"] > 0


GENERATION = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": list(range(3, 30)), "pad_token_id": 0}
"""So that sequences end at different lengths."""


def test_predictions_are_logits_or_generated(tmp_path: Path) -> None:
    model = llama()
    logits = fit(tmp_path).predict(HFModule(model), loader(count=4))
    torch.testing.assert_close(logits[0], logits_of(model))
    found = fit(tmp_path).predict(HFModule(model, generation=GENERATION), loader(size=2, count=4))
    prompts = torch.stack([row["input_ids"] for row in rows()[:2]])
    assert torch.equal(found[0], model.generate(prompts, attention_mask=torch.ones_like(prompts), **GENERATION))


def test_batches_are_dicts(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="collate_fn"):
        fit(tmp_path).run(HFModule(llama()), [torch.ones(2, 5, dtype=torch.int64)])


class Smoothed(HFModule):
    def loss(self, outputs: Any, batch: Mapping[str, Any]) -> Loss:
        labels = batch["labels"][:, 1:]
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.2, reduction="sum")
        return Loss(total, (labels != -100).sum())


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    losses = Losses()
    module = Smoothed(llama())
    data = rows()[:4]
    logits = module.model(torch.stack([row["input_ids"] for row in data])).logits[:, :-1].flatten(0, 1)
    labels = torch.stack([row["labels"] for row in data])[:, 1:].flatten()
    fit(tmp_path, max_epochs=1, accumulate_grad_batches=2, callbacks=losses).run(module, loader(size=2, count=4))
    assert losses.found[0] == pytest.approx(F.cross_entropy(logits, labels, label_smoothing=0.2).item(), abs=1e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------------------


def test_an_export_has_the_tokenizer_and_the_dtype_of_its_tensors(tmp_path: Path) -> None:
    module = module_of("full", tokenizer=tokenizer())
    by_fit("single", module, tmp_path)
    done = export_checkpoint(tmp_path, tmp_path / "out", dtype="bf16", max_shard_size="40KB")
    assert len(done.files) > 1
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype is torch.bfloat16
    assert torch.equal(again.lm_head.weight, module.model.lm_head.weight.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w4")["input_ids"] == [3, 4]
    plain = export_checkpoint(tmp_path, tmp_path / "plain", prefix_strip="")
    assert "model.lm_head.weight" in load_file(plain.files[0]) | load_file(plain.files[-1])


def test_tied_weights_are_exported_once(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    by_fit("single", module_of("full", model), tmp_path)
    export_checkpoint(tmp_path, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits_of(LlamaForCausalLM.from_pretrained(tmp_path / "out")), logits_of(model))


def test_averaged_weights_are_exported_as_the_model(tmp_path: Path) -> None:
    module = module_of("lora")
    callbacks = [EMA(0.5), ModelCheckpoint()]
    fit(tmp_path, max_epochs=1, callbacks=callbacks).run(module, loader())
    export_checkpoint(tmp_path, tmp_path / "out")
    averaged = PeftModel.from_pretrained(llama(), tmp_path / "out")
    assert torch.equal(logits_of(averaged), logits_of(module.model))  # which has the average after the training
    export_checkpoint(tmp_path, tmp_path / "trained", weights="trained")
    trained = PeftModel.from_pretrained(llama(), tmp_path / "trained")
    assert not torch.equal(logits_of(averaged), logits_of(trained))


def test_a_checkpoint_of_an_adapter_is_the_adapter_and_resumes_on_the_same_model(tmp_path: Path) -> None:
    whole = Losses()
    fit(tmp_path / "a", max_epochs=2, callbacks=whole).run(module_of("lora", total_steps=10), loader())
    first, second = Losses(), Losses()
    fit(tmp_path / "b", max_epochs=1, callbacks=[first, ModelCheckpoint()]).run(
        module_of("lora", total_steps=10), loader()
    )
    again = module_of("lora", total_steps=10)
    fit(tmp_path / "b", max_epochs=2, callbacks=[second, ModelCheckpoint()]).run(again, loader(), resume="last")
    assert first.found + second.found == whole.found
    names = set().union(
        *(open_checkpoint(path).tensors("model").stored for path in (tmp_path / "b" / "checkpoints").iterdir())
    )
    assert names == {f"model.{name}" for name, p in again.model.named_parameters() if "lora_" in name}
    loaded = HFModule.load_from_checkpoint(tmp_path / "b", model=model_of("lora"))
    assert torch.equal(logits_of(loaded.model), logits_of(again.model))
    base = set(fit(tmp_path / "c").state_dict(again)) - names
    assert any("base_layer" in name for name in base)  # asked for, all of it is there


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # peft's prefix uses transformers' former name
@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_learned_prompts(config: Any, tmp_path: Path) -> None:
    model = get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    before, settings = logits_of(model), {"max_steps": 2, "callbacks": ModelCheckpoint()}
    if config is PromptEncoderConfig:  # its file has what a small network computes
        with pytest.warns(UserWarning, match="save_pretrained"):
            fit(tmp_path, **settings).run(HFModule(model, lr=0.1), loader())
        assert not torch.equal(logits_of(model), before)
        return
    fit(tmp_path, **settings).run(HFModule(model, lr=0.1), loader())
    assert not torch.equal(logits_of(model), before)
    export_checkpoint(tmp_path, tmp_path / "out")
    assert torch.equal(logits_of(PeftModel.from_pretrained(llama(), tmp_path / "out")), logits_of(model))


def test_the_frozen_model_is_saved_where_asked_for(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=1, callbacks=ModelCheckpoint()).run(module_of("lora", save_base=True), loader())
    done = export_checkpoint(tmp_path, tmp_path / "out")
    assert any("base_layer" in name for name in done.left_out) or done.tensors == 12
    names = set(load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert names == set(get_peft_model_state_dict(model_of("lora")))


# -- a saved model, sharded --------------------------------------------------------------------------------------------------------

FOLDER = "TEST_FOLDER"
SHARDING = ("fsdp", "zero3") if WITH_DEEPSPEED else ("fsdp",)


def half_missing(folder: Path, rank: int) -> Path:
    """The saved model with NaN in the half of each tensor that is the other rank's."""
    own = folder / f"saved_{rank}"
    if not own.exists():
        LlamaForCausalLM.from_pretrained(folder / "saved").save_pretrained(own)
        state = load_file(own / "model.safetensors")
        for value in state.values():
            middle = value.numel() // 2
            value.flatten()[slice(middle, None) if rank == 0 else slice(middle)] = math.nan
        save_file(state, own / "model.safetensors", metadata={"format": "pt"})
    return own


def read_by(name: str) -> list[float]:
    """A saved model under a strategy that shards: its logits, without any training."""
    folder = Path(os.environ[FOLDER])
    module = HFModule.from_pretrained(str(half_missing(folder, int(os.environ["RANK"]))))
    found = Fit(strategy=strategy(name), accelerator="cpu", root_dir=folder / f"read_{name}").predict(
        module, loader(size=2, count=4)
    )
    return torch.cat(found).flatten().tolist()


def trained_by(name: str, peft: bool) -> tuple[list[float], bool]:
    """The losses of a saved model, and whether an adapter started from nothing: its first loss is the model's."""
    folder = Path(os.environ[FOLDER])
    options = {"lr": 5e-3, "weight_decay": 0.1, "scheduler": "cosine", "warmup": 2}
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"]) if peft else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = HFModule.from_pretrained(str(folder / "saved"), peft=config, **options)
        fitted, losses = by_fit(name, module, folder / f"trained_{name}_{peft}")
    state = fitted.state_dict(module)
    moved = all(bool(value.abs().sum() > 0) for key, value in state.items() if ".lora_" in key)
    return losses, moved


def generated_by(name: str) -> list[list[int]]:
    """Sequences of several lengths."""
    folder = Path(os.environ[FOLDER])
    module = HFModule(llama(), generation=GENERATION)
    found = Fit(strategy=strategy(name), accelerator="cpu", root_dir=folder / f"generated_{name}").predict(
        module, loader(size=1, count=5)
    )
    return [row.tolist() for batch in found for row in batch]


for _name in SHARDING:
    globals()[f"rank_read_{_name}"] = partial(read_by, _name)
    globals()[f"rank_trained_{_name}"] = partial(trained_by, _name, False)
    globals()[f"rank_adapter_{_name}"] = partial(trained_by, _name, True)
    globals()[f"rank_generated_{_name}"] = partial(generated_by, _name)


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[str, list[Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(Path(folder) / "saved")
        yield ranks_of_file(__file__, 2, **{FOLDER: folder})


@pytest.mark.parametrize("name", ["distributed_config", "tp_plan"])
def test_transformers_is_not_asked_to_shard(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}'.*the strategy shards this model"):
        HFModule.from_pretrained("folder", model_args={name: "auto"})


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDING)
def test_each_rank_reads_its_own_shards_of_a_saved_model(ran: dict[str, list[Any]], name: str) -> None:
    expected = logits_of(llama())
    for found in ran[f"read_{name}"]:
        torch.testing.assert_close(torch.tensor(found), expected.flatten(), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDING)
def test_a_saved_model_is_trained_as_one_in_memory(ran: dict[str, list[Any]], name: str, tmp_path: Path) -> None:
    _, expected = by_fit("single", module_of("full"), tmp_path)
    for losses, _ in ran[f"trained_{name}"]:
        assert losses == pytest.approx(expected, abs=1e-5)
    for losses, moved in ran[f"adapter_{name}"]:
        assert losses[0] == pytest.approx(expected[0], abs=1e-5)
        assert losses[-1] < losses[0]
        assert moved


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDING)
def test_sharded_models_generate_what_one_process_generates(
    ran: dict[str, list[Any]], name: str, tmp_path: Path
) -> None:
    batches = fit(tmp_path).predict(HFModule(llama(), generation=GENERATION), loader(size=1, count=5))
    expected = [row.tolist() for batch in batches for row in batch]
    assert len({len(row) for row in expected}) > 1
    for found in ran[f"generated_{name}"]:
        assert found == expected


def test_a_saved_model_in_one_process(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "saved")
    module = HFModule.from_pretrained(str(tmp_path / "saved"), lr=5e-3, weight_decay=0.1, scheduler="cosine", warmup=2)
    _, losses = by_fit("single", module, tmp_path / "a")
    assert losses == by_fit("single", module_of("full"), tmp_path / "b")[1]
    assert len(losses) == EPOCHS * -(-len(rows()) // STEP)
    assert isinstance(module.model.lm_head.weight, Tensor)


def test_without_transformers_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; import engine.huggingface"
    ended = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True)
    assert (
        'ModuleNotFoundError: engine.huggingface needs transformers: pip install "fit-trainer[huggingface]"'
        in ended.stderr
    )
