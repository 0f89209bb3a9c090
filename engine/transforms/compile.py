"""``torch.compile`` for a module, in place: class, parameter names and checkpoints stay as they are."""

from __future__ import annotations

from torch import nn


def compile_module(module: nn.Module) -> None:
    """Compile the forward pass of ``module`` and of its direct children, so that steps that call a child instead of ``self(x)`` gain too.

    Compilation itself happens at the first call.
    """
    for child in module.children():
        child.compile()
    module.compile()
