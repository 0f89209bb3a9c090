"""How each micro-batch and each window of a training is processed: one object, chosen when the run is prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from engine.loop.run import Run
from engine.metrics.torchmetrics_states import unchanged
from engine.module import overrides
from engine.step.gradients import Loss, check_held, loss_in
from engine.step.window import Share
from engine.utils.log import warn_once


class Automatic:
    """Forward and backward pass of each micro-batch; at a window's end all optimizers step as one."""

    accumulates = True
    """Whether the run decides where a window ends (otherwise the module steps when it wants)."""

    def __init__(self, run: Run, optimizers: Sequence[Any]) -> None:
        self.run, self.optimizers, self.phases = run, list(optimizers), run.phases
        self._parameters = _named(run)

    def begin(self) -> None:
        """An epoch begins.

        Raises:
            ValueError: an optimizer has parameters that the module no longer has.
        """
        run = self.run
        before, self._parameters = self._parameters, _named(run)
        check_held(before, self._parameters, self.optimizers)
        self.call = within(run.engine.autocast(), self.forward())
        self.sync, self.models = run.engine.strategy.sync, run.engine.models

    def forward(self) -> Callable[..., Any]:
        """What is called for each micro-batch, under autocast."""
        return self.run.call

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        """One micro-batch; what ``training_step`` returned."""
        self.sync(self.models, share.last)
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("forward", call)
        outputs = call(batch, index) if share.size else matched_only(self.run, call, batch, index)
        backward(self.run, outputs)
        return outputs

    def step(self) -> None:
        """The window is over: finish its gradients and step. A window without any loss makes no step."""
        run = self.run
        engine, module, hooks = run.engine, run.module, run.hooks
        if not engine.window.fed and not engine.window_has_loss():
            engine.window.discard()
            warn_unfed(run)
            return
        if hooks.on_before_optimizer_step:
            engine.unscale_gradients(run.optimizers)
            for optimizer in run.optimizers:
                for hook in hooks.on_before_optimizer_step:
                    hook(run, module, optimizer)
        step = engine.step
        if profiler._is_profiler_enabled or run.phases.timers:
            step = run.phases.named("optimizer", step)
        step(run.optimizers, max_norm=run.max_norm, max_value=run.max_value, then=run.applied)
        for optimizer in run.optimizers:
            for hook in hooks.on_before_zero_grad:
                hook(run, module, optimizer)
            optimizer.zero_grad()

    def cut(self) -> None:
        """The epoch ends inside a window: discard the window's gradients and step values."""
        self.run.engine.discard_window()
        self.run.recorder.window += 1

    def before_validation(self) -> None:
        """Validation during training is due. Gradients are kept, unless the module clears them."""
        if overrides(self.run.module, "on_validation_model_zero_grad"):
            self.run.module.on_validation_model_zero_grad()


class InParts(Automatic):
    """The strategy runs forward and backward passes together, on chunks of the micro-batch."""

    def forward(self) -> Callable[..., Any]:
        return partial(in_parts, self.run)

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        self.sync(self.models, share.last)
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("forward_backward", call)
        return call(batch, index) if share.size else matched_only(self.run, call, batch, index)


class ByHand(Automatic):
    """``automatic_optimization = False``: the module steps its optimizers inside ``training_step``."""

    accumulates = False

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        self.run.stepping = True
        call, phases = self.call, self.phases
        if profiler._is_profiler_enabled or phases.timers:
            call = phases.named("training_step", call)
        return call(batch, index) if share.size else matched_only(self.run, call, batch, index)

    def step(self) -> None:
        """Nothing is left to do."""


def _named(run: Run) -> dict[str, Tensor]:
    """The module's parameters, if only the user can replace them."""
    strategy = run.engine.strategy
    alone = strategy.group.world_size == 1 and not strategy.fused
    return dict(run.module.named_parameters(remove_duplicate=False)) if alone else {}


def within(context: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, called in ``context``; without a context itself, so that a step has two calls less."""
    if isinstance(context, nullcontext):
        return function

    def inside(batch: Any, index: int) -> Any:
        with context:
            return function(batch, index)

    return inside


def in_parts(run: Run, batch: Any, index: int) -> Any:
    """``training_step`` and its backward pass on chunks of a micro-batch; returns the loss of all."""
    module, recorder, size = run.module, run.recorder, run.recorder.size

    def step(part: Any, samples: int) -> Any:
        recorder.size, recorder.batch = samples if size else 0, part
        return loss_in(run.training_step(part, index), type(module).__name__)

    try:
        return run.engine.forward_backward(step, batch)
    finally:
        recorder.size, recorder.batch = size, batch


def matched_only(run: Run, call: Callable[..., Any], batch: Any, index: int) -> Any:
    """A training step that only keeps the ranks matched: its samples were trained on before."""
    with unchanged(run.module, run.recorder.metrics):
        return call(batch, index)


def backward(run: Run, outputs: Any) -> None:
    """Backward from what ``training_step`` returned."""
    loss = outputs
    if type(loss) is not Tensor and not isinstance(loss, (Tensor, Loss)):
        loss = loss_in(outputs, type(run.module).__name__)
        if loss is None:
            run.engine.backward_nothing()
            return
    for hook in run.hooks.on_before_backward:
        hook(run, run.module, loss)
    function = run.backward
    if profiler._is_profiler_enabled or run.phases.timers:
        function = run.phases.named("backward", function)
    function(loss)
    for hook in run.hooks.on_after_backward:
        hook(run, run.module)


def warn_unfed(run: Run) -> None:
    """Warn when nothing has been trained so far because ``training_step`` returned no loss."""
    if run.state.step == 0:
        warn_once(
            f"{type(run.module).__name__}.training_step returned None for every batch so far: nothing is trained. "
            "Return the loss, unless you want to skip these batches"
        )
