"""From plain PyTorch objects to prepared ones: models, optimizers, schedulers, loaders."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from engine.data.combined_loaders import CombinedLoader
from engine.data.prepared_loader import PreparedLoader
from engine.metrics.recorder import Recorder
from engine.processes import Processes
from engine.step.precision import Precision
from engine.step.stepper import Stepper
from engine.step.wrappers import AutocastForward, PreparedOptimizer, PreparedScheduler
from engine.strategies.base import Strategy
from engine.strategies.foreign_wrappers import check_plain
from engine.transforms import batch_norm
from engine.transforms.float8 import Layers
from engine.utils.parameters import parameters_of


class Preparing(Processes):
    """The part of :class:`engine.Engine` that makes objects ready."""

    strategy: Strategy
    precision: Precision
    seed: int
    _stepper: Stepper
    _models: list[nn.Module]
    _schedulers: list[PreparedScheduler]
    _loaders: list[PreparedLoader]
    _low: Layers
    _norms: batch_norm.Layers

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedulers, ready for this job's processes; in the order given, one alone not in a tuple.

        Objects of other kinds come back as they are, and so does what was prepared before.
        """
        done = tuple(self._prepare(item) for item in objects)
        return done[0] if len(done) == 1 else done

    def _prepare(self, item: Any) -> Any:
        if isinstance(item, (PreparedLoader, PreparedOptimizer, PreparedScheduler)):
            return item
        if isinstance(item, nn.Module):
            return self.prepare_model(item)
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, LRScheduler) or _schedules(item):
            return self.prepare_scheduler(item)
        if isinstance(item, (DataLoader, CombinedLoader)):
            return self.prepare_data_loader(item)
        return item

    def prepare_model(self, model: nn.Module, *, autocast: bool = True) -> nn.Module:
        """The model on its device, wrapped by the strategy.

        Args:
            autocast: under mixed precision, run the forward pass in autocast and give half-precision outputs back as fp32.
                Without it, use :meth:`autocast` yourself.
        """
        if any(model is known or model is self.unwrap_model(known) for known in self._models):
            return next(known for known in self._models if model is known or model is self.unwrap_model(known))
        check_plain(model)
        self.strategy.place(self._low.convert(self._norms.convert(model)))
        if autocast and self.precision.autocast is not None:
            AutocastForward(self.precision, self.device).attach(model)
        prepared = self.strategy.setup(model)
        self._models.append(prepared)
        self.window.lockstep = self.group.world_size > 1
        for optimizer in self._stepper.known:
            self.strategy.repoint(optimizer)
        return prepared

    def place_model(self, model: nn.Module) -> nn.Module:
        """The model on its device and in its dtype, the same on every rank, but not wrapped: for evaluation and manual optimization."""
        check_plain(model)
        self.precision.convert(self._low.convert(self._norms.convert(model)))
        model.to(self.device)
        self.strategy.share_parameters(model)
        return model

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers of rank 0, which are those that a checkpoint holds; all ranks call this.

        Each rank's running statistics (of batch norms) are of its own batches. Before an evaluation in a loop of one's own, so that its result
        belongs to the checkpoint; :class:`engine.Fit` does it by itself.
        """
        self.strategy.share_buffers(self.unwrap_model(model))

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """An optimizer that steps with exact gradients at the end of each window."""
        parameters = parameters_of([optimizer])
        if not parameters:
            raise ValueError(f"{type(optimizer).__name__} has no parameters: give it model.parameters()")
        self.strategy.repoint(optimizer)
        self._stepper.add(optimizer)
        if self.strategy.pipelined:
            self.window.join()  # there is one model, and one loss
        return PreparedOptimizer(optimizer, self._stepper, self.window)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """A scheduler that steps when the optimizer did."""
        self._schedulers.append(PreparedScheduler(scheduler, self._stepper, self.window))
        return self._schedulers[-1]

    def prepare_data_loader(self, loader: Any, *, place: bool = True) -> PreparedLoader:
        """A loader that gives this process its part of the data, on the device. Takes any iterable, a list of batches too.

        Args:
            place: move the batches to the device (and floating point inputs to a ``*-true`` precision's dtype).
        """
        self._loaders.append(
            PreparedLoader(loader, group=self.data_group, window=self.window, seed=self.seed, dtype=self.precision.parameters, place=place)
        )
        return self._loaders[-1]

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> PreparedLoader:
        """A loader that goes on in the middle of an epoch: its first pass leaves out ``num_batches`` micro-batches of each process.

        That costs nothing where the data has indices; streams are read up to there. Later passes are whole. The pass counts as ``loader``'s
        own: the one that ``loader`` gives next is of the next epoch, unless ``set_epoch`` is called.

        Args:
            loader: what :meth:`prepare` gave back, or a plain one.
            num_batches: a whole number of windows, so that later ones hold what they would have held.

        Raises:
            ValueError: ``num_batches`` is negative.
        """
        prepared = loader if isinstance(loader, PreparedLoader) else self.prepare_data_loader(loader)
        return prepared.skipping(num_batches)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module that the user gave to :meth:`prepare`."""
        inner = self.strategy.unwrap(model)
        original = inner._modules.get("_orig_mod")  # torch.compile's wrapper
        return inner if original is None else original

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything that was prepared and return cached device memory; as many ``None`` as objects, to assign to their names."""
        self.release()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def release(self) -> None:
        """Forget every prepared model and optimizer."""
        self.strategy.release()
        self._low.restore()
        self._norms.restore()
        self._stepper.leave()
        for known in (self._models, self._schedulers, self._loaders):
            known.clear()

    @property
    def models(self) -> list[nn.Module]:
        """Every model that was prepared, as :meth:`prepare` gave it back."""
        return self._models

    def recorder(self, *, on_step: bool, on_epoch: bool, suffix: str = "") -> Recorder:
        """What collects logged values of this engine's ranks."""
        return Recorder(self.group, on_step=on_step, on_epoch=on_epoch, suffix=suffix, data_group=self.data_group, speaks=self.strategy.speaks)


def raw(optimizer: Any) -> Any:
    """The user's own optimizer."""
    return optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer


def _schedules(item: Any) -> bool:
    """Whether it is a scheduler of another class than torch's, such as timm's."""
    schedules = hasattr(item, "optimizer") and not hasattr(item, "zero_grad")
    return schedules and all(callable(getattr(item, name, None)) for name in ("step", "state_dict", "load_state_dict"))
