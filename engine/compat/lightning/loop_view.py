"""``trainer.fit_loop``: the training's progress under the names of Lightning's loops, with the inner parts that published modules read."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from engine.compat.lightning.names import OF_LOOPS
from engine.utils.extensions import attribute_error


class _Part:
    """A read-only part of Lightning's loops; setting an attribute would have no effect, so it is an error."""

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
    """Lightning's loop over epochs, as a view. Setting ``max_epochs`` or ``max_steps`` changes the end of the training."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("max_epochs", "max_steps"):
            super().__setattr__(name, value)
        self._trainer.set_limit(name, None if value is None or value == -1 else int(value))

    max_epochs = property(lambda self: self._trainer.max_epochs, doc="The trainer's.")
    min_epochs = property(lambda self: self._trainer.min_epochs or 0, doc="The trainer's; 0 if unset.")
    max_steps = property(lambda self: self._trainer.max_steps, doc="The trainer's.")
    min_steps = property(lambda self: self._trainer.min_steps, doc="The trainer's.")
    max_batches = property(
        lambda self: self._trainer.num_training_batches, doc="The trainer's ``num_training_batches``."
    )
    batch_idx = property(lambda self: self.epoch_loop.batch_idx, doc="See :class:`EpochLoopView`.")
    total_batch_idx = property(lambda self: self.epoch_loop.total_batch_idx, doc="See :class:`EpochLoopView`.")
    epoch_loop = property(lambda self: EpochLoopView(self._trainer), doc="The loop over the batches of an epoch.")
    _data_source = property(lambda self: DataSourceView(self._trainer, "train"), doc="The training data.")

    @property
    def restarting(self) -> bool:
        """Whether the training has resumed from a checkpoint, and has done no step since."""
        run = self._run
        return run.loaded_from is not None and run.step == run.first_step

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """The counts ``current`` and ``total``, which both count the completed epochs."""
        return _progress(self._run.state.epoch, self._run.state.epoch)

    @property
    def _combined_loader(self) -> SimpleNamespace:
        """An object whose ``flattened`` lists the training loaders as the user gave them."""
        loaders: Any = self._trainer.train_dataloader
        loaders = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
        return SimpleNamespace(flattened=loaders if isinstance(loaders, list) else [loaders])

    def setup_data(self) -> None:
        """Create the training loader now, so that ``num_training_batches`` can be read early; all ranks must call this."""
        self._run.loaders.training()


class EpochLoopView(_Part):
    """Lightning's loop over the batches of an epoch, as a view. ``max_steps`` may be set, as on :class:`FitLoopView`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "max_steps":
            super().__setattr__(name, value)
        self._trainer.fit_loop.max_steps = value

    max_steps = property(lambda self: self._trainer.max_steps, doc="The trainer's.")

    global_step = property(lambda self: self._trainer.global_step, doc="The trainer's.")
    _batches_that_stepped = property(
        lambda self: self._trainer.global_step, doc="Optimizer steps, including the one just done."
    )
    val_loop = property(
        lambda self: SimpleNamespace(
            _data_source=DataSourceView(self._trainer, "validation"), _has_run=self._run.validated_step >= 0
        ),
        doc="The validations of this training.",
    )

    @property
    def batch_idx(self) -> int:
        """The index of this rank's latest micro-batch in the epoch; -1 before the first one."""
        loader = self._run.train_loader
        return -1 if loader is None else int(loader.batches_given) - 1

    @property
    def total_batch_idx(self) -> int:
        """The index of this rank's latest micro-batch, counted over all epochs."""
        state = self._run.state
        return int(state.batches - state.batch_idx) + self.batch_idx

    @property
    def batch_progress(self) -> SimpleNamespace:
        """Counts of this rank's micro-batches that were read and completed: ``current`` (in the epoch) and ``total``; also ``is_last_batch``."""
        state = self._run.state
        progress = _progress(state.batch_idx, state.batches, self.batch_idx + 1, self.total_batch_idx + 1)
        progress.is_last_batch = self._trainer.is_last_batch
        return progress


class EvaluationLoopView(_Part):
    """Lightning's loop of ``validate``, ``test`` or ``predict``, as a view."""

    def __init__(self, trainer: Any, stage: str) -> None:
        super().__init__(trainer)
        vars(self)["_stage"] = stage

    @property
    def max_batches(self) -> list[int | float]:
        """This rank's number of batches for each loader of the evaluation; empty unless an evaluation of this kind runs."""
        batches: list[int | float] = self._trainer._lengths(self._stage)
        return batches

    num_dataloaders = property(lambda self: len(self.max_batches), doc="The number of loaders.")
    restarting = False


class DataSourceView(_Part):
    """The source of the loaders: ``instance.train_dataloader()`` and ``instance.val_dataloader()`` return them, whoever provided them."""

    def __init__(self, trainer: Any, kind: str) -> None:
        super().__init__(trainer)
        vars(self)["_kind"] = kind

    @property
    def instance(self) -> SimpleNamespace:
        """An object with the methods ``train_dataloader`` and ``val_dataloader``."""
        trainer: Any = self._trainer
        return SimpleNamespace(
            train_dataloader=lambda: trainer.train_dataloader, val_dataloader=lambda: trainer.val_dataloaders
        )

    def is_defined(self) -> bool:
        """Whether this run uses data of this kind; known by the time the optimizers are created."""
        run = self._run
        return bool(run.val_loaders) if self._kind == "validation" else run.train_loader is not None


def _progress(current: int, total: int, read: int | None = None, read_in_total: int | None = None) -> SimpleNamespace:
    """Lightning's progress object: the completed counts, and the counts that were read (``None``: equal to the completed ones)."""

    def counts(done: int, ready: int | None) -> SimpleNamespace:
        ready = done if ready is None else ready
        return SimpleNamespace(ready=ready, started=ready, processed=done, completed=done)

    return SimpleNamespace(current=counts(current, read), total=counts(total, read_in_total))
