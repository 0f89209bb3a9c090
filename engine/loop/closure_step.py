"""Steps that a module overrides (``optimizer_step`` and related hooks) or that compute gradients themselves (LBFGS, SAM).

The forward and backward pass of a window's last micro-batch run inside the closure that ``optimizer_step`` gets, as in Lightning.
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
from engine.loop.steps import AutomaticOptimization, run_for_matching, warn_without_loss
from engine.metrics.torchmetrics_states import unchanged
from engine.module import TrainModule, overrides
from engine.step.optimizers import needs_closure
from engine.step.window import Share
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
        """One step with the window's gradients. ``closure`` computes them (default: the run's); its value is returned."""
        return self._owner.apply(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._stepper.forget([self.optimizer])


class SummedBackward:
    """Runs the exact backward passes of a window's micro-batches, by the module's own ``backward`` if it has one, and adds up their losses."""

    def __init__(self, engine: Engine, module: TrainModule) -> None:
        self._engine, self._module, self._overridden = engine, module, overrides(module, "backward")
        self.value: Tensor | None = None
        """The losses so far, weighted, shape (), fp64; ``None``: there was none."""

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

        closure: the last micro-batch's training_step and backward; when it is called again, zero_grad and the whole window's
        optimizer.step(closure): closure; on_before_optimizer_step; configure_gradient_clipping; the optimizer's own step

    A step is counted when an optimizer has stepped.
    """

    calls_closures = True

    def __init__(self, run: Run, prepared: Sequence[PreparedOptimizer]) -> None:
        super().__init__(run, [ClosureOptimizer(optimizer, self) for optimizer in prepared])
        self.evaluates_again = any(
            optimizer.needs_closure for optimizer in self.optimizers
        )  # the window's micro-batches are kept
        self.zeroes_first = overrides(run.module, "optimizer_zero_grad")
        self.clips = overrides(run.module, "configure_gradient_clipping") or overrides(run.module, "clip_gradients")
        clipping = run.module.configure_gradient_clipping
        self._clipping = accepting(clipping, run.module, "configure_gradient_clipping", TrainModule)
        self._summed = SummedBackward(run.engine, run.module)
        self.backward_pass = self._summed.backward
        self._apart = self.clips or self.evaluates_again or len(self.optimizers) > 1
        self._limits = {"max_norm": self.max_norm, "max_value": self.max_value}
        self._window: list[tuple[Any, int, Share]] = []
        self._verdicts: list[bool] = []
        self._held = False

    def begin(self) -> None:
        super().begin()
        self._window.clear()

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        run, first = self.run, not self._window
        if first or self.evaluates_again:
            self._window.append((batch, index, share))
        if not share.last:
            return self._evaluate(batch, index, share, first)
        self.stepping, self._last, self._evaluated, self._single = True, (batch, index, share, first), False, first
        run.engine.checkpoint_writer.hold()
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
        if not self._fed:
            run.engine.window.discard()
            warn_without_loss(run)
        if self._verdicts:
            self.applied(any(self._verdicts))
            self._verdicts.clear()
        if not self.zeroes_first:
            self._zero(index)
        self._window.clear()
        self._summed.value, self._held = None, False

    def before_validation(self) -> None:
        if self.zeroes_first:  # otherwise there are none
            self.run.module.on_validation_model_zero_grad()
        else:
            super().before_validation()

    # -- the closure ------------------------------------------------------------------------------------------------------------

    def closure(self) -> Tensor | None:
        """Compute the window's gradients; its mean loss over all ranks, shape (), fp64 without graph. ``None``: no micro-batch had one."""
        with torch.enable_grad():
            if not self._evaluated:
                self._finish_window(self._evaluate(*self._last))
            elif self._touched():
                self._repeat_window()
        return self.loss

    def _evaluate(self, batch: Any, index: int, share: Share, first: bool) -> Any:
        """Forward and backward pass of one micro-batch."""
        self.strategy.sync(self.models, share.last)
        call = self.phases.named("forward", self.call)
        outputs = call(batch, index) if share.size else run_for_matching(self.run, call, batch, index)
        if first and self.zeroes_first:
            self._zero(index)
        self.backward_from(outputs)
        return outputs

    def _finish_window(self, outputs: Any) -> None:
        """All gradients of the window are complete: make them readable, and compute their loss."""
        engine = self.run.engine
        self.outputs, self._evaluated, self._clipped, self.loss = outputs, True, False, None
        self._fed = engine.window.fed or engine.window_has_loss()
        if not self._fed:
            return
        engine.unscale_gradients(self.optimizers)
        total = engine.window.state_of(self.optimizers[0].optimizer).total
        if self._held and (engine.scaler is not None or total is not None):
            raise RuntimeError(
                f"{type(self.run.module).__name__}.optimizer_zero_grad did not clear an earlier step's gradients, and this step's are "
                "still to be divided (fp16, Loss(sum, count) or a micro-batch without loss): call optimizer.zero_grad(), or return a scalar "
                "loss in fp32 or bf16"
            )
        value = (
            torch.zeros((), dtype=accelerator.wide(engine.device), device=engine.device)
            if self._summed.value is None
            else self._summed.value
        )
        mean = engine.strategy.sum(value) / engine.data_group.world_size
        self.loss = torch.as_tensor(mean if total is None else mean / total)
        if self._awaits_changes:
            self._mark = self._fingerprint()

    def _repeat_window(self) -> None:
        """Evaluate the whole window again, for gradients at the current parameters. Nothing is logged twice."""
        run, window, recorder = self.run, self.run.engine.window, self.run.logbook.recorder
        if not self.evaluates_again and not self._single:
            raise RuntimeError(
                "optimizer_closure() was called twice in one step with accumulate_grad_batches > 1, and the earlier micro-batches are not kept: "
                "call it once, set accumulate_grad_batches=1, or use an optimizer whose step(closure) has no default for closure"
            )
        if not self.zeroes_first:
            self._zero(self._window[0][1])
        self._summed.value, outputs = None, None
        with logging_nothing(run):
            for number, (batch, index, share) in enumerate(self._window):
                window.share, recorder.size, recorder.batch = share, share.size, batch
                outputs = self._evaluate(batch, index, share, number == 0)
        self._finish_window(outputs)

    @property
    def _awaits_changes(self) -> bool:
        """Whether an optimizer may change the parameters before it calls its closure for the first time; LBFGS does not."""
        return any(
            optimizer.needs_closure and not isinstance(optimizer.optimizer, LBFGS) for optimizer in self.optimizers
        )

    def _touched(self) -> bool:
        """Whether the existing gradients may belong to other parameters than the current ones."""
        if not self._fresh:
            return True
        self._fresh = False
        return self._awaits_changes and self._fingerprint() != self._mark

    def _fingerprint(self) -> list[Any]:
        """A fingerprint of parameters and gradients. Waits for the device."""
        parameters = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return [
            *torch.stack(norms([p.detach().to(accelerator.wide(p.device)) for p in parameters])).tolist(),
            *(id(p.grad) for p in parameters),
        ]

    # -- the step ---------------------------------------------------------------------------------------------------------------

    _fresh = False
    """The gradients of an evaluation, which the optimizer's first call of the closure need not repeat."""

    def apply(self, optimizer: ClosureOptimizer, closure: Callable[[], Any] | None) -> Any:
        """``optimizer.step(closure)``."""
        run, value = self.run, None
        if optimizer.needs_closure:
            return self._apply_inside(optimizer, closure or self.closure)
        if closure is not None:
            value = closure()
        elif not self._evaluated:
            self.closure()
        if self._fed:
            self._clip()
            limits = {} if self._apart else self._limits
            run.phases.named("optimizer", run.engine.step)([optimizer], then=self._verdicts.append, **limits)
        return value

    def _apply_inside(self, optimizer: ClosureOptimizer, closure: Callable[[], Any]) -> Any:
        """A step that may evaluate the closure several times."""
        if not self._evaluated:
            self.closure()
        if not self._fed:
            return None
        self._clip()
        self._fresh = True

        def exact() -> Any:
            value = closure()
            if value is None:
                raise ValueError(
                    f"{type(optimizer.optimizer).__name__} needs a loss of every batch, but training_step returned None"
                )
            self._clip()
            return value

        with self.phases.timed("optimizer"):
            value = optimizer.optimizer.step(exact)
        self._fresh = False
        self._verdicts.append(True)
        return value

    def _clip(self) -> None:
        """Once for each evaluation, for all optimizers: the hooks, and the clipping that does not happen within the step."""
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
        if self._apart:
            run.engine.finish_gradients(
                self.optimizers, inside=self.evaluates_again, **({} if self.clips else self._limits)
            )

    def _zero(self, index: int) -> None:
        run = self.run
        for optimizer in self.optimizers:
            for hook in run.hooks.on_before_zero_grad:
                hook(run, run.module, optimizer.optimizer)
            if self.zeroes_first:
                run.module.optimizer_zero_grad(run.epoch, index, optimizer.optimizer)
                optimizer._stepper.forget([optimizer.optimizer])
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
            self._held = bool(run.engine.strategy.norm(gradients) > 0) if gradients else False


@contextmanager
def logging_nothing(run: Run) -> Iterator[None]:
    """Discard what the module logs in the block, and what its torchmetrics objects see."""
    recorder = run.logbook.recorder
    size, batch = recorder.size, recorder.batch
    try:
        with run.logbook.silenced(), unchanged(run.module):
            yield
    finally:
        recorder.size, recorder.batch = size, batch


def refuse(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """Check that this run supports what the module overrides and its optimizers need.

    Raises:
        ValueError: it does not; the message says what to do.
    """
    engine, module = run.engine, run.module
    strategy, name = engine.strategy, type(engine.strategy).__name__
    for method in (*STEP_METHODS, "backward"):
        if overrides(module, method) and strategy.fused:
            raise ValueError(
                f"{type(module).__name__} overrides {method}, which cannot be called under {name}: it {strategy.fused}. "
                "Remove the method (learning rates: a scheduler; clipping: gradient_clip_val), or use strategy='ddp' or 'fsdp'"
            )
    inside = [type(o).__name__ for o in optimizers if needs_closure(o)]
    if not inside:
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
            f"{inside[0]} evaluates the loss inside its step (closure), which does not work with {reasons[0]}; "
            "use strategy='single' or 'ddp', precision='32-true' or 'bf16-mixed', one optimizer, or another optimizer"
        )
