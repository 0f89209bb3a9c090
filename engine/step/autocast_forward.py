"""Models under autocast, as ``Engine.prepare`` returns them in mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.step.precision import Precision
from engine.utils.torch_private import without_dynamo
from engine.utils.tree import map_tensors


class AutocastForward:
    """Runs a module's forward pass under autocast; its half-precision outputs become fp32, so that losses on them are computed exactly."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision, self.device = precision, device
        self._open: list[Any] = []

    def attach(self, module: nn.Module, compiled: bool = False) -> None:
        """Attach hooks rather than a wrapper: class, parameter names and pickling stay as they are.

        Args:
            compiled: the whole module will be compiled, with its hooks. ``torch.compile`` loses an autocast context that one hook enters and another
                leaves, so these are left out of what it compiles.
        """
        module.register_forward_pre_hook(self.enter_uncompiled if compiled else self.enter)
        module.register_forward_hook(self.leave_uncompiled if compiled else self.leave, always_call=True)

    @without_dynamo
    def enter_uncompiled(self, module: nn.Module, args: Any) -> None:
        self.enter(module, args)

    @without_dynamo
    def leave_uncompiled(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.leave(module, args, output)

    def enter(self, module: nn.Module, args: Any) -> None:
        context = self.precision.context(self.device)
        context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open:
            self._open.pop().__exit__(None, None, None)
        return map_tensors(_to_fp32, output)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
