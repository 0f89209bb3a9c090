"""Gradients that are divided and unscaled ahead of their step, each optimizer's by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.step import gradients
from engine.step.gradient_sync import GradientSync
from engine.step.scaler import Scaler
from engine.step.window import Window
from engine.utils.parameters import parameters_of


class EarlyGradients:
    """Divides and unscales gradients ahead of their step: for code that reads or clips them before it, for several optimizers, whose gradients
    have a divisor each, and under fp16.

    Args:
        window: the window whose end the step is.
        gradient_sync: how the ranks combine gradients.
        scaler: the loss scaler under fp16, or ``None``.
        optimizers: every optimizer of the engine.
    """

    def __init__(
        self, window: Window, gradient_sync: GradientSync, scaler: Scaler | None, optimizers: Sequence[Optimizer]
    ) -> None:
        self._window, self._gradient_sync, self._scaler, self._optimizers = window, gradient_sync, scaler, optimizers

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Unscale and divide the gradients of ``optimizers`` now, so that they can be read; the step does not do it again."""
        for optimizer in optimizers:
            state = self._window.state_of(optimizer)
            if id(optimizer) in state.ready:
                continue
            divisor = self._window.weights.close(state)
            flag: Tensor | None = None
            if self._scaler is not None or divisor is not None:
                state.altered = True
                grads = gradients.gradients(parameters_of([optimizer]))
                parts = self._gradient_sync.local(grads)
                if self._scaler is not None:
                    flag = self._scaler.unscale(optimizer, divisor, None if parts is grads else parts)
                elif divisor is not None:
                    gradients.divide(parts, divisor)
            state.ready[id(optimizer)] = flag

    def readable(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of ``parameters``, divided and unscaled."""
        ids = {id(p) for p in parameters}
        self.prepare([o for o in self._optimizers if any(id(p) in ids for p in parameters_of([o]))])
        return gradients.gradients(parameters)

    def named_norms(self, model: nn.Module, norm_type: float, optimizers: Sequence[Any]) -> dict[str, Tensor]:
        """The norm of each gradient of ``model``, divided and unscaled, by the parameter's name. Shapes ``()``, on the device.

        ``optimizers``: those whose parameters to include; if empty, all parameters are included.
        """
        chosen = {id(p) for p in parameters_of(optimizers)}
        named = {
            name: p
            for name, p in model.named_parameters()
            if p.grad is not None and (not optimizers or id(p) in chosen)
        }
        self.readable(list(named.values()))
        return self._gradient_sync.norms({name: gradients.gradients([p])[0] for name, p in named.items()}, norm_type)

    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the norm of these parameters' gradients. Return the norm before clipping, shape ``()``; ``None`` if it is known at the step only."""
        grads = self.readable(parameters)
        return gradients.clip_norm(
            self._gradient_sync.local(grads), self._gradient_sync.norm(grads, norm_type), max_norm, None
        )

    def clip_each_norm(
        self, parameters: Iterable[Tensor], limit: float, divisor: Tensor | float | None = None
    ) -> Tensor:
        """Divide gradients by ``divisor`` and clip the norm of each. Return the norm of all together between the two, shape ``()``."""
        grads = [next(iter(gradients.gradients([p])), None) for p in parameters]
        norms, norm = self._gradient_sync.norm_of_each(grads)
        present = [index for index, grad in enumerate(grads) if grad is not None]
        parts = self._gradient_sync.local([grad for grad in grads if grad is not None])
        if present:
            norms = norms if len(present) == len(grads) else torch.stack([norms[index] for index in present])
            gradients.clip_each_norm(parts, norms, limit, divisor)
        return norm if divisor is None else norm / divisor

    def clip_readable_norms(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the norm of each of these parameters' gradients, divided and unscaled. Return that of all together before clipping, shape ``()``."""
        self.readable(parameters)
        return self.clip_each_norm(parameters, limit)

    def clip_values(self, parameters: Sequence[Tensor], limit: float) -> None:
        """Clamp each element of the gradients of ``parameters`` to [-limit, limit]."""
        gradients.clip_values(self._gradient_sync.local(self.readable(parameters)), limit)

    def checked(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Prepare the gradients of ``optimizers``. Return 1.0 if some are not finite, else 0.0, shape ``()``; ``None``: that was not checked."""
        self.prepare(optimizers)
        flags = [flag for o in optimizers if (flag := self._window.state_of(o).ready[id(o)]) is not None]
        return torch.stack(flags).max() if flags else None

    def divisor_of(self, optimizers: Sequence[Optimizer]) -> Tensor | float | None:
        """The divisor of optimizers that may step by themselves. Each has its own, so the gradients of several optimizers are divided here."""
        divisors = [self._window.weights.close(self._window.state_of(optimizer)) for optimizer in optimizers]
        if len(divisors) == 1:
            return divisors[0]
        if any(divisor is not None for divisor in divisors):
            self.prepare(optimizers)
        return None
