"""Objects of the installed Lightning as this library's. ``Fit`` finds :func:`adapt` by the entry-point group ``engine.adapters``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from engine.callback import Callback
from engine.compat.lightning.callback import adapted_class, lightnings
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
_ASKED = (
    *("log", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "all_gather", "print"),
    *("toggle_optimizer", "untoggle_optimizer"),
)
"""Methods of Lightning's modules that need its trainer. The others, such as ``log_dict``, call these."""
_LINK = "engine.compat.lightning"
"""The entry of a module's ``__dict__`` that holds its :class:`_Link`: no attribute of the user's can have this name."""
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_OF_DATA = tuple(
    name
    for name, method in vars(DataModule).items()
    if callable(method) and name[0] != "_" and name not in ("attach", "save_hyperparameters", *_LOADERS)
)
"""Methods of a data module that a run calls as it finds them; it asks for loaders again each time."""


def adapt(value: Any) -> Any:
    """A module, data module or callback of Lightning's as this library's, which shares its weights and state; others are returned as they are.

    Parts that are not honoured are named in the log.

    Raises:
        NotImplementedError: a callback of Lightning's that works only under its own ``Trainer``.
    """
    if isinstance(value, (Callback, DataModule, TrainModule)):
        return value
    kind: Any = type(value)
    if lightnings(kind, "LightningModule"):
        link = vars(value).get(_LINK) or _Link(_class_for(kind)(value))
        vars(value)[_LINK] = link
        link.adapter.refresh()
        return link.adapter
    if lightnings(kind, "LightningDataModule"):
        return _data_class_for(kind)(value)
    if not lightnings(kind, "Callback"):
        return value
    if name := next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in BOUND and lightnings(base, base.__name__)), ""
    ):
        raise NotImplementedError(
            f"{kind.__name__}: Lightning's {name} works only under Lightning's own Trainer: {BOUND[name]}"
        )
    return adapted_class(kind)(value)


class AdaptedModule(LightningModule, Adapter):
    """A module of Lightning's, ``original``, in a run here. Both have the same parameters, buffers and submodules, under the same names."""

    def __init__(self, original: Any) -> None:
        self.__dict__["original"] = original
        super().__init__()
        self.refresh()

    def __setattr__(self, name: str, value: Any) -> None:
        # A submodule or parameter of the user's may have the name of an attribute of ours.
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
        """Take the module's :data:`_SHARED` attributes, hyperparameters and overrides as they are now, at the start of each run."""
        self.__dict__.update({name: vars(self.original)[name] for name in _SHARED})
        _take_hyperparameters(self)
        base = lightnings(type(self.original), "LightningModule")
        _serve(base)
        self.forward_overrides(base, _called(base))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def configure_callbacks(self) -> Any:
        callbacks = self.original.configure_callbacks()
        return [adapt(callback) for callback in (callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]

    def attach(self, context: Any) -> None:
        super().attach(context)
        if context is not None:
            for part in parts_that_log(self.original, lightnings(type(self.original), "LightningModule")):
                part._trainer, part._device = self.trainer, context.device


class _Link:
    """A module's reference to its adapter. A copy or a pickle of the module has ``None`` instead, and gets an adapter of its own."""

    def __init__(self, adapter: AdaptedModule) -> None:
        self.adapter = adapter

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


@functools.cache
def _called(base: Any) -> tuple[str, ...]:
    """Methods of Lightning's module class that a run here calls."""
    apart = (*vars(AdaptedModule), "load_from_checkpoint")
    return tuple(
        n
        for n in dir(base)
        if n[0] != "_" and n not in apart and callable(getattr(base, n)) and hasattr(LightningModule, n)
    )


@functools.cache
def _serve(base: Any) -> None:
    """Let the :data:`_ASKED` methods of Lightning's class ask our run where the module is in one: there the user's overrides, in classes above
    and on objects, find them with ``super()``. Under Lightning's own trainer nothing changes."""
    for name in _ASKED:
        setattr(base, name, _serving(name, getattr(base, name)))


def _serving(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = vars(self).get("_trainer")
        module = trainer.run.module if isinstance(trainer, TrainerView) else None
        if module is None:
            return method(self, *args, **kwargs)
        return getattr(LightningModule, name)(module, *args, **kwargs)

    return served


class AdaptedDataModule(LightningDataModule, Adapter):
    """A data module of Lightning's, ``original``, in a run here; the run asks it for each loader when it needs it."""

    def __init__(self, original: Any) -> None:
        self.original = original
        super().__init__()
        _take_hyperparameters(self)
        self.prepare_data_per_node = original.prepare_data_per_node
        self.forward_overrides(lightnings(type(original), "LightningDataModule"), _OF_DATA)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name) if "original" in vars(self) else super().__getattr__(name)

    def translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return with_stage(method) if name in WITH_STAGE else method

    def _overrides(self, name: str) -> bool:
        return overridden(self.original, name, lightnings(type(self.original), "LightningDataModule"))

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
    """The class that stands for data modules of ``kind``: messages have its name."""
    return AdaptedDataModule.standing_for(kind)


@functools.cache
def _class_for(kind: Any) -> type[AdaptedModule]:
    """The class that stands for modules of ``kind``: messages have its name. Overrides that are not honoured are named in the log."""
    base = lightnings(kind, "LightningModule")
    changed = {name for name in dir(base) if getattr(kind, name) is not getattr(base, name)}
    for name in sorted(changed):
        if name[0] != "_" and callable(getattr(kind, name)) and not hasattr(LightningModule, name):
            logger.warning("%s.%s is not called: nothing here has this event", kind.__name__, name)
    if changed & {"on_save_checkpoint", "on_load_checkpoint"}:
        message = "%s: on_save_checkpoint and on_load_checkpoint get a dict of their own entries, without weights and counters"
        logger.warning(message, kind.__name__)
    return AdaptedModule.standing_for(kind)
