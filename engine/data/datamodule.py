"""``DataModule``: data preparation and loaders, separate from any model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from engine.checkpoint.module_loading import load_datamodule
from engine.config.hyperparameters import HParams, initial, save, saved_by
from engine.utils.extensions import missing
from engine.utils.overrides import set_to_none, use_base_methods
from engine.utils.sample_count import counted
from engine.utils.tree import move

if TYPE_CHECKING:
    from engine.loop.run import Run


class DataModule:
    """The base class for data preparation and loaders: define the loaders that the run needs, and call ``Fit(...).run(module, datamodule=data)``.

    In hooks, ``batch`` is one micro-batch, ``dataloader_idx`` the number of its loader, and ``exception`` the raised exception.

    Methods are called in this order: ``prepare_data`` (on one process of each machine), ``setup(stage)`` (on every process), the loaders,
    ``teardown(stage)``.
    """

    _hparams: HParams
    hparams_name: str | None = None
    """The name of the constructor argument that holds all hyperparameters as a dict, if it was saved that way."""

    def __getattr__(self, name: str) -> Any:
        if name == "trainer":
            if (run := self.__dict__.get("_attached_run")) is None:
                raise AttributeError(
                    f"{type(self).__name__}.trainer is there during a Fit run only", name=name, obj=self
                )
            return run.trainer
        raise missing(self, "DataModule", name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle, such as the one for a loader's worker processes, belongs to no run.
        return {name: value for name, value in self.__dict__.items() if name != "_attached_run"}

    trainer: Any
    """A read-only view of the run with the attribute names of Lightning's ``Trainer``; outside of a run an ``AttributeError``."""

    prepare_data_per_node: bool = True
    """``True``: :meth:`prepare_data` runs on one process of each machine; ``False``: on rank 0 alone."""

    def attach(self, run: Run | None) -> None:
        """Attach the data module to a ``run``, or detach it (``None``). The run calls this."""
        self._attached_run = run
        if run is None:
            set_to_none(self, vars(self).pop("_set_to_none", {}))
        else:
            vars(self).setdefault("_set_to_none", {}).update(use_base_methods(self, DataModule))

    def prepare_data(self) -> None:
        """Download or convert data on disk. It must not set attributes, since only one process of each machine runs it."""

    def setup(self, stage: str) -> None:
        """Create the datasets; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """Clean up; called after the run, also after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception was raised during the run; it propagates afterwards. Other ranks may be gone: no collectives here."""

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch, where it does not show it; see :meth:`engine.TrainModule.count_samples`."""
        return counted(batch)[0]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch before it goes to the device. This hook and the next two take precedence over the module's."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch to the device; override this for your own batch types."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch on the device."""
        return batch

    def train_dataloader(self) -> Any:
        """Return the training loader."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list or dict of several."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list or dict of several."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list or dict of several."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints, a tree of tensors and JSON values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Keep the arguments of ``__init__`` in :attr:`hparams`, and in every checkpoint.

        ``args``, ``ignore``, ``frame`` and ``logger`` mean the same as in ``TrainModule.save_hyperparameters``.
        """
        current = inspect.currentframe()
        save(self, args, ignore, logger, frame or (current.f_back if current else None))

    @property
    def hparams(self) -> HParams:
        """The hyperparameters that :meth:`save_hyperparameters` has saved, readable as entries and as attributes."""
        return saved_by(self)

    @property
    def hparams_initial(self) -> HParams:
        """A copy of :attr:`hparams`, made when they were last saved."""
        return initial(self)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **overrides: Any) -> Self:
        """Create a data module of this class with a checkpoint's hyperparameters and state. No code from the checkpoint is run.

        Args:
            checkpoint_path: a checkpoint, or a folder, whose newest checkpoint is used; a directory or a URL that fsspec knows.
            overrides: arguments of the constructor, which take precedence over saved hyperparameters.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or it is damaged.
            TypeError: a constructor argument is missing, or an override is not one; the message names it.
        """
        return load_datamodule(cls, checkpoint_path, overrides)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Create a data module whose loaders read these datasets; each may be a list or a dict of several.

        Args:
            train_dataset: the training data, which is shuffled unless it is iterable.
            val_dataset, test_dataset, predict_dataset: data that is read in order.
            batch_size, num_workers: for every loader; also passed to the constructor, if it takes arguments of these names.
            datamodule_kwargs: other arguments of the constructor.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        parameters = inspect.signature(cls).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        data = cls(**datamodule_kwargs, **{name: n for name, n in sizes.items() if takes_any or name in parameters})
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, dataset in datasets.items():
            if dataset is not None:
                setattr(data, f"{kind}_dataloader", partial(_loaders, dataset, kind == "train", sizes))
        return data


def _loaders(dataset: Any, shuffle: bool, sizes: dict[str, Any]) -> Any:
    """Create a loader for a dataset, or for each dataset in a list or a dict."""
    if isinstance(dataset, Mapping):
        return {name: _loaders(member, shuffle, sizes) for name, member in dataset.items()}
    if isinstance(dataset, (list, tuple)) and dataset and all(isinstance(member, Dataset) for member in dataset):
        return [_loaders(member, shuffle, sizes) for member in dataset]
    return DataLoader(dataset, shuffle=shuffle and not isinstance(dataset, IterableDataset), **sizes)
