"""The prepared models, optimizers, schedulers and loaders of one engine."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from engine.data.combined_loaders import CombinedLoader
from engine.data.prepared_loader import PreparedLoader
from engine.step import gradients
from engine.step.optimizer_step import Stepper
from engine.step.precision import Precision
from engine.step.wrappers import AutocastForward, PreparedOptimizer, PreparedScheduler
from engine.strategies.base import Strategy
from engine.strategies.foreign_wrappers import check_plain
from engine.transforms import batch_norm
from engine.transforms.float8 import Layers
from engine.utils import accelerator
from engine.utils.parameters import parameters_of


class Registry:
    """Prepares objects, each once, and keeps them.

    Args:
        seed: the seed of the data order.
        sync_batchnorm: whether batch norms compute their statistics over all ranks.
    """

    def __init__(
        self, strategy: Strategy, precision: Precision, stepper: Stepper, seed: int, sync_batchnorm: bool
    ) -> None:
        precision.check(strategy.group.device)
        self.strategy, self.precision, self.stepper, self.seed = strategy, precision, stepper, seed
        self.window, self.group, self.data_group = stepper.window, strategy.group, strategy.data_group
        self.models: list[nn.Module] = []
        """As :meth:`model` returned them."""
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        window = self.window
        self._low = Layers(precision.fp8, self.group)
        self._norms = batch_norm.Layers(sync_batchnorm, self.data_group, lambda: window.share.size != 0)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's model."""
        return self.stepper.known

    def prepare(self, item: Any, by: Any) -> Any:
        """An object made ready by the method for its type that ``by`` has, an engine: ``prepare_model``, ... Others are returned unchanged."""
        if isinstance(item, (PreparedLoader, PreparedOptimizer, PreparedScheduler)):
            return item
        if isinstance(item, nn.Module):
            return by.prepare_model(item)
        if isinstance(item, Optimizer):
            return by.prepare_optimizer(item)
        if isinstance(item, LRScheduler) or _schedules(item):
            return by.prepare_scheduler(item)
        if isinstance(item, (DataLoader, CombinedLoader)):
            return by.prepare_data_loader(item)
        return item

    def model(self, model: nn.Module, autocast: bool = True) -> nn.Module:
        """As :meth:`engine.Engine.prepare_model`."""
        if any(model is known or model is self.unwrap(known) for known in self.models):
            return next(known for known in self.models if model is known or model is self.unwrap(known))
        check_plain(model)
        self.strategy.place(self._converted(model))
        if autocast and self.precision.autocast is not None:
            AutocastForward(self.precision, self.group.device).attach(model)
        prepared = self.strategy.setup(model)
        self.models.append(prepared)
        self.window.lockstep = self.group.world_size > 1
        for optimizer in self.optimizers:
            self.strategy.repoint(optimizer)
        return prepared

    def place(self, model: nn.Module) -> nn.Module:
        """As :meth:`engine.Engine.place_model`."""
        check_plain(model)
        self.precision.convert(self._converted(model))
        model.to(self.group.device)
        self.strategy.share_parameters(model)
        return model

    def optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """As :meth:`engine.Engine.prepare_optimizer`."""
        if not parameters_of([optimizer]):
            raise ValueError(f"{type(optimizer).__name__} has no parameters: give it model.parameters()")
        self.strategy.repoint(optimizer)
        self.stepper.add(optimizer)
        return PreparedOptimizer(optimizer, self.stepper, self.window)

    def scheduler(self, scheduler: Any) -> PreparedScheduler:
        """As :meth:`engine.Engine.prepare_scheduler`."""
        self.schedulers.append(PreparedScheduler(scheduler, self.stepper, self.window))
        return self.schedulers[-1]

    def loader(self, loader: Any, place: bool = True) -> PreparedLoader:
        """As :meth:`engine.Engine.prepare_data_loader`."""
        if isinstance(loader, PreparedLoader):
            return loader
        dtype = self.precision.parameters
        self.loaders.append(
            PreparedLoader(loader, group=self.data_group, window=self.window, seed=self.seed, dtype=dtype, place=place)
        )
        return self.loaders[-1]

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        inner = self.strategy.unwrap(model)
        original = inner._modules.get("_orig_mod")  # torch.compile's wrapper
        return inner if original is None else original

    def refuse_none(self) -> None:
        """Raise if a micro-batch without a loss is impossible, because some batch norm computes over all ranks."""
        self._norms.refuse_none()

    def release(self) -> None:
        """Release everything."""
        self.strategy.release()
        self._low.restore()
        self._norms.restore()
        self.stepper.leave()
        for known in (self.models, self.schedulers, self.loaders):
            known.clear()

    def free(self) -> None:
        """Forget everything, and return cached device memory."""
        self.release()
        gc.collect()
        accelerator.empty_cache(self.group.device)

    def discard(self) -> None:
        """As :meth:`engine.Engine.discard_window`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.strategy.discard(self.models)
        self.window.discard()

    def where_nonfinite(self) -> str:
        """The names of parameters whose gradients are not finite, as the end of a message. Waits for the device."""
        named = ((name, p) for model in self.models for name, p in self.unwrap(model).named_parameters())
        names = gradients.where_nonfinite(named, self.strategy.local)
        return f"; first in: {', '.join(names[:5])}" if names else ""

    def _converted(self, model: nn.Module) -> nn.Module:
        return self._low.convert(self._norms.convert(model))


def _schedules(item: Any) -> bool:
    """Whether it is a scheduler that is not torch's, such as timm's."""
    schedules = hasattr(item, "optimizer") and not hasattr(item, "zero_grad")
    return schedules and all(callable(getattr(item, name, None)) for name in ("step", "state_dict", "load_state_dict"))
