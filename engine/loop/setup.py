"""Creates a run and sets it up: the user's hooks, loaders, model, optimizers. Wrong input is an error here, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from engine.callback import Callback, with_callbacks_of_module
from engine.config import combinations
from engine.config.resolve import Resolved
from engine.data.datamodule import DataModule
from engine.data.loader import PreparedLoader
from engine.data.order import mixed
from engine.distributed.group import Group
from engine.engine import Engine
from engine.loop.callback_states import check_keys
from engine.loop.closure_step import STEP_METHODS, ClosureOptimization, check_closures
from engine.loop.first_checks import check_parameters, report_misspelled
from engine.loop.hook_random import share_random_numbers
from engine.loop.late_methods import methods_of_steps, take_late_methods
from engine.loop.loaders import RunData
from engine.loop.method_arguments import accepting
from engine.loop.model_building import build_model
from engine.loop.optimization import Optimization
from engine.loop.run import PendingSetUp, Run
from engine.loop.steps import AutomaticOptimization, ManualOptimization, PipelinedOptimization
from engine.metrics.torchmetrics_values import connect_metrics
from engine.module import TrainModule, overrides
from engine.step.optimizers import configured, needs_closure
from engine.strategies import quantized_weights
from engine.utils.extensions import refuse_uncalled
from engine.utils.log import StartLog, warn_once
from engine.utils.overrides import overridden_methods
from engine.utils.seed import seed_everything


def new_run(
    resolved: Resolved,
    module: TrainModule,
    stage: str,
    group: Group,
    data: RunData,
    callbacks: Sequence[Callback] | None = None,
    start_log: StartLog | None = None,
) -> Run:
    """Create the run of ``module`` on these processes, without setting it up.

    Args:
        resolved: the settings of the run, and where they come from.
        module: the module to run.
        stage: see :attr:`engine.Run.stage`.
        group: the processes.
        data: the loaders and the data module that the user passed.
        callbacks: replace those of the settings and of the module.
        start_log: shows the log on an attached terminal until the first step is done.
    """
    settings = resolved.settings
    engine = Engine(
        strategy=settings.strategy,
        precision=settings.precision,
        on_nonfinite=settings.on_nonfinite,
        max_skipped_steps=settings.max_skipped_steps,
        seed=settings.seed,
        group=group,
        activation_checkpointing=settings.activation_checkpointing,
        activation_offload=settings.activation_offload,
        compile=settings.compile,
        sync_batchnorm=settings.sync_batchnorm,
    )
    settings, origins = combinations.configured_by_strategy(settings, resolved.origins, engine.strategy)
    refuse_uncalled(stage, module, *settings.callbacks)
    callbacks = tuple(
        c
        for c in (with_callbacks_of_module(module, settings.callbacks) if callbacks is None else callbacks)
        if not (settings.fast_dev_run and c.runs_last)
    )
    check_keys(callbacks)
    start_log = start_log or StartLog(False)
    run = Run(settings, engine, module, callbacks, stage, data, origins, resolved.sections, start_log)
    if engine.is_main_process:
        report_misspelled((module, *callbacks), Callback)
    return run


def call_setup_hooks(run: Run, building: AbstractContextManager[Any] | None = None) -> None:
    """Seed, and call ``prepare_data``, ``setup`` and ``configure_model``.

    Args:
        building: a context for ``configure_model``, around that of the strategy.
    """
    stage, module, datamodule, seed = run.stage, run.module, run.datamodule, run.settings.seed
    if seed is not None:
        seed_everything(seed)
    if datamodule is not None:
        datamodule.attach(run)
        _prepare_data(run, datamodule)
    if overrides(module, "prepare_data"):
        _prepare_data(run, module)
    if datamodule is not None:
        accepting(datamodule.setup, datamodule, "setup", DataModule)(stage)
    for hook in run.hooks.setup:
        hook(run, module, stage)
    if not module.built:
        with nullcontext() if building is None else building, run.engine.strategy.building():
            build_model(module)
    take_late_methods(run)
    if stage == "fit":
        _separate_random_numbers(run)


def _separate_random_numbers(run: Run) -> None:
    """Give this rank the random numbers of its stream: with the same ones dropout would drop the same units on all ranks.

    The host's generators follow ``data_group``, because loaders draw from them: ranks that see the same samples must augment them alike. The
    device's would have to follow ``loss_group``, so that dropout differs between parts of a sample; one seed serves both as long as the groups
    are the same.
    """
    stream = run.engine.strategy.random_stream
    if stream:
        seed_everything(mixed(run.engine.seed, stream) % 2**32)


def _prepare_data(run: Run, owner: DataModule | TrainModule) -> None:
    """Call ``prepare_data`` on one process of each machine, or of the job, while the other processes wait."""
    engine = run.engine
    if run.world_size == 1:
        owner.prepare_data()
        return
    with engine.local_main_process_first():
        if engine.is_local_main_process if owner.prepare_data_per_node else engine.is_main_process:
            owner.prepare_data()


def _warn(run: Run, message: str) -> None:
    """Warn once, on the main process only, because the message is the same on all ranks."""
    if run.is_main_process:
        warn_once(message)


class TrainingSetUp(PendingSetUp):
    """One call of :func:`set_up_training`."""

    def __init__(self, run: Run) -> None:
        self._run, self._is_done = run, False

    def complete(self) -> None:
        if not self._is_done:
            self._is_done = True
            set_up_training(self._run)


def set_up_training(run: Run) -> None:
    """Set up a training: loaders, model, optimizers. The model is compiled and distributed before the optimizers are created."""
    module = run.module
    check_best(run)
    if getattr(module.training_step, "__func__", None) is TrainModule.training_step:
        raise TypeError(f"{type(module).__name__} must define training_step(self, batch, batch_idx)")
    run.placed.accept_training_step()
    check_manual_optimization(run)
    loaders_come_last = run.loaders.asks_for_training and module.starts_before_data and not run.engine.strategy.fused
    if not loaders_come_last:
        prepare_loaders(run)
    run.placed.for_training()
    set_up_optimizers(run)
    share_random_numbers(run)
    if loaders_come_last:
        module.on_fit_start()
        run.hooks.leave_out("on_fit_start")
        prepare_loaders(run)


def check_best(run: Run) -> None:
    """Check that some callback tracks the best checkpoint, if ``reload_best`` asks for it.

    Raises:
        ValueError: no callback does.
    """
    if run.settings.reload_best and not run.settings.fast_dev_run and not any(c.finds_best for c in run.callbacks):
        raise ValueError(
            "reload_best=True needs to know which checkpoint is the best: attach ModelCheckpoint(monitor=<a logged metric>, mode='min' or 'max')"
        )


def prepare_loaders(run: Run) -> None:
    """Prepare the loaders of training and validation, and what depends on them."""
    run.clock.measure(run.loaders.training())
    run.loaders.for_validation(run.val_every)
    connect_metrics(run.module, run.engine.group, run.engine.loss_group)
    check_min_steps(run)


def check_min_steps(run: Run) -> None:
    """Refuse a ``min_steps`` that ``max_epochs`` cannot reach, if the number of steps per epoch is known."""
    settings, loaders, max_epochs = run.settings, run.loaders, run.max_epochs
    if (
        settings.min_steps is None
        or max_epochs is None
        or loaders.train_batches is None
        or not run.module.automatic_optimization
    ):
        return
    steps = loaders.steps(max_epochs)
    if steps is not None and steps < settings.min_steps:
        raise ValueError(
            f"min_steps={settings.min_steps} and max_epochs={max_epochs}: the training would end after {steps} step(s); give max_steps or "
            "more epochs"
        )


def check_manual_optimization(run: Run) -> None:
    """Refuse settings that manual optimization leaves to the module."""
    if run.module.automatic_optimization:
        return
    for name, neutral in (("accumulate_grad_batches", 1), ("gradient_clip_val", None), ("global_batch_size", None)):
        value = getattr(run.settings, name)
        if value != neutral:
            raise ValueError(
                f"{name}={value!r} has no effect with automatic_optimization=False: do it in training_step, and leave it out of Fit"
            )


def set_up_optimizers(run: Run) -> None:
    """Call ``configure_optimizers``, prepare its optimizers and schedulers, and choose the run's optimization."""
    module, engine = run.module, run.engine
    overridden = overrides(module, "configure_optimizers")
    configuration = module.configure_optimizers() if overridden else None
    if configuration is None and engine.models:
        configuration = engine.strategy.own_optimizers(engine.models[0])
    if configuration is None and not overridden:
        raise TypeError(f"{type(module).__name__} must define configure_optimizers(self); return [] to train nothing")
    if configuration is None and module.automatic_optimization and any(p.requires_grad for p in module.parameters()):
        message = f"{type(module).__name__}.configure_optimizers returned None, so nothing is trained: return the optimizer, or [] if that is meant"
        if not module.may_train_nothing:
            raise TypeError(message)
        _warn(run, message)
    unknown_keys: list[str] = []
    frozen: list[str] = []
    unfreezes = any(callback.unfreezes for callback in run.callbacks)
    raw_optimizers, schedules = configured(
        configuration,
        module.automatic_optimization,
        unknown_keys if module.leaves_out_unknown_keys else None,
        frozen if unfreezes or module.may_train_nothing else None,
    )
    for message in unknown_keys + ([] if unfreezes else frozen):
        _warn(run, message)
    if overridden:
        check_parameters(module, raw_optimizers)
    engine.prepared.saves = any(callback.is_checkpoint for callback in run.callbacks)
    if engine.prepared.saves:
        quantized_weights.check_saved(module, type(engine.strategy).__name__)
    for optimizer in raw_optimizers:
        engine.add_optimizer(optimizer)
    check_batches_told(run, len(raw_optimizers))
    if module.automatic_optimization:
        engine.window.join()
    for schedule in schedules:
        if schedule.is_counted and not module.automatic_optimization:
            raise ValueError(
                f"lr_scheduler interval={schedule.interval!r} has no effect with automatic_optimization=False: the module steps its schedulers, and "
                "self.run.clock has the count"
            )
        if overrides(module, "lr_scheduler_step"):
            schedule.step = module.lr_scheduler_step
        elif module.automatic_optimization:
            schedule.check()
    optimization = choose_optimization(run, raw_optimizers)
    run.begin_optimization(optimization, methods_of_steps(module))
    run.optimizer_set.fill(optimization.optimizers, schedules, module.automatic_optimization)


def check_batches_told(run: Run, optimizers: int) -> None:
    """Refuse a ``run.total_steps`` that was read under ``max_steps``, if the module steps several ``optimizers`` itself and does not say how many
    steps a batch has.

    Raises:
        ValueError: the number of batches is not known.
    """
    module, max_steps = run.module, run.max_steps
    if run.batches_told is None or max_steps is None or module.steps_per_batch is not None or optimizers < 2:
        return
    name = type(module).__name__
    raise ValueError(
        f"{name} has {optimizers} optimizers and automatic_optimization=False, so each optimizer.step() counts for max_steps={max_steps}, and "
        f"run.total_steps, the number of batches, is not known: set {name}.steps_per_batch, to {optimizers} if each batch steps each optimizer "
        "once, or give Fit(max_epochs=) in place of max_steps"
    )


def choose_optimization(run: Run, optimizers: list[Optimizer]) -> Optimization:
    """Choose how micro-batches and accumulation windows are processed, by the module, its optimizers and the strategy.

    Raises:
        ValueError: the strategy cannot call a method that the module overrides, or the run does not support an optimizer's closure.
    """
    module, engine = run.module, run.engine
    methods = overridden_methods(module, ("lr_scheduler_step", *STEP_METHODS, "backward"), TrainModule)
    if not module.automatic_optimization:
        for name in (*STEP_METHODS, "lr_scheduler_step"):
            if name != "clip_gradients" and name in methods:
                _warn(
                    run,
                    f"{type(module).__name__}.{name} is not called with automatic_optimization=False: call it in training_step",
                )
        return ManualOptimization(run, [engine.prepare_optimizer(o) for o in optimizers])
    if engine.strategy.fused:
        _refuse_step_methods(run, methods)
    if methods.intersection(STEP_METHODS) or any(map(needs_closure, optimizers)):
        check_closures(run, optimizers)
        return ClosureOptimization(run, [engine.prepare_optimizer(o) for o in optimizers])
    # The loop steps with Engine.step, which takes torch's own optimizers; only modules that step by themselves need prepared ones.
    kind = PipelinedOptimization if engine.strategy.pipelined else AutomaticOptimization
    return kind(run, optimizers)


def _refuse_step_methods(run: Run, overridden: frozenset[str]) -> None:
    """Refuse the module's ``overridden`` methods that are parts of a step, which the strategy does in one call."""
    strategy = run.engine.strategy
    for method in (*STEP_METHODS, "backward"):
        if method in overridden:
            raise ValueError(
                f"{type(run.module).__name__} overrides {method}, which cannot be called under {type(strategy).__name__}: it {strategy.fused}. "
                "Remove the method (learning rates: a scheduler; clipping: gradient_clip_val), or use strategy='ddp' or 'fsdp'"
            )


def set_up_evaluation(run: Run, kind: str) -> list[PreparedLoader]:
    """Set up a run of ``"validation"``, ``"test"`` or ``"predict"`` (``kind``); return its loaders, ``[]`` if the limit of batches is 0."""
    module = run.module
    if kind != "predict" and not overrides(module, f"{kind}_step"):
        raise TypeError(f"{type(module).__name__} must define {kind}_step(self, batch, batch_idx)")
    loaders = run.loaders.for_evaluation(kind)
    if not loaders:
        return []
    connect_metrics(module, run.engine.group, run.engine.loss_group)
    run.placed.for_evaluation()
    return loaders
