"""The verdict about a use is what our classes have, and its sentence says what to do."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from reported import changes, report_of, uses_of

from engine.compat.lightning.names import BOUND, CHECKPOINT

AS_IS, INTEROP, CHANGE = "as is", "interop", "change"
HEAD = "import lightning.pytorch as pl\n"


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        ("def on_epoch_end(self): ...", "def on_epoch_end", "it is never called: define on_train_epoch_end"),
        ("def validation_epoch_end(self, outputs): ...", "def validation_epoch_end", "define on_validation_epoch_end"),
        (
            "def on_train_batch_end(self, a, b, c, d): ...",
            "def on_train_batch_end",
            "a run gives it (outputs, batch, batch_idx)",
        ),
        ("def training_step(self, batch, batch_idx, optimizer_idx): ...", "def training_step", "needs 'optimizer_idx'"),
        ("def train_dataloader(self, stage): ...", "def train_dataloader", "Net.train_dataloader is called with ()"),
        (
            "def f(self): self.log('x', 1, reduce_fx='median')",
            "LightningModule.log()",
            "reduce_fx='median') is unknown",
        ),
        (
            "def f(self): self.log_dict({}, False, None, True, True, 'std')",
            "LightningModule.log_dict()",
            "'std') is unknown",
        ),
        ("def f(self): self.log('x', 1, enable_graph=True)", "LightningModule.log()", "a logged value is detached"),
        ("def f(self): self.log('x', 1, unknown=2)", "LightningModule.log(unknown=)", "no such argument"),
        ("def f(self): self._to_hparams_dict({})", "LightningModule._to_hparams_dict", "it is private in Lightning"),
        ("def f(self): self.fabric", "LightningModule.fabric", "engine.Engine"),
        ("def f(self): self.device = 'cpu'", "LightningModule.device =", "it cannot be set"),
        ("def f(self): self.trainer.fit_loop_of_mine.x", "trainer.fit_loop_of_mine", "there is no 'fit_loop_of_mine'"),
    ],
)
def test_what_needs_a_change_in_a_module(tmp_path: Path, body: str, name: str, said: str) -> None:
    found = changes(tmp_path, f"{HEAD}class Net(pl.LightningModule):\n    {body}\n")
    assert list(found) == [name]
    assert said in found[name]


@pytest.mark.parametrize(
    "body",
    [
        "def f(self): self.example_input_array = 1",
        "def f(self): self.whatever(self.other)",
        "device: int\n    def f(self):\n        self.device: str\n        return self.device",
        "def on_epoch(self): self.on_epoch()",
        "def on_epoch_end(self, outputs): ...",
        "def log_it(self, *a, **k): self.log(*a, **k)",
        "@staticmethod\n    def f(trainer_of_mine): return trainer_of_mine.anything",
        "def on_train_batch_end(self, *args): ...",
        "def training_step(self, batch): ...",
        "def validation_step(self, batch, batch_idx, dataloader_idx): ...",
        "def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx): ...",
        "def setup(self): ...",
        "@property\n    def device(self): ...",
        "def state_dict(self, *args, **kwargs): return super().state_dict(*args, **kwargs)",
    ],
)
def test_what_works_in_a_module(tmp_path: Path, body: str) -> None:
    assert changes(tmp_path, f"{HEAD}class Net(pl.LightningModule):\n    {body}\n") == {}


def test_a_class_that_can_only_be_named(tmp_path: Path) -> None:
    text = "from lightning.pytorch.callbacks import ModelPruning as F\nis_one = isinstance(x, F)\nF()\nclass Mine(F): ...\n"
    found = [(line, verdict) for line, _, verdict in uses_of(tmp_path, text)]
    assert found == [(2, INTEROP), (3, CHANGE), (4, CHANGE)]


def test_values_of_callbacks(tmp_path: Path) -> None:
    text = """\
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    ModelCheckpoint(save_top_k=-3)
    EarlyStopping("x", mode="maximum")
    EarlyStopping("x", mode="max")
    EarlyStopping("x", mode=chosen)
    EarlyStopping("x", mode="maximum", **others)
    """
    assert list(changes(tmp_path, text)) == ["ModelCheckpoint()", "EarlyStopping()"]
    assert [line for line, _, verdict in uses_of(tmp_path, text) if verdict == CHANGE] == [3, 4]


def test_values_that_a_run_takes_or_computes(tmp_path: Path) -> None:
    text = """\
    import torch, lightning.pytorch as pl

    class Net(pl.LightningModule):
        def training_step(self, batch, batch_idx):
            self.log("a", 1.0, reduce_fx="avg")
            self.log("b", 1.0, reduce_fx=torch.median)
            self.log("c", 1.0, reduce_fx=self.chosen, sync_dist_group=self.group)
            self.log(self.name, 1.0, True, True, True, True, "max")
    """
    assert changes(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "line", "name", "said"),
    [
        (
            "class Saves(pl.callbacks.ModelCheckpoint):\n    def _save_checkpoint(self, trainer, filepath): ...\n",
            *(3, "def _save_checkpoint", "never called: on_checkpoint_saved"),
        ),
        (
            "t = pl.Trainer()\nt.strategy.setup_optimizers(t)\n",
            3,
            "trainer.strategy.setup_optimizers",
            "add_param_group",
        ),
        (
            "class C(pl.Callback):\n    def setup(self, trainer, pl_module, stage):\n        trainer.strategy.setup_optimizers(trainer)\n",
            *(4, "trainer.strategy.setup_optimizers", "add_param_group"),
        ),
    ],
)
def test_what_stays_different_is_foreseen(text: str, line: int, name: str, said: str, tmp_path: Path) -> None:
    found = [use for use in report_of(tmp_path, net=HEAD + text).uses if use.verdict == CHANGE]
    assert [(use.cell_and_line[1], use.name) for use in found] == [(line, name)]
    assert said in found[0].sentence


def test_entries_of_outputs_need_the_translated_class(tmp_path: Path) -> None:
    text = """\
    class Shows(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(outputs["loss"])
    class Net(pl.LightningModule):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            print(outputs.get("loss"))
    class Counts(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.batches += 1
    """
    found = {line: verdict for line, name, verdict in uses_of(tmp_path, HEAD + dedent(text)) if "def " in name}
    assert found == {3: INTEROP, 6: INTEROP, 9: AS_IS}


def test_helpers_of_accelerate_are_found(tmp_path: Path) -> None:
    text = """\
    from accelerate.utils import DDPCommunicationHookType, concatenate, extract_model_from_parallel, is_torch_version, load, save, wait_for_everyone
    DDPCommunicationHookType("fp16"), concatenate([1]), extract_model_from_parallel(m), is_torch_version(">", "2"), load("x"), save(1, "x")
    wait_for_everyone()
    """
    assert {verdict for *_, verdict in uses_of(tmp_path, text)} == {INTEROP}


@pytest.mark.parametrize(
    ("scheduler", "options", "is_foreseen"),
    [
        ("ReduceLROnPlateau(optimizer)", "'interval': 'step', 'monitor': 'val_loss'", True),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)", "'interval': 'step', 'monitor': 'score'", True),
        ("plateau", "'interval': 'step', 'monitor': 'val_loss', 'frequency': 100", True),
        ("plateau", "'interval': 'step', 'monitor': 'train_loss'", False),
        ("plateau", "'interval': 'epoch', 'monitor': 'val_loss'", False),
        ("StepLR(optimizer, 1)", "'interval': 'step', 'monitor': 'val_loss'", False),
    ],
)
def test_a_plateau_of_steps_that_follows_validation_is_foreseen(
    scheduler: str, options: str, is_foreseen: bool, tmp_path: Path
) -> None:
    text = f"""\
    class Net(pl.LightningModule):
        def validation_step(self, batch, batch_idx):
            self.log("score", 1.0)
        def configure_optimizers(self):
            plateau = ReduceLROnPlateau(optimizer)
            return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": {scheduler}, {options}}}}}
    """
    sentences = changes(tmp_path, HEAD + dedent(text))
    assert list(sentences) == (["ReduceLROnPlateau"] if is_foreseen else [])
    assert all("before the validation" in sentence for sentence in sentences.values())


@pytest.mark.parametrize(
    "call",
    ["EarlyStopping('val', check_on_train_epoch_end=True)", "ModelCheckpoint(monitor=n, save_on_train_epoch_end=True)"],
)
def test_callbacks_that_act_at_ends_of_epochs(tmp_path: Path, call: str) -> None:
    assert changes(tmp_path, f"from lightning.pytorch.callbacks import *\n{call}\n") == {}


def test_entries_of_checkpoints_and_names_of_files(tmp_path: Path) -> None:
    text = f"""{HEAD}class Net(pl.LightningModule):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["optimizer_states"], checkpoint["mine"]
    def other(self, checkpoint):
        checkpoint["state_dict"]
class Mine(pl.Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["state_dict"] = checkpoint["loops"]
pl.Trainer().fit(Net(), ckpt_path="runs/last.ckpt")
"""
    found = changes(tmp_path, text)
    assert list(found) == ["checkpoint['optimizer_states']", "checkpoint['loops']", "'last.ckpt'"]
    assert found["checkpoint['loops']"] == CHECKPOINT["loops"]
    assert "ckpt_path='last'" in found["'last.ckpt'"]


@pytest.mark.parametrize("name", BOUND)
def test_callbacks_of_lightning_that_fit_refuses_are_not_as_is(tmp_path: Path, name: str) -> None:
    report = report_of(tmp_path, net=f"from lightning.pytorch.callbacks import {name} as C\nC\nC()\n")
    assert AS_IS not in [use.verdict for use in report.uses]
    assert BOUND[name] in report.uses[0].sentence


def test_a_step_of_an_accelerator_is_its_number(tmp_path: Path) -> None:
    text = "from accelerate import Accelerator\na = Accelerator()\na.step % 2\n"
    assert uses_of(tmp_path, text)[-1] == (3, "Accelerator.step", INTEROP)
