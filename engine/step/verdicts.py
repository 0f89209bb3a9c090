"""The verdicts on optimizer steps, which fp16, ``on_nonfinite`` and guards may leave out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.step import gradients
from engine.step.gradient_sync import GradientSync
from engine.step.scaler import Scaler
from engine.step.skipped_steps import SMALLEST_SCALE, SkippedSteps
from engine.step.window import Window
from engine.utils import accelerator
from engine.utils.parameters import uncompiled

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


@dataclass(frozen=True)
class NonFiniteStep:
    """The error of a step whose gradients are not finite, in parts, between which a run puts its position."""

    error: FloatingPointError
    problem: str
    consequence: str
    at_once: bool
    """Whether the step is still in progress; with a verdict that is known later, the next one has begun."""


class Verdicts:
    """Decides which steps are applied.

    A step is skipped when a gradient is not finite: always under fp16's scaler, otherwise if ``on_nonfinite`` says so; a guard may leave out others.
    On the CPU the verdict is known at once. On a device, with optimizers that skip by themselves (fused ones), the host does not wait for the
    verdict: it is read at the next step, after that step's kernels are queued, or by :meth:`await_pending`.

    Args:
        window: the window whose end the steps are.
        gradient_sync: how the ranks combine gradients.
        scaler: the loss scaler under fp16, or ``None``.
        on_nonfinite: ``"raise"``, ``"skip"`` or ``None``, as for :class:`engine.Engine`.
        optimizers: every optimizer of the engine.
        skips: counts the steps that are skipped because a gradient is not finite.
    """

    def __init__(
        self,
        window: Window,
        gradient_sync: GradientSync,
        scaler: Scaler | None,
        on_nonfinite: str | None,
        optimizers: Sequence[Optimizer],
        skips: SkippedSteps,
    ) -> None:
        self._window, self._gradient_sync, self._scaler = window, gradient_sync, scaler
        self._on_nonfinite, self._optimizers, self._skips = on_nonfinite, optimizers, skips
        self.guard: Guard | None = None
        """An additional judge of each step; see :meth:`guard_by`."""
        self.failure: NonFiniteStep | None = None
        """The error that :meth:`fail` has raised."""
        self.skipped = False
        """Whether the latest step with a known verdict was skipped."""
        self.pending: list[tuple[Tensor, Any, list[Then], Sequence[Optimizer]]] = []
        """Steps without a verdict yet: flags in host memory, the event after which they can be read, functions to call then, and the optimizers."""

    def guard_by(self, guard: Guard | None) -> None:
        """Let ``guard`` decide about each step from now on. A step with non-finite gradients is still the matter of the scaler or
        ``on_nonfinite``, if one is set, and does not count as left out by the guard.

        Raises:
            ValueError: there is another guard already.
        """
        if guard is not None and self.guard is not None and guard is not self.guard:
            raise ValueError(f"{type(self.guard).__name__} decides already whether steps are applied: give one guard")
        self.guard = guard

    def apply(
        self, optimizers: Sequence[Optimizer], norm: Tensor | None, nonfinite: Tensor | None, then: Then | None
    ) -> None:
        """Step, unless a gradient is not finite or the guard leaves the step out.

        Args:
            norm: the global norm of the gradients before clipping, shape ``()``, for the guard.
            nonfinite: 1.0 if a gradient is not finite, else 0.0, the same on all ranks, shape ``()``; ``None``: that was not checked.
            then: a function to call with whether the step was applied, as soon as that is known.
        """
        guarded: Tensor | None = None
        if self.guard is not None:
            assert norm is not None
            guarded = self._gradient_sync.agree(self.guard.check(norm))
            guarded = guarded if nonfinite is None else guarded * (1.0 - nonfinite)
        flag = nonfinite if guarded is None else guarded if nonfinite is None else nonfinite + guarded
        on_device = (
            flag is not None and accelerator.defers(flag.device) and all(accelerator.skips_steps(o) for o in optimizers)
        )
        skip = flag is not None and not on_device and bool(flag)  # waits for the device if it is there
        if skip and self._on_nonfinite == "raise" and self._scaler is None and bool(nonfinite):
            self.fail()
        for optimizer in optimizers:
            if on_device:
                optimizer.found_inf = flag  # type: ignore[attr-defined]
                if not hasattr(optimizer, "grad_scale"):
                    optimizer.grad_scale = None  # type: ignore[attr-defined]
            if not skip:
                optimizer.step()
            for name in ("found_inf", "grad_scale"):
                optimizer.__dict__.pop(name, None)
            self._window.state_of(optimizer).altered = False
        if self._scaler is not None:
            assert nonfinite is not None
            self._scaler.stepped(optimizers, nonfinite, self._optimizers)
        callbacks = [] if then is None else [then]
        if on_device:
            assert flag is not None
            flags = flag if guarded is None else torch.stack([flag, guarded])
            host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
            event = torch.Event(flags.device)
            event.record()
            self.pending.append((host, event, callbacks, optimizers))
        else:
            self.decide(not skip, optimizers, callbacks, skip and guarded is not None and bool(guarded))

    def await_pending(self) -> None:
        """Wait for the pending verdicts, and call the functions that wait for them."""
        while self.pending:
            host, event, callbacks, optimizers = self.pending.pop(0)
            event.synchronize()
            flags = host.reshape(-1).tolist()  # [was the step skipped, with a guard: did the guard skip it]
            applied, guarded = not flags[0], len(flags) > 1 and bool(flags[1])
            if not applied and not guarded and self._on_nonfinite == "raise" and self._scaler is None:
                self.fail(at_once=False)
            self.decide(applied, optimizers, callbacks, guarded, at_once=False)

    def after(self, then: Then) -> None:
        """Call ``then`` with the latest step's verdict, now or when it is known."""
        if self.pending:
            self.pending[-1][2].append(then)
        else:
            then(not self.skipped)

    def decide(
        self,
        applied: bool,
        optimizers: Sequence[Optimizer],
        callbacks: list[Then],
        guarded: bool = False,
        at_once: bool = True,
    ) -> None:
        """Record the verdict on a step of ``optimizers``, and call the functions that wait for it.

        Args:
            applied: whether the step was applied.
            guarded: whether the guard left it out.
            at_once: whether the gradients are still those of this step.

        Raises:
            FloatingPointError: too many steps in a row were skipped because a gradient was not finite.
        """
        self.skipped = not applied
        for then in callbacks:
            then(applied)
        if applied:
            if self._skips.in_a_row:
                self._skips.applied(optimizers)
        elif guarded and self.guard is not None:
            self.guard.left_out()
        else:
            self._count_skip(optimizers, at_once)

    def _count_skip(self, optimizers: Sequence[Optimizer], at_once: bool) -> None:
        """Count a step that was skipped because a gradient is not finite; tell the first one, and fail when too many follow each other."""
        skips = self._skips
        in_a_row = skips.add(optimizers)
        rule = "on_nonfinite='skip'" if self._scaler is None else "fp16, whose loss scale is lowered now"
        if not skips.is_told:
            skips.warn_of_first(rule, self._where_nonfinite() if at_once else "")
        if skips.limit is None or in_a_row < skips.limit:
            return
        scale = None if self._scaler is None else self._scaler.get_scale()
        if scale is not None and scale > SMALLEST_SCALE:
            return
        at_scale = "" if scale is None else f", the last one at the loss scale {scale:g}"
        raise FloatingPointError(
            f"{in_a_row} optimizer steps in a row were skipped (max_skipped_steps={skips.limit}), because a gradient was not finite in each of "
            f"them{at_scale}{self._where_nonfinite() if at_once else ''}; the parameters are those from before these steps. Look at the data, the "
            "loss (log(0), a division by 0) and the learning rate; detect_anomaly=True finds the operation"
        )

    def _where_nonfinite(self) -> str:
        """The names of parameters whose gradients are not finite, as the end of a message. Waits for the device."""
        modules = [uncompiled(self._gradient_sync.unwrap(model)) for model in self._window.models]
        named = (pair for module in modules for pair in module.named_parameters())
        names = gradients.where_nonfinite(named, self._gradient_sync.local)
        return f"; first in: {', '.join(names[:5])}" if names else ""

    def fail(self, at_once: bool = True) -> NoReturn:
        """Raise the error of a step whose gradients are not finite. ``at_once``: as in :meth:`decide`."""
        problem = "a gradient is not finite (on_nonfinite='raise')"
        consequence = (
            f"{self._where_nonfinite()}; the parameters are those from before this step. Lower the learning rate, set gradient_clip_val, look at "
            "the batch, or continue with on_nonfinite='skip'"
        )
        error = FloatingPointError(f"{problem}{consequence}")
        self.failure = NonFiniteStep(error, problem, consequence, at_once)
        raise error
