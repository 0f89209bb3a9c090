"""Each use is found, with its line, and its verdict is what our classes have."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from reported import classes, report_of, uses_of

from engine.compat.migrate.things import things

AS_IS, INTEROP, CHANGE = "as is", "interop", "change"
HEAD = "import lightning.pytorch as pl\n"


def changes(folder: Path, text: str) -> dict[str, str]:
    """What needs a change, and what is said about it."""
    return {use.name: use.what for use in report_of(folder, net=text).uses if use.verdict == CHANGE}


def test_a_module_from_top_to_bottom(tmp_path: Path) -> None:
    text = """\
    import lightning as L
    from lightning.pytorch.utilities.types import STEP_OUTPUT

    class Net(L.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters(ignore="width")
            self.layer, self.mine = make(width), 1
        def forward(self, x):
            return self.layer(x) + self.mine + self.eval()
        def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
            self.log("loss", 1.0, sync_dist=True)
            self.helper(self.hparams.width)
            return self(batch)
        def helper(self, x):
            trainer = self.trainer
            if trainer.is_global_zero:
                trainer.fit(self)
                trainer.nothing_of_this_name
            trainer = x
            trainer.nothing_of_this_name
    """
    assert uses_of(tmp_path, text) == [
        (4, "LightningModule", AS_IS),
        (6, "LightningModule.__init__", AS_IS),
        (7, "LightningModule.save_hyperparameters", AS_IS),
        (11, "STEP_OUTPUT", INTEROP),
        (11, "def training_step", AS_IS),
        (12, "LightningModule.log", AS_IS),
        (13, "LightningModule.hparams", AS_IS),
        (16, "LightningModule.trainer", AS_IS),
        (17, "trainer.is_global_zero", AS_IS),
        (18, "trainer.fit", INTEROP),
        (19, "trainer.nothing_of_this_name", CHANGE),
    ]


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


def test_a_mixin_is_read_as_a_part_of_the_modules_that_use_it(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        pkg__mixin="class Mixin:\n    def f(self): self.trainer.no_such_name\nclass Unused:\n    def f(self): self.trainer.no_such_name\n",
        pkg__net=f"{HEAD}from pkg.mixin import Mixin\nclass Net(Mixin, pl.LightningModule): ...\n",
    )
    assert classes(report) == {"Net": ("module", CHANGE)}
    assert [(use.owner.name, use.name) for use in report.uses if use.verdict == CHANGE and use.owner] == [
        ("Mixin", "trainer.no_such_name")
    ]


def test_callbacks_see_the_trainer_and_the_module(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
class A(pl.Callback):
    def on_train_end(self, t, m):
        t.datamodule, m.current_epoch, t.callback_metrics
        self.helper(t, m)
    def helper(self, trainer: "pl.Trainer", pl_module):
        trainer.no_such_name; pl_module.fabric
class B(pl.callbacks.ModelCheckpoint):
    def __init__(self):
        super().__init__(monitor="x", no_such=1)
"""
    assert [each for each in uses_of(tmp_path, text) if each[0] > 3] == [
        (4, "def on_train_end", AS_IS),
        (5, "LightningModule.current_epoch", AS_IS),
        (5, "trainer.callback_metrics", INTEROP),
        (5, "trainer.datamodule", AS_IS),
        (8, "LightningModule.fabric", CHANGE),
        (8, "trainer.no_such_name", CHANGE),
        (9, "ModelCheckpoint", AS_IS),
        (11, "ModelCheckpoint.__init__(no_such=)", CHANGE),
    ]


def test_a_trainer(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
trainer = pl.Trainer(max_epochs=3)
trainer.fit(net)
plain = pl.Trainer(logger=False)
plain.predict
gone = pl.Trainer(gpus=1)
valued = pl.Trainer(reload_dataloaders_every_n_epochs=1)
computed = pl.Trainer(reload_dataloaders_every_n_epochs=some())
class Holder:
    def __init__(self):
        self.trainer = pl.Trainer()
class Own(pl.Trainer):
    extra = 1
def f(trainer: pl.Trainer):
    return trainer.extra
"""
    assert [each for each in uses_of(tmp_path, text) if each[1] != "Trainer.extra"] == [
        (3, "Trainer", AS_IS),
        (4, "Trainer.fit", INTEROP),
        (5, "Trainer", INTEROP),
        (6, "Trainer.predict", AS_IS),
        (7, "Trainer(gpus=)", CHANGE),
        (8, "Trainer()", CHANGE),
        (9, "Trainer", INTEROP),
        (12, "Trainer", AS_IS),
        (13, "Trainer", AS_IS),
        (15, "Trainer", AS_IS),
    ]
    found = changes(tmp_path, text)
    assert "'devices'" in found["Trainer(gpus=)"]
    assert "reload_dataloaders_every_n_epochs=1" in found["Trainer()"]


def test_an_accelerator(tmp_path: Path) -> None:
    text = """\
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import set_seed, no_such_helper

    accelerator = Accelerator(mixed_precision="bf16")
    plain = Accelerator(cpu=True)
    accelerator.backward(loss)
    accelerator.init_trackers("run")
    accelerator.no_such_name
    set_seed(0)
    no_such_helper()

    class Holder:
        def __init__(self):
            self.acc = accelerate.Accelerator()
        def step(self, loss, accelerator: "Accelerator | None" = None):
            self.acc.backward(loss)
            self.acc.state.process_index
            accelerator.wait_for_everyone()
    """
    assert uses_of(tmp_path, text) == [
        (5, "Accelerator", INTEROP),
        (6, "Accelerator", INTEROP),
        (7, "Accelerator.backward", AS_IS),
        (8, "Accelerator.init_trackers", INTEROP),
        (9, "Accelerator.no_such_name", CHANGE),
        (10, "set_seed", AS_IS),
        (11, "no_such_helper", CHANGE),
        (15, "Accelerator", AS_IS),
        (17, "Accelerator.backward", AS_IS),
        (18, "Accelerator.state", INTEROP),
        (19, "Accelerator.wait_for_everyone", AS_IS),
    ]
    assert {each.library for each in report_of(tmp_path, net=text).uses} == {"accelerate"}


def test_a_class_that_can_only_be_named(tmp_path: Path) -> None:
    text = "from lightning.pytorch.callbacks import BatchSizeFinder as F\nis_one = isinstance(x, F)\nF()\nclass Mine(F): ...\n"
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


# -- what stays different -----------------------------------------------------------------------------------------------------------------


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
        (
            "from accelerate.local_sgd import LocalSGD\nLocalSGD(accelerator=a, model=m, local_sgd_steps=8)\n",
            *(3, "LocalSGD", "on several processes it is an error"),
        ),
    ],
)
def test_what_stays_different_is_foreseen(text: str, line: int, name: str, said: str, tmp_path: Path) -> None:
    found = [use for use in report_of(tmp_path, net=HEAD + text).uses if use.verdict == CHANGE]
    assert [(use.place[1], use.name) for use in found] == [(line, name)]
    assert said in found[0].what


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


def test_loaders_of_accelerates_own_tests_are_no_use(tmp_path: Path) -> None:
    text = """\
    import os
    from accelerate import Accelerator
    if os.environ.get("TESTING_MOCKED_DATALOADERS") == "1":
        from accelerate.test_utils.training import mocked_dataloaders
        get_dataloaders = mocked_dataloaders
        mocked_dataloaders(None, 8)
    Accelerator()
    """
    assert [name for _, name, _ in uses_of(tmp_path, text)] == ["Accelerator"]


def test_helpers_of_accelerate_are_found(tmp_path: Path) -> None:
    text = """\
    from accelerate.utils import DDPCommunicationHookType, concatenate, extract_model_from_parallel, is_torch_version, load, save, wait_for_everyone
    DDPCommunicationHookType("fp16"), concatenate([1]), extract_model_from_parallel(m), is_torch_version(">", "2"), load("x"), save(1, "x")
    wait_for_everyone()
    """
    assert {verdict for *_, verdict in uses_of(tmp_path, text)} == {INTEROP}


def test_no_name_is_suggested_for_itself(tmp_path: Path) -> None:
    for owner in things().values():
        for name in {each for kind in (owner.plain, owner.translated) if kind is not None for each in dir(kind)}:
            assert f"did you mean {name!r}" not in owner.instead(name)
