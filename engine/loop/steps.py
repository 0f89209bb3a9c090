"""The kinds of optimization: automatic, automatic under a pipeline, and manual, where the module steps its optimizers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from engine.engine import Engine
from engine.loop.last_checks import without_loss
from engine.loop.optimization import Optimization
from engine.loop.run import Run
from engine.metrics.torchmetrics_states import unchanged
from engine.module import TrainModule, overrides
from engine.step.gradients import Loss, check_held, loss_in
from engine.step.position import Share
from engine.step.wrappers import PreparedOptimizer
from engine.utils.log import warn_once

MOST_WITHOUT_LOSS = 1000
"""The number of windows without any loss, from the training's start on, that is an error where only ``max_steps`` ends the training."""


class AutomaticOptimization(Optimization):
    """Runs the forward and backward pass of each micro-batch; at the end of a window all optimizers step together."""

    call: Callable[..., Any]
    """:attr:`engine.Run.call` under autocast; set by :meth:`begin`."""

    def __init__(self, run: Run, optimizers: Sequence[Any]) -> None:
        super().__init__(run.state, run.optimizer_set, run.logbook)
        self.run, self.optimizers, self.phases = run, list(optimizers), run.phases
        self.backward_pass = run.engine.backward
        if overrides(run.module, "backward"):
            self.backward_pass = partial(_backward_of_module, run.engine, run.module)
        settings = run.settings
        self.max_norm = settings.gradient_clip_val if settings.gradient_clip_algorithm == "norm" else None
        self.max_value = settings.gradient_clip_val if settings.gradient_clip_algorithm == "value" else None
        self.max_parameter_norm = (
            settings.gradient_clip_val if settings.gradient_clip_algorithm == "norm_per_parameter" else None
        )
        self._parameters = _replaceable_parameters(run)

    def begin(self) -> None:
        run = self.run
        before, self._parameters = self._parameters, _replaceable_parameters(run)
        check_held(before, self._parameters, self.optimizers)
        self.call = in_context(run.engine.autocast(), self.forward())
        self.strategy, self.models = run.engine.strategy, run.engine.models

    def forward(self) -> Callable[..., Any]:
        """Return the function to call for each micro-batch; :meth:`begin` wraps it in autocast."""
        return self.run.call

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        self.strategy.sync(self.models, share.last)
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("forward", call)
        outputs = call(batch, index) if share.size else run_for_matching(self.run, call, batch, index)
        self.backward_from(outputs)
        return outputs

    def backward_from(self, outputs: Any) -> None:
        """Run the backward pass from ``outputs``, which ``training_step`` has returned."""
        run, loss = self.run, outputs
        if type(loss) is not Tensor and not isinstance(loss, (Tensor, Loss)):
            loss = loss_in(outputs, type(run.module).__name__)
            if loss is None:
                recorder = run.logbook.recorder
                self.samples_left_out += 0 if recorder.batch is None else recorder.samples()
                run.engine.backward_nothing()
                return
        for hook in run.hooks.on_before_backward:
            hook(run, run.module, loss)
        function = self.backward_pass
        if profiler._is_profiler_enabled or run.phases.timers:
            function = run.phases.named("backward", function)
        function(loss)
        for hook in run.hooks.on_after_backward:
            hook(run, run.module)

    def step(self) -> None:
        run = self.run
        engine, module, hooks = run.engine, run.module, run.hooks
        if not engine.window.weights.fed and not engine.window_has_loss():
            engine.window.discard()
            self.note_without_loss()
            if run.module.may_train_nothing:
                self.applied(True)
            return
        if hooks.on_before_optimizer_step:
            engine.unscale_gradients(self.optimizers)
            for optimizer in self.optimizers:
                for hook in hooks.on_before_optimizer_step:
                    hook(run, module, optimizer)
        step = engine.step
        if profiler._is_profiler_enabled or run.phases.timers:
            step = run.phases.named("optimizer", step)
        step(
            self.optimizers,
            max_norm=self.max_norm,
            max_value=self.max_value,
            max_parameter_norm=self.max_parameter_norm,
            then=self.applied,
        )
        for optimizer in self.optimizers:
            for hook in hooks.on_before_zero_grad:
                hook(run, module, optimizer)
            optimizer.zero_grad()

    def note_without_loss(self) -> None:
        """Count a window in which ``training_step`` has returned no loss, and warn as long as this training has none at all. Where only a number of
        steps ends the training, which it would never reach, that is an error in the end.

        Raises:
            ValueError: as :func:`engine.loop.last_checks.check_trained`.
        """
        run = self.run
        self.windows_without_loss += 1
        if run.state.step != run.first_step:
            return
        if self.samples_left_out:
            warn_once(
                f"{type(run.module).__name__}.training_step returned None for every batch so far: nothing is trained. "
                "Return the loss, unless you want to skip these batches"
            )
        else:
            warn_once(
                "every batch so far is None or without samples, so nothing is trained: does the loader leave out all?"
            )
        control = run.control
        limits = (control.max_epochs, control.max_time, control.max_length)
        only_steps_end_it = control.max_steps is not None and limits == (None, None, None)
        if only_steps_end_it and self.windows_without_loss >= max(MOST_WITHOUT_LOSS, run.max_steps or 0):
            raise ValueError(without_loss(run.module, self))

    def cut(self) -> None:
        self.run.engine.discard_window()
        self.run.logbook.recorder.window += 1

    def before_validation(self) -> None:
        if overrides(self.run.module, "on_validation_model_zero_grad"):
            self.run.module.on_validation_model_zero_grad()


class PipelinedOptimization(AutomaticOptimization):
    """Lets the strategy run forward and backward passes together, on chunks of the micro-batch."""

    def forward(self) -> Callable[..., Any]:
        return partial(in_chunks, self.run)

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        self.strategy.sync(self.models, share.last)
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("forward_backward", call)
        return call(batch, index) if share.size else run_for_matching(self.run, call, batch, index)


class ManualOptimizer(PreparedOptimizer):
    """An optimizer for manual optimization: its step averages the gradients over the ranks, unscales and checks them, and is counted."""

    def __init__(self, prepared: PreparedOptimizer, optimization: ManualOptimization) -> None:
        super().__init__(prepared.optimizer, prepared._stepper, prepared._window)
        self._optimization, self._run = optimization, optimization.run

    def readable(self) -> None:
        """Average the gradients over the ranks and unscale them, as the step will apply them."""
        self._average()
        self._run.engine.unscale_gradients(self)

    def _average(self) -> None:
        window_state = self._window.state_of(self.optimizer)
        if not window_state.averaged:
            self._run.engine.average_gradients(self)
            window_state.averaged = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step. With a ``closure``, which computes gradients inside the step (on one process only), return its value."""
        run = self._run
        if closure is not None:
            if run.world_size > 1:
                raise RuntimeError(
                    "optimizer.step(closure) on several ranks: call manual_backward first and step() without a closure"
                )
            with run.phases.timed("optimizer"):
                value = super().step(closure)
            self._optimization.applied(True)
            return value
        if run.hooks.on_before_optimizer_step:
            self.readable()
            for hook in run.hooks.on_before_optimizer_step:
                hook(run, run.module, self)
        else:
            self._average()
        run.phases.named("optimizer", run.engine.step)([self], then=self._optimization.applied)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for hook in self._run.hooks.on_before_zero_grad:
            hook(self._run, self._run.module, self)
        super().zero_grad(set_to_none)


class ManualOptimization(AutomaticOptimization):
    """The optimization for ``automatic_optimization = False``: the module steps its optimizers inside ``training_step``."""

    accumulates = False

    def __init__(self, run: Run, prepared: Sequence[PreparedOptimizer]) -> None:
        super().__init__(run, [])
        self.optimizers = [ManualOptimizer(optimizer, self) for optimizer in prepared]

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        self.stepping = True
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("training_step", call)
        return call(batch, index) if share.size else run_for_matching(self.run, call, batch, index)

    def step(self) -> None:
        """Do nothing: ``training_step`` has stepped the optimizers."""


def _backward_of_module(engine: Engine, module: TrainModule, loss: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the module's overridden ``backward``, from a scalar that has the micro-batch's weight."""
    return engine.backward_by(loss, lambda root: module.backward(root, *args, **kwargs))


def _replaceable_parameters(run: Run) -> dict[str, Tensor]:
    """The module's parameters by name, on one process, where only the user's code can have replaced one; otherwise ``{}``."""
    strategy = run.engine.strategy
    only_user_replaces = strategy.group.world_size == 1 and not strategy.fused
    return dict(run.module.named_parameters(remove_duplicate=False)) if only_user_replaces else {}


def in_context(context: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function``, so that it runs in ``context``; return ``function`` itself for a null context, which saves two calls per step."""
    if isinstance(context, nullcontext):
        return function

    def function_in_context(batch: Any, index: int) -> Any:
        with context:
            return function(batch, index)

    return function_in_context


def in_chunks(run: Run, batch: Any, index: int) -> Any:
    """Run ``training_step`` and its backward pass on chunks of a micro-batch; return the loss of the whole micro-batch."""
    module, recorder = run.module, run.logbook.recorder
    size = recorder.size

    def step(part: Any, samples: int) -> Any:
        recorder.size, recorder.batch = samples if size else 0, part
        return loss_in(run.training_step(part, index), type(module).__name__)

    try:
        return run.engine.forward_backward(step, batch)
    finally:
        recorder.size, recorder.batch = size, batch


def run_for_matching(run: Run, call: Callable[..., Any], batch: Any, index: int) -> Any:
    """Run a training step on a repeated micro-batch, only because the other ranks' steps have collectives; metrics do not see it."""
    with unchanged(run.module, run.logbook.recorder.metrics):
        return call(batch, index)
