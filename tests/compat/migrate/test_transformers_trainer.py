"""``transformers.Trainer`` and its parts are seen by whatever path they are imported, each with its row."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import pytest
from reported import changes, report_of

from engine.compat.migrate.report_text import lines
from engine.compat.transformers.names import CONTROL, EVENTS, METHODS, STATE, TRAINER_ARGUMENTS, training_argument


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("from transformers import Trainer", "Trainer"),
        ("import transformers", "transformers.Trainer"),
        ("import transformers as tf", "tf.trainer.Trainer"),
        ("from transformers.trainer import Trainer as T", "T"),
        ("from transformers import trainer", "trainer.Trainer"),
        ("from transformers import *", "Trainer"),
        ("import importlib\ntf = importlib.import_module('transformers')", "tf.Trainer"),
        ("import transformers", "getattr(transformers, 'Trainer')"),
        ("try:\n    from transformers import Trainer\nexcept ImportError:\n    Trainer = None", "Trainer"),
    ],
)
def test_paths_of_the_trainer(tmp_path: Path, head: str, name: str) -> None:
    found = changes(tmp_path, f"{head}\n{name}(model).train()\n")
    assert list(found) == ["Trainer.train", "Trainer"]
    assert "HFModule" in found["Trainer"]
    assert "fit.run" in found["Trainer.train"]


def test_subclasses_overrides_and_events(tmp_path: Path) -> None:
    text = """\
    import transformers
    from transformers import Seq2SeqTrainer, TrainerCallback, TrainingArguments

    class Args(TrainingArguments):
        width: int = 1
    class Base(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False): ...
        def of_mine(self): ...
    class Mine(Base):
        def get_train_dataloader(self): ...
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step > 3:
                control.should_training_stop = True
    arguments = Args("out", num_train_epochs=3, learning_rate=1e-3, bf16=True, hub_model_id="x", log_on_each_node=True)
    trainer = Mine(model, arguments, compute_metrics=metrics, callbacks=[Stops()])
    trainer.evaluate()
    trainer.of_mine()
    def run(trainer: Seq2SeqTrainer):
        trainer.save_model("x")
    """
    found = changes(tmp_path, text)
    assert set(found) == {
        *("Trainer", "Seq2SeqTrainer", "TrainingArguments", "TrainerCallback"),
        *("def compute_loss", "def get_train_dataloader", "def on_step_end"),
        *("state.global_step", "control.should_training_stop =", "Trainer.evaluate", "Trainer.save_model"),
        *("Trainer(compute_metrics=)", "Trainer(callbacks=)"),
        *("TrainingArguments(num_train_epochs=)", "TrainingArguments(learning_rate=)", "TrainingArguments(bf16=)"),
    }
    assert found["def compute_loss"] == "override HFModule.loss(outputs, batch)"
    assert "run.stop" in found["control.should_training_stop ="]


def test_trainers_of_packages_on_transformers(tmp_path: Path) -> None:
    found = changes(tmp_path, "from trl import SFTTrainer, SFTConfig\nSFTTrainer(model, train_dataset=rows).train()\n")
    assert list(found) == ["Trainer.train", "SFTTrainer", "SFTTrainer(train_dataset=)"]


def test_models_and_tokenizers_are_no_use(tmp_path: Path) -> None:
    text = "from transformers import AutoModel, AutoTokenizer, get_scheduler, set_seed\nset_seed(0)\nAutoModel.from_pretrained('x')\n"
    report = report_of(tmp_path, net=text)
    assert report.uses == []
    *_, last = lines(report)
    assert last == f"  transformers ({tmp_path}/net.py:1): its models, tokenizers and data work as they are"


@pytest.mark.parametrize(
    "text",
    [
        "import lightning",
        "from pytorch_lightning.utilities import rank_zero_only",
        "import accelerate",
        "def f():\n    import lightning_fabric",
        "try:\n    import lightning.pytorch.nothing\nexcept ImportError: pass",
    ],
)
def test_there_is_nothing_to_change_only_without_an_import(tmp_path: Path, text: str) -> None:
    found = list(lines(report_of(tmp_path, net=dedent(text))))
    assert not any("nothing to change" in line for line in found)
    assert any(line.endswith("takes its place") for line in found)


def test_every_name_of_the_trainer_has_a_row() -> None:
    transformers = pytest.importorskip("transformers")
    methods = [name for name in dir(transformers.Seq2SeqTrainer) if name[0] != "_"]
    assert [name for name in methods if name not in METHODS] == []
    assert [name for name in dir(transformers.TrainerCallback) if name.startswith("on_") and name not in EVENTS] == []
    assert [field.name for field in fields(transformers.TrainerControl) if field.name not in CONTROL] == []
    assert [field.name for field in fields(transformers.TrainerState) if field.name not in STATE] == []
    arguments = transformers.Trainer.__init__.__code__.co_varnames[
        1 : transformers.Trainer.__init__.__code__.co_argcount
    ]
    assert [name for name in arguments if name not in TRAINER_ARGUMENTS] == []
    named = [field.name for field in fields(transformers.Seq2SeqTrainingArguments)]
    assert [name for name in named if training_argument(name) is None] == []
