"""Steps of modules that override ``optimizer_step`` or related hooks, and of optimizers that compute gradients within their step (LBFGS, SAM).

The forward and backward pass of a window's last micro-batch run inside the closure passed to ``optimizer_step``, as in Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from engine.engine import Engine
from engine.loop.method_arguments import accepting
from engine.loop.run import Run
from engine.loop.steps import AutomaticOptimization, run_for_matching
from engine.metrics.torchmetrics_states import unchanged
from engine.module import TrainModule, overrides
from engine.step.optimizers import needs_closure
from engine.step.position import Share
from engine.step.wrappers import PreparedOptimizer
from engine.utils import accelerator
from engine.utils.parameters import is_sharded, parameters_of
from engine.utils.torch_private import norms

STEP_METHODS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients")


class ClosureOptimizer(PreparedOptimizer):
    """The optimizer passed to ``optimizer_step``: its ``step`` evaluates the closure, clips and applies the gradients."""

    def __init__(self, prepared: PreparedOptimizer, owner: ClosureOptimization) -> None:
        super().__init__(prepared.optimizer, prepared._stepper, prepared._window)
        self._owner, self.needs_closure = owner, needs_closure(prepared.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the window's gradients, which ``closure`` computes (default: the run's closure); return the closure's value."""
        return self._owner.apply(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._window.state_of(self.optimizer).cleared()


class SummedBackward:
    """Runs the weighted backward passes of a window's micro-batches, through the module's ``backward`` if overridden, and sums their losses."""

    def __init__(self, engine: Engine, module: TrainModule) -> None:
        self._engine, self._module, self._overridden = engine, module, overrides(module, "backward")
        self.value: Tensor | None = None
        """The weighted sum of the losses so far, shape (), fp64; ``None``: there was no loss."""

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run the backward pass of one micro-batch."""
        module = self._module
        if self._overridden:
            value = self._engine.backward_by(loss, lambda root: module.backward(root, **kwargs))
        else:
            value = self._engine.backward_by(loss, lambda root: root.backward(**kwargs))
        self.value = value if self.value is None else self.value + value


class ClosureOptimization(AutomaticOptimization):
    """Each window's step goes through ``module.optimizer_step(epoch, batch_idx, optimizer, closure)``::

        closure: training_step and backward of the last micro-batch; when called again: zero_grad, then those of the whole window
        optimizer.step(closure): closure; on_before_optimizer_step; configure_gradient_clipping; the optimizer's own step

    The step counter increases if any optimizer has stepped.
    """

    calls_closures = True

    def __init__(self, run: Run, prepared: Sequence[PreparedOptimizer]) -> None:
        super().__init__(run, [ClosureOptimizer(optimizer, self) for optimizer in prepared])
        self.evaluates_again = any(optimizer.needs_closure for optimizer in self.optimizers)
        self.zeroes_first = overrides(run.module, "optimizer_zero_grad")
        self.clips = overrides(run.module, "configure_gradient_clipping") or overrides(run.module, "clip_gradients")
        clipping = run.module.configure_gradient_clipping
        self._clipping = accepting(clipping, run.module, "configure_gradient_clipping", TrainModule)
        self._summed = SummedBackward(run.engine, run.module)
        self.backward_pass = self._summed.backward
        self._clips_before_step = self.clips or self.evaluates_again or len(self.optimizers) > 1
        self._limits = {
            "max_norm": self.max_norm,
            "max_value": self.max_value,
            "max_parameter_norm": self.max_parameter_norm,
        }
        self._window: list[tuple[Any, int, Share]] = []
        self._verdicts: list[bool] = []
        self._earlier_gradients = False

    def begin(self) -> None:
        super().begin()
        self._window.clear()

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        run, first = self.run, not self._window
        if first or self.evaluates_again:
            self._window.append((batch, index, share))
        if not share.last:
            return self._evaluate(batch, index, share, first)
        self.stepping, self._evaluated = True, False
        self._last_micro_batch, self._is_single_micro_batch = (batch, index, share, first), first
        run.engine.checkpoint_writer.before_closures()
        for optimizer in self.optimizers:
            run.module.optimizer_step(run.epoch, index, optimizer, self.closure)
        if not self._evaluated:
            raise RuntimeError(
                f"{type(run.module).__name__}.optimizer_step called neither optimizer_closure() nor optimizer.step(): "
                "call optimizer.step(closure=optimizer_closure), or optimizer_closure() alone to skip the step"
            )
        return self.outputs

    def cut(self) -> None:
        super().cut()
        self._window.clear()
        self._summed.value = None

    def step(self) -> None:
        run, index = self.run, self._window[-1][1]
        run.engine.settle()
        if not self._window_has_loss:
            run.engine.window.discard()
            self.note_without_loss()
            if run.module.may_train_nothing and not self._verdicts:
                self.applied(True)
        if self._verdicts:
            self.applied(any(self._verdicts))
            self._verdicts.clear()
        if not self.zeroes_first:
            self._zero(index)
        self._window.clear()
        self._summed.value, self._earlier_gradients = None, False

    def before_validation(self) -> None:
        if self.zeroes_first:  # otherwise step() has cleared the gradients
            self.run.module.on_validation_model_zero_grad()
        else:
            super().before_validation()

    # -- the closure ------------------------------------------------------------------------------------------------------------

    def closure(self) -> Tensor | None:
        """Compute the window's gradients; return its mean loss over all ranks, shape (), fp64, detached; ``None`` if no micro-batch had a loss."""
        with torch.enable_grad():
            if not self._evaluated:
                self._finish_window(self._evaluate(*self._last_micro_batch))
            elif self._gradients_outdated():
                self._repeat_window()
        return self.loss

    def _evaluate(self, batch: Any, index: int, share: Share, first: bool) -> Any:
        """Run the forward and backward pass of one micro-batch; ``first``: of the window."""
        self.strategy.sync(self.models, share.last)
        call = self.phases.named("forward", self.call)
        outputs = call(batch, index) if share.size else run_for_matching(self.run, call, batch, index)
        if first and self.zeroes_first:
            self._zero(index)
        self.backward_from(outputs)
        return outputs

    def _finish_window(self, outputs: Any) -> None:
        """Once all gradients of the window are computed: unscale them, and compute the window's loss."""
        engine = self.run.engine
        self.outputs, self._evaluated, self._clipped, self.loss = outputs, True, False, None
        self._window_has_loss = engine.window.weights.fed or engine.window_has_loss()
        if not self._window_has_loss:
            return
        engine.unscale_gradients(self.optimizers)
        total = engine.window.state_of(self.optimizers[0].optimizer).total
        if self._earlier_gradients and (engine.scaler is not None or total is not None):
            raise RuntimeError(
                f"{type(self.run.module).__name__}.optimizer_zero_grad did not clear an earlier step's gradients, and dividing this step's (as fp16, "
                "Loss(sum, count) or a micro-batch without loss needs) would divide them too: call optimizer.zero_grad(), or return a scalar "
                "loss in fp32 or bf16"
            )
        value = (
            torch.zeros((), dtype=accelerator.wide(engine.device), device=engine.device)
            if self._summed.value is None
            else self._summed.value
        )
        mean = engine.strategy.sum(value) / engine.loss_group.world_size
        self.loss = torch.as_tensor(mean if total is None else mean / total)
        if self._may_change_parameters_first:
            self._fingerprint_at_evaluation = self._fingerprint()

    def _repeat_window(self) -> None:
        """Evaluate the whole window again, for gradients at the current parameters, without logging values a second time."""
        run, window, recorder = self.run, self.run.engine.window, self.run.logbook.recorder
        if not self.evaluates_again and not self._is_single_micro_batch:
            raise RuntimeError(
                "optimizer_closure() was called twice in one step with accumulate_grad_batches > 1, and the earlier micro-batches are not kept: "
                "call it once, set accumulate_grad_batches=1, or use an optimizer whose step(closure) has no default for closure"
            )
        if not self.zeroes_first:
            self._zero(self._window[0][1])
        self._summed.value, outputs = None, None
        with logging_nothing(run):
            for number, (batch, index, share) in enumerate(self._window):
                window.begin(share)
                recorder.size, recorder.guess, recorder.batch = share.size, share.guess, batch
                outputs = self._evaluate(batch, index, share, number == 0)
        self._finish_window(outputs)

    @property
    def _may_change_parameters_first(self) -> bool:
        """Whether an optimizer may change the parameters before it first calls its closure. LBFGS does not."""
        return any(
            optimizer.needs_closure and not isinstance(optimizer.optimizer, LBFGS) for optimizer in self.optimizers
        )

    def _gradients_outdated(self) -> bool:
        """Whether the existing gradients may not belong to the current parameters, so that the closure must evaluate the window again."""
        if not self._just_evaluated:
            return True
        self._just_evaluated = False
        return self._may_change_parameters_first and self._fingerprint() != self._fingerprint_at_evaluation

    def _fingerprint(self) -> list[Any]:
        """A fingerprint of parameters and gradients. Waits for the device."""
        parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return [
            *torch.stack(norms([p.detach().to(accelerator.wide(p.device)) for p in parameters])).tolist(),
            *(id(p.grad) for p in parameters),
        ]

    # -- the step ---------------------------------------------------------------------------------------------------------------

    _just_evaluated = False
    """Whether the window was evaluated just before the optimizer's step, so that the optimizer's first call of the closure need not repeat it."""

    def apply(self, optimizer: ClosureOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Implements ``optimizer.step(closure)``."""
        run, value = self.run, None
        if optimizer.needs_closure:
            return self._apply_inside(optimizer, closure or self.closure)
        if closure is not None:
            value = closure()
        elif not self._evaluated:
            self.closure()
        if self._window_has_loss:
            self._clip()
            limits = {} if self._clips_before_step else self._limits
            run.phases.named("optimizer", run.engine.step)([optimizer], then=self._verdicts.append, **limits)
        return value

    def _apply_inside(self, optimizer: ClosureOptimizer, closure: Callable[[], Any]) -> Any:
        """Step an optimizer that may call the closure several times within its step."""
        if not self._evaluated:
            self.closure()
        if not self._window_has_loss:
            return None
        self._clip()
        self._just_evaluated = True

        def evaluate_and_clip() -> Any:
            value = closure()
            if value is None:
                raise ValueError(
                    f"{type(optimizer.optimizer).__name__} needs a loss of every batch, but training_step returned None"
                )
            self._clip()
            return value

        with self.phases.timed("optimizer"):
            value = optimizer.optimizer.step(evaluate_and_clip)
        self._just_evaluated = False
        self._verdicts.append(True)
        return value

    def _clip(self) -> None:
        """Call the hooks before a step and clip the gradients of all optimizers, unless ``Engine.step`` will clip; once for each evaluation."""
        run = self.run
        if self._clipped:
            return
        self._clipped = True
        for optimizer in self.optimizers:
            for hook in run.hooks.on_before_optimizer_step:
                hook(run, run.module, optimizer.optimizer)
        if self.clips:
            for optimizer in self.optimizers:
                self._clipping(
                    optimizer.optimizer, run.settings.gradient_clip_val, run.settings.gradient_clip_algorithm
                )
        if self._clips_before_step:
            run.engine.finish_gradients(
                self.optimizers, inside=self.evaluates_again, **({} if self.clips else self._limits)
            )

    def _zero(self, index: int) -> None:
        """Call the hooks and clear the gradients, or let the module do so and note whether it has left some."""
        run = self.run
        for optimizer in self.optimizers:
            for hook in run.hooks.on_before_zero_grad:
                hook(run, run.module, optimizer.optimizer)
            if self.zeroes_first:
                run.module.optimizer_zero_grad(run.epoch, index, optimizer.optimizer)
                run.engine.window.state_of(optimizer.optimizer).cleared()
            else:
                optimizer.zero_grad()
        if self.zeroes_first:
            gradients = [
                p.grad
                for wrapper in self.optimizers
                for group in wrapper.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            self._earlier_gradients = bool(run.engine.strategy.norm(gradients) > 0) if gradients else False


@contextmanager
def logging_nothing(run: Run) -> Iterator[None]:
    """Inside the block, discard what the module logs, and updates of its torchmetrics objects."""
    with run.logbook.silenced(), unchanged(run.module):
        yield


def check_closures(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """Check that this run supports those ``optimizers`` that evaluate the loss inside their step.

    Raises:
        ValueError: it does not; the message says what to do.
    """
    engine = run.engine
    strategy, name = engine.strategy, type(engine.strategy).__name__
    closure_optimizers = [type(o).__name__ for o in optimizers if needs_closure(o)]
    if not closure_optimizers:
        return
    sharded = any(map(is_sharded, parameters_of(optimizers)))
    obstacles = {
        f"{name}, which {strategy.fused}": strategy.fused is not None,
        f"{name}, where each rank has a part of the parameters": sharded,
        f"precision={engine.precision.name!r}, whose loss scale changes between two evaluations": engine.scaler
        is not None,
        "on_nonfinite='skip': an evaluation inside a step cannot be skipped": run.settings.on_nonfinite == "skip",
        f"{len(optimizers)} optimizers, whose steps are made from the same gradients": len(optimizers) > 1,
    }
    if reasons := [reason for reason, holds in obstacles.items() if holds]:
        raise ValueError(
            f"{closure_optimizers[0]} evaluates the loss inside its step (closure), which does not work with {reasons[0]}; "
            "use strategy='single' or 'ddp', precision='32-true' or 'bf16-mixed', one optimizer, or another optimizer"
        )
