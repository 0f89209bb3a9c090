"""Objects of the installed Lightning as this library's. ``Fit`` finds :func:`adapt` by the entry-point group ``engine.adapters``."""

from __future__ import annotations

import functools
from typing import Any

from engine.callback import Callback
from engine.compat.lightning.callback import adapted_class, lightnings
from engine.compat.lightning.events import Adapter
from engine.compat.lightning.module import LightningDataModule, LightningModule, parts_that_log
from engine.compat.lightning.names import BOUND
from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.utils.log import logger
from engine.utils.overrides import overridden

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_ASKED = (
    *("log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "clip_gradients", "all_gather", "print"),
    *("toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"),
)
"""What a module asks of its trainer: during a run, of the adapted module."""
_OF_DATA = {name for name in vars(LightningDataModule) | vars(DataModule) if name.startswith("_")} | {
    *("attach", "save_hyperparameters"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
}
"""Methods of a data module that a run does not call, or asks for again each time."""
_OWN = (*_ASKED, "forward", "trainer", "configure_optimizers", "configure_callbacks")


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
        if "_adapted" not in vars(value):
            vars(value)["_adapted"] = _class_for(kind)(value)
        return vars(value)["_adapted"]
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
        self.__dict__.update({name: vars(original)[name] for name in _SHARED})
        self.hparams.update(original.hparams)
        self.prepare_data_per_node = original.prepare_data_per_node

    training = property(
        lambda self: self.original.training, lambda self, value: setattr(self.original, "training", value)
    )
    automatic_optimization = property(lambda self: self.original.automatic_optimization)
    strict_loading = property(lambda self: self.original.strict_loading)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def configure_optimizers(self) -> Any:
        return self.original.configure_optimizers()

    def configure_callbacks(self) -> Any:
        given = self.original.configure_callbacks()
        return [adapt(each) for each in (given if isinstance(given, (list, tuple)) else [given])]

    def attach(self, context: Any) -> None:
        super().attach(context)
        for part in parts_that_log(self.original, lightnings(type(self.original), "LightningModule")):
            if context is not None:
                part._trainer, part._device = self.trainer, context.device
                vars(part).update({name: getattr(self, name) for name in _ASKED})
                continue
            for name in _ASKED:
                vars(part).pop(name, None)


class AdaptedDataModule(LightningDataModule, Adapter):
    """A data module of Lightning's, ``original``, in a run here; the run asks it for each loader when it needs it."""

    def __init__(self, original: Any) -> None:
        self.original = original
        super().__init__()
        self.hparams.update(original.hparams)
        self.prepare_data_per_node = original.prepare_data_per_node
        hooks = (name for name, method in vars(DataModule).items() if callable(method) and name not in _OF_DATA)
        for name in (name for name in hooks if self._overrides(name)):
            vars(self)[name] = getattr(original, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name) if "original" in vars(self) else super().__getattr__(name)

    def _overrides(self, name: str) -> bool:
        return overridden(self.original, name, lightnings(type(self.original), "LightningDataModule"))

    def attach(self, run: Any) -> None:
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


@functools.cache
def _data_class_for(kind: Any) -> type[AdaptedDataModule]:
    """The class that stands for data modules of ``kind``: messages have its name."""
    return type(kind.__name__, (AdaptedDataModule,), {})


@functools.cache
def _class_for(kind: Any) -> type[AdaptedModule]:
    """The class for modules of a class of Lightning's: what that overrides is called, or named in the log."""
    base, space = lightnings(kind, "LightningModule"), {"__module__": kind.__module__}
    for name in dir(base):
        method = getattr(kind, name)
        if name.startswith("_") or name in _OWN or not callable(method) or method is getattr(base, name):
            continue
        if hasattr(LightningModule, name):
            space[name] = _forwarding(method, name)
        else:
            logger.warning("%s.%s is not called: nothing here has this event", kind.__name__, name)
    if space.keys() & {"on_save_checkpoint", "on_load_checkpoint"}:
        said = "%s: on_save_checkpoint and on_load_checkpoint get a dict of their own entries, without weights and counters"
        logger.warning(said, kind.__name__)
    return type(kind.__name__, (AdaptedModule,), space)


def _forwarding(method: Any, name: str) -> Any:
    return functools.wraps(method)(lambda self, *args, **kwargs: getattr(self.original, name)(*args, **kwargs))
