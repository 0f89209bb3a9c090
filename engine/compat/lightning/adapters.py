"""Adapts objects of the installed Lightning to this library. ``Fit`` finds :func:`adapt` through the entry-point group ``engine.adapters``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from engine.callback import Callback
from engine.compat.lightning.callback import adapted_class, lightning_base
from engine.compat.lightning.events import WITH_STAGE, Adapter, with_stage
from engine.compat.lightning.module import LightningDataModule, LightningModule, parts_that_log
from engine.compat.lightning.names import BOUND
from engine.compat.lightning.trainer_view import TrainerView
from engine.data.datamodule import DataModule
from engine.loop.run import Run
from engine.module import TrainModule
from engine.utils.log import logger
from engine.utils.overrides import overridden

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_NEEDING_TRAINER = (
    *("log", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "all_gather", "print"),
    *("toggle_optimizer", "untoggle_optimizer"),
)
"""Methods of Lightning's modules that need its trainer. Other such methods, for example ``log_dict``, call these."""
_LINK = "engine.compat.lightning"
"""The key of a module's :class:`_Link` in its ``__dict__``; it contains dots, so that no attribute of the user's collides with it."""
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_DATA_METHODS = tuple(
    name
    for name, method in vars(DataModule).items()
    if callable(method) and name[0] != "_" and name not in ("attach", "save_hyperparameters", *_LOADERS)
)
"""Methods of a data module that are forwarded when it is adapted; the loader methods are looked up at each call instead."""


def adapt(value: Any) -> Any:
    """Wrap a module, data module or callback of the installed Lightning as one of this library, sharing its weights and state.

    Return any other object unchanged. A warning names each overridden method that is never called.

    Raises:
        NotImplementedError: a callback works only under Lightning's own ``Trainer``.
    """
    if isinstance(value, (Callback, DataModule, TrainModule)):
        return value
    kind: Any = type(value)
    if lightning_base(kind, "LightningModule"):
        link = vars(value).get(_LINK) or _Link(_module_class_for(kind)(value))
        vars(value)[_LINK] = link
        link.adapter.refresh()
        return link.adapter
    if lightning_base(kind, "LightningDataModule"):
        return _data_class_for(kind)(value)
    if not lightning_base(kind, "Callback"):
        return value
    if name := next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in BOUND and lightning_base(base, base.__name__)), ""
    ):
        raise NotImplementedError(
            f"{kind.__name__}: Lightning's {name} works only under Lightning's own Trainer: {BOUND[name]}"
        )
    return adapted_class(kind)(value)


class AdaptedModule(LightningModule, Adapter):
    """Lets a module of the installed Lightning, ``original``, take part in a run. Both have the same parameters, buffers and submodules."""

    def __init__(self, original: Any) -> None:
        self.__dict__["original"] = original
        super().__init__()
        self.refresh()

    def __setattr__(self, name: str, value: Any) -> None:
        # For our own attributes nn.Module.__setattr__ is bypassed: a user's submodule or parameter may have the same name.
        kind = object if name in vars(self) or hasattr(type(self), name) else nn.Module
        kind.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return adapt, (self.original,), {"_reached": self._reached}

    training = property(
        lambda self: self.original.training, lambda self, value: setattr(self.original, "training", value)
    )
    automatic_optimization = property(lambda self: self.original.automatic_optimization)
    strict_loading = property(lambda self: self.original.strict_loading)
    example_input_array = property(lambda self: self.original.example_input_array)
    prepare_data_per_node = property(lambda self: self.original.prepare_data_per_node)

    def refresh(self) -> None:
        """Take over the original's :data:`_SHARED` attributes, hyperparameters and overrides again, at the start of each run."""
        self.__dict__.update({name: vars(self.original)[name] for name in _SHARED})
        _take_hyperparameters(self)
        base = lightning_base(type(self.original), "LightningModule")
        _redirect_to_run(base)
        self.note_methods()

    def note_methods(self) -> None:
        base = lightning_base(type(self.original), "LightningModule")
        self.forward_overrides(base, _forwarded_methods(base))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def configure_callbacks(self) -> Any:
        callbacks = [] if self.original.configure_callbacks is None else self.original.configure_callbacks()
        return [adapt(callback) for callback in (callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]

    def attach(self, context: Any) -> None:
        super().attach(context)
        if context is not None:
            for part in parts_that_log(self.original, lightning_base(type(self.original), "LightningModule")):
                part._trainer, part._device = self.trainer, context.device


class _Link:
    """A module's reference to its adapter. In a copy or a pickle of the module it becomes ``None``, so that the copy gets its own adapter."""

    def __init__(self, adapter: AdaptedModule) -> None:
        self.adapter = adapter

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


@functools.cache
def _forwarded_methods(base: Any) -> tuple[str, ...]:
    """Names of the methods of Lightning's module class ``base`` that a run calls."""
    excluded = (*vars(AdaptedModule), "load_from_checkpoint")
    return tuple(
        n
        for n in dir(base)
        if n[0] != "_" and n not in excluded and callable(getattr(base, n)) and hasattr(LightningModule, n)
    )


@functools.cache
def _redirect_to_run(base: Any) -> None:
    """Redirect the :data:`_NEEDING_TRAINER` methods of Lightning's class ``base`` to our run while the module is in one. They are replaced in the
    class, so that the user's overrides reach them with ``super()``. Under Lightning's own trainer nothing changes."""
    for name in _NEEDING_TRAINER:
        setattr(base, name, _redirected(name, getattr(base, name)))


def _redirected(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's ``method``, or in a run here our method of this ``name``."""

    @functools.wraps(method)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = vars(self).get("_trainer")
        module = trainer.run.module if isinstance(trainer, TrainerView) else None
        if module is None:
            return method(self, *args, **kwargs)
        return getattr(LightningModule, name)(module, *args, **kwargs)

    return redirected


class AdaptedDataModule(LightningDataModule, Adapter):
    """Lets a data module of the installed Lightning, ``original``, take part in a run, which requests each loader when needed."""

    def __init__(self, original: Any) -> None:
        self.original = original
        super().__init__()
        _take_hyperparameters(self)
        self.prepare_data_per_node = original.prepare_data_per_node
        self.forward_overrides(lightning_base(type(original), "LightningDataModule"), _DATA_METHODS)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name) if "original" in vars(self) else super().__getattr__(name)

    def translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return with_stage(method) if name in WITH_STAGE else method

    def _overrides(self, name: str) -> bool:
        return overridden(self.original, name, lightning_base(type(self.original), "LightningDataModule"))

    def attach(self, run: Run | None) -> None:
        super().attach(run)
        self.original.trainer = self.trainer

    def train_dataloader(self) -> Any:
        return self.original.train_dataloader() if self._overrides("train_dataloader") else None

    def val_dataloader(self) -> Any:
        return self.original.val_dataloader() if self._overrides("val_dataloader") else None

    def test_dataloader(self) -> Any:
        return self.original.test_dataloader() if self._overrides("test_dataloader") else None

    def predict_dataloader(self) -> Any:
        return self.original.predict_dataloader() if self._overrides("predict_dataloader") else None


def _take_hyperparameters(adapter: AdaptedModule | AdaptedDataModule) -> None:
    adapter.hparams.clear()
    adapter.hparams.update(adapter.original.hparams)
    vars(adapter)["_hparams_unlogged"] = set() if adapter.original._log_hyperparams else set(adapter.hparams)


@functools.cache
def _data_class_for(kind: Any) -> type[AdaptedDataModule]:
    """The adapter class for data modules of class ``kind``; it has that class's name, for messages."""
    return AdaptedDataModule.subclass_for(kind)


@functools.cache
def _module_class_for(kind: Any) -> type[AdaptedModule]:
    """The adapter class for modules of class ``kind``, with that class's name for messages. A warning names overrides that are never called."""
    base = lightning_base(kind, "LightningModule")
    changed = {name for name in dir(base) if getattr(kind, name) is not getattr(base, name)}
    for name in sorted(changed):
        if name[0] != "_" and callable(getattr(kind, name)) and not hasattr(LightningModule, name):
            logger.warning("%s.%s is not called: nothing here has this event", kind.__name__, name)
    if changed & {"on_save_checkpoint", "on_load_checkpoint"}:
        message = "%s: on_save_checkpoint and on_load_checkpoint get a dict of their own entries, without weights and counters"
        logger.warning(message, kind.__name__)
    return AdaptedModule.subclass_for(kind)
