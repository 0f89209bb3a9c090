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
from engine.utils.tree import move

if TYPE_CHECKING:
    from engine.loop.run import Run


class DataModule:
    """Subclass it and define the loaders that the run needs; ``Fit(...).run(module, datamodule=data)``.

    ``batch`` is one micro-batch, ``dataloader_idx`` the number of its loader, ``exception`` what was raised.

    Order: ``prepare_data`` (one process of each machine), ``setup(stage)`` (every process), loaders, ``teardown(stage)``.
    """

    _hparams: HParams
    hparams_name: str | None = None
    """The constructor's argument that was saved as the dict of all hyperparameters, if one was."""

    def __getattr__(self, name: str) -> Any:
        if name == "trainer":
            if (run := self.__dict__.get("_attached_run")) is None:
                raise AttributeError(
                    f"{type(self).__name__}.trainer is there during a Fit run only", name=name, obj=self
                )
            return run.trainer
        raise missing(self, "DataModule", name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle, for a loader's worker processes too, belongs to no run.
        return {name: value for name, value in self.__dict__.items() if name != "_attached_run"}

    trainer: Any
    """The run under the names of Lightning's ``Trainer``, to read; outside of a run an ``AttributeError``."""

    prepare_data_per_node: bool = True
    """``True``: :meth:`prepare_data` runs on one process of each machine; ``False``: on rank 0 alone."""

    def attach(self, run: Run | None) -> None:
        """Enter a ``run`` (leave it: ``None``); called by it."""
        self._attached_run = run

    def prepare_data(self) -> None:
        """Download or convert data on disk; must not set state, since only one process of a machine runs it."""

    def setup(self, stage: str) -> None:
        """Create the datasets; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """Called after the run, also after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception was raised during the run; it propagates afterwards. Other ranks may be gone: no collectives here."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, before it goes to the device. This and the next two win over the module's."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device, for your own batch types."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, on the device."""
        return batch

    def train_dataloader(self) -> Any:
        """The loader of a training."""

    def val_dataloader(self) -> Any:
        """The loader of a validation; several in a list or a dict."""

    def test_dataloader(self) -> Any:
        """The loader of a test; several in a list or a dict."""

    def predict_dataloader(self) -> Any:
        """The loader of a prediction; several in a list or a dict."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in checkpoints: a tree of tensors and JSON values."""
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
        """The hyperparameters that :meth:`save_hyperparameters` kept; entries are attributes too."""
        return saved_by(self)

    @property
    def hparams_initial(self) -> HParams:
        """A copy of :attr:`hparams` as they were when they were saved last."""
        return initial(self)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **overrides: Any) -> Self:
        """A new data module of this class with a checkpoint's hyperparameters and state; opening it runs no code from it.

        Args:
            checkpoint_path: a checkpoint, or a folder, whose newest checkpoint is used; a directory or a URL that fsspec knows.
            overrides: other arguments of the constructor; they win over the saved hyperparameters.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
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
        """A data module whose loaders read the given datasets; each may be a list or a dict of several.

        Args:
            train_dataset: is shuffled, unless it is iterable.
            val_dataset, test_dataset, predict_dataset: are read in order.
            batch_size, num_workers: of every loader; the constructor gets them too, if it takes arguments of these names.
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
    """A loader for a dataset, or for each one in a list or a dict."""
    if isinstance(dataset, Mapping):
        return {name: _loaders(member, shuffle, sizes) for name, member in dataset.items()}
    if isinstance(dataset, (list, tuple)) and dataset and all(isinstance(member, Dataset) for member in dataset):
        return [_loaders(member, shuffle, sizes) for member in dataset]
    return DataLoader(dataset, shuffle=shuffle and not isinstance(dataset, IterableDataset), **sizes)
