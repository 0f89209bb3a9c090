"""``Callback``: the base class of callbacks, with a method for each event of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.utils.extensions import adapt, with_advice

if TYPE_CHECKING:
    from torch import nn

    from engine.loop.run import Run
    from engine.module import TrainModule


class Callback:
    """Base class of callbacks: override the events that you need; only overridden ones are called. Every event gets the run and the module.

    The events of a training, in order::

        setup
        on_fit_start
        on_sanity_check_start, validation, on_sanity_check_end
        on_train_start
        for each epoch:
            on_train_epoch_start
            for each micro-batch:
                on_train_batch_start
                on_before_backward, on_after_backward
                on_before_optimizer_step, on_before_zero_grad    (only in the last micro-batch of an accumulation window)
                on_train_batch_end
                validation, when it is due
            on_train_epoch_end
        on_train_end
        on_fit_end
        teardown

    The events of a validation, in order::

        on_validation_start
        on_validation_epoch_start
        on_validation_batch_start, on_validation_batch_end    (for each batch)
        on_validation_epoch_end
        on_validation_end

    A test has ``on_test_start``, ``on_test_epoch_start``, ``on_test_batch_start``, ``on_test_batch_end``, ``on_test_epoch_end`` and ``on_test_end``,
    a prediction ``on_predict_start``, ``on_predict_epoch_start``, ``on_predict_batch_start``, ``on_predict_batch_end``, ``on_predict_epoch_end`` and
    ``on_predict_end`` in the same order. ``on_save_checkpoint`` and ``on_load_checkpoint`` are called while a checkpoint is created or loaded,
    ``on_checkpoint_loaded`` once its weights are loaded, ``on_checkpoint_saved`` and ``on_checkpoint_removed`` at the end of a step soon after a
    checkpoint is complete or deleted.

    The arguments of the events:

    - ``run``: the current :class:`engine.Run`; ``module``: the :class:`engine.TrainModule`.
    - ``stage``: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
    - ``batch``: the micro-batch, on the device; ``batch_idx``: its index in the epoch on this rank, from 0.
    - ``dataloader_idx``: the index of the loader that the batch comes from.
    - ``outputs``: what the module's step returned, detached; ``loss``: the loss that is about to be backpropagated.
    - ``optimizer``: the optimizer that is about to step, or to clear its gradients.
    - ``checkpoint``: a dict of JSON values and tensors that the callback may add to or read from.
    - ``path``: the path of the checkpoint; a ``str`` if it is a URL.
    - ``exception``: the exception that was raised.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__module__.startswith(("callbacks.", "engine.callbacks.")):
            with_advice(cls)

    runs_last = False
    """Whether each event calls this callback after all others, as checkpoint callbacks need to see what the others logged."""

    unfreezes = False
    """Whether this callback unfreezes parameters, or gives some to an optimizer, in the training: an optimizer may then start with frozen ones."""

    is_logger = False
    """Whether this callback is a logger (``callbacks.loggers.base.Logger``), listed in ``run.loggers`` and in the module's ``self.loggers``."""
    stands_for: Any = None
    """The object that is listed there in the place of this logger, whose calls it passes on; ``None``: the logger itself."""
    is_checkpoint = False
    """Whether this callback saves checkpoints; ``trainer.checkpoint_callback`` is the first callback that does."""
    is_early_stopping = False
    """Whether this callback ends trainings early; ``trainer.early_stopping_callback`` is the first callback that does."""
    takes: frozenset[str] = frozenset()
    """The kinds of media that :meth:`on_media` handles: any of ``image``, ``histogram``, ``text``, ``audio``, ``figure``, ``table``, ``artifact``."""
    shows_progress = False
    """Whether this callback shows the user progress and metrics; a run without such a callback logs them itself."""
    critical = True
    """Whether an error in this callback ends the run. Set ``False`` for a callback that only observes: an error is logged, and the callback is
    not called again in this run, except for ``teardown``. An error in ``setup`` or ``load_state_dict`` still ends the run, before its first step.
    A callback with ``critical = False`` must not communicate with other ranks, which would wait for the rank where it failed."""

    validates_with: str | None = None
    """The name of the weights (one of :meth:`other_weights`) that the model has during validation; ``None``: the trained weights. Scores are
    measured with these weights: checkpoints record the name, and loading one uses these weights by default."""

    @property
    def checkpoints_in(self) -> str | Path | None:
        """The directory or URL where this callback saves checkpoints; ``None``: in the run's folder, or nowhere. Read before ``setup``."""
        return None

    @property
    def monitored(self) -> str | None:
        """The name of the metric that this callback follows, which something has to log; ``None``: it follows none."""
        return getattr(self, "monitor", None)

    @property
    def finds_best(self) -> bool:
        """Whether this callback sets ``run.best_checkpoint`` by a metric."""
        return False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None: ...
    def teardown(self, run: Run, module: nn.Module, stage: str) -> None: ...
    def on_fit_start(self, run: Run, module: nn.Module) -> None: ...
    def on_fit_end(self, run: Run, module: nn.Module) -> None: ...
    def on_sanity_check_start(self, run: Run, module: nn.Module) -> None: ...
    def on_sanity_check_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_start(self, run: Run, module: nn.Module) -> None: ...
    def on_train_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None: ...
    def on_after_backward(self, run: Run, module: nn.Module) -> None: ...
    def on_before_optimizer_step(self, run: Run, module: nn.Module, optimizer: Any) -> None: ...
    def on_before_zero_grad(self, run: Run, module: nn.Module, optimizer: Any) -> None: ...
    def on_validation_start(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_end(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_validation_batch_start(
        self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_start(self, run: Run, module: nn.Module) -> None: ...
    def on_test_end(self, run: Run, module: nn.Module) -> None: ...
    def on_test_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_test_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_test_batch_start(
        self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_start(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_end(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_epoch_start(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_epoch_end(self, run: Run, module: nn.Module) -> None: ...
    def on_predict_batch_start(
        self, run: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Called on every rank before values are logged: add to ``metrics`` here."""

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Called on every rank with ``metrics`` over all ranks, for the first step, every ``log_every_n_steps``-th, the last, each epoch and
        evaluation."""

    def on_media(self, run: Run, module: nn.Module, kind: str, name: str, value: Any, options: dict[str, Any]) -> None:
        """Called on rank 0 when ``module.log_<kind>(name, value, **options)`` is called, for the kinds that some callback takes.

        ``value``: as :func:`engine.metrics.media.as_medium` gives it; a tensor is a copy, on its device.
        """

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        """Called when an exception is raised (also Ctrl-C), before it propagates. Use no collectives here: other ranks may be gone."""

    def on_save_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called when a run is resumed, once its optimizers are configured: after the callbacks' states, before the weights and the optimizers."""

    def on_checkpoint_loaded(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called when a run is resumed, after all weights and optimizers, with the entries that ``on_load_checkpoint`` gets.

        Changes of parameters and buffers made here are made in other weights, such as averages, too: what is in the model is what validates.
        """

    def on_checkpoint_saved(self, run: Run, module: nn.Module, path: Path | str, score: float | None) -> None:
        """Called when the checkpoint at ``path`` is complete: on every rank after the same step of a training, at the latest before ``on_fit_end``.

        ``score``: the value by which ``resume="best"`` compares the checkpoint; ``None``: none was measured.
        """

    def on_checkpoint_removed(self, run: Run, module: nn.Module, path: Path | str) -> None:
        """Called when the checkpoint at ``path`` has been deleted because it no longer ranks among those to keep; when: see
        :meth:`on_checkpoint_saved`."""

    def note_methods(self) -> None:
        """Take note of methods that were set on the object since the last call. An adapter of another library's callback forwards them."""

    @property
    def state_key(self) -> str:
        """The key under which a checkpoint stores :meth:`state_dict`: by default the name of the class.

        Two callbacks of one class that have state need different keys: include what differs, as in ``f"EarlyStopping[monitor={self.monitor!r}]"``.
        The text after ``"; "`` may change between runs, provided that the text before it is unique among the callbacks and among the saved states.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """The state to save in checkpoints: a tree of tensors and JSON values. Called on all ranks together; rank 0's state is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ``state`` that :meth:`state_dict` returned on rank 0."""

    def other_weights(self, run: Run, module: nn.Module) -> dict[str, dict[str, Any]]:
        """Further weights of the model that this callback keeps, such as averages: ``{"ema": {name in the model: tensor}}``.

        The tensors may be whole, or sharded as the parameters are; checkpoints store them in parts, as they do parameters. Load them by name with
        ``weights`` of :meth:`engine.TrainModule.load_from_checkpoint`; the name ``"trained"`` is taken by the parameters.
        Call ``run.saver.hold()`` before you change the tensors.

        Called on all ranks together when a checkpoint is created, and when one is loaded: then after :meth:`load_state_dict`, and the
        returned tensors are filled in place.
        """
        return {}


def affecting_steps(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that may change a training step; loggers, progress bars and checkpoint callbacks cannot."""
    return [c for c in callbacks if c.critical and not (c.is_logger or c.runs_last or c.shows_progress)]


def adapted_callbacks(where: str, callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Convert the callbacks of other libraries to :class:`Callback` objects; ``where`` names the argument in an error."""
    result = tuple(item if isinstance(item, Callback) else adapt(item) for item in callbacks)
    for callback in result:
        if isinstance(callback, type):
            raise TypeError(f"{where} has the class {callback.__name__}: give an object, {callback.__name__}(...)")
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{where} has {callback!r:.80} of type {type(callback).__name__}: give engine.Callback objects"
            )
    return result


def with_callbacks_of_module(module: TrainModule, callbacks: Sequence[Callback]) -> list[Callback]:
    """Add the callbacks of ``module.configure_callbacks``; they replace callbacks of the same classes."""
    configured = [] if module.configure_callbacks is None else module.configure_callbacks()
    of_module = adapted_callbacks(
        f"{type(module).__name__}.configure_callbacks",
        configured if isinstance(configured, (list, tuple)) else [configured],
    )
    return [*(c for c in callbacks if type(c) not in {type(callback) for callback in of_module}), *of_module]
