"""The transforms of a model in their only valid order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from engine.config.transform_settings import Compile, Recompute
from engine.transforms.checkpointing import recompute
from engine.transforms.compile import compile_model, is_whole


@dataclass(frozen=True)
class Transforms:
    """The transforms that a strategy applies after tensor parallel and before sharding or wrapping the model."""

    recompute: Recompute = None
    compile: Compile = False

    def check(self, why_not_whole: str | None, strategy: str) -> None:
        """Raise ``ValueError`` for compiling the whole model under a strategy that does not allow it."""
        if why_not_whole is not None and is_whole(self.compile):
            raise ValueError(f"compile={self.compile!r} under {strategy}: {why_not_whole}; use compile='blocks'")

    def apply(self, model: nn.Module) -> None:
        """Activation checkpointing first: then a compiled block contains its own recomputation."""
        recompute(model, self.recompute)
        compile_model(model, self.compile)
