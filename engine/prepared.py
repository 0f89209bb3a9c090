"""The objects that one engine has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from engine.data.loader import PreparedLoader
from engine.distributed.group import Group
from engine.step.optimizer_step import Stepper
from engine.step.window import Window
from engine.step.wrappers import PreparedScheduler
from engine.strategies.base import Strategy
from engine.utils.parameters import uncompiled


@dataclass
class Prepared:
    """The models, optimizers, schedulers and loaders of one engine, each in the order in which it was prepared, and its registered objects."""

    strategy: Strategy
    stepper: Stepper
    seed: int
    """The seed of the data order."""
    models: list[nn.Module] = field(default_factory=list)
    """The results of ``Engine.prepare_model``."""
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    """Objects with ``state_dict`` and ``load_state_dict`` that checkpoints keep too."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as the user made them."""
        return self.stepper.optimizers

    @property
    def window(self) -> Window:
        """The engine's window."""
        return self.stepper.window

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.strategy.group

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module of a prepared one."""
        return uncompiled(self.strategy.unwrap(model))

    def form_of(self, model: nn.Module) -> nn.Module | None:
        """The prepared form of ``model`` (which may be that itself), if there is one."""
        return next((prepared for prepared in self.models if model is prepared or model is self.unwrap(prepared)), None)

    def whole_module(self) -> nn.Module:
        """The user's model; several as submodules of one module.

        Raises:
            ValueError: there are several, and the strategy takes one.
        """
        models = [self.unwrap(model) for model in self.models]
        if len(models) == 1:
            return models[0]
        if self.strategy.fused and models:
            raise ValueError(
                f"save_state of {len(models)} models under {type(self.strategy).__name__}: it takes one model"
            )
        return nn.ModuleList(models)

    def without(self, left_out: Sequence[nn.Module]) -> nn.Module:
        """:meth:`whole_module` without some models; the others keep their names."""
        module = self.whole_module()
        if not left_out:
            return module
        users = {id(self.unwrap(model)) for model in left_out}
        remaining = nn.Module()
        if id(module) not in users:
            for name, child in module.named_children():
                if id(child) not in users:
                    remaining.add_module(name, child)
        return remaining

    def forget(self) -> None:
        """Forget models, schedulers and loaders."""
        self.models.clear()
        self.schedulers.clear()
        self.loaders.clear()
