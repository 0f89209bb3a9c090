"""Recomputation and ``torch.compile`` of a module, in place: its class, parameter names and checkpoints stay as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from engine.config.kinds import Compile, Recompute
from engine.transforms.blocks import blocks_of, user_module
from engine.transforms.recompute import recompute


@dataclass(frozen=True)
class Transforms:
    """The transforms that a strategy applies to a model after tensor parallelism and before sharding or wrapping it."""

    recompute: Recompute = None
    compile: Compile = False

    def check(self, why_not_whole: str | None, strategy: str) -> None:
        """Raise ``ValueError`` if the whole model is to be compiled and the strategy does not allow it, for the reason ``why_not_whole``."""
        if why_not_whole is not None and is_whole(self.compile):
            raise ValueError(f"compile={self.compile!r} under {strategy}: {why_not_whole}; use compile='blocks'")

    def apply(self, model: nn.Module) -> None:
        """Apply the transforms to ``model``: activation checkpointing first, so that a compiled block contains its own recomputation."""
        recompute(model, self.recompute)
        compile_model(model, self.compile)


def compile_model(model: nn.Module, setting: Compile) -> None:
    """Compile the model's forward pass and those of its direct children, so that steps which call a child instead of ``self(x)`` are fast, too.
    With ``"blocks"``, compile each of the model's repeated blocks instead. Compilation happens at the first call.

    Raises:
        ValueError: blocks were requested, but the model has none.
    """
    options = dict(setting) if isinstance(setting, dict) else {}
    by_block = options.pop("blocks", setting == "blocks")
    if not setting:
        return
    inner = user_module(model)
    if not by_block:
        for child in inner.children():
            child.compile(**options)
        inner.compile(**options)
        return
    blocks = blocks_of(model, [], 0)
    if not blocks:
        raise ValueError(
            f"compile='blocks': {type(inner).__name__} has no repeated blocks; define blocks(self), or use compile=True"
        )
    for block in blocks:
        block.compile(**options)


def is_whole(setting: Compile) -> bool:
    """Whether ``setting`` means to compile the whole model rather than its blocks."""
    return bool(setting) and setting != "blocks" and not (isinstance(setting, dict) and setting.get("blocks"))
