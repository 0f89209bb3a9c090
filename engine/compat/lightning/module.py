"""``LightningModule`` and ``LightningDataModule``: our module and data module with Lightning's ``self.trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import nn

from engine.compat.lightning import pickled_checkpoint
from engine.compat.lightning.events import WITH_STAGE, lightning_arguments, with_stage
from engine.compat.lightning.hyperparameters import HyperparametersMixin as HyperparametersMixin
from engine.compat.lightning.optimizer import LightningOptimizer
from engine.data.datamodule import DataModule
from engine.loop.run import Run
from engine.metrics.recorder import ClosedRecorder, Recorder
from engine.module import TrainModule, overrides
from engine.utils.parameters import parameters_of

T = TypeVar("T")
_TRANSLATED = ("on_train_batch_end", *WITH_STAGE)


class LightningModule(TrainModule, HyperparametersMixin):
    """:class:`engine.TrainModule` as a Lightning project calls it: ``self.trainer`` is the ``Trainer``, also after a run."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME, CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_name", "hparams_type"
    _trainer: Any = None
    may_train_nothing = leaves_out_unknown_keys = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainer": None}

    @property
    def starts_before_data(self) -> bool:  # type: ignore[override]
        return overrides(self, "on_fit_start")

    @property
    def trainer(self) -> Any:
        if self._trainer is not None:
            return self._trainer
        if self._context is None:
            raise RuntimeError(f"{type(self).__qualname__} is not attached to a `Trainer`.")
        return self._context.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    def _outside_run(self, name: str) -> Any:
        if name in ("logger", "loggers"):
            loggers: list[Any] = [] if self._trainer is None else self._trainer.loggers
            return loggers if name == "loggers" else next(iter(loggers), None)
        return super()._outside_run(name)

    def attach(self, context: Any) -> None:
        if context is not None and self._trainer is not None:
            self._trainer.attach_run(context)
        super().attach(context)
        if isinstance(context, Run) and context.module is self:
            context.hooks.wrap(_with_lightnings_arguments)
        for part in parts_that_log(self, LightningModule)[1:]:
            if context is not None:
                part.trainer = self.trainer
            TrainModule.attach(part, context)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer of ``configure_optimizers``, or a list of several, with ``optimizer`` and ``toggle_model``; with ``use_pl_optimizer=False``
        without these."""
        optimizers = self._attached("optimizers()").optimizers
        if use_pl_optimizer:
            optimizers = [LightningOptimizer(optimizer, self) for optimizer in optimizers]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Freeze the parameters of the other optimizers until :meth:`untoggle_optimizer`. Parameters that no optimizer has stay as they are."""
        own_ids = {id(parameter) for parameter in parameters_of([optimizer])}
        for parameter in parameters_of(self._attached("toggle_optimizer()").optimizers):
            if parameter.requires_grad and id(parameter) not in own_ids:
                parameter.requires_grad_(False)
                self._toggled.append(parameter)

    def log_to(self, recorder: Recorder | ClosedRecorder) -> None:
        super().log_to(recorder)
        for part in parts_that_log(self, LightningModule)[1:]:
            TrainModule.log_to(part, recorder)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: Any, map_location: Any = None, hparams_file: None = None, strict: bool | None = None,
        weights_only: bool | None = None, **kwargs: Any,
    ) -> Self:  # fmt: skip
        """Build the module from a checkpoint, which may also be one file; see :meth:`engine.TrainModule.load_from_checkpoint`.

        ``weights_only`` has no effect: from a pickle, only tensors and plain values are ever read. ``hparams_file`` is an error: pass the
        hyperparameters as arguments.
        """
        if hparams_file is not None:
            raise ValueError("load_from_checkpoint(hparams_file=...): give the hyperparameters as arguments")
        device = _device_of(map_location)
        with pickled_checkpoint.readable(checkpoint_path) as path:
            return super().load_from_checkpoint(path, strict=strict is not False, map_location=device, **kwargs)


def _device_of(map_location: Any) -> Any:
    """The device that ``map_location`` of ``torch.load`` gives to tensors in a checkpoint here, whose files have them on the CPU; ``None``: the
    default."""
    if isinstance(map_location, Mapping):
        return next(iter(map_location.values()), None)
    if callable(map_location):
        storage = map_location(torch.UntypedStorage(0), "cpu")
        return None if storage is None else storage.device
    return map_location


def parts_that_log(module: nn.Module, kind: type[T]) -> list[T]:
    """The module and its submodules, at any depth, that are instances of ``kind``: each may call ``self.log`` and read ``self.trainer``."""
    return [part for part in module.modules() if isinstance(part, kind)]


def _with_lightnings_arguments(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook of the module whose arguments differ from ours, so that it gets Lightning's; return other hooks unchanged."""
    owner, _, event = name.rpartition(".")
    if event not in _TRANSLATED or not owner.startswith("[TrainModule]"):
        return hook
    return lambda run, module, *args: hook(run, module, *lightning_arguments(event, run, module, args)[2:])


class LightningDataModule(DataModule, HyperparametersMixin):
    """:class:`engine.DataModule` with ``self.trainer``, which is ``None`` before a run."""

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME, CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_name", "datamodule_hparams_type"
    trainer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls).keys() & WITH_STAGE:
            setattr(cls, name, with_stage(vars(cls)[name]))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "trainer": None}

    def attach(self, run: Run | None) -> None:
        super().attach(run)
        self.trainer = self.trainer if run is None else run.trainer


def _load_from_checkpoint(cls: type[Any], checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the base class's ``load_from_checkpoint`` for ``cls``, which overrides it."""
    of_module = issubclass(cls, LightningModule)
    base: Any = LightningModule if of_module else LightningDataModule
    return base.load_from_checkpoint.__func__(cls, checkpoint_path, *(args if of_module else ()), **kwargs)
