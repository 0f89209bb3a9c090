"""The optimizer step: finish the gradients in as few passes as possible, and apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.step import gradients
from engine.step.early_gradients import EarlyGradients
from engine.step.gradient_sync import GradientSync
from engine.step.scaler import Scaler
from engine.step.skipped_steps import SkippedSteps
from engine.step.verdicts import Guard, NonFiniteStep, Then, Verdicts
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.parameters import parameters_of

Optimizers = Sequence[Any]
"""Optimizers, prepared or not."""


class Stepper:
    """Steps optimizers whose gradients one :class:`Window` accumulates.

    Every step is applied, unless fp16's scaler, ``on_nonfinite`` or a guard is there to decide about it (:class:`Verdicts`).

    A strategy that owns the step (``Strategy.stepper``) has :class:`engine.strategies.owned_step.OwnedStepper` in its place.
    """

    def __init__(
        self, window: Window, gradient_sync: GradientSync, scaler: Scaler | None, on_nonfinite: str | None
    ) -> None:
        self.window, self.gradient_sync, self.scaler, self.on_nonfinite = window, gradient_sync, scaler, on_nonfinite
        self.optimizers: list[Optimizer] = []
        """Every optimizer of this engine."""
        self.norm: Tensor | None = None
        """The global norm of the latest step's gradients before clipping; ``None`` when it was not needed. Shape ``()``."""
        self.before_next: list[Callable[[], None]] = []
        """Functions to call once, before the next step, such as ``CheckpointWriter.hold``."""
        self.skips = SkippedSteps()
        """Counts the steps that were skipped because a gradient was not finite."""
        self.verdicts = None if scaler is None and on_nonfinite is None else self.new_verdicts()
        """Decides which steps are applied; ``None``: all of them are."""

    def new_verdicts(self) -> Verdicts:
        """Create the object that decides which steps are applied."""
        return Verdicts(self.window, self.gradient_sync, self.scaler, self.on_nonfinite, self.optimizers, self.skips)

    @property
    def pending(self) -> int:
        """The number of steps whose verdict is not known yet."""
        return 0 if self.verdicts is None else len(self.verdicts.pending)

    @property
    def failure(self) -> NonFiniteStep | None:
        """The step with gradients that are not finite which ended the training; ``None``: there is none."""
        return None if self.verdicts is None else self.verdicts.failure

    @property
    def skipped(self) -> bool:
        """Whether the latest step with a known verdict was skipped."""
        return self.verdicts is not None and self.verdicts.skipped

    @cached_property
    def early(self) -> EarlyGradients:
        """Finishes gradients ahead of their step; created when first used, because most trainings do not do that."""
        return EarlyGradients(self.window, self.gradient_sync, self.scaler, self.optimizers)

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, unless it was added before."""
        if not any(optimizer is stepped for stepped in self.optimizers):
            self.optimizers.append(optimizer)
            self.window.add(optimizer)
            # Asks the device now, because doing so in the first step would wait for it.
            accelerator.skips_steps(optimizer)

    def guard_by(self, guard: Guard | None) -> None:
        """Let ``guard`` decide about each :meth:`step` from now on; see :meth:`Verdicts.guard_by`.

        Raises:
            ValueError: the strategy owns the step, or there is another guard already.
        """
        if self.verdicts is None and guard is not None:
            self.verdicts = self.new_verdicts()
        if self.verdicts is not None:
            self.verdicts.guard_by(guard)

    def leave(self) -> None:
        """Release all optimizers."""
        if self.verdicts is not None:
            self.verdicts.guard = None
        self.optimizers.clear()
        self.window.leave()

    def check_closure(self) -> None:
        """Raise ``RuntimeError`` if optimizers cannot step with a closure, as under fp16's scaler."""
        if self.scaler is not None:
            raise RuntimeError(
                "optimizer.step(closure) under precision='16-mixed': gradients cannot be unscaled inside the closure; use bf16-mixed"
            )

    def step(
        self,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        max_parameter_norm: float | None = None,
        then: Then | None = None,
    ) -> None:
        """Divide by the window's weight, clip, check and apply the gradients of ``optimizers``.

        Args:
            optimizers: the optimizers to step together on one loss; all of them step or none.
            max_norm: clip the global 2-norm of all their gradients to this.
            max_value: clip each element to [-max_value, max_value].
            max_parameter_norm: clip the 2-norm of each gradient to this.
            then: a function to call with whether the step was applied, as soon as that is known.
        """
        verdicts = self.verdicts
        if verdicts is not None and verdicts.pending:
            verdicts.await_pending()
        if self.before_next:
            self.call_before()
        weights = self.window.weights
        divisor = weights.close(weights.state) if weights.reach is None else self.early.divisor_of(optimizers)
        if (
            verdicts is None
            and divisor is None
            and max_norm is None
            and max_value is None
            and max_parameter_norm is None
        ):
            for optimizer in optimizers:
                optimizer.step()
            for state in weights.states:
                state.altered = False
            if then is not None:
                then(True)
            return
        nonfinite = self._finish(optimizers, divisor, max_norm, max_value, max_parameter_norm)
        if verdicts is not None:
            verdicts.apply(optimizers, self.norm, nonfinite, then)
            return
        for optimizer in optimizers:
            optimizer.step()
            for name in ("found_inf", "grad_scale"):
                optimizer.__dict__.pop(name, None)
            self.window.state_of(optimizer).altered = False
        if then is not None:
            then(True)

    def finish(
        self,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        max_parameter_norm: float | None = None,
    ) -> None:
        """Divide, clip and check the gradients of ``optimizers`` together, ahead of their steps, which do not repeat it."""
        nonfinite = self._finish(optimizers, self.early.divisor_of(optimizers), max_norm, max_value, max_parameter_norm)
        for optimizer in optimizers:
            state = self.window.state_of(optimizer)
            state.ready[id(optimizer)], state.altered = nonfinite, True

    def finish_inside(
        self,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        max_parameter_norm: float | None = None,
    ) -> None:
        """Divide, clip and check the gradients within an optimizer's step, after an evaluation of its closure: the optimizer uses them at once.

        Raises:
            FloatingPointError: a gradient is not finite, because such a step cannot be skipped.
        """
        nonfinite = self._finish(optimizers, self.early.divisor_of(optimizers), max_norm, max_value, max_parameter_norm)
        self.call_before()
        for optimizer in optimizers:
            self.window.state_of(optimizer).cleared()
        if nonfinite is not None and bool(nonfinite):  # waits for the device, as such an optimizer does
            assert self.verdicts is not None
            self.verdicts.fail()

    def await_verdicts(self) -> None:
        """Wait for the pending verdicts, and call the functions that wait for them."""
        if self.verdicts is not None:
            self.verdicts.await_pending()

    def after(self, then: Then) -> None:
        """Call ``then`` with the latest step's verdict, now or when it is known."""
        if self.verdicts is None:
            then(True)
        else:
            self.verdicts.after(then)

    def before_step(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, before the next optimizer step; see :meth:`engine.Engine.before_step`."""
        if function not in self.before_next:
            self.before_next.append(function)

    def call_before(self) -> None:
        """Call the functions that wait for the next step; code that changes parameters in other ways calls this first."""
        functions, self.before_next = self.before_next, []
        for function in functions:
            function()

    def _finish(
        self,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | float | None,
        max_norm: float | None,
        max_value: float | None,
        max_parameter_norm: float | None,
    ) -> Tensor | None:
        """Run all passes over the gradients; return a flag (1.0: some gradient is not finite) if one is needed."""
        nonfinite: Tensor | None = None
        states = [self.window.state_of(optimizer) for optimizer in optimizers]
        if self.scaler is not None or any(id(o) in s.ready for o, s in zip(optimizers, states, strict=True)):
            nonfinite, divisor = self.early.checked(optimizers), None
        grads = gradients.gradients(parameters_of(optimizers))
        parts = self.gradient_sync.local(grads)
        checks = self.on_nonfinite is not None and self.scaler is None and nonfinite is None
        if max_parameter_norm is not None:
            self.norm = self.early.clip_each_norm(parameters_of(optimizers), max_parameter_norm, divisor)
            divisor, nonfinite = None, (~self.norm.isfinite()).float() if checks else nonfinite
        elif max_norm is not None or checks or (self.verdicts is not None and self.verdicts.guard is not None):
            norm = self.gradient_sync.norm(grads)
            if max_norm is not None:
                self.norm, divisor = gradients.clip_norm(parts, norm, max_norm, divisor), None
            else:
                self.norm = norm if divisor is None else norm / divisor
            if checks:
                nonfinite = (~self.norm.isfinite()).float()
        if divisor is not None and not self._fold(optimizers, divisor, nonfinite, max_value):
            gradients.divide(parts, divisor)
        if max_value is not None:
            gradients.clip_values(parts, max_value)
        return None if nonfinite is None else self.gradient_sync.agree(nonfinite)

    def _fold(
        self,
        optimizers: Sequence[Optimizer],
        divisor: Tensor | float,
        nonfinite: Tensor | None,
        max_value: float | None,
    ) -> bool:
        """Let a fused optimizer divide inside its kernel instead of in another pass."""
        if (
            max_value is not None
            or not isinstance(divisor, Tensor)
            or not all(accelerator.skips_steps(o) for o in optimizers)
        ):
            return False
        if any(p.dtype == torch.float64 for p in parameters_of(optimizers)):
            return False  # fused kernels take the factor as fp32
        for optimizer in optimizers:
            optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
            if nonfinite is None:
                optimizer.found_inf = torch.zeros((), device=divisor.device)  # type: ignore[attr-defined]
        return True
