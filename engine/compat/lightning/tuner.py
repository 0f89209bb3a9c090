"""``Tuner``: the searches of the two finders, when a script asks for them."""

from __future__ import annotations

from typing import Any, Literal

from callbacks.lr_finder import LRSweep
from engine.compat.lightning.searches import BatchSizeFinder, Finder, LearningRateFinder
from engine.compat.lightning.trainer import Trainer


class Tuner:
    """Calls this library's searches with the settings of a ``trainer``, and sets what they find."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, dataloaders: Any = None, datamodule: Any = None,
        method: str = "fit", min_lr: float = 1e-8, max_lr: float = 1, num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential", early_stop_threshold: float | None = 4.0, update_attr: bool = True,
        attr_name: str = "",
    ) -> LRSweep | None:  # fmt: skip
        """Find a learning rate; return the losses, whose ``suggestion()`` is set as ``lr`` or ``learning_rate``. See :class:`LearningRateFinder`."""
        _only_training("lr_find", method, dataloaders)
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        self._search(finder, model, train_dataloaders, datamodule)
        return finder.optimal_lr

    def scale_batch_size(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, dataloaders: Any = None, datamodule: Any = None,
        method: str = "fit", mode: Literal["power", "binsearch"] = "power", steps_per_trial: int = 3, init_val: int = 2,
        max_trials: int = 25, batch_arg_name: str = "batch_size", margin: float = 0.05, max_val: int = 8192,
    ) -> int | None:  # fmt: skip
        """Find the largest batch size that fits, set it as ``batch_arg_name`` and return it. See :class:`BatchSizeFinder`."""
        _only_training("scale_batch_size", method, dataloaders)
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self._search(finder, model, train_dataloaders, datamodule)
        return finder.optimal_batch_size

    def _search(self, finder: Finder, model: Any, loaders: Any, datamodule: Any) -> None:
        if any(isinstance(callback, type(finder)) for callback in self._trainer.callbacks):
            raise ValueError(
                f"Tuner: the trainer has a {type(finder).__name__} among its callbacks: leave one of the two out"
            )
        self._trainer.search_with([finder], model, loaders, datamodule)


def _only_training(search: str, method: str, dataloaders: Any) -> None:
    if method != "fit" or dataloaders is not None:
        raise ValueError(
            f"Tuner.{search}(method={method!r}): it searches with trainings; give method='fit' and train_dataloaders"
        )
