"""Sets a run up from what the user passed: loaders, model, optimizers. Wrong input is an error here, before the first step."""

from __future__ import annotations

from engine.data.loader import PreparedLoader
from engine.loop.closure_step import STEP_METHODS, ClosureOptimization, refuse
from engine.loop.first_checks import check_parameters
from engine.loop.optimization import Optimization
from engine.loop.run import Run
from engine.loop.steps import AutomaticOptimization, ManualOptimization, PipelinedOptimization
from engine.metrics.torchmetrics_values import joined
from engine.module import TrainModule, overrides
from engine.step.optimizers import configured, needs_closure
from engine.step.wrappers import PreparedOptimizer
from engine.utils.log import warn_once
from engine.utils.overrides import overridden_methods


def _warn(run: Run, message: str) -> None:
    """Warn once, on the main process only, because the message is the same on all ranks."""
    if run.is_main_process:
        warn_once(message)


def training(run: Run) -> None:
    """Set up a training: loaders, model, optimizers. The model is compiled and distributed before the optimizers are created."""
    module = run.module
    check_best(run)
    if getattr(module.training_step, "__func__", None) is TrainModule.training_step:
        raise TypeError(f"{type(module).__name__} must define training_step(self, batch, batch_idx)")
    run.placed.accept_training_step()
    manual_checks(run)
    loaders_come_last = run.loaders.asks_for_training and module.starts_before_data and not run.engine.strategy.fused
    if not loaders_come_last:
        training_loaders(run)
    run.placed.for_training()
    optimizers(run)
    if loaders_come_last:
        module.on_fit_start()
        run.hooks.leave_out("on_fit_start")
        training_loaders(run)


def check_best(run: Run) -> None:
    """Check that some callback tracks the best checkpoint, if ``reload_best`` asks for it.

    Raises:
        ValueError: no callback does.
    """
    if run.settings.reload_best and not run.settings.fast_dev_run and not any(c.finds_best for c in run.callbacks):
        raise ValueError(
            "reload_best=True needs to know which checkpoint is the best: attach ModelCheckpoint(monitor=<a logged metric>, mode='min' or 'max')"
        )


def training_loaders(run: Run) -> None:
    """Prepare the loaders of training and validation, and what depends on them."""
    run.loaders.training()
    run.loaders.for_validation()
    joined(run.module, run.engine.group, run.engine.loss_group)
    minimum(run)


def minimum(run: Run) -> None:
    """Refuse a ``min_steps`` that ``max_epochs`` cannot reach, if the number of steps per epoch is known."""
    settings, loaders = run.settings, run.loaders
    if (
        settings.min_steps is None
        or settings.max_epochs is None
        or loaders.train_batches is None
        or not run.module.automatic_optimization
    ):
        return
    steps = loaders.steps(settings.max_epochs)
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


def optimizers(run: Run) -> None:
    """Call ``configure_optimizers``, prepare its optimizers and schedulers, and choose the run's optimization."""
    module, engine = run.module, run.engine
    overridden = overrides(module, "configure_optimizers")
    configuration = module.configure_optimizers() if overridden else None
    if configuration is None and engine.models:
        configuration = engine.strategy.own_optimizers(engine.models[0])
    if configuration is None and not overridden:
        raise TypeError(f"{type(module).__name__} must define configure_optimizers(self); return [] to train nothing")
    if configuration is None and module.automatic_optimization and any(p.requires_grad for p in module.parameters()):
        _warn(
            run,
            f"{type(module).__name__}.configure_optimizers returned None, so nothing is trained: return the optimizer, or [] if that is meant",
        )
    raw_optimizers, schedules = configured(configuration)
    if overridden:
        check_parameters(module, raw_optimizers)
    prepared = [engine.prepare_optimizer(o) for o in raw_optimizers]
    if module.automatic_optimization:
        engine.window.join()
    for schedule in schedules:
        if overrides(module, "lr_scheduler_step"):
            schedule.step = module.lr_scheduler_step
        elif module.automatic_optimization:
            schedule.check()
    if module.automatic_optimization:
        refuse(run, raw_optimizers)
    run.optimization = optimization(run, prepared)
    run.optimizer_set.fill(run.optimization.optimizers, schedules, module.automatic_optimization)


def optimization(run: Run, prepared: list[PreparedOptimizer]) -> Optimization:
    """Choose how micro-batches and accumulation windows are processed, by the module, its optimizers and the strategy."""
    module, engine = run.module, run.engine
    methods = overridden_methods(module, ("lr_scheduler_step", *STEP_METHODS), TrainModule)
    if not module.automatic_optimization:
        for name in (*STEP_METHODS, "lr_scheduler_step"):
            if name != "clip_gradients" and name in methods:
                _warn(
                    run,
                    f"{type(module).__name__}.{name} is not called with automatic_optimization=False: call it in training_step",
                )
        return ManualOptimization(run, prepared)
    if methods.intersection(STEP_METHODS) or any(needs_closure(optimizer.optimizer) for optimizer in prepared):
        return ClosureOptimization(run, prepared)
    # The loop steps with Engine.step, which takes torch's own optimizers; only modules that step by themselves need the prepared ones.
    kind = PipelinedOptimization if engine.strategy.pipelined else AutomaticOptimization
    return kind(run, [optimizer.optimizer for optimizer in prepared])


def evaluation(run: Run, kind: str) -> list[PreparedLoader]:
    """Set up a run of ``"validation"``, ``"test"`` or ``"predict"`` (``kind``); return its loaders, ``[]`` if the limit of batches is 0."""
    module = run.module
    if kind != "predict" and not overrides(module, f"{kind}_step"):
        raise TypeError(f"{type(module).__name__} must define {kind}_step(self, batch, batch_idx)")
    loaders = run.loaders.for_evaluation(kind)
    if not loaders:
        return []
    joined(module, run.engine.group, run.engine.loss_group)
    run.placed.for_evaluation()
    return loaders
