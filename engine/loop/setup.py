"""Prepare a run from what the user passed: loaders, model, optimizers, checkpoint.

Wrong input is an error here, before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from engine.data.combined_loaders import CombinedLoader
from engine.data.datamodule import DataModule
from engine.data.overfit_order import in_order
from engine.data.prepared_loader import PreparedLoader
from engine.distributed.collectives import gather_json
from engine.loop.automatic_step import Automatic, ByHand, InParts
from engine.loop.batch_transfer import transfer_of
from engine.loop.closure_step import OF_THE_STEP, ByClosure, refuse
from engine.loop.first_checks import check_parameters
from engine.loop.given_loaders import is_loader
from engine.loop.manual_optimization import ManualOptimizer
from engine.loop.method_arguments import step_accepting
from engine.loop.run import Run
from engine.loop.step_count import steps_of
from engine.metrics.torchmetrics_values import joined
from engine.module import TrainModule, overrides
from engine.step.optimizers import configured, needs_closure
from engine.step.wrappers import PreparedOptimizer
from engine.utils.log import logger, warn_once
from engine.utils.overrides import overridden_methods

SOURCES = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
LIMITS = {"validation": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}


class TrainingStep(nn.Module):
    """``training_step``, or another step by name, as a forward pass, for strategies that wrap forward passes."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.module = module

    @property
    def user_module(self) -> TrainModule:
        """For :func:`engine.transforms.blocks.user_module`."""
        return self.module

    def forward(self, *args: Any, step: str = "training_step") -> Any:
        return getattr(self.module, step)(*args)


def _warn(run: Run, message: str) -> None:
    """Warn, on the main process alone: what the message says holds on all ranks."""
    if run.is_main_process:
        warn_once(message)


def loaders_for(run: Run, kind: str, given: Any, datamodule: DataModule | None) -> list[PreparedLoader]:
    """The prepared loaders of a kind: those given, else the data module's, else the module's own.

    Several training loaders are read side by side, the shorter ones repeatedly; other loaders are read one after the other.
    """
    name = SOURCES[kind]
    for source in (datamodule, run.module):
        if given is None and source is not None:
            given = getattr(source, name)()
    if given is None:
        return []
    original = given
    if kind == "train" and (
        isinstance(given, dict)
        or (isinstance(given, list) and given and all(isinstance(item, DataLoader) for item in given))
    ):
        given = CombinedLoader(given, "max_size_cycle")
    several = isinstance(given, dict) or (
        kind != "train" and isinstance(given, (list, tuple)) and all(map(is_loader, given))
    )
    if isinstance(given, dict):
        given = list(given.values())
    each = given if several else [given]
    if run.stage == "fit" and run.settings.overfit_batches:
        each = [in_order(loader) for loader in each]
    prepared = [run.engine.prepare_data_loader(loader) for loader in each]
    run.loaders += prepared
    run.given_loaders[kind] = original, prepared
    for index, loader in enumerate(prepared):
        loader.transfer = transfer_of(run.module, run.datamodule, index)
        if kind != "train":
            loader.window_size = 1
    return prepared


def not_empty(run: Run, kind: str, loaders: Sequence[PreparedLoader]) -> None:
    """Refuse a loader in which no rank has a batch. A collective.

    Raises:
        ValueError: the loader is empty; the message names it.
    """
    by_rank = gather_json(run.engine.group, [loader.length for loader in loaders])
    for index, loader in enumerate(loaders):
        if loader.limit != 0 and all(lengths[index] == 0 for lengths in by_rank):
            which = f"{kind} loader {index}" if len(loaders) > 1 else f"{kind} loader"
            raise ValueError(
                f"the {which} ({type(loader.loader).__name__}) is empty; leave it out, or check its dataset"
            )


def limit(loader: PreparedLoader, name: str, value: int | float | None) -> None:
    """Apply ``limit_train_batches`` or another setting of this kind."""
    if isinstance(value, float):
        length = loader.length
        if value == 1.0:
            return
        if length is None:
            raise ValueError(
                f"{name}={value} is a fraction, but {type(loader.loader).__name__} has no length: give a number of batches"
            )
        value = int(length * value)
        if not value:
            raise ValueError(
                f"{name} leaves no batch of the {length} that each rank has: give a larger fraction, or a number of batches"
            )
    loader.limit = value


def training(run: Run, train_loader: Any, val_loaders: Any, datamodule: DataModule | None) -> None:
    """Prepare a training: model, loaders, optimizers. The model is compiled and distributed before the optimizers are created."""
    module = run.module
    if getattr(module.training_step, "__func__", None) is TrainModule.training_step:
        raise TypeError(f"{type(module).__name__} must define training_step(self, batch, batch_idx)")
    run.training_step = step_accepting(module, "training_step", module.training_step, training=True)
    manual_checks(run)
    asks = train_loader is None and run.train_loader is None
    late = asks and module.starts_before_data and not run.engine.strategy.fused
    if not late:
        training_loaders(run, train_loader, val_loaders, datamodule)
    place(run)
    run.call = step_accepting(module, "training_step", run.call, training=True)
    optimizers(run)
    if late:
        module.on_fit_start()
        run.hooks.leave_out("on_fit_start")
        training_loaders(run, train_loader, val_loaders, datamodule)


def training_loaders(run: Run, train_loader: Any, val_loaders: Any, datamodule: DataModule | None) -> None:
    """The loaders of training and validation, and what depends on them."""
    training_loader(run, train_loader, datamodule)
    run.val_loaders = validation_loaders(run, val_loaders, datamodule)
    joined(run.module, run.engine.group, run.engine.data_group)
    minimum(run)


def training_loader(run: Run, given: Any, datamodule: DataModule | None) -> None:
    """The training loader with its limit, and the window; once for a run, perhaps in a ``setup`` that asks for the number of steps."""
    settings = run.settings
    if run.train_loader is not None:
        return
    found = loaders_for(run, "train", given, datamodule)
    if not found:
        raise ValueError(
            "no training data: give a train_loader, a datamodule (fit run, fit plan: --data my.module:Data) or a module with train_dataloader"
        )
    run.engine.strategy.train_with(found[0].loader)
    limit(found[0], "limit_train_batches", settings.limit_train_batches)
    if found[0].length == 0 and settings.limit_train_batches != 0:
        raise ValueError(f"the training loader ({type(found[0].loader).__name__}) is empty")
    windows(run, found[0])
    run.train_loader, run.num_train_batches = found[0], found[0].length


def validation_loaders(run: Run, given: Any, datamodule: DataModule | None) -> list[PreparedLoader]:
    """The validation loaders of a training; none when validation is switched off or the module has no ``validation_step``."""
    settings, module = run.settings, run.module
    if settings.limit_val_batches == 0 or settings.val_every is None:
        return []
    found = loaders_for(run, "validation", given, datamodule)
    if found and not overrides(module, "validation_step"):
        _warn(run, f"{type(module).__name__} has no validation_step: the validation data is not used")
        return []
    for loader in found:
        limit(loader, "limit_val_batches", settings.limit_val_batches)
    step_accepting(module, "validation_step", module.validation_step, len(found) > 1)  # wrong ones are errors now
    not_empty(run, "validation", found)
    run.num_eval_batches = [loader.length for loader in found]
    return found


def windows(run: Run, loader: PreparedLoader) -> None:
    """The window from ``global_batch_size``."""
    wanted = run.settings.global_batch_size
    if wanted is not None:
        size = getattr(loader.loader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError(
                f"global_batch_size={wanted} needs a loader with a batch_size; {type(loader.loader).__name__} has none"
            )
        ranks = run.engine.data_group.world_size
        each = size * ranks
        window, rest = divmod(wanted, each)
        if rest or not window:
            near = sorted({max(1, window) * each, (window + 1) * each})
            others = [b for b in range(1, wanted // ranks + 1) if wanted % (b * ranks) == 0]
            around = sorted(sorted(others, key=lambda b: abs(b - size))[:4])
            raise ValueError(
                f"global_batch_size={wanted} cannot be divided into batches of {size} on {ranks} rank(s) ({each} samples per micro-batch); "
                f"nearest possible: {', '.join(map(str, near))}, or "
                + (
                    f"batch_size={', '.join(map(str, around))} in the loader"
                    if around
                    else f"a multiple of {ranks}, the number of ranks"
                )
            )
        run.window_at = lambda epoch: window


def minimum(run: Run) -> None:
    """Refuse a ``min_steps`` that the epochs cannot reach, if the steps per epoch are known."""
    settings, batches = run.settings, run.num_train_batches
    if (
        settings.min_steps is None
        or settings.max_epochs is None
        or batches is None
        or not run.module.automatic_optimization
    ):
        return
    steps = steps_of(batches, settings.max_epochs, run.window_at)
    if steps < settings.min_steps:
        raise ValueError(
            f"min_steps={settings.min_steps} and max_epochs={settings.max_epochs}: the training would end after {steps} step(s); give max_steps or "
            "more epochs"
        )


def manual_checks(run: Run) -> None:
    """Refuse settings that manual optimization leaves to the module."""
    if run.module.automatic_optimization:
        return
    for name, neutral in (("accumulate_grad_batches", 1), ("gradient_clip_val", None), ("global_batch_size", None)):
        value = getattr(run.settings, name)
        if value != neutral:
            raise ValueError(
                f"{name}={value!r} has no effect with automatic_optimization=False: do it in training_step, and leave it out of Fit"
            )


def place(run: Run) -> None:
    """The module on its device, compiled and distributed as the settings say."""
    module, engine = run.module, run.engine
    if not module.training:
        _warn(
            run,
            f"{type(module).__name__} is in eval mode (dropout off, batch norm frozen) during training; call module.train() before the run",
        )
    if not module.automatic_optimization:
        if engine.strategy.matched_forward or engine.strategy.fused:
            raise ValueError(
                f"automatic_optimization=False under {type(engine.strategy).__name__}: the backward pass would run in the sharded model's "
                "forward pass; use strategy='ddp', or your own loop with Engine"
            )
        engine.place_model(module)
        engine.strategy.transform(module)
    else:
        distribute(run)
    read_weights(run)


def read_weights(run: Run) -> None:
    """Let a module with a method ``read_weights()`` read values for what it has built without them: each rank has its shards now."""
    read = getattr(run.module, "read_weights", None)
    if read is not None:
        read()


def distribute(run: Run) -> None:
    """Let the strategy wrap the training step, and evaluation steps if their forward pass has collectives."""
    module, matched = run.module, run.engine.strategy.matched_forward
    # A module stays sharded: a later run calls the same root.
    step = module.sharded_root[0] if matched and module.sharded_root else TrainingStep(module)
    wrapped = run.engine.prepare_model(step, autocast=False)
    if matched or type(wrapped) is not TrainingStep:
        run.call = wrapped
    if matched:
        module.sharded_root = [wrapped]
        run.method = lambda name: partial(wrapped, step=name)


def optimizers(run: Run) -> None:
    """The prepared result of ``configure_optimizers``."""
    module, engine = run.module, run.engine
    overridden = overrides(module, "configure_optimizers")
    given = module.configure_optimizers() if overridden else None
    if given is None and engine.models:
        given = engine.strategy.own_optimizers(engine.models[0])
    if given is None and not overridden:
        raise TypeError(f"{type(module).__name__} must define configure_optimizers(self); return None to train nothing")
    found, schedules = configured(given)
    if overridden:
        check_parameters(module, found)
    prepared = [engine.prepare_optimizer(o) for o in found]
    if module.automatic_optimization:
        engine.window.join()
    for schedule in schedules:
        if overrides(module, "lr_scheduler_step"):
            schedule.step = module.lr_scheduler_step
        elif module.automatic_optimization:
            schedule.check()
    if module.automatic_optimization:
        refuse(run, found)
    run.optimization = optimization(run, prepared)
    run.set_optimizers(run.optimization.optimizers, schedules, module.automatic_optimization)


def optimization(run: Run, prepared: list[PreparedOptimizer]) -> Automatic:
    """Choose how micro-batches and windows are processed, for this module, its optimizers and the strategy."""
    module, engine = run.module, run.engine
    methods = overridden_methods(module, ("backward", "lr_scheduler_step", *OF_THE_STEP), TrainModule)
    if "backward" in methods:
        run.backward = lambda loss, *args, **kwargs: engine.backward_by(
            loss, lambda root: module.backward(root, *args, **kwargs)
        )
    if not module.automatic_optimization:
        for name in (*OF_THE_STEP, "lr_scheduler_step"):
            if name != "clip_gradients" and name in methods:
                _warn(
                    run,
                    f"{type(module).__name__}.{name} is not called with automatic_optimization=False: call it in training_step",
                )
        return ByHand(run, [ManualOptimizer(each, run) for each in prepared])
    if methods.intersection(OF_THE_STEP) or any(needs_closure(each.optimizer) for each in prepared):
        return ByClosure(run, prepared)
    # The loop steps whole windows with engine.step and needs no wrapper; a module that steps by itself does.
    return (InParts if engine.strategy.pipelined else Automatic)(run, [each.optimizer for each in prepared])


def evaluation(run: Run, kind: str, given: Any, datamodule: DataModule | None, step: str) -> list[PreparedLoader]:
    """Prepare ``validate``, ``test`` or ``predict``. No loaders means that the limit is 0."""
    module = run.module
    if step != "predict_step" and not overrides(module, step):
        raise TypeError(f"{type(module).__name__} must define {step}(self, batch, batch_idx)")
    name = LIMITS[kind]
    value = getattr(run.settings, name)
    if value == 0:
        logger.warning("%s=0: %s takes no batch", name, step)
        return []
    found = loaders_for(run, kind, given, datamodule)
    if not found:
        if datamodule is not None:
            raise ValueError(
                f"no data: {type(datamodule).__name__} has no {SOURCES[kind]}: define it, or give a loader instead"
            )
        raise ValueError(f"no data: give a loader, a datamodule or a module with {SOURCES[kind]}")
    for loader in found:
        limit(loader, name, value)
    not_empty(run, kind, found)
    run.num_eval_batches = [loader.length for loader in found]
    joined(module, run.engine.group, run.engine.data_group)
    if run.engine.strategy.matched_forward:
        distribute(run)
    else:
        run.engine.place_model(module)
    read_weights(run)
    return found
