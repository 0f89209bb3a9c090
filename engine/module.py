"""``TrainModule``: a model together with its training, validation, test and prediction steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from engine.checkpoint.module_loading import load_module
from engine.config.hyperparameters import HParams, initial, save, saved_by
from engine.metrics.recorder import ClosedRecorder, Recorder
from engine.step.gradients import Loss
from engine.strategies.deferred_init import reset
from engine.utils.extensions import missing, with_advice
from engine.utils.log import warn_once
from engine.utils.model_export import to_onnx, to_torchscript
from engine.utils.overrides import overridden, set_to_none, use_base_methods
from engine.utils.parameters import frozen_except
from engine.utils.sample_count import counted
from engine.utils.tree import move

if TYPE_CHECKING:
    from engine.loop.run import Run


@with_advice
class TrainModule(nn.Module):
    """Base class of models that :class:`engine.Fit` trains: define ``training_step`` and ``configure_optimizers``.

    Call the forward pass as ``self(x)`` or through any submodule; the run does device placement, distributed
    wrapping, precision, gradient accumulation and clipping.

    The module's events have the names, order and arguments of :class:`engine.Callback`'s, without ``run`` and ``module``: ``batch`` is one
    micro-batch, ``batch_idx`` its index in the ``epoch`` on this rank, ``dataloader_idx`` the index of its loader.
    """

    automatic_optimization: bool = True
    """Set to False to call ``manual_backward`` and the optimizers' ``step`` and ``zero_grad`` in ``training_step`` yourself."""
    steps_per_batch: float | None = None
    """The number of optimizer steps in a batch, on average, of a module with ``automatic_optimization = False``: 2 in a GAN whose ``training_step``
    steps both optimizers. ``run.total_steps`` needs it where ``max_steps`` ends the training; ``None`` means 1, and is an error with several
    optimizers."""
    hparams_name: str | None = None
    """The name of the constructor's argument that was saved as the dict of all hyperparameters, if one was."""
    _reached: tuple[int, int, int] = (0, 0, 0)
    """The step, epoch and sample counters at the end of the latest run."""
    strict_loading: bool = True
    """Set to False to load checkpoints that lack some of the module's parameters, or have others."""
    run: Any
    """The current :class:`engine.Run`; outside of a run, access is an ``AttributeError``. A module's own attribute of this name takes precedence."""
    trainer: Any
    """The current run's ``trainer``, see :attr:`engine.Run.trainer`; available as :attr:`run` is."""
    loggers: list[Any]
    """The loggers among the run's callbacks; available as :attr:`run` is."""
    logger: Any
    """The first of :attr:`loggers`, or ``None``; available as :attr:`run` is."""
    starts_before_data: bool = False
    """Whether the run calls :meth:`on_fit_start` before it asks the module or the data module for loaders, and before it resumes."""
    may_train_nothing: bool = False
    """Whether a training without optimizers or without any loss is a warning rather than an error, and windows without a loss count as steps."""
    leaves_out_unknown_keys: bool = False
    """Whether an unknown key in a dict of :meth:`configure_optimizers` is left out with a warning rather than an error."""
    built: bool = False
    """Whether the run skips :meth:`configure_model`, because the model is built already and keeps its values."""

    def __init__(self) -> None:
        super().__init__()
        self._context: Run | None = None
        self._log_recorder: Recorder | ClosedRecorder | None = None
        self._toggled: list[Tensor] = []
        self.sharded_root: list[nn.Module] = []
        """The wrapper that a sharding strategy calls instead of the module; in a list, so that it is not a submodule."""

    def __getattr__(self, name: str) -> Any:
        # Does nn.Module.__getattr__'s lookup without calling it: every forward pass looks up parameters and submodules here.
        attributes = self.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):
            if kind in attributes and name in attributes[kind]:
                return attributes[kind][name]
        if name in _FROM_RUN:
            if attributes.get("_context") is not None:
                return _FROM_RUN[name](attributes["_context"])
            return self._outside_run(name)
        raise missing(self, "TrainModule", name)

    def _outside_run(self, name: str) -> Any:
        """The value of an attribute of :data:`_FROM_RUN` outside of a run."""
        if name not in _OUTSIDE_RUN:
            raise AttributeError(f"{type(self).__name__}.{name} is there during a Fit run only")
        return _OUTSIDE_RUN[name]

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the module belongs to no run.
        return {**self.__dict__, "_context": None, "_log_recorder": None, "sharded_root": []}

    # -- what to define ---------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Loss | Mapping[str, Any] | None:
        """Compute the loss of one micro-batch. This and the other steps may be defined without ``batch_idx``.

        Returns:
            A scalar (the mean over the micro-batch's samples), an :class:`engine.Loss` (a sum and a count, for means over tokens), a
            dict with one of these under ``"loss"``, or ``None`` to leave the micro-batch out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define training_step(self, batch, batch_idx)")

    def configure_optimizers(self) -> Any:
        """Return optimizers and learning rate schedulers.

        Possible are an optimizer; a list of optimizers; ``([optimizers], [schedulers])``; a dict ``{"optimizer": ..., "lr_scheduler": ...}``, a
        list or tuple of such dicts; ``[]`` to train no parameters (``None`` too, with a warning). A scheduler is an object, or a dict of
        ``scheduler``, ``interval`` (``"epoch"`` or ``"step"``), ``frequency``, ``monitor`` (for ReduceLROnPlateau), ``strict`` and ``name``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define configure_optimizers(self)")

    def configure_model(self) -> None:
        """Build parts of the model here if their construction depends on the run; called once on every rank, after :meth:`setup`.

        Under strategies that shard the model, parameters created here have no memory until they are sharded. What happens to them here is repeated
        then, so that they start with the values of one process. They cannot be read as numpy arrays.
        """

    def init_weights(self, module: nn.Module) -> None:
        """Initialize one module (without its submodules) that :meth:`configure_model` has built; by default by ``reset_parameters()``.

        Your own method is called after ``configure_model``, on every rank and under every strategy, for each module with parameters of its own that
        was built there; not if ``configure_model`` calls it. Modules that were built in ``with torch.device("meta")`` are initialized on rank 0,
        by this method or the default, once they have memory.

        Raises:
            ValueError: the module has no ``reset_parameters()``.
        """
        reset(module)

    def validation_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Process one validation batch, without gradients; may take ``dataloader_idx`` too, the index of the batch's loader."""

    def test_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Process one test batch, without gradients; may take ``dataloader_idx`` too."""

    def predict_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch; by default ``self(batch)``."""
        return self(batch)

    # -- logging ----------------------------------------------------------------------------------------------------------------

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False,
        sync_dist: bool = False, sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: Any = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False, *, reduce: str | Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Log one number. The value stays on its device until a log boundary; it is always reduced over all ranks.

        Args:
            name: the name to log under; every call with this name must have the same options.
            value: a number, a tensor with one element, an :class:`engine.Loss` (logged as its sum / count, which weighs by its count), or a
                torchmetrics ``Metric``: it is computed over all ranks and reset at the epoch's end, separately for each validation loader. With
                ``on_step``, the metric of the step's micro-batches is reported too.
            prog_bar: show the value in the progress bar.
            logger: ``False``: hide the value from loggers; callbacks (``run.metrics``, monitors) and the progress bar still get it.
            on_step: report the latest step's value every ``log_every_n_steps`` steps; the default in training steps.
            on_epoch: report the epoch's value; the default everywhere else. With both, the names end in ``_step`` and ``_epoch``.
            reduce_fx: ``"mean"`` (weighted by ``batch_size``), ``"sum"``, ``"min"``, ``"max"``, or torch's function of this name.
            enable_graph: ``True`` is an error: values are always detached.
            sync_dist, sync_dist_group: without effect, since values are always reduced over all ranks; a group of fewer ranks is an error.
            add_dataloader_idx: ``False``: with several loaders, do not append the loader's index to the name; only one loader may log the name.
            batch_size: the value's weight in a mean; by default the number of samples in the micro-batch, of a ``Loss`` its count.
            metric_attribute: the name of the torchmetrics object in this module; it is found without, too.
            rank_zero_only: report rank 0's values only, on every rank; the other ranks may call ``log`` or not.
            reduce: another name of ``reduce_fx``.

        Raises:
            TypeError, ValueError: the value is not one number, or options differ from earlier calls or cannot be honoured; the message has the name.
        """
        if self._log_recorder is None:
            warn_once(f"{type(self).__name__}.log() outside a Fit run records nothing")
            return
        self._log_recorder.record(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
            add_dataloader_idx, batch_size, metric_attribute, rank_zero_only, reduce,
        )  # fmt: skip

    def log_dict(
        self, dictionary: Mapping[str, Any], prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False,
        sync_dist: bool = False, sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: Any = None,
        rank_zero_only: bool = False, *, reduce: str | Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Call :meth:`log` for each entry of ``dictionary``, a dict or a torchmetrics ``MetricCollection``, with these ``prog_bar``, ``logger``,
        ``on_step``, ``on_epoch``, ``reduce_fx``, ``enable_graph``, ``sync_dist``, ``sync_dist_group``, ``add_dataloader_idx``, ``batch_size``,
        ``rank_zero_only`` and ``reduce``."""
        for name, value in dictionary.items():
            if isinstance(value, Mapping):
                raise TypeError(f"log_dict: the value of {name!r} is a dict; give one flat dict of numbers")
            self.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
                add_dataloader_idx, batch_size, rank_zero_only=rank_zero_only, reduce=reduce,
            )  # fmt: skip

    def log_image(self, name: str, image: Any, *, caption: str | None = None) -> None:
        """Log an ``image`` under ``name``, with a ``caption``: a tensor [height, width], [channels, height, width] or [n, channels, height, width],
        uint8 or floats from 0 to 1, or a PIL image.

        This and the other ``log_<kind>`` methods pass rank 0's value to every logger that takes this kind; other ranks' values are only checked.
        Tensors are copied and may change afterwards; the logger writes them in a separate thread.

        Raises:
            TypeError, ValueError: the value has another type or shape.
        """
        self._log_media("image", name, image, caption=caption)

    def log_histogram(self, name: str, values: Any) -> None:
        """Log the distribution of ``values``, a tensor of any shape, under ``name``."""
        self._log_media("histogram", name, values)

    def log_text(self, name: str, text: str) -> None:
        """Log a ``text``, which may be Markdown, under ``name``."""
        self._log_media("text", name, text)

    def log_audio(self, name: str, audio: Any, sample_rate: int) -> None:
        """Log ``audio`` under ``name``: a tensor [samples] or [channels, samples] of floats from -1 to 1; ``sample_rate`` in Hz."""
        self._log_media("audio", name, audio, sample_rate=sample_rate)

    def log_figure(self, name: str, figure: Any) -> None:
        """Log a matplotlib ``figure`` under ``name``."""
        self._log_media("figure", name, figure)

    def log_table(self, name: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        """Log ``rows``, with one value for each of ``columns``, under ``name``."""
        self._log_media("table", name, (columns, rows))

    def log_artifact(self, name: str, path: str | Path) -> None:
        """Log the file or directory at ``path``, which must not change until the run ends, under ``name``."""
        self._log_media("artifact", name, path)

    def _log_media(self, kind: str, name: str, value: Any, **options: Any) -> None:
        if self._context is None:
            warn_once(f"{type(self).__name__}.log_{kind}() outside a Fit run records nothing")
        else:
            self._context.log_media(kind, name, value, **options)

    # -- hyperparameters --------------------------------------------------------------------------------------------------------

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Save the arguments of ``__init__`` in :attr:`hparams` and in every checkpoint. Call this inside ``__init__``, even before
        ``super().__init__()``.

        Args:
            args: names of the only arguments to save; or one dict, ``argparse.Namespace`` or dataclass object, whose entries are saved.
            ignore: names to leave out (modules passed as arguments, for example).
            frame: the frame of the constructor, or of a function that it calls; by default the caller's.
            logger: ``False``: save in checkpoints, but do not pass to loggers.
        """
        current = inspect.currentframe()
        save(self, args, ignore, logger, frame or (current.f_back if current else None))

    @property
    def hparams(self) -> HParams:
        """The hyperparameters that :meth:`save_hyperparameters` saved, by name; also accessible as attributes."""
        return saved_by(self)

    @property
    def hparams_initial(self) -> HParams:
        """A copy of :attr:`hparams` as of the latest call of :meth:`save_hyperparameters`."""
        return initial(self)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, *, strict: bool | None = True, map_location: Any = None, weights: str | None = None,
        weights_only: bool | None = None, **overrides: Any,
    ) -> Self:  # fmt: skip
        """Create a module of this class with a checkpoint's weights, whatever strategy and number of ranks wrote them::

            hyperparameters -> __init__ -> configure_model -> on_load_checkpoint -> weights, in place -> on_checkpoint_loaded -> map_location

        Loading runs no code from the checkpoint: the class is the one that this method is called on. Each calling process reads all weights.

        Args:
            checkpoint_path: a checkpoint, or a folder, whose newest checkpoint is used; ``RUN/best`` is the best one in the folder ``RUN``. A local
                path or a URL that fsspec supports.
            strict: ``False``: skip parameters that only the checkpoint or only the module has, or whose shapes differ, and name them in a warning.
            map_location: the device to move the module to; by default it stays where its constructor put it.
            weights: ``"trained"``, or the name of weights that a callback has saved, such as ``"ema"``; by default those that the checkpoint's
                score was measured with.
            weights_only: without effect, since nothing in a checkpoint is ever unpickled.
            overrides: arguments of the constructor that replace saved hyperparameters. Saved ones that the constructor does not take are
                ignored.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or it is damaged.
            TypeError: an argument of the constructor is missing, or an override is none; the message names it.
            ValueError: the weights do not fit and ``strict`` is not ``False``, or the checkpoint has no ``weights`` of this name.
        """
        return load_module(cls, checkpoint_path, strict is not False, map_location, weights, overrides)

    # -- manual optimization ----------------------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer of ``configure_optimizers``, or a list of several, for manual optimization; ``use_pl_optimizer`` has no effect."""
        optimizers = self._attached("optimizers()").optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler of ``configure_optimizers``, a list of several, or ``None``; in manual optimization call their ``step`` yourself."""
        schedulers = [schedule.scheduler for schedule in self._attached("lr_schedulers()").schedulers]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass from ``loss`` (scaled under fp16); gradients are averaged over the ranks when an optimizer steps."""
        self._attached("manual_backward()").manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip one optimizer's gradients before its ``step``, in manual optimization or :meth:`configure_gradient_clipping`.

        ``gradient_clip_algorithm``: limit their 2-norm (``"norm"``), each element (``"value"``), or the 2-norm of each parameter's
        (``"norm_per_parameter"``) to ``gradient_clip_val``; the defaults are ``Fit``'s settings.
        """
        self._attached("clip_gradients()").clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters receive gradients until :meth:`untoggle_optimizer`; for manual optimization."""
        self._toggled = [*self._toggled, *frozen_except(self, optimizer)]

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo :meth:`toggle_optimizer`, whatever ``optimizer`` is."""
        while self._toggled:
            self._toggled.pop().requires_grad_(True)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Inside the block, only the parameters of ``optimizer`` receive gradients."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    example_input_array: Any = None
    """An example input of ``forward``, for exports: a tensor, a tuple of arguments, or a dict of arguments by name."""

    def to_onnx(self, file_path: str | Path | IO[bytes] | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Call ``torch.onnx.export(self, input_sample, file_path, **kwargs)`` in eval mode (unless ``training`` is given), on the module's device.

        ``input_sample``: an input of ``forward``, by default :attr:`example_input_array`. If onnx or onnxscript is missing, a
        ``ModuleNotFoundError`` names it.
        """
        return to_onnx(self, file_path, input_sample, kwargs)

    def to_torchscript(
        self, file_path: str | Path | None = None, method: str = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """Return the module in eval mode as a ``torch.jit.ScriptModule`` (deprecated by torch: see ``torch.export``); also write it to ``file_path``.

        ``method``: ``"script"``, or ``"trace"`` with ``example_inputs`` (by default :attr:`example_input_array`); ``kwargs`` are torch's.
        """
        return to_torchscript(self, file_path, method, example_inputs, kwargs)

    def freeze(self) -> Self:
        """Let no parameter receive gradients, and set eval mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Let all parameters receive gradients, and set training mode."""
        return self.requires_grad_(True).train()

    # -- the other ranks --------------------------------------------------------------------------------------------------------

    def all_gather(self, data: Any, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Return the tensors in ``data`` of all ranks, stacked along a new dim 0 of size ``world_size``; on one process tensors are unchanged.
        Numbers in ``data`` become tensors. All ranks call this together.

        With ``sync_grads`` each rank's tensor gets the sum of all ranks' gradients for it. A ``group`` of fewer ranks is an error.
        """
        return self._attached("all_gather()").all_gather(data, group, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the run; outside a run, that of the first parameter."""
        if self._context is not None:
            return self._context.device
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def global_step(self) -> int:
        """The number of optimizer steps so far; after a run, at the run's end."""
        return self._context.step if self._context else self._reached[0]

    @property
    def current_epoch(self) -> int:
        """The index of the epoch, from 0; from ``on_train_end`` on, the number of epochs that were started."""
        return self._context.epoch if self._context else self._reached[1]

    global_rank: int
    """This process's rank. A module's own attribute named ``global_rank``, ``local_rank`` or ``world_size`` takes precedence."""
    local_rank: int
    """This process's rank among the processes of its machine."""
    world_size: int
    """The number of processes of the job."""

    @property
    def on_gpu(self) -> bool:
        """Whether :attr:`device` is an accelerator (CUDA or any other)."""
        return self.device.type not in ("cpu", "meta")

    @property
    def attached(self) -> bool:
        """Whether the module is in a run."""
        return self._context is not None

    def _attached(self, what: str) -> Run:
        if self._context is None:
            raise RuntimeError(f"{what} is only possible during a Fit run")
        return self._context

    def attach(self, context: Run | None) -> None:
        """Enter the run ``context``, or leave the current one (``None``); called by the run."""
        if context is None and self._context is not None:
            self._reached = (self._context.step, self._context.epoch, self._context.samples)
        self._context = context
        if context is None:
            self._log_recorder = None
            set_to_none(self, vars(self).pop("_set_to_none", {}))
        else:
            vars(self).setdefault("_set_to_none", {}).update(use_base_methods(self, TrainModule))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the block the module is detached from its run, if it is in one, for an evaluation that a hook of the run starts.

        Raises:
            RuntimeError: the run's strategy owns the weights, so that no other run can use them.
        """
        if self._context is None:
            yield
            return
        run = self._context
        if run.engine.strategy.owns_weights:
            raise RuntimeError(
                f"{type(self).__name__} is in a run whose strategy owns its weights, so nothing else can evaluate it inside that run: give the run "
                "val_loaders, or evaluate after it"
            )
        self._reached = (run.step, run.epoch, run.samples)
        detached = [(m, m._context, m._log_recorder) for m in self.modules() if isinstance(m, TrainModule)]
        for module, _, _ in detached:
            module._context = None
        try:
            yield
        finally:
            for module, context, recorder in detached:
                module._context, module._log_recorder = context, recorder

    def note_methods(self) -> None:
        """Take note of methods that were set on the object since the last call. An adapter of another library's module forwards them."""

    def log_to(self, recorder: Recorder | ClosedRecorder) -> None:
        """Send logged values to ``recorder`` from now on; called by the run."""
        self._log_recorder = recorder

    # -- events of a run: Lightning's, all optional, in the order of engine/README.md; only overridden ones are called -------------

    def setup(self, stage: str) -> None:
        """Called before a run; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """Called after a run, also after an error."""

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Called before each micro-batch. Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, loss: Any) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Called before ``optimizer`` steps, when gradients are reduced over the ranks and unscaled, but not yet clipped."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    # -- the step, as in Lightning; overriding a method that the strategy cannot call is an error before the first step --------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of one micro-batch. ``loss`` is already weighted (and scaled under fp16), so that ``loss.backward()`` is exact."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step one optimizer at the end of an accumulation window.

        Args:
            optimizer_closure: runs ``training_step`` and the backward pass of the window's last micro-batch, and returns the window's mean loss
                over all ranks; called again, it zeroes the gradients and evaluates the whole window. Call it, or pass it to ``optimizer.step``.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear an optimizer's gradients. An override is called before a window's first backward pass, as in Lightning."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip one optimizer's gradients, which are reduced over the ranks and unscaled, before its step.

        ``gradient_clip_val`` and ``gradient_clip_algorithm`` are ``Fit``'s settings.
        """
        clip: Any = self.clip_gradients
        clip(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step one scheduler; ``metric``: the value that a ``ReduceLROnPlateau`` monitors, else ``None``."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- data and callbacks -------------------------------------------------------------------------------------------------------

    prepare_data_per_node: bool = True
    """Whether :meth:`prepare_data` runs on one process of each machine; ``False``: on rank 0 alone."""

    def prepare_data(self) -> None:
        """Download or convert data on disk, before :meth:`setup`; set no attributes here, since not every process runs this."""

    def configure_callbacks(self) -> Any:
        """Return the module's own callback or list of callbacks; they replace ``Fit``'s callbacks of the same classes."""
        return []

    def count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch, which weighs its loss and its logged values. Override this where the batch does not show it.

        Called before the batch goes to the device. By default see ``engine/data/README.md``; a data module's override wins over the module's, and a
        loader's or a dataset's own ``count_samples`` over both.
        """
        return counted(batch)[0]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Called before the batch is moved to the device; return the batch, changed or not."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device; override this for your own batch types. A data module's transfer hooks win over the module's."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Called once the batch is on the device (for augmentation on the GPU, say); return the batch, changed or not."""
        return batch

    def on_validation_model_zero_grad(self) -> None:
        """Clear leftover gradients before a validation during training."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Put the module into eval mode before validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Put the module into training mode after validation. Called only if overridden: by default each submodule's own mode is restored."""
        self.train()

    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None:
        """Put the module into eval mode before a test."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Put the module into training mode after a test. Called only if overridden: by default each submodule's own mode is restored."""
        self.train()

    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None:
        """Put the module into eval mode before a prediction."""
        self.eval()

    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries (trees of tensors and JSON values) to the ``checkpoint``."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read the entries of :meth:`on_save_checkpoint` from ``checkpoint``, before its weights are loaded.

        Called whenever a checkpoint's weights are: when a run is resumed, also with ``weights_only``, in evaluations with a ``checkpoint``, with
        ``reload_best``, and in :meth:`load_from_checkpoint`. It comes before the model is placed and the optimizers are configured: layers whose
        sizes are in ``checkpoint`` can be built here. The weights overwrite parameters and buffers that are set here; see
        :meth:`on_checkpoint_loaded`.
        """

    def on_checkpoint_loaded(self, checkpoint: dict[str, Any]) -> None:
        """Change what shall differ from the checkpoint, after all its weights are loaded; called whenever :meth:`on_load_checkpoint` is.

        Parameters and buffers that are changed here change in averages such as those of ``callbacks.EMA``, too. ``checkpoint``: the entries that
        :meth:`on_load_checkpoint` gets.
        """

    def on_checkpoint_saved(self, path: Path | str, score: float | None) -> None:
        """Called when the checkpoint at ``path`` is complete, with its ``score``; see :meth:`engine.Callback.on_checkpoint_saved`."""

    def on_checkpoint_removed(self, path: Path | str) -> None:
        """Called when the checkpoint at ``path`` has been deleted; see :meth:`engine.Callback.on_checkpoint_removed`."""

    # -- the module's own loaders, used when ``Fit`` gets none ---------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """Return the loader for training."""

    def val_dataloader(self) -> Any:
        """Return the loader for validation, or a list or dict of several."""

    def test_dataloader(self) -> Any:
        """Return the loader for testing, or a list or dict of several."""

    def predict_dataloader(self) -> Any:
        """Return the loader for prediction, or a list or dict of several."""


# Without these, torch.jit.script would compile the properties and evaluate the annotations.
TrainModule.__jit_unused_properties__ = [n for n, v in vars(TrainModule).items() if isinstance(v, property)]  # type: ignore[attr-defined]
TrainModule.__jit_ignored_attributes__ = list(TrainModule.__annotations__)  # type: ignore[attr-defined]
_FROM_RUN: dict[str, Callable[[Any], Any]] = {
    "run": lambda run: run,
    "trainer": lambda run: run.trainer,
    "loggers": lambda run: run.loggers,
    "logger": lambda run: next(iter(run.loggers), None),
    "global_rank": lambda run: run.rank,
    "local_rank": lambda run: run.local_rank,
    "world_size": lambda run: run.world_size,
}


_OUTSIDE_RUN = {"global_rank": 0, "local_rank": 0, "world_size": 1}


def overrides(module: TrainModule, name: str) -> bool:
    """Whether ``module`` overrides the method ``name`` of ``TrainModule``."""
    return overridden(module, name, TrainModule)
