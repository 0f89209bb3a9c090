"""The optimizer step of strategies that do it by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from engine.step.early_gradients import EarlyGradients
from engine.step.gradient_sync import GradientSync
from engine.step.optimizer_step import Stepper
from engine.step.scaler import Scaler
from engine.step.verdicts import Guard, Then
from engine.step.window import Window


class OwnsStep(GradientSync):
    """A strategy that divides, clips, checks and applies gradients by itself: :class:`engine.strategies.deepspeed.strategy.DeepSpeed`."""

    def step(
        self,
        optimizers: Sequence[Any],
        divisor: Tensor | float | None,
        max_norm: float | None,
        max_value: float | None,
        checked: bool,
    ) -> tuple[Tensor | None, bool]:
        """Divide, clip and apply the gradients; return their norm before clipping (``None``: not known) and whether the step was applied.

        ``checked``: whether a step whose norm is not finite must be skipped.
        """
        raise NotImplementedError

    def clip_at_step(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> None:
        """Clip the norm of these parameters' gradients in the next step."""
        raise NotImplementedError


class OwnedGradients(EarlyGradients):
    """The gradients of strategies that own the step: what can be done with them ahead of it."""

    def __init__(
        self, window: Window, strategy: OwnsStep, scaler: Scaler | None, optimizers: Sequence[Optimizer]
    ) -> None:
        super().__init__(window, strategy, scaler, optimizers)
        self.strategy = strategy

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Do nothing: gradients are readable only inside the step."""

    def readable(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        raise ValueError(
            f"grad_norms() under {type(self.strategy).__name__}, which keeps its gradients to itself: after a step with clipping, "
            "engine.grad_norm has the whole's"
        )

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Pass the limit to the strategy, which clips in its step; the norm is known after that."""
        self.strategy.clip_at_step(parameters, max_norm, norm_type)
        return None

    def clip_readable_norms(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        raise ValueError(
            f"clip_grad_norm_per_parameter_ under {type(self.strategy).__name__}, which clips the global norm only: use clip_grad_norm_"
        )

    def clip_values(self, parameters: Sequence[Tensor], limit: float) -> None:
        raise ValueError(
            f"clip_grad_value_ under {type(self.strategy).__name__}, which clips by norm only: use clip_grad_norm_"
        )


class OwnedStepper(Stepper):
    """The stepper of strategies that divide, clip, check and apply gradients in one call of their own."""

    def __init__(self, window: Window, strategy: OwnsStep, scaler: Scaler | None, on_nonfinite: str | None) -> None:
        super().__init__(window, strategy, scaler, on_nonfinite)
        self.strategy = strategy
        self.verdicts = self.new_verdicts()

    @cached_property
    def early(self) -> OwnedGradients:
        return OwnedGradients(self.window, self.strategy, self.scaler, self.optimizers)

    def check_closure(self) -> None:
        name = type(self.strategy).__name__
        raise RuntimeError(f"optimizer.step(closure) under {name}, which steps by itself: omit it")

    def guard_by(self, guard: Guard | None) -> None:
        raise ValueError(
            f"{type(self.strategy).__name__} steps by itself: whether a step is applied cannot be decided for it"
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
        """Clip, check and apply the gradients by the strategy's own step; see :meth:`Stepper.step`."""
        verdicts = self.verdicts
        assert verdicts is not None
        if max_parameter_norm is not None:
            raise ValueError(
                f"{type(self.strategy).__name__} clips the global norm only, not that of each parameter (norm_per_parameter)"
            )
        self.call_before()
        divisor = self.window.weights.close(self.window.state_of(optimizers[0]))
        self.norm, applied = self.strategy.step(optimizers, divisor, max_norm, max_value, self.on_nonfinite is not None)
        if not applied and self.on_nonfinite == "raise" and self.scaler is None:
            verdicts.fail()
        verdicts.decide(applied, optimizers, [] if then is None else [then])
