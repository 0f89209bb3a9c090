"""Number formats: the dtypes of parameters, inputs and computations."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.masked import fields_of
from engine.config.named_options import NamedOptions
from engine.config.settings import checked_setting
from engine.config.typed_values import construct
from engine.transforms.float8 import FP8
from engine.utils import accelerator
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
