"""``trainer.fit_loop``: where the training stands, under the names of Lightning's loops, with what published modules read of their inner parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from engine.compat.lightning.names import OF_LOOPS
from engine.utils.extensions import attribute_error


class _Part:
    """A part of Lightning's loops, to read: nothing would follow what is set."""

    _trainer: Any

    def __init__(self, trainer: Any) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> NoReturn:
        raise attribute_error(self, name, OF_LOOPS)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: {OF_LOOPS}", name=name, obj=self)

    @property
    def _run(self) -> Any:
        return self._trainer._run


class FitLoopView(_Part):
    """The epochs. ``max_epochs`` and ``max_steps`` may be set: the training then ends there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("max_epochs", "max_steps"):
            super().__setattr__(name, value)
        self._trainer.set_limit(name, None if value is None or value == -1 else int(value))

    max_epochs = property(lambda self: self._trainer.max_epochs, doc="The trainer's.")
    min_epochs = property(lambda self: self._trainer.min_epochs or 0, doc="The trainer's; 0: no such limit.")
    max_steps = property(lambda self: self._trainer.max_steps, doc="The trainer's.")
    min_steps = property(lambda self: self._trainer.min_steps, doc="The trainer's.")
    max_batches = property(
        lambda self: self._trainer.num_training_batches, doc="The trainer's ``num_training_batches``."
    )
    batch_idx = property(lambda self: self.epoch_loop.batch_idx, doc="See :class:`EpochLoopView`.")
    total_batch_idx = property(lambda self: self.epoch_loop.total_batch_idx, doc="See :class:`EpochLoopView`.")
    epoch_loop = property(lambda self: EpochLoopView(self._trainer), doc="The batches of an epoch.")
    _data_source = property(lambda self: DataSourceView(self._trainer, "train"), doc="The training data.")

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """``current`` and ``total``: the epochs done."""
        return _progress(self._run.state.epoch, self._run.state.epoch)

    @property
    def _combined_loader(self) -> SimpleNamespace:
        """``flattened``: the training loaders, as they were given."""
        loaders: Any = self._trainer.train_dataloader
        loaders = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
        return SimpleNamespace(flattened=loaders if isinstance(loaders, list) else [loaders])

    def setup_data(self) -> None:
        """Make the training loader now, where ``num_training_batches`` is read before it is made; all ranks call this."""
        self._run.loaders.training()


class EpochLoopView(_Part):
    """The batches of an epoch. ``max_steps`` may be set, as that of :class:`FitLoopView`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "max_steps":
            super().__setattr__(name, value)
        self._trainer.fit_loop.max_steps = value

    max_steps = property(lambda self: self._trainer.max_steps, doc="The trainer's.")

    global_step = property(lambda self: self._trainer.global_step, doc="The trainer's.")
    _batches_that_stepped = property(lambda self: self._trainer.global_step, doc="Steps, with the one just done.")
    val_loop = property(
        lambda self: SimpleNamespace(
            _data_source=DataSourceView(self._trainer, "validation"), _has_run=self._run.validated_step >= 0
        ),
        doc="The validations of this training.",
    )

    @property
    def batch_idx(self) -> int:
        """The number of this rank's newest micro-batch in the epoch; -1: there is none yet."""
        loader = self._run.train_loader
        return -1 if loader is None else int(loader.batches_given) - 1

    @property
    def total_batch_idx(self) -> int:
        """The number of this rank's newest micro-batch, counted over the epochs."""
        state = self._run.state
        return int(state.batches - state.batch_idx) + self.batch_idx

    @property
    def batch_progress(self) -> SimpleNamespace:
        """``current`` (in the epoch) and ``total``: this rank's micro-batches that were read, and that are done; ``is_last_batch``."""
        state = self._run.state
        progress = _progress(state.batch_idx, state.batches, self.batch_idx + 1, self.total_batch_idx + 1)
        progress.is_last_batch = self._trainer.is_last_batch
        return progress


class DataSourceView(_Part):
    """Source of the loaders: ``instance.train_dataloader()`` and ``instance.val_dataloader()`` give them, wherever they come from."""

    def __init__(self, trainer: Any, kind: str) -> None:
        super().__init__(trainer)
        vars(self)["_kind"] = kind

    @property
    def instance(self) -> SimpleNamespace:
        """An object with the methods."""
        trainer: Any = self._trainer
        return SimpleNamespace(
            train_dataloader=lambda: trainer.train_dataloader, val_dataloader=lambda: trainer.val_dataloaders
        )

    def is_defined(self) -> bool:
        """Whether this run has data of this kind and uses it; known when the optimizers are made."""
        run = self._run
        return bool(run.val_loaders) if self._kind == "validation" else run.train_loader is not None


def _progress(current: int, total: int, read: int | None = None, read_in_total: int | None = None) -> SimpleNamespace:
    def counts(done: int, ready: int | None) -> SimpleNamespace:
        ready = done if ready is None else ready
        return SimpleNamespace(ready=ready, started=ready, processed=done, completed=done)

    return SimpleNamespace(current=counts(current, read), total=counts(total, read_in_total))
