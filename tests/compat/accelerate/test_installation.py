"""``install()``: other packages' ``import accelerate`` gives ``engine.interop.accelerate``, and their trainers train to the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.commands import free_port

from engine.interop import accelerate

HEAD = """
import os, sys, tempfile, random
import torch
folder, which = sys.argv[1:3]
if which == "ours":
    from engine.interop import accelerate
    accelerate.install()
    accelerate.install()
    import accelerate as named
    import accelerate.utils.dataclasses
    from accelerate.utils import DistributedType
    assert named is accelerate and accelerate.utils.dataclasses.DistributedType is DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
set_seed(3)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM(LlamaConfig(vocab_size=43, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, **sizes))
usual = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True)
words = ["[PAD]", "[EOS]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(38))]
draw = random.Random(0)
def sentence(): return " ".join(f"w{draw.randrange(38)}" for _ in range(draw.randrange(4, 12)))
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "eos", "unk", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)
"""
TAIL = """
trainer.train()
trainer.evaluate()
assert type(trainer.accelerator).__module__.startswith("engine.") == (which == "ours")
torch.save(trainer.model.state_dict(), f"{folder}/{which}-{os.environ.get('RANK', 0)}.pt")
"""
CAUSAL = """
generator = torch.Generator().manual_seed(0)
rows = [torch.randint(3, 43, (12,), generator=generator) for _ in range(37)]
data = [{"input_ids": row, "labels": torch.where(torch.arange(12) < i % 5, -100, row)} for i, row in enumerate(rows)]
options = dict(num_train_epochs=2, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)
trainer = Trainer(model, TrainingArguments(f"{folder}/{which}", **usual, **options), train_dataset=data, eval_dataset=data[:7])
"""
TRL = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
data = Dataset.from_dict({"text": [sentence() for _ in range(30)]})
arguments = SFTConfig(f"{folder}/{which}", max_steps=6, bf16=False, max_length=16, save_strategy="no", gradient_checkpointing=False, **usual)
trainer = SFTTrainer(model, args=arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer())
"""
SENTENCES = """
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel
tokenizer().save_pretrained(f"{folder}/bert")
BertModel(BertConfig(vocab_size=43, **sizes)).save_pretrained(f"{folder}/bert")
model = SentenceTransformer(modules=[Transformer(f"{folder}/bert"), Pooling(16)], device="cpu")
data = Dataset.from_dict({name: [sentence() for _ in range(30)] for name in ("anchor", "positive")})
arguments = SentenceTransformerTrainingArguments(f"{folder}/{which}", max_steps=6, save_strategy="no", **usual)
loss = MultipleNegativesRankingLoss(model)
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, eval_dataset=data, loss=loss)
"""


def weights(script: str, folder: Path, ranks: int, which: str) -> list[dict[str, torch.Tensor]]:
    """Run a script under Accelerate (``"theirs"``) or under the door (``"ours"``), and return each rank's weights."""
    (folder / "script.py").write_text(HEAD + script + TAIL)
    launcher = (
        ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launcher, str(folder / "script.py"), str(folder), which]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{which}-{rank}.pt") for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package", "ranks"),
    [
        pytest.param(CAUSAL, "transformers", 1, id="transformers"),
        pytest.param(CAUSAL, "transformers", 2, id="transformers on two ranks"),
        pytest.param(TRL, "trl", 1, id="TRL"),
        pytest.param(SENTENCES, "sentence_transformers", 1, id="sentence-transformers"),
    ],
)
def test_a_trainer_trains_to_accelerates_weights(script: str, package: str, ranks: int, tmp_path: Path) -> None:
    for name in ("accelerate", package):
        pytest.importorskip(name)
    theirs, ours = (weights(script, tmp_path, ranks, which) for which in ("theirs", "ours"))
    for rank in range(ranks):
        assert theirs[rank].keys() == ours[rank].keys()
        assert all(torch.equal(value, ours[rank][name]) for name, value in theirs[rank].items())


@pytest.mark.parametrize("name", ["accelerate", "transformers.trainer", "trl"])
def test_too_late(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(RuntimeError, match=rf"install\(\) comes too late: .*{name}.* call it in the first lines"):
        accelerate.install()


def test_an_import_of_ours_alone_installs_nothing() -> None:
    assert not any("Installed" in type(finder).__name__ for finder in sys.meta_path)
    assert accelerate.Accelerator.usual_rules == "exact"


def test_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.interop.accelerate.utils import (
        clear_environment,
        patch_environment,
        purge_accelerate_environment,
        str_to_bool,
    )

    monkeypatch.setenv("ACCELERATE_X", "1")
    monkeypatch.setenv("KEPT", "a")
    with patch_environment(kept=2, new="b"):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "b")
    assert os.environ["KEPT"] == "a"
    assert "NEW" not in os.environ
    with clear_environment():
        assert not os.environ
        os.environ["INSIDE"] = "1"
    assert os.environ["KEPT"] == "a"
    assert "INSIDE" not in os.environ

    def change(*_: Any) -> None:
        os.environ.update(ACCELERATE_X="2", ACCELERATE_Y="3", OTHER="4")

    monkeypatch.setenv("OTHER", "0")
    purge_accelerate_environment(change)()
    assert (os.environ["ACCELERATE_X"], os.environ["OTHER"]) == ("1", "4")
    assert "ACCELERATE_Y" not in os.environ

    @purge_accelerate_environment
    class Tests:
        test_one = change

    class Later(Tests):
        test_two = change

    Tests().test_one()
    Later().test_two()
    assert "ACCELERATE_Y" not in os.environ
    assert [str_to_bool(text) for text in ("Yes", "t", "on", "1", "no", "off", "0")] == [1, 1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="invalid truth value maybe"):
        str_to_bool("maybe")


def test_a_state_in_a_pickle_is_that_of_the_process_that_reads_it() -> None:
    import copy
    import pickle

    state = accelerate.PartialState()
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert again.process_index == 0
        assert again.device == state.device


def test_hooks_around_forward() -> None:
    from engine.interop.accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Adds(ModelHook):
        def __init__(self, number: int) -> None:
            self.number = number

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + self.number, *args[1:]), kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 10

    class Frozen(ModelHook):
        no_grad = True

    layer, one = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    torch.nn.init.ones_(layer.weight)
    assert add_hook_to_module(layer, Adds(2)) is layer
    assert layer(one).item() == 30.0
    add_hook_to_module(layer, Adds(3), append=True)
    assert layer(one).item() == 600.0
    add_hook_to_module(layer, Frozen())
    assert layer(one).requires_grad is False
    remove_hook_from_module(layer)
    assert layer(one).item() == 1.0
    assert layer(one).requires_grad
    assert "forward" not in vars(layer)
