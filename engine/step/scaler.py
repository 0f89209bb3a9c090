"""The loss scaler of fp16."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.utils import accelerator, torch_private


class Scaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose unscaling also divides by the window's weight, and that several optimizers share correctly. Another strategy may
    have an object with the same methods in its place: see :meth:`engine.strategies.base.Strategy.scaler`.

    The scale changes only while no optimizer holds gradients that were made with the old one: with
    ``backward(a); backward(b); a.step(); b.step()`` both are unscaled with the scale of their backward passes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device.type)
        self._step_flags: list[Tensor] = []
        """A flag (1.0: not finite) of each step since the scale was last adjusted."""
        self._used_gradients: dict[int, tuple[weakref.ref[Tensor], int] | None] = {}
        """By id of the optimizer: its first gradient in its latest step, and that gradient's version."""

    def seed(self, seed: Tensor) -> Tensor:
        """The scaled gradient of the loss itself, for ``loss.backward(seed)``. Shape ``()``."""
        scaled: Tensor = self.scale(seed)
        return scaled

    def unscale(
        self, optimizer: Optimizer, divisor: Tensor | float | None, parts: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Divide the optimizer's gradients by scale and ``divisor`` in one pass; return 1.0 if any of them is not finite, else 0.0, shape ``()``.

        ``parts``: this rank's shards of the gradients, which are divided instead of the gradients themselves.
        """
        if self._scale is None:  # no backward pass on this rank yet; others may have had one
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        inverse = self._scale.to(accelerator.wide(self._scale.device)).reciprocal()
        if divisor is not None:
            inverse = inverse / divisor
        nonfinite = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        if parts is not None:
            return _unscale_parts(parts, inverse.float(), nonfinite)
        devices = self._unscale_grads_(optimizer, inverse.float(), nonfinite, False)
        for flag in devices.values():
            if flag is not nonfinite:
                nonfinite += flag.to(nonfinite.device, non_blocking=True)
        return nonfinite

    def stepped(self, optimizers: Iterable[Optimizer], nonfinite: Tensor, all_optimizers: Iterable[Optimizer]) -> None:
        """Record the outcome of a step of ``optimizers``; adjust the scale as soon as no other optimizer holds scaled gradients."""
        stepped_ids = set()
        for optimizer in optimizers:
            stepped_ids.add(id(optimizer))
            self._step_flags.append(nonfinite)
            grad = _first_grad(optimizer)
            self._used_gradients[id(optimizer)] = None if grad is None else (weakref.ref(grad), grad._version)
        if any(self._has_unused_gradients(other) for other in all_optimizers if id(other) not in stepped_ids):
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        nonfinite = torch.stack([flag.to(scale.device) for flag in self._step_flags]).max()
        torch_private.update_scale(
            scale, tracker, nonfinite, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        self._step_flags.clear()

    def state_dict(self) -> dict[str, Any]:
        """State of the scaler; its two tensors are copied on the device, because reading their values would wait for it during a save."""
        if self._scale is None:
            return super().state_dict()
        scale, tracker = self._check_scale_growth_tracker("state_dict")
        return {
            "scale": scale.clone(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": tracker.clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {"scale": float(state_dict["scale"]), "_growth_tracker": int(state_dict["_growth_tracker"])}
        super().load_state_dict({**state_dict, **numbers})

    def _has_unused_gradients(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has gradients that it has not stepped with (loops that call ``zero_grad`` first keep stepped ones till then)."""
        grad = _first_grad(optimizer)
        used = self._used_gradients.get(id(optimizer))
        return grad is not None and (used is None or used[0]() is not grad or used[1] != grad._version)


@torch.no_grad()
def _unscale_parts(parts: Iterable[Tensor], inverse: Tensor, nonfinite: Tensor) -> Tensor:
    """Multiply shards by ``inverse`` in place; return ``nonfinite``, raised to 1.0 if any of them is not finite."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), group in groups.items():
        flag = nonfinite.to(device, copy=True)
        torch_private.unscale(group, flag, inverse.to(device))
        nonfinite = torch.maximum(nonfinite, flag.to(nonfinite.device))
    return nonfinite


def _first_grad(optimizer: Optimizer) -> Tensor | None:
    return next((p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)
