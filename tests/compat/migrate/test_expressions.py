"""Each use is found, with its line, and its verdict is what our classes have."""

from __future__ import annotations

from pathlib import Path

from reported import changes, classes, report_of, uses_of

AS_IS, INTEROP, CHANGE = "as is", "interop", "change"
HEAD = "import lightning.pytorch as pl\n"


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


def test_arguments_of_a_callback_that_are_no_trainer(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
class A(pl.Callback):
    def __init__(self, first, second):
        first.no_such_name, second.fabric
    def load_state_dict(self, state):
        state.no_such_name
    def of_mine(self, first, second):
        first.no_such_name
    def on_load_checkpoint(self, t, m, state):
        state.no_such_name
        t.no_such_name
"""
    assert [line for line, _, verdict in uses_of(tmp_path, text) if verdict == CHANGE] == [12]


def test_a_trainer_that_an_object_holds(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
class Holds:
    def __init__(self, trainer: pl.Trainer):
        self.given, self.later = trainer, None
        self.kept = trainer
        self.made = pl.Trainer()
class Outer:
    def __init__(self):
        self.inner = Holds(None)
    def run(self, other: Holds):
        self.inner.made.no_such_name
        other.kept.no_such_name
"""
    assert [line for line, _, verdict in uses_of(tmp_path, text) if verdict == CHANGE] == [12, 13]


def test_names_and_methods_of_the_users_own(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
def frame():
    import polars as pl
    return pl.col("x"), pl.Int64
class Mine(pl.Trainer):
    def test(self): ...
class Loud(pl.callbacks.EarlyStopping):
    def __init__(self, **options):
        self.warmup = options.pop("warmup", 0)
        super().__init__(**options)
Loud(monitor="x", warmup=3)
Loud(monitor="x", no_such=3)
def f(checkpoint: pl.callbacks.ModelCheckpoint): ...
"""
    found = [(line, name) for line, name, verdict in uses_of(tmp_path, text) if verdict == CHANGE]
    assert found == [(13, "EarlyStopping.__init__(no_such=)")]


def test_a_function_imports_classes_of_its_own_package(tmp_path: Path) -> None:
    report = report_of(
        tmp_path,
        pkg__own=f"{HEAD}class Mine(pl.Trainer): ...\n",
        pkg__run="def run():\n    from pkg.own import Mine\n    Mine(gpus=1)\n",
    )
    assert [use.name for use in report.uses if use.verdict == CHANGE] == ["Trainer.__init__(gpus=)"]


def test_attributes_for_whose_lack_a_source_is_prepared(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
class Net(pl.LightningModule):
    def on_fit_start(self):
        try:
            self.trainer.no_such_name
        except AttributeError:
            self.trainer.another_name
        if hasattr(self.trainer, "num_gpus"):
            self.trainer.num_gpus
        return self.trainer.device if hasattr(self.trainer, "device") else None
def f(either: pl.Trainer | list, trainer: "pl.Trainer | None"):
    either.no_such_name
    trainer.no_such_name
    if either:
        other = load()
    else:
        other = trainer
    other.no_such_name
    if either:
        same = None
    else:
        same = trainer
    same.no_such_name
if pl.__version__.startswith("2"): ...
"""
    found = [(line, name) for line, name, verdict in uses_of(tmp_path, text) if verdict == CHANGE]
    assert found == [(14, "Trainer.no_such_name"), (24, "Trainer.no_such_name")]


def test_a_trainer(tmp_path: Path) -> None:
    text = f"""\
{HEAD}
trainer = pl.Trainer(max_epochs=3)
trainer.fit(net)
plain = pl.Trainer(logger=False)
plain.predict
gone = pl.Trainer(gpus=1)
valued = pl.Trainer(model_registry=1)
computed = pl.Trainer(model_registry=some())
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
    assert "model_registry=1" in found["Trainer()"]


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
        (3, "import accelerate.utils.no_such_helper", CHANGE),
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
