"""Number formats: the dtypes of parameters, inputs and computations, and the loss scaler of fp16."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.config.masked import fields_of
from engine.config.named_options import NamedOptions
from engine.config.settings import checked_setting
from engine.config.typed_values import construct
from engine.transforms.float8 import FP8
from engine.utils import accelerator, torch_private
from engine.utils.errors import nearest
from engine.utils.tree import formats


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of a training.

    ``*-mixed``: parameters and gradients stay fp32, the forward pass runs under ``torch.autocast``.
    ``*-true``: parameters, buffers, gradients, floating point inputs and optimizer state have that dtype. Complex ones are ``complex64``,
    and ``complex128`` under ``64-true``. The states of torchmetrics objects stay as they are.
    ``fp8-mixed``: ``bf16-mixed`` with the matrix products of linear layers in fp8, see :class:`engine.FP8`.
    """

    name: str
    """Name of the precision: ``"bf16-mixed"``."""
    autocast: torch.dtype | None = None
    """The dtype that autocast computes in; ``None`` without autocast."""
    parameters: torch.dtype | None = None
    """The dtype of parameters and floating point inputs; ``None`` leaves them unchanged."""
    scaled: bool = False
    """Whether the loss is scaled: fp16 gradients below 6e-8 would vanish otherwise."""
    fp8: FP8 | None = None
    """How linear layers compute in fp8; ``None`` without fp8."""

    def __str__(self) -> str:
        return self.name if self.fp8 in (None, FP8()) else f"{self.name} by {self.fp8}"

    def describe(self) -> str | dict[str, Any]:
        """The precision as written into a file: its name, or a dict with fp8's settings if any are set."""
        return self.name if self.fp8 in (None, FP8()) else fields_of(self.fp8, self.name)

    @classmethod
    def parse(cls, name: str | int | Mapping[str, Any] | NamedOptions | Precision | FP8) -> Precision:
        """The precision of a name (Lightning's names, and Accelerate's ``no``, ``bf16``, ``fp16`` and ``fp8``).

        ``{"name": "fp8-mixed", "recipe": "rowwise"}`` has settings of :class:`engine.FP8`.

        Raises:
            ValueError: an unknown name or setting; the message lists the known ones.
            TypeError: another type.
        """
        if isinstance(name, (Mapping, NamedOptions)):
            name = checked_setting("precision", name)
            if isinstance(name, NamedOptions):
                name = construct("precision", name, FP8)
        if isinstance(name, Precision):
            return name
        if isinstance(name, FP8):
            return cls("fp8-mixed", autocast=torch.bfloat16, fp8=name)
        if not isinstance(name, (str, int)):
            raise TypeError(f"precision={name!r} must be a name, an FP8 or a Precision object")
        key = _ALIASES.get(str(name), str(name))
        if key not in _PRECISIONS:
            names = [*_PRECISIONS, *_ALIASES]
            raise ValueError(f"precision={name!r} is unknown{nearest(name, names)}; possible: {', '.join(names)}")
        return _PRECISIONS[key]

    def convert(self, model: nn.Module) -> None:
        """Convert a model's parameters and buffers to this precision, in place."""
        if self.parameters is None:
            return
        dtypes = formats(self.parameters)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(dtypes.get(tensor.dtype, tensor.dtype))

        convert.__qualname__ = "Module.type"  # torchmetrics does not apply to its sums what has such a name
        model._apply(convert)

    def check(self, device: torch.device) -> None:
        """Check before the training that ``device`` can compute in the precision's formats.

        Raises:
            ValueError: the device lacks the dtype, autocast to it, or the loss scaler's kernels; the message names the device.
        """
        lacks = None
        if self.parameters is not None and not accelerator.computes_in(device, self.parameters):
            lacks = str(self.parameters).removeprefix("torch.")
        elif self.autocast is not None and not accelerator.autocasts_to(device, self.autocast):
            lacks = f"autocast to {str(self.autocast).removeprefix('torch.')}"
        elif self.scaled and not accelerator.scales_losses(device):
            lacks = "the loss scaler that fp16 gradients need"
        if lacks is not None:
            raise ValueError(
                f"precision={self.name!r}: {accelerator.name(device)} lacks {lacks}; use another precision ('32-true' works everywhere), or another "
                "accelerator. fit env shows what the device has"
            )

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of a forward pass on ``device``; one object serves a whole run, but cannot be nested in itself."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


_PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("32-true"),
        Precision("bf16-mixed", autocast=torch.bfloat16),
        Precision("16-mixed", autocast=torch.float16, scaled=True),
        Precision("bf16-true", parameters=torch.bfloat16),
        Precision("16-true", parameters=torch.float16),
        Precision("64-true", parameters=torch.float64),
        Precision("fp8-mixed", autocast=torch.bfloat16, fp8=FP8()),
    )
}
_ALIASES = {
    "no": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "fp8-mixed",
    "fp32": "32-true",
    "32": "32-true",
    "16": "16-mixed",
    "64": "64-true",
}


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
