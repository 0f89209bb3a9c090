"""Smaller things that a script sees of a ``Trainer``, under both: variables, precisions, hyperparameters, counts, averages, stops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from both import OURS, THEIRS, data, module, quietly, trainer, weights
from engine.interop.lightning.core.mixins import HyperparametersMixin
from engine.interop.lightning.core.saving import load_hparams_from_yaml, save_hparams_to_yaml
from engine.interop.lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities import types as their_types
from torch.utils.data import DataLoader, IterableDataset

from engine import Fit, TrainModule
from engine.compat.lightning.default_dtype import default_dtype
from engine.interop.lightning.utilities import CombinedLoader as OurCombinedLoader
from engine.interop.lightning.utilities import types as our_types

Case = Callable[[Any, Path], Any]
COMBINED: tuple[Any, Any] = CombinedLoader, OurCombinedLoader


@pytest.mark.parametrize(
    ("variables", "options", "names"),
    [
        ({"MAX_EPOCHS": "7", "LIMIT_TRAIN_BATCHES": "0.5"}, {}, ("max_epochs", "limit_train_batches")),
        ({"MAX_EPOCHS": "7"}, {"max_epochs": 2}, ("max_epochs",)),
        ({"ACCUMULATE_GRAD_BATCHES": "3", "PRECISION": "bf16-mixed"}, {}, ("accumulate_grad_batches", "precision")),
        ({"FAST_DEV_RUN": "True", "UNKNOWN": "1"}, {}, ("fast_dev_run",)),
        ({"MAX_STEPS": "", "CHECK_VAL_EVERY_N_EPOCH": "4"}, {}, ("max_steps", "check_val_every_n_epoch")),
    ],
)
def test_variables_are_defaults(
    variables: dict[str, str], options: Any, names: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", text)
    theirs, ours = (quietly(trainer, library, tmp_path, **options) for library in (THEIRS, OURS))
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def test_a_subclass_has_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("PL_MINE_MAX_EPOCHS", "4")
    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "enable_progress_bar": False}
    mine = (type("Mine", (library.Trainer,), {}) for library in (THEIRS, OURS))
    assert [quietly(kind, **quiet).max_epochs for kind in mine] == [4, 4]
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "many")
    with pytest.raises((TypeError, ValueError), match="max_epochs"):
        OURS.Trainer(**quiet)


def default_dtypes(L: Any, folder: Path) -> Any:
    found = []
    for precision in ("64-true", "bf16-true", "32-true", "bf16-mixed"):
        seen: dict[str, str] = {}

        class Net(L.LightningModule):  # type: ignore[misc]
            def note(self, name: str, seen: dict[str, str] = seen) -> None:
                seen.setdefault(name, f"{torch.get_default_dtype()} {torch.zeros(1).dtype}")

            def configure_model(self) -> None:
                self.note("configure_model")
                self.layer = torch.nn.Linear(3, 1)
                self.note(f"made {self.layer.weight.dtype}")

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.note("training_step")
                return self.layer(batch[0].to(self.layer.weight.dtype)).mean()

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.note("validation_step")

            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.note("test_step")

            def predict_step(self, batch: Any, batch_idx: int) -> None:
                self.note("predict_step")

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                self.note("on_train_batch_start")

            def on_after_backward(self) -> None:
                self.note("on_after_backward")

            def configure_optimizers(self) -> Any:
                self.note("configure_optimizers")
                return torch.optim.SGD(self.parameters(), lr=0.1)

        fitted, net = trainer(L, folder, precision=precision, max_epochs=1), Net()
        fitted.fit(net, data(8), data(4))
        fitted.test(net, data(4), verbose=False)
        fitted.predict(net, data(4))
        found.append(dict(sorted(seen.items())))
        assert torch.get_default_dtype() == torch.float32
        assert not {"training_step", "configure_model"} & vars(net).keys()
    return found


def test_a_copy_of_a_module_in_a_run_calls_its_own_steps() -> None:
    class Net(OURS.LightningModule):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any) -> Any:
            return self, torch.get_default_dtype()

    net = Net()
    with default_dtype(net, torch.float64):
        twin = copy.deepcopy(net)
        assert twin.training_step(None)[0] is twin
        assert net.training_step(None) == (net, torch.float64)


def counts_of_streams(L: Any, folder: Path) -> Any:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([*data(40, 1).dataset])

    loader = DataLoader(Stream())
    fitted = trainer(L, folder, limit_train_batches=10, limit_val_batches=3, max_epochs=1)
    fitted.fit(module(L), loader, loader)
    of_validation = fitted.num_val_batches
    fitted.test(module(L), loader, verbose=False)
    whole = trainer(L, folder, max_steps=2, limit_val_batches=0)
    whole.fit(module(L), loader)
    return of_validation, fitted.num_training_batches, fitted.num_test_batches, whole.num_training_batches


MADE: tuple[dict[str, Any], ...] = {"max_epochs": -1}, {"max_epochs": 2}, {"max_steps": 3}, {"fast_dev_run": 2}


def limits(L: Any, folder: Path) -> Any:
    made = (trainer(L, folder, **options) for options in MADE)
    return [(fitted.max_steps, fitted.fit_loop.max_steps) for fitted in made]


def sanity_checks(L: Any, folder: Path) -> Any:
    """``False`` is 0, and ``True`` is 1."""
    found = []
    for steps in (False, True, 0, 2):
        net = module(L)
        trainer(L, folder, max_steps=1, num_sanity_val_steps=steps, limit_val_batches=3).fit(net, data(), data())
        found.append(net.seen.count("on_validation_batch_start"))
    return found


def stops_that_wait(L: Any, folder: Path) -> Any:
    found = []
    for options in ({"min_epochs": 3}, {"min_steps": 12}):
        seen: list[Any] = []
        net = module(L)
        net.on_train_epoch_start = lambda net=net, seen=seen: seen.append(net.trainer.should_stop)
        fitted = trainer(L, folder, max_epochs=6, **options)

        def stop(outputs: Any, batch: Any, batch_idx: int, fitted: Any = fitted) -> None:
            if fitted.global_step == 2:
                fitted.should_stop = True

        net.on_train_batch_end = stop
        fitted.fit(net, data(20))
        found.append((seen, fitted.current_epoch, fitted.global_step, fitted.should_stop))
    return found


def callbacks_of_the_module(L: Any, folder: Path) -> Any:
    Watch, Other = (type(name, (L.Callback,), {}) for name in ("Watch", "Other"))
    net, seen = module(L), []
    net.configure_callbacks = lambda: [Watch(), L.callbacks.EarlyStopping("loss_epoch")]
    net.on_train_start = lambda: seen.append([type(callback).__name__ for callback in fitted.callbacks])
    saves = L.callbacks.ModelCheckpoint(folder)
    fitted = trainer(L, folder, enable_checkpointing=True, callbacks=[saves, Watch(), Other()], max_epochs=1)
    before = [type(callback).__name__ for callback in fitted.callbacks]
    fitted.fit(net, data())
    return before, seen, [type(callback).__name__ for callback in fitted.callbacks], len(fitted.callbacks)


def averages(L: Any, folder: Path) -> Any:
    found = []
    for options in (
        {"update_starting_at_epoch": 1},
        {"update_starting_at_epoch": 1, "update_every_n_steps": 3},
        {"update_starting_at_step": 6, "update_starting_at_epoch": 2},
        {"update_starting_at_step": 9},
        {"update_starting_at_epoch": 5},
        {"update_every_n_steps": 4},
    ):
        average, net = L.callbacks.EMAWeightAveraging(decay=0.5, **options), module(L)
        trainer(L, folder, max_epochs=3, callbacks=[average]).fit(net, data())
        found.append(weights(net).double().round(decimals=5).tolist())
        found.append([average.should_update(step_idx=step) for step in range(9)])
        found.append([average.should_update(epoch_idx=epoch) for epoch in range(4)])
    return found


def one_combined_loader(L: Any, folder: Path) -> Any:
    net = module(L)
    trainer(L, folder, max_epochs=1).fit(net, COMBINED[L is OURS](data(), "max_size_cycle"))
    return weights(net).double().round(decimals=5).tolist()


def toggled_optimizers(L: Any, folder: Path) -> Any:
    """A layer of no optimizer keeps its gradients, one of another optimizer has none while it is frozen."""
    net, found = module(L, automatic=False), []
    net.third = torch.nn.Linear(3, 1)

    def step(batch: Any, batch_idx: int) -> None:
        optimizers = net.optimizers()
        for optimizer in optimizers:
            net.toggle_optimizer(optimizer)
            found.append([parameter.requires_grad for parameter in net.parameters()])
            net.manual_backward(net.third(batch[0]).sum())
            optimizer.step()
            optimizer.zero_grad()
            net.untoggle_optimizer(optimizer)
        found.append([parameter.requires_grad for parameter in net.parameters()])

    net.training_step = step
    net.configure_optimizers = lambda: [torch.optim.SGD(net.layers[i].parameters(), 0.1) for i in (0, 2)]
    trainer(L, folder, max_steps=2).fit(net, data())
    return found, net.third.bias.grad.tolist()


def optimizers_of_frozen_parameters(L: Any, folder: Path) -> Any:
    class Later(L.callbacks.BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.layers[0], [pl_module.layers[2]]])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            self.unfreeze_and_add_param_group(pl_module.layers[2 - 2 * epoch], optimizer)

    found = []
    for by_callback in (True, False):
        net = module(L)
        net.configure_optimizers = lambda net=net: torch.optim.SGD(net.layers[0].parameters(), 0.1)
        if not by_callback:
            net.layers[0].requires_grad_(False)
            net.on_train_epoch_start = lambda net=net: net.layers[0].requires_grad_(net.current_epoch == 1)
        trainer(L, folder, max_epochs=2, callbacks=[Later()] if by_callback else []).fit(net, data())
        found.append(weights(net).double().round(decimals=5).tolist())
    return found


def limits_before_and_after(L: Any, folder: Path) -> Any:
    options: list[dict[str, Any]] = [
        *({}, {"max_epochs": 2, "min_steps": 2}, {"max_steps": 3}, {"max_time": {"seconds": 100}, "max_steps": 2}),
        *({"fast_dev_run": 1}, {"fast_dev_run": 3, "min_epochs": 1}, {"num_sanity_val_steps": -1, "max_epochs": 1}),
    ]
    found = []
    for number, option in enumerate(options):
        made = trainer(L, folder / str(number), enable_checkpointing=True, **option)
        for call in (lambda *objects, made=made: made.validate(*objects, verbose=False), made.fit):
            found.append([made.max_epochs, made.min_epochs, made.max_steps, made.min_steps, made.fast_dev_run])
            found.append([made.num_sanity_val_steps, type(made.checkpoint_callback).__name__])
            if option:
                call(module(L), data())
    return found


def idle_checkpoints(L: Any, folder: Path) -> Any:
    """The folder of a callback that saves nothing, and its score when it is NaN."""
    found = []
    for number, (options, saved) in enumerate(
        [({"fast_dev_run": True}, 1), ({"max_epochs": 1}, 0), ({"max_epochs": 1}, 1)]
    ):
        for dirpath in (None, folder / "own"):
            net, root = module(L), folder / str(number)
            net.validation_step = lambda batch, batch_idx, net=net: net.log("nan", float("nan"))
            checkpoint = L.callbacks.ModelCheckpoint(dirpath, save_top_k=saved, monitor="nan", mode="max")
            made = trainer(L, root, callbacks=[checkpoint], enable_checkpointing=True, **options)
            made.fit(net, data(), data())
            found.append(
                (str(made.checkpoint_callback.dirpath).replace(str(folder), ""), str(checkpoint.current_score))
            )
    return found


def exchanged_objects(L: Any, folder: Path) -> Any:
    """Callbacks and loggers that a script appends, sets and removes between runs."""

    class Counting(L.Callback):  # type: ignore[misc]
        count = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.count += 1

    class Noting:
        name, version, save_dir, group_separator = "noting", 0, str(folder), "/"

        def __init__(self) -> None:
            self.names: list[str] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.names.extend(metrics.keys() & {"loss_step", "val"})

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: None

    first, second, earlier, later = Counting(), Counting(), Noting(), Noting()
    made = trainer(L, folder, max_epochs=1, logger=earlier, log_every_n_steps=10)
    made.callbacks.append(first)
    made.fit(module(L), data(), data())
    made.logger = later
    made.fit_loop.max_epochs = 2
    made.callbacks = [second]
    made.fit(module(L), data(), data())
    counts = [first.count, second.count, len(made.callbacks), len(made.loggers), made.logger is later]
    made.loggers = None
    made.validate(module(L), data(), verbose=False)
    return counts, sorted(set(earlier.names)), sorted(set(later.names)), made.logger, made.loggers


def typed_configurations(L: Any, folder: Path) -> Any:
    """``configure_optimizers`` that returns the dicts and objects of ``utilities.types``."""
    types: Any = our_types if L is OURS else their_types

    class Mine(types.OptimizerLRSchedulerConfig):  # type: ignore[misc, name-defined]
        note: str

    def configured(kind: str, net: Any) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        match kind:
            case "optimizer":
                return types.OptimizerConfig(optimizer=optimizer)
            case "dict":
                return types.OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler=steps)
            case "nested":
                inner = types.LRSchedulerConfigType(scheduler=steps, interval="step", frequency=2)
                return Mine(optimizer=optimizer, lr_scheduler=inner)
            case "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                assert isinstance(plateau, types.LRSchedulerTypeTuple)
                assert isinstance(plateau, types.LRSchedulerTypeUnion)
                return types.OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler=plateau, monitor="loss")
        return [types.OptimizerConfig(optimizer=optimizer)]

    found = {}
    for kind in ("optimizer", "dict", "nested", "plateau", "list"):
        net = module(L)
        net.configure_optimizers = partial(configured, kind, net)
        used = trainer(L, folder, max_epochs=2, limit_train_batches=4)
        used.fit(net, data())
        found[kind] = [weights(net).tolist(), used.optimizers[0].param_groups[0]["lr"]]
    return found


@pytest.mark.parametrize(
    "case",
    [
        *(default_dtypes, counts_of_streams, limits, stops_that_wait, callbacks_of_the_module),
        *(one_combined_loader, toggled_optimizers, optimizers_of_frozen_parameters),
        *(limits_before_and_after, exchanged_objects, idle_checkpoints, typed_configurations, sanity_checks),
        pytest.param(averages, marks=pytest.mark.slow),
    ],
    ids=lambda case: str(getattr(case, "__name__", case)),
)
def test_details_are_lightnings(case: Case, tmp_path: Path) -> None:
    theirs, ours = (quietly(case, library, tmp_path / name) for name, library in (("theirs", THEIRS), ("ours", OURS)))
    assert ours == theirs


def data_module(L: Any, **hyperparameters: Any) -> Any:
    class Data(L.LightningDataModule):  # type: ignore[misc]
        def __init__(self, lr: Any = 0.05, width: int = 5, other: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=logger)

        def train_dataloader(self) -> Any:
            return data()

    logger = hyperparameters.pop("logger", True)
    return Data(**hyperparameters)


@pytest.mark.parametrize(
    ("hyperparameters", "logger", "differs"),
    [
        ({}, True, False),
        ({"other": 3}, True, False),
        ({"lr": 1.0}, True, True),
        ({"width": 5.0}, True, True),
        ({"lr": 1.0, "logger": False}, True, False),
        ({"lr": 1.0}, False, False),
    ],
)
def test_hyperparameters_of_module_and_data(
    hyperparameters: dict[str, Any], logger: bool, differs: bool, tmp_path: Path
) -> None:
    for library in (THEIRS, OURS):
        fitted = trainer(
            library, tmp_path, max_epochs=1, logger=library.loggers.CSVLogger(tmp_path) if logger else False
        )
        if differs:
            with pytest.raises(RuntimeError, match=r"lr|width"):
                quietly(fitted.fit, module(library), datamodule=data_module(library, **hyperparameters))
        else:
            quietly(fitted.fit, module(library), datamodule=data_module(library, **hyperparameters))


def schedulers(kind: str, optimizer: Any, other: Any) -> Any:
    of = torch.optim.lr_scheduler
    match kind:
        case "step":
            return of.StepLR(other, 1)
        case "plateau":
            return {"scheduler": of.ReduceLROnPlateau(other), "monitor": "loss_epoch"}
        case "sequence":
            return of.SequentialLR(other, [of.ConstantLR(other), of.StepLR(other, 1)], [1])
        case "own":
            return of.StepLR(optimizer, 1)
    return of.ChainedScheduler([of.StepLR(optimizer, 1), of.StepLR(optimizer, 2)])


@pytest.mark.parametrize("kind", ["step", "plateau", "sequence", "own", "chain"])
def test_a_scheduler_of_an_optimizer_that_is_not_returned(kind: str, tmp_path: Path) -> None:
    def configure(net: Any) -> Any:
        first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
        return [first], [schedulers(kind, first, second)]

    for library in (THEIRS, OURS):
        net = module(library)
        net.configure_optimizers = lambda net=net: configure(net)
        fitted = trainer(library, tmp_path, max_epochs=1)
        if kind in ("own", "chain"):
            quietly(fitted.fit, net, data())
        else:
            with pytest.raises(Exception, match="returned"):
                quietly(fitted.fit, net, data())


def test_a_frozen_optimizer_is_an_error_where_nothing_unfreezes_it() -> None:
    class Net(TrainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1), requires_grad=False)], lr=0.1)

    with pytest.raises(ValueError, match=r"has no parameters to train.*unfreezes = True"):
        Fit(max_steps=1).run(Net(), data())


def test_hyperparameters_of_any_class(tmp_path: Path) -> None:
    class Part(torch.nn.Module, HyperparametersMixin):
        def __init__(self, width: int, *, name: str = "a") -> None:
            super().__init__()
            self.save_hyperparameters(ignore="name")

    class Net(OURS.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, values: dict[str, int]) -> None:
            super().__init__()
            self.save_hyperparameters(values)
            self._set_hparams({"rate": 3})

    part, net = Part(4), Net({"width": 5})
    assert part.hparams == part.hparams_initial == {"width": 4}
    assert (part.hparams.width, net.hparams, net.hparams_name) == (4, {"width": 5, "rate": 3}, "values")
    assert all(isinstance(owner, HyperparametersMixin) for owner in (net, OURS.LightningDataModule()))
    file = tmp_path / "hparams.yaml"
    save_hparams_to_yaml(file, {**net.hparams, "layer": torch.nn.ReLU})
    assert load_hparams_from_yaml(file) == {"width": 5, "rate": 3}
    assert load_hparams_from_yaml(tmp_path / "none.yaml") == {}
    assert get_filesystem(tmp_path).exists(file)
    assert get_filesystem("memory://a").protocol == "memory"


def test_hyperparameters_that_collide_under_names_of_several_types(tmp_path: Path) -> None:
    net, names = module(OURS), data_module(OURS)
    net.hparams.update({1: "a", "b": 1})
    names.hparams.update({1: "c", "b": 2})
    with pytest.raises(RuntimeError, match="both have the hyperparameter 1"):
        trainer(OURS, tmp_path, logger=True, max_steps=1).fit(net, datamodule=names)


def test_the_seed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """``seed_everything()``, and ``LightningCLI`` without a seed, take the one that was set before."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    for library in (THEIRS, OURS):
        library.seed_everything(123)
        first = torch.rand(2)
        assert library.seed_everything() == 123
        assert torch.equal(torch.rand(2), first)
        monkeypatch.delenv("PL_GLOBAL_SEED")


@pytest.mark.parametrize("change", [*("append", "remove", "set", "loggers", "logger")])
def test_the_callbacks_and_loggers_of_a_run_are_fixed(change: str, tmp_path: Path) -> None:
    class Changing(OURS.Callback):  # type: ignore[misc]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if change in ("append", "remove"):
                getattr(trainer.callbacks, change)(self)
            else:
                setattr(trainer, "callbacks" if change == "set" else change, [])

    with pytest.raises((TypeError, RuntimeError), match="fixed"):
        trainer(OURS, tmp_path, max_epochs=1, callbacks=[Changing()]).fit(module(OURS), data())


def test_refresh_rates_are_those_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(L: Any) -> Any:
        bars = [L.callbacks.TQDMProgressBar(refresh_rate=rate) for rate in (0, 1, 50)]
        made = L.Trainer(callbacks=[bars[0]], accelerator="cpu", logger=False, enable_checkpointing=False)
        return [(bar.refresh_rate, bar.is_enabled) for bar in bars], made.progress_bar_callback is bars[0]

    assert quietly(rates, OURS) == quietly(rates, THEIRS)
    monkeypatch.setenv("TQDM_MINITERS", "3")
    assert quietly(rates, OURS) == quietly(rates, THEIRS)


@pytest.mark.parametrize("library", [THEIRS, OURS])
def test_a_process_alone_may_ask_its_strategy_before_a_run(library: Any, tmp_path: Path) -> None:
    strategy = trainer(library, tmp_path).strategy
    assert strategy.broadcast({"lr": 0.1}) == {"lr": 0.1}
    assert strategy.barrier("here") is None
    assert [strategy.reduce_boolean_decision(vote) for vote in (True, False)] == [True, False]


def test_several_ranks_meet_in_a_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    strategy = trainer(OURS, tmp_path, devices=2).strategy
    for call in (lambda: strategy.broadcast(1), strategy.barrier, lambda: strategy.reduce_boolean_decision(True)):
        with pytest.raises(RuntimeError, match="before a run: 2 ranks were started, and they meet in a run only"):
            call()
