"""The optimizer step: finish the gradients in as few passes as possible, check that they are finite, apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.step import gradients
from engine.step.early_gradients import EarlyGradients
from engine.step.gradient_sync import GradientSync
from engine.step.scaler import Scaler
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.parameters import parameters_of, uncompiled

Optimizers = Sequence[Any]
"""Optimizers, prepared or not."""
Then = Callable[[bool], None]
"""A function that is called with whether a step was applied, once known: in a run :meth:`engine.loop.optimization.Optimization.applied`."""


class Guard(Protocol):
    """Decides on the device whether a step is left out, as :class:`callbacks.SpikeGuard` does."""

    def check(self, norm: Tensor) -> Tensor:
        """Return 1.0 to leave this step out, 0.0 to apply it; computed on the device, the same on all ranks. Shape ``()``, fp32.

        ``norm``: the global norm of the step's gradients before clipping, shape ``()``.
        """

    def left_out(self) -> None:
        """Called after a step was left out because of :meth:`check`, once that is known, on all ranks at the same step."""


class Stepper:
    """Steps optimizers whose gradients one :class:`Window` accumulates.

    A step is skipped when a gradient is not finite: always under fp16's scaler, otherwise if ``on_nonfinite`` says so. On the CPU the
    verdict is known at once. On a device, with optimizers that skip by themselves (fused ones), the host does not wait for the verdict:
    it is read at the next step, after that step's kernels are queued, or by :meth:`await_verdicts`.

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
        self.skipped = False
        """Whether the latest step with a known verdict was skipped."""
        self.before_next: list[Callable[[], None]] = []
        """Functions to call once, before the next step, such as ``CheckpointWriter.hold``."""
        self.guard: Guard | None = None
        """An additional judge of each step; see :meth:`guard_by`."""
        self._pending: list[tuple[Tensor, Any, list[Then]]] = []
        """Steps without a verdict yet: flags in host memory, the event after which they can be read, and functions to call then."""

    @property
    def pending(self) -> int:
        """The number of steps whose verdict is not known yet."""
        return len(self._pending)

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
        """Let ``guard`` decide about each :meth:`step` from now on. A step with non-finite gradients is still the matter of the scaler or
        ``on_nonfinite``, if one is set, and does not count as left out by the guard.

        Raises:
            ValueError: the strategy owns the step, or there is another guard already.
        """
        if guard is not None and self.guard is not None and guard is not self.guard:
            raise ValueError(f"{type(self.guard).__name__} decides already whether steps are applied: give one guard")
        self.guard = guard

    def leave(self) -> None:
        """Release all optimizers."""
        self.guard = None
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
        then: Then | None = None,
    ) -> None:
        """Divide by the window's weight, clip, check and apply the gradients of ``optimizers``.

        Args:
            optimizers: the optimizers to step together on one loss; all of them step or none.
            max_norm: clip the global 2-norm of all their gradients to this.
            max_value: clip each element to [-max_value, max_value].
            then: a function to call with whether the step was applied, as soon as that is known.
        """
        if self._pending:
            self.await_verdicts()
        if self.before_next:
            self.call_before()
        weights = self.window.weights
        divisor = weights.close(weights.state) if weights.reach is None else self.early.divisor_of(optimizers)
        if (
            self.scaler is None
            and max_norm is None
            and max_value is None
            and self.on_nonfinite is None
            and divisor is None
            and self.guard is None
        ):
            for optimizer in optimizers:
                optimizer.step()
            self.skipped = False
            for state in weights.states:
                state.altered = False
            if then is not None:
                then(True)
            return
        nonfinite = self._finish(optimizers, divisor, max_norm, max_value)
        guarded: Tensor | None = None
        if self.guard is not None:
            assert self.norm is not None
            guarded = self.gradient_sync.agree(self.guard.check(self.norm))
            guarded = guarded if nonfinite is None else guarded * (1.0 - nonfinite)
        self._apply(optimizers, nonfinite, guarded, then)

    def finish(
        self,
        optimizers: Sequence[Optimizer],
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
    ) -> None:
        """Divide, clip and check the gradients of ``optimizers`` together, ahead of their steps, which do not repeat it."""
        nonfinite = self._finish(optimizers, self.early.divisor_of(optimizers), max_norm, max_value)
        for optimizer in optimizers:
            state = self.window.state_of(optimizer)
            state.ready[id(optimizer)], state.altered = nonfinite, True

    def finish_inside(
        self, optimizers: Sequence[Optimizer], *, max_norm: float | None = None, max_value: float | None = None
    ) -> None:
        """Divide, clip and check the gradients within an optimizer's step, after an evaluation of its closure: the optimizer uses them at once.

        Raises:
            FloatingPointError: a gradient is not finite, because such a step cannot be skipped.
        """
        nonfinite = self._finish(optimizers, self.early.divisor_of(optimizers), max_norm, max_value)
        self.call_before()
        for optimizer in optimizers:
            self.window.state_of(optimizer).cleared()
        if nonfinite is not None and bool(nonfinite):  # waits for the device, as such an optimizer does
            self._fail()

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
    ) -> Tensor | None:
        """Run all passes over the gradients; return a flag (1.0: some gradient is not finite) if one is needed."""
        nonfinite: Tensor | None = None
        states = [self.window.state_of(optimizer) for optimizer in optimizers]
        if self.scaler is not None or any(id(o) in s.ready for o, s in zip(optimizers, states, strict=True)):
            nonfinite, divisor = self.early.checked(optimizers), None
        grads = gradients.gradients(parameters_of(optimizers))
        parts = self.gradient_sync.local(grads)
        checks = self.on_nonfinite is not None and self.scaler is None and nonfinite is None
        if max_norm is not None or checks or self.guard is not None:
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

    def _apply(
        self, optimizers: Sequence[Optimizer], nonfinite: Tensor | None, guarded: Tensor | None, then: Then | None
    ) -> None:
        """Step unless ``nonfinite`` or ``guarded`` (the guard leaves the step out) is 1.0."""
        flag = nonfinite if guarded is None else guarded if nonfinite is None else nonfinite + guarded
        on_device = (
            flag is not None and accelerator.defers(flag.device) and all(accelerator.skips_steps(o) for o in optimizers)
        )
        skip = flag is not None and not on_device and bool(flag)  # waits for the device if it is there
        if skip and self.on_nonfinite == "raise" and self.scaler is None and bool(nonfinite):
            self._fail()
        for optimizer in optimizers:
            if on_device:
                optimizer.found_inf = flag  # type: ignore[attr-defined]
                if not hasattr(optimizer, "grad_scale"):
                    optimizer.grad_scale = None  # type: ignore[attr-defined]
            if not skip:
                optimizer.step()
            for name in ("found_inf", "grad_scale"):
                optimizer.__dict__.pop(name, None)
            self.window.state_of(optimizer).altered = False
        if self.scaler is not None:
            assert nonfinite is not None
            self.scaler.stepped(optimizers, nonfinite, self.optimizers)
        callbacks = [] if then is None else [then]
        if on_device:
            assert flag is not None
            flags = flag if guarded is None else torch.stack([flag, guarded])
            host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.Event(flags.device)
            event.record()
            self._pending.append((host, event, callbacks))
        else:
            self._decide(not skip, callbacks, skip and guarded is not None and bool(guarded))

    def await_verdicts(self) -> None:
        """Wait for the pending verdicts, and call the functions that wait for them."""
        while self._pending:
            host, event, callbacks = self._pending.pop(0)
            event.synchronize()
            flags = host.reshape(-1).tolist()  # [was the step skipped, with a guard: did the guard skip it]
            applied, guarded = not flags[0], len(flags) > 1 and bool(flags[1])
            if not applied and not guarded and self.on_nonfinite == "raise" and self.scaler is None:
                self._fail()
            self._decide(applied, callbacks, guarded)

    def after(self, then: Then) -> None:
        """Call ``then`` with the latest step's verdict, now or when it is known."""
        if self._pending:
            self._pending[-1][2].append(then)
        else:
            then(not self.skipped)

    def _decide(self, applied: bool, callbacks: list[Then], guarded: bool = False) -> None:
        """Record the verdict on a step, and call the functions that wait for it."""
        self.skipped = not applied
        for then in callbacks:
            then(applied)
        if guarded and self.guard is not None:
            self.guard.left_out()

    def _where_nonfinite(self) -> str:
        """The names of parameters whose gradients are not finite, as the end of a message. Waits for the device."""
        modules = [uncompiled(self.gradient_sync.unwrap(model)) for model in self.window.models]
        named = (pair for module in modules for pair in module.named_parameters())
        names = gradients.where_nonfinite(named, self.gradient_sync.local)
        return f"; first in: {', '.join(names[:5])}" if names else ""

    def _fail(self) -> None:
        raise FloatingPointError(
            f"a gradient is not finite (on_nonfinite='raise'){self._where_nonfinite()}; the parameters are those from before this step. "
            "Lower the learning rate, set gradient_clip_val, look at the batch, or continue with on_nonfinite='skip'"
        )
