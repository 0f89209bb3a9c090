"""Objects, attributes and idioms of Lightning that scripts use around a training, under both libraries: the expected values are Lightning's."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from both import EVENTS, OURS, THEIRS, quietly, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BOTH = {"lightning": THEIRS, "door": OURS}


def loader(samples: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 4)), batch_size=2)


def _net(L: Any) -> Any:
    class Net(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            nn.init.constant_(self.layer.weight, 0.5)
            nn.init.constant_(self.layer.bias, 0.25)
            self.calls: list[Any] = []

        def forward(self, x: Any) -> Any:
            return self.layer(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", 1.0)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Net


TheirNet, OurNet = _net(THEIRS), _net(OURS)
TheirNet.__qualname__, OurNet.__qualname__ = "TheirNet", "OurNet"  # pickles name them


def net(L: Any) -> Any:
    return TheirNet if L is THEIRS else OurNet


def same(question: Any, tmp_path: Path) -> Any:
    """Ask both libraries, and return the answer if it is the same."""
    answers = {name: quietly(question, L, tmp_path / name) for name, L in BOTH.items()}
    assert answers["door"] == answers["lightning"]
    return answers["door"]


# Lightning refuses to log there.
FORBIDDEN = ("on_fit", "on_sanity", "on_train_end", "on_validation_end", "on_test_end", "on_predict")


@pytest.mark.slow
@pytest.mark.parametrize("event", [event for event in EVENTS if not event.startswith(FORBIDDEN)])
def test_a_callback_logs_where_a_module_may(event: str, tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        def hook(self: Any, *args: Any) -> None:
            self.log("x", 2.0)
            self.log_dict({"y": 3.0})

        used = trainer(L, folder, max_epochs=1, callbacks=[type("C", (L.Callback,), {event: hook})()])
        if "test" in event:
            used.test(net(L)(), loader(), verbose=False)
        else:
            used.fit(net(L)(), loader(), loader())
        return {name: float(value) for name, value in used.callback_metrics.items() if name in "xy"}

    assert same(ask, tmp_path) == {"x": 2.0, "y": 3.0}


def test_what_a_callback_logs_goes_through_the_modules_own_log(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        class Prefixed(net(L)):  # type: ignore[misc]
            def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
                super().log(f"p/{name}", value, *args, **kwargs)

        class Watcher(L.Callback):  # type: ignore[misc]
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                self.log("own", 1.0)
                pl_module.log_dict({"module": 1.0})

        used = trainer(L, folder, max_epochs=1, callbacks=[Watcher()])
        used.fit(Prefixed(), loader(), loader())
        return sorted(used.callback_metrics)

    assert same(ask, tmp_path) == ["p/loss", "p/module", "p/own", "p/val"]


def test_a_callback_of_the_installed_lightning_logs_in_a_plain_fit(tmp_path: Path) -> None:
    from engine import Fit

    class Watcher(THEIRS.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.log("own", 4.0)

    watcher = Watcher()
    result = Fit(max_epochs=1, accelerator="cpu", callbacks=[watcher], root_dir=tmp_path).run(OurNet(), loader())
    assert result.metrics["own"] == 4.0
    assert len(pickle.dumps(watcher.log)) < 1000  # the module is not in it


def test_methods_set_to_none_are_not_overridden(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        on_object = net(L)()
        on_object.validation_step = on_object.val_dataloader = on_object.on_train_epoch_end = None
        on_object.configure_callbacks = None
        none = dict.fromkeys(
            ("validation_step", "val_dataloader", "configure_model", "prepare_data", "setup", "test_step")
        )
        on_class = type("N", (net(L),), none)()
        data = type(
            "D", (L.LightningDataModule,), {"val_dataloader": None, "train_dataloader": lambda self: loader()}
        )()
        data.setup = data.prepare_data = data.teardown = None
        for name, arguments in (
            ("a", (on_object, loader())),
            ("b", (on_class, loader(), loader())),
            ("c", (on_class, data)),
        ):
            trainer(L, folder / name, max_epochs=1).fit(*arguments)
        return [on_object.validation_step, on_object.val_dataloader, on_class.setup, data.setup]

    assert same(ask, tmp_path) == [None, None, None, None]


def test_a_step_that_is_none_is_asked_for(tmp_path: Path) -> None:
    module = OurNet()
    module.training_step = module.test_step = None
    with pytest.raises(TypeError, match="must define training_step"):
        trainer(OURS, tmp_path / "a", max_epochs=1).fit(module, loader())
    with pytest.raises(TypeError, match="must define test_step"):
        trainer(OURS, tmp_path / "b").test(module, loader())


def test_steps_of_the_base_class_take_a_loaders_index(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        base = L.LightningModule

        class Net(net(L)):  # type: ignore[misc]
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return base.validation_step(self, batch, batch_idx, dataloader_idx)

            def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return base.test_step(self, batch=batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

            def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                return base.predict_step(self, batch[0], batch_idx, dataloader_idx)

        used, module = trainer(L, folder, max_epochs=1), Net()
        used.fit(module, loader(), loader())
        used.test(module, loader(), verbose=False)
        return [len(outputs) for outputs in used.predict(module, [loader(), loader(4)])]

    assert same(ask, tmp_path) == [4, 2]


def test_map_location_may_be_a_function(tmp_path: Path) -> None:
    used, module = trainer(OURS, tmp_path, max_epochs=1), OurNet()
    used.fit(module, loader())
    used.save_checkpoint(tmp_path / "x.ckpt")
    stays = lambda storage, location: storage  # noqa: E731
    for where in (
        stays,
        lambda storage, location: None,
        lambda storage, location: storage.cpu(),
        {"cuda:0": "cpu"},
        "cpu",
    ):
        loaded = OurNet.load_from_checkpoint(tmp_path / "x.ckpt", map_location=where)
        torch.testing.assert_close(loaded.layer.weight, module.layer.weight)
        assert loaded.device.type == "cpu"
    there = OurNet.load_from_checkpoint(
        tmp_path / "x.ckpt", map_location=lambda s, location: torch.UntypedStorage(0, device="meta")
    )
    assert there.layer.weight.device.type == "meta"


def test_finetuning_functions_on_the_class() -> None:
    def ask(L: Any) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        base, answers = L.callbacks.BaseFinetuning, []
        for function, options in (
            (base.freeze, {}),
            (base.freeze, {"train_bn": False}),
            (base.make_trainable, {}),
            (L.callbacks.BackboneFinetuning.freeze, {}),
        ):
            function(model, **options)
            answers.append([p.requires_grad for p in model.parameters()] + [model[1].track_running_stats])
        base.freeze_module(model[0])
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
        base.unfreeze_and_add_param_group(model, optimizer)
        answers.append(
            [len(optimizer.param_groups), optimizer.param_groups[1]["lr"], len(optimizer.param_groups[1]["params"])]
        )
        return [*answers, len(base.filter_on_optimizer(optimizer, model.parameters()))]

    assert quietly(ask, OURS) == quietly(ask, THEIRS)


def test_the_logger_of_a_module_outside_of_a_run(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        module = net(L)()
        before = [module.logger, module.loggers]
        used = trainer(L, folder, max_epochs=1, logger=L.loggers.CSVLogger(folder))
        used.fit(module, loader())
        return [*before, module.logger is used.logger, len(module.loggers)]

    assert same(ask, tmp_path) == [None, [], True, 1]


def test_a_trainer_is_pickled_and_copied(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        used = trainer(L, folder, max_epochs=1, logger=L.loggers.CSVLogger(folder), enable_checkpointing=True)
        used.fit(net(L)(), loader(), loader())
        return [
            [t.global_step, t.current_epoch, t.max_epochs, {n: float(v) for n, v in t.callback_metrics.items()}]
            for t in (pickle.loads(pickle.dumps(used)), copy.deepcopy(used))
        ]

    assert same(ask, tmp_path)[0][:3] == [4, 1, 1]


def test_a_pickled_trainer_trains_on(tmp_path: Path) -> None:
    used, module = trainer(OURS, tmp_path, max_epochs=1), OurNet()
    used.fit(module, loader())
    again = pickle.loads(pickle.dumps(used))
    again.fit_loop.max_epochs = 3
    again.fit(module, loader())
    assert (again.global_step, again.current_epoch, used.global_step) == (12, 3, 4)


def test_metrics_during_the_sanity_check(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        seen = []

        def noting(event: str) -> Any:
            return lambda self, trainer, pl_module: seen.append((event, sorted(trainer.callback_metrics)))

        events = ("on_validation_epoch_end", "on_validation_end", "on_sanity_check_end", "on_train_start")
        watcher = type("Watcher", (L.Callback,), {event: noting(event) for event in events})()
        trainer(L, folder, max_epochs=1, callbacks=[watcher], num_sanity_val_steps=1).fit(net(L)(), loader(), loader())
        return seen[:4]

    assert same(ask, tmp_path)[-2:] == [("on_sanity_check_end", ["val"]), ("on_train_start", [])]


@pytest.mark.parametrize("automatic", [True, False])
def test_optimizers_have_lightnings_attributes(automatic: bool, tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        seen = []

        class Net(net(L)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                optimizer = self.optimizers()
                kinds = (torch.optim.SGD, torch.optim.Optimizer, torch.optim.Adam)
                seen.append(
                    [
                        type(optimizer.optimizer).__name__,
                        optimizer.defaults["lr"],
                        *(isinstance(optimizer, k) for k in kinds),
                    ]
                )
                with optimizer.toggle_model():
                    loss = super().training_step(batch, batch_idx)
                    if not automatic:
                        optimizer.zero_grad()
                        self.manual_backward(loss)
                        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                        optimizer.step()
                return loss

        module, used = Net(), trainer(L, folder, max_epochs=1)
        module.automatic_optimization = automatic
        used.fit(module, loader())
        return [seen, used.global_step, [round(float(p.sum()), 6) for p in module.parameters()]]

    assert same(ask, tmp_path)[0][0] == ["SGD", 0.01, True, True, False]


def test_thin_objects_of_the_trainer(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        seen: list[Any] = []

        class Watcher(L.Callback):  # type: ignore[misc]
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                strategy = trainer.strategy
                seen.append(
                    [strategy.model is pl_module, strategy.lightning_module is pl_module, len(strategy.optimizers)]
                )
                seen.append([trainer.fit_loop.restarting, len(strategy.lr_scheduler_configs)])
                with trainer.profiler.profile("mine"):
                    pass
                trainer.profiler.start("more")
                trainer.profiler.stop("more")

            def on_test_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append(trainer.test_loop.max_batches)

        used = trainer(L, folder, max_epochs=1, callbacks=[Watcher()])
        used.fit(net(L)(), loader(), loader())
        used.test(used.lightning_module, loader(4), verbose=False)
        moved = used.strategy.batch_to_device({"a": torch.ones(2)})
        return [*seen, str(moved["a"].device)]

    assert same(ask, tmp_path) == [[True, True, 1], [False, 0], [2], "cpu"]


def test_attributes_of_callbacks(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        stopping = L.callbacks.EarlyStopping("val", patience=2)
        saving = L.callbacks.ModelCheckpoint(dirpath=folder / "c", monitor="val", save_top_k=2)
        rates = L.callbacks.LearningRateMonitor(log_momentum=True)
        used = trainer(
            L,
            folder,
            max_epochs=9,
            callbacks=[stopping, saving, rates],
            enable_checkpointing=True,
            logger=L.loggers.CSVLogger(folder),
        )
        used.fit(net(L)(), loader(), loader())
        saving.to_yaml()
        written = (folder / "c" / "best_k_models.yaml").read_text().count(": 1.0")
        return [
            [stopping.stopping_reason.name, stopping.wait_count, written, float(saving.current_score)],
            [
                saving.save_weights_only,
                saving.verbose,
                list(rates.lrs),
                rates.lrs["lr-SGD"][0],
                list(rates.last_momentum_values),
            ],
        ]

    assert same(ask, tmp_path)[0] == ["PATIENCE_EXHAUSTED", 2, 2, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stopping_threshold": 2.0}, "STOPPING_THRESHOLD"),
        ({"divergence_threshold": 0.5}, "DIVERGENCE_THRESHOLD"),
        ({"patience": 99}, "NOT_STOPPED"),
    ],
)
def test_the_reason_of_early_stopping(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        stopping = L.callbacks.EarlyStopping("val", **options)
        trainer(L, folder, max_epochs=3, callbacks=[stopping]).fit(net(L)(), loader(), loader())
        return stopping.stopping_reason.name

    assert same(ask, tmp_path) == reason


def test_progress_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(L: Any, folder: Path) -> Any:
        bar, seen = L.callbacks.TQDMProgressBar(), []

        class Watcher(L.Callback):  # type: ignore[misc]
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                seen.extend([bar.total_train_batches, bar.total_val_batches, bar.is_enabled, bar.trainer is trainer])
                bar.disable()
                seen.append(bar.is_enabled)
                bar.enable()
                seen.extend([bar.is_enabled, sorted(bar.get_metrics(trainer, pl_module))])

        class Own(L.callbacks.ProgressBar):  # type: ignore[misc]
            def disable(self) -> None: ...

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
                seen.append((batch_idx + 1) / self.total_train_batches)

        options = {"max_epochs": 1, "enable_progress_bar": True}
        trainer(L, folder / "a", callbacks=[bar, Watcher()], **options).fit(net(L)(), loader(), loader())
        trainer(L, folder / "b", callbacks=[Own()], **options).fit(net(L)(), loader(), loader())
        return [L.callbacks.RichProgressBar(refresh_rate=0).is_enabled, *seen]

    assert same(ask, tmp_path) == [False, 4, 4, True, True, False, True, [], 0.25, 0.5, 0.75, 1.0]


def test_hooks_set_during_the_set_up_are_called(tmp_path: Path) -> None:
    """On a module of the installed Lightning, under both trainers."""

    def ask(L: Any, folder: Path) -> Any:
        class Net(TheirNet):
            def setup(self, stage: str) -> None:
                self.on_train_epoch_end = lambda: self.calls.append("of setup")

            def on_fit_start(self) -> None:
                self.on_train_end = lambda: self.calls.append("of on_fit_start")

        class Watcher(L.Callback):  # type: ignore[misc]
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                pl_module.on_train_epoch_start = lambda: pl_module.calls.append("of a callback")
                self.on_train_epoch_end = lambda trainer, pl_module: pl_module.calls.append("of itself")

        module = Net()
        trainer(L, folder, max_epochs=1, callbacks=[Watcher()]).fit(module, loader())
        return module.calls

    assert same(ask, tmp_path) == ["of a callback", "of itself", "of setup", "of on_fit_start"]


def test_a_hook_replaced_during_the_set_up(tmp_path: Path) -> None:
    """On a module of the installed Lightning, under both trainers: wrapped by a callback, and switched off."""

    def ask(L: Any, folder: Path) -> Any:
        class Net(TheirNet):
            def on_train_epoch_end(self) -> None:
                self.calls.append("the module's own")

            def on_train_end(self) -> None:
                self.calls.append("never")

        class Watcher(L.Callback):  # type: ignore[misc]
            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                wrapped = pl_module.on_train_epoch_end
                pl_module.on_train_epoch_end = lambda: (pl_module.calls.append("before it"), wrapped())[1]
                pl_module.on_train_end = lambda: None

        module = Net()
        trainer(L, folder, max_epochs=1, callbacks=[Watcher()]).fit(module, loader())
        return module.calls

    assert same(ask, tmp_path) == ["before it", "the module's own"]


def test_late_hooks_of_two_callbacks_of_one_class(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        seen: list[str] = []

        class Watcher(L.Callback):  # type: ignore[misc]
            def __init__(self, number: int) -> None:
                self.number = number

            def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
                if self.number:
                    self.on_train_epoch_start = lambda *args: seen.append(f"new start {self.number}")
                    self.on_train_epoch_end = lambda *args: seen.append(f"new end {self.number}")

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                seen.append(f"end {self.number}")

        trainer(L, folder, max_epochs=1, callbacks=[Watcher(0), Watcher(1), Watcher(2)]).fit(net(L)(), loader())
        return seen

    assert same(ask, tmp_path) == ["new start 1", "new start 2", "end 0", "new end 1", "new end 2"]


def test_a_step_set_during_the_set_up(tmp_path: Path) -> None:
    class Net(OurNet):
        def setup(self, stage: str) -> None:
            first = super().training_step
            self.training_step = lambda batch, batch_idx: self.calls.append("step") or first(batch, batch_idx)

    module = Net()
    trainer(OURS, tmp_path / "a", max_epochs=1).fit(module, loader())
    assert module.calls == ["step"] * 4

    class Late(OurNet):
        def on_train_start(self) -> None:
            self.training_step = lambda batch, batch_idx: None

    with pytest.raises(
        TypeError, match=r"Late.training_step was set on the module after .* set it before the run, or in setup"
    ):
        trainer(OURS, tmp_path / "b", max_epochs=1).fit(Late(), loader())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reload_every", "val_every", "epochs", "created"),
    [
        (1, 1, 3, [("t", 0), ("v", 0), ("t", 1), ("v", 1), ("t", 2), ("v", 2)]),
        (2, 1, 5, [("t", 0), ("v", 0), ("t", 2), ("v", 2), ("t", 4), ("v", 4)]),
        (3, 1, 5, [("t", 0), ("v", 0), ("t", 3), ("v", 3)]),
    ],
)
def test_loaders_are_created_again(
    reload_every: int, val_every: int, epochs: int, created: Any, tmp_path: Path
) -> None:
    def ask(L: Any, folder: Path) -> Any:
        class Net(net(L)):  # type: ignore[misc]
            def train_dataloader(self) -> Any:
                self.calls.append(("t", self.current_epoch))
                return loader(4 + 2 * self.current_epoch)

            def val_dataloader(self) -> Any:
                self.calls.append(("v", self.current_epoch))
                return loader()

        module = Net()
        used = trainer(
            L, folder, max_epochs=epochs, reload_dataloaders_every_n_epochs=reload_every, num_sanity_val_steps=0
        )
        used.fit(module)
        return [module.calls, used.global_step]

    assert same(ask, tmp_path)[0] == created


@pytest.mark.slow
@pytest.mark.parametrize(
    ("monitor", "options", "best"),
    [
        ("step", {"every_n_train_steps": 2}, ["epoch=2-step=10.ckpt", "epoch=2-step=12.ckpt"]),
        ("epoch", {}, ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
        ("epoch", {"mode": "min", "save_top_k": 1}, ["epoch=0-step=4.ckpt"]),
        ("step", {"save_top_k": -1}, ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
    ],
)
def test_the_newest_checkpoints_by_epoch_or_step(monitor: str, options: Any, best: list[str], tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        arguments = {"save_top_k": 2, "mode": "max", "filename": "{epoch}-{step}", **options}
        saving = L.callbacks.ModelCheckpoint(dirpath=folder / "c", monitor=monitor, **arguments)
        trainer(L, folder, max_epochs=3, callbacks=[saving], enable_checkpointing=True).fit(
            net(L)(), loader(), loader()
        )
        names = sorted(path.name for path in (folder / "c").iterdir() if path.suffix == ".ckpt")
        return [names, Path(saving.best_model_path).name, float(saving.best_model_score)]

    assert same(ask, tmp_path)[0] == best


def test_on_step_in_an_evaluation_reports_the_epochs_value(tmp_path: Path) -> None:
    class Net(OurNet):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", float(batch_idx), on_step=True, on_epoch=False)

    with pytest.warns(UserWarning, match="only the epoch's value is reported"):
        results = trainer(OURS, tmp_path).test(Net(), loader(), verbose=False)
    assert results == [{"test": 1.5}]


@pytest.mark.parametrize(("stage", "event"), [("test", "on_test_end"), ("validate", "on_validation_end")])
def test_a_value_after_the_end_of_an_evaluation_is_not_lost_silently(stage: str, event: str, tmp_path: Path) -> None:
    Net = type("Net", (OurNet,), {event: lambda self: self.log("late", 1.0)})
    with pytest.warns(
        UserWarning, match=rf"log\('late'\) after the \w+'s epoch is not reported: log it in {event[:-3]}epoch_end"
    ):
        getattr(trainer(OURS, tmp_path), stage)(Net(), loader(), verbose=False)


def test_a_plateau_scheduler_that_the_module_steps_needs_no_monitor(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        class Net(net(L)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.layer(batch[0]).sum())
                optimizer.step()

            def on_train_epoch_end(self) -> None:
                self.lr_schedulers().step(torch.tensor(1.0))

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), 0.1)
                return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]

        used = trainer(L, folder, max_epochs=3)
        used.fit(Net(), loader())
        return used.optimizers[0].param_groups[0]["lr"]

    assert same(ask, tmp_path) == pytest.approx(0.001)


def test_pythons_functions_reduce(tmp_path: Path) -> None:
    def ask(L: Any, folder: Path) -> Any:
        class Net(net(L)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                for function in (min, max, sum):
                    self.log(function.__name__, float(batch_idx), reduce_fx=function, on_step=False, on_epoch=True)
                return super().training_step(batch, batch_idx)

        used = trainer(L, folder, max_epochs=1)
        used.fit(Net(), loader())
        return {name: float(used.callback_metrics[name]) for name in ("min", "max", "sum")}

    assert same(ask, tmp_path) == {"min": 0.0, "max": 3.0, "sum": 6.0}
