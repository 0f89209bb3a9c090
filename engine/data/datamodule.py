"""``DataModule``: data preparation and loaders, separate from any model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Never

import torch

from engine.config.hyperparameters import HParams, init_arguments
from engine.config.other_trainers import knows_other_trainers, missing, refused
from engine.interop.lightning_names import DATA
from engine.utils.tree import move


@knows_other_trainers
class DataModule:
    """Subclass it and define the loaders that the run needs; ``Fit(...).run(module, datamodule=data)``.

    ``batch`` is one micro-batch, ``dataloader_idx`` the number of its loader, ``exception`` what was raised.

    Order: ``prepare_data`` (one process of each machine), ``setup(stage)`` (every process), loaders, ``teardown(stage)``.
    """

    def __init__(self) -> None:
        self._hparams = HParams()

    def __getattr__(self, name: str) -> Any:
        raise missing(self, DATA, name)

    prepare_data_per_node: bool = True
    """Whether :meth:`prepare_data` runs on one process of each machine, or on rank 0 alone."""

    def prepare_data(self) -> None:
        """Download or convert data on disk; must not set state, since only one process of a machine runs it."""

    def setup(self, stage: str) -> None:
        """Create the datasets; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """After the run, also after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """An exception was raised during the run; it propagates afterwards. Other ranks may be gone: no collectives here."""

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
        """The loader of a testing; several in a list or a dict."""

    def predict_dataloader(self) -> Any:
        """The loader of a prediction; several in a list or a dict."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in checkpoints: a tree of tensors and JSON values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def save_hyperparameters(self, ignore: str | Iterable[str] = (), **unknown: Never) -> None:
        """Keep the arguments of ``__init__`` in :attr:`hparams`, without those in ``ignore``. Call it inside ``__init__``."""
        if unknown:
            raise refused("DataModule.save_hyperparameters", unknown)
        frame = inspect.currentframe()
        ignored = {ignore} if isinstance(ignore, str) else set(ignore)
        found = init_arguments(self, frame.f_back if frame else None)
        self.hparams.update({name: value for name, value in found.items() if name not in ignored})

    @property
    def hparams(self) -> HParams:
        """The arguments that :meth:`save_hyperparameters` kept."""
        if "_hparams" not in self.__dict__:  # a subclass whose __init__ does not call ours
            self._hparams = HParams()
        return self._hparams
