"""``LightningModule`` and ``LightningDataModule``: ours, with the trainer that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from torch import nn

from engine.data.datamodule import DataModule
from engine.interop.lightning.ckpt import readable
from engine.module import TrainModule


class LightningModule(TrainModule):
    """:class:`engine.TrainModule` as a Lightning project calls it: ``self.trainer`` is the ``Trainer``."""

    _trainer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trainer": None}

    @property
    def trainer(self) -> Any:
        """The trainer of the run under way or of the latest one.

        Raises:
            RuntimeError: there is none.
        """
        if self._trainer is None and self._context is None:
            raise RuntimeError(f"{type(self).__qualname__} is not attached to a `Trainer`.")
        return self._trainer if self._trainer is not None else self._context.trainer  # type: ignore[union-attr]

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        for child in self.children():
            if isinstance(child, LightningModule):
                child.trainer = trainer
        self._trainer = trainer

    def attach(self, context: Any) -> None:
        if context is not None and self._trainer is not None:
            self._trainer.joins(context)
        super().attach(context)
        for child in _parts(self):
            child.attach(context)

    def log_with(self, record: Any) -> None:
        super().log_with(record)
        for child in _parts(self):
            child.log_with(record)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """As :meth:`engine.TrainModule.optimizers`."""
        return super().optimizers()

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """As :meth:`engine.TrainModule.load_from_checkpoint`, also of one-file checkpoints, Lightning's too: only tensors and plain values are
        unpickled, whatever ``weights_only`` is."""
        if hparams_file is not None:
            raise ValueError("load_from_checkpoint(hparams_file=...): give the hyperparameters as arguments")
        device = next(iter(map_location.values()), None) if isinstance(map_location, dict) else map_location
        with readable(checkpoint_path) as path:
            return super().load_from_checkpoint(path, strict=strict is not False, map_location=device, **kwargs)


def _parts(module: nn.Module) -> list[TrainModule]:
    """Modules in it that are trained with it, and log."""
    return [child for child in module.children() if isinstance(child, TrainModule)]


class LightningDataModule(DataModule):
    """:class:`engine.DataModule` with ``self.trainer``."""

    trainer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
