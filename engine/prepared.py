"""The objects that one engine has prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from engine.data.loader import PreparedLoader
from engine.distributed.group import Group
from engine.step.optimizer_random import OptimizerRandom
from engine.step.optimizer_step import Stepper
from engine.step.window import Window
from engine.step.wrappers import PreparedOptimizer, PreparedScheduler
from engine.strategies.base import Strategy
from engine.utils.parameters import uncompiled


@dataclass
class Prepared:
    """An engine's models, optimizers, schedulers and loaders, in the order in which they were prepared, and its registered objects."""

    strategy: Strategy
    stepper: Stepper
    seed: int
    """The seed of the data order."""
    optimizer_random: OptimizerRandom
    """Gives optimizers that draw random numbers in their steps the same ones where ranks hold the same values."""
    models: list[nn.Module] = field(default_factory=list)
    """The models as ``Engine.prepare_model`` returned them."""
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    """Other objects whose state checkpoints contain, by ``state_dict`` and ``load_state_dict``."""
    saves: bool = False
    """Whether the training will save checkpoints, as far as it is known: a run with a callback that does."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, without their wrappers."""
        return self.stepper.optimizers

    @property
    def window(self) -> Window:
        """The engine's accumulation window."""
        return self.stepper.window

    @property
    def group(self) -> Group:
        """All processes of the job."""
        return self.strategy.group

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's original module inside a prepared one."""
        return uncompiled(self.strategy.unwrap(model))

    def form_of(self, model: nn.Module) -> nn.Module | None:
        """The prepared model whose original module is ``model``, or ``model`` itself if it is a prepared one; else ``None``."""
        return next((prepared for prepared in self.models if model is prepared or model is self.unwrap(prepared)), None)

    def whole_module(self) -> nn.Module:
        """The user's model; if there are several, a module that contains them.

        Raises:
            ValueError: there are several models, but the strategy takes one.
        """
        models = [self.unwrap(model) for model in self.models]
        if len(models) == 1:
            return models[0]
        if self.strategy.fused and models:
            raise ValueError(
                f"save_state of {len(models)} models under {type(self.strategy).__name__}: it supports only one model"
            )
        return nn.ModuleList(models)

    def without(self, left_out: Sequence[nn.Module]) -> nn.Module:
        """:meth:`whole_module` without the models in ``left_out``; remaining ones keep their names."""
        module = self.whole_module()
        if not left_out:
            return module
        left_out_ids = {id(self.unwrap(model)) for model in left_out}
        remaining = nn.Module()
        if id(module) not in left_out_ids:
            for name, child in module.named_children():
                if id(child) not in left_out_ids:
                    remaining.add_module(name, child)
        return remaining

    def forget(self) -> None:
        """Drop the references to models, schedulers and loaders."""
        self.models.clear()
        self.schedulers.clear()
        self.loaders.clear()


def raw(optimizer: Any) -> Any:
    """The user's optimizer: the one inside a prepared optimizer, or ``optimizer`` itself."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
