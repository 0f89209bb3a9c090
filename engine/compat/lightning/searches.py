"""``LearningRateFinder`` and ``BatchSizeFinder``: this library's searches with Lightning's arguments, before a training begins."""

from __future__ import annotations

from typing import Any, Literal

import engine.callbacks as own
from callbacks.lr_finder import LRSweep
from engine.compat.checked_arguments import checking_arguments
from engine.compat.lightning.callback import Callback
from engine.compat.lightning.events import original
from engine.data.datamodule import DataModule
from engine.fit import Fit
from engine.module import TrainModule
from engine.utils.log import logger

_NOT_HERE = "give it to Trainer(callbacks=...), which searches before the training, or call Tuner(trainer)"


class Finder(Callback):
    """The base of the two finders. ``Trainer.fit`` calls :meth:`search` before its run."""

    _has_searched = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("on_fit_start", "lr_find", "scale_batch_size"):
            if name in vars(cls) and Finder not in cls.__bases__:
                raise TypeError(
                    f"{cls.__name__}.{name} is not called: the search comes before the training, once; call Tuner(trainer) when you need it"
                )

    def search(self, fit: Fit, module: TrainModule, loader: Any, datamodule: DataModule | None) -> None:
        """Search with the settings of ``fit``, and set what is found on the module or the data module."""
        raise NotImplementedError

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and not self._has_searched:
            raise ValueError(f"{type(self).__name__} has not searched: {_NOT_HERE}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._has_searched = False


class LearningRateFinder(Finder):
    """Finds a learning rate with :func:`callbacks.find_lr` before each training, and sets the module's ``lr`` or ``learning_rate``.

    ``optimal_lr`` has the losses, and as ``suggestion()`` a tenth of the rate at which the smoothed loss is lowest.
    """

    optimal_lr: LRSweep | None = None

    @checking_arguments()
    def __init__(
        self, min_lr: float = 1e-8, max_lr: float = 1, num_training_steps: int = 100, mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0, update_attr: bool = True, attr_name: str = "",
    ) -> None:  # fmt: skip
        self._options: dict[str, Any] = {
            "min_lr": min_lr, "max_lr": float(max_lr), "num_steps": num_training_steps, "mode": mode,
            "early_stop_threshold": early_stop_threshold, "picture": None,
        }  # fmt: skip
        self._sets, self._attribute = update_attr, attr_name

    def search(self, fit: Fit, module: TrainModule, loader: Any, datamodule: DataModule | None) -> None:
        self._has_searched = True
        if fit.settings.fast_dev_run:
            return
        names = [self._attribute] if self._attribute else ["lr", "learning_rate"]
        owners = _owners(module, datamodule) if self._sets else []
        name = next((name for name in names if any(_has(owner, name) for owner in owners)), None)
        if self._sets and name is None:
            raise AttributeError(
                f"LearningRateFinder: neither {type(module).__name__} nor its hyperparameters have {' or '.join(names)}: give attr_name, or "
                "update_attr=False"
            )
        self.optimal_lr = own.find_lr(module, loader, datamodule=datamodule, fit=fit, **self._options)
        rate = self.optimal_lr.suggestion()
        if name is not None and rate is not None:
            _set(name, rate, owners)
            logger.info("LearningRateFinder: %s = %.3g", name, rate)


class BatchSizeFinder(Finder):
    """Finds the largest batch size that fits with :func:`callbacks.find_batch_size` before each training, and sets it as ``batch_arg_name``."""

    optimal_batch_size: int | None = None

    @checking_arguments()
    def __init__(
        self, mode: Literal["power", "binsearch"] = "power", steps_per_trial: int = 3, init_val: int = 2, max_trials: int = 25,
        batch_arg_name: str = "batch_size", margin: float = 0.05, max_val: int = 8192,
    ) -> None:  # fmt: skip
        if not 0.0 <= margin < 1.0:
            raise ValueError(f"BatchSizeFinder(margin={margin}): it must be at least 0 and below 1")
        self._options: dict[str, Any] = {
            "mode": mode, "steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "batch_arg_name": batch_arg_name,
        }  # fmt: skip
        self._margin, self._largest = margin if mode == "binsearch" else 0.0, max_val

    def search(self, fit: Fit, module: TrainModule, loader: Any, datamodule: DataModule | None) -> None:
        self._has_searched = True
        if fit.settings.fast_dev_run:
            return
        name = self._options["batch_arg_name"]
        if loader is not None:
            raise ValueError(
                f"BatchSizeFinder: a loader was given, whose batch size cannot be set: use {name} in train_dataloader"
            )
        size = own.find_batch_size(module, None, datamodule=datamodule, fit=fit, **self._options)
        self.optimal_batch_size = min(max(1, int(size * (1 - self._margin))), self._largest)
        _set(name, self.optimal_batch_size, _owners(module, datamodule))


def _owners(module: TrainModule, datamodule: DataModule | None) -> list[Any]:
    """The objects that may have the attribute, and their hyperparameters."""
    objects = [original(module)] + ([] if datamodule is None else [original(datamodule)])
    return [place for owner in objects for place in (owner, owner.hparams)]


def _has(owner: Any, name: str) -> bool:
    return name in owner if isinstance(owner, dict) else hasattr(owner, name)


def _set(name: str, value: Any, owners: list[Any]) -> None:
    for owner in owners:
        if _has(owner, name):
            if isinstance(owner, dict):
                owner[name] = value
            else:
                setattr(owner, name, value)
