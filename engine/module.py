"""``TrainModule``: a model together with how it is trained."""

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
from engine.utils.extensions import completed, missing
from engine.utils.log import warn_once
from engine.utils.model_export import to_onnx, to_torchscript
from engine.utils.overrides import overridden
from engine.utils.parameters import frozen_except
from engine.utils.tree import move

if TYPE_CHECKING:
    from engine.loop.run import Run


@completed
class TrainModule(nn.Module):
    """Subclass it, define ``training_step`` and ``configure_optimizers``, and give it to :class:`engine.Fit`.

    The model's forward pass is called as ``self(x)`` or through any submodule; the run does device placement, distributed
    wrapping, precision, accumulation and clipping.

    Its events have the names, the order and the arguments of :class:`engine.Callback`'s, without ``run`` and ``module``: ``batch`` is one
    micro-batch, ``batch_idx`` its number in the ``epoch`` on this rank, ``dataloader_idx`` the number of its loader.
    """

    automatic_optimization: bool = True
    """Set to False to call ``manual_backward`` and the optimizers' ``step`` and ``zero_grad`` in ``training_step`` yourself."""
    hparams_name: str | None = None
    """The constructor's argument that was saved as the dict of all hyperparameters, if one was."""
    _reached: tuple[int, int, int] = (0, 0, 0)
    """Steps, epochs and samples of the latest run."""
    strict_loading: bool = True
    """Set to False to load checkpoints that lack some parameters, or have more."""
    run: Any
    """The :class:`engine.Run` under way; outside of one an ``AttributeError``. A module's own attribute of this name takes precedence."""
    trainer: Any
    """The run's ``trainer``: see :attr:`engine.Run.trainer`; as :attr:`run`."""
    loggers: list[Any]
    """The loggers among the run's callbacks; as :attr:`run`."""
    logger: Any
    """The first of :attr:`loggers`, or ``None``; as :attr:`run`."""
    starts_before_data: bool = False
    """Whether the run calls :meth:`on_fit_start` before it asks the module or the data module for loaders, and before it resumes."""
    built: bool = False
    """:meth:`configure_model` was called already, and the values of what it built are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._context: Run | None = None
        self._log_recorder: Recorder | ClosedRecorder | None = None
        self._toggled: list[Tensor] = []
        self.sharded_root: list[nn.Module] = []
        """The wrapper that a sharding strategy calls instead of the module; in a list, so that it is not a submodule."""

    def __getattr__(self, name: str) -> Any:
        # Replaces nn.Module's without another call: parameters and submodules are looked up here in every forward pass.
        attributes = self.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):
            if kind in attributes and name in attributes[kind]:
                return attributes[kind][name]
        if name in _OF_RUN:
            if attributes.get("_context") is not None:
                return _OF_RUN[name](attributes["_context"])
            if name not in _ALONE:
                raise AttributeError(f"{type(self).__name__}.{name} is there during a Fit run only")
            return _ALONE[name]
        raise missing(self, "TrainModule", name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the module belongs to no run.
        return {**self.__dict__, "_context": None, "_log_recorder": None, "sharded_root": []}

    # -- what to define ---------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Loss | Mapping[str, Any] | None:
        """The loss of one micro-batch. This and the other steps may leave out ``batch_idx``.

        Returns:
            A scalar (the mean over the micro-batch's samples), :class:`engine.Loss` (a sum and a count, for means over tokens), a
            dict with either under ``"loss"``, or ``None`` to leave the micro-batch out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define training_step(self, batch, batch_idx)")

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning rate schedulers.

        The forms: an optimizer; a list of them; ``([optimizers], [schedulers])``; a dict ``{"optimizer": ..., "lr_scheduler": ...}``, a list or
        tuple of such dicts; ``[]`` to train no parameters (``None`` too, with a warning). A scheduler is given as it is, or as a dict of
        ``scheduler``, ``interval`` (``"epoch"`` or ``"step"``), ``frequency``, ``monitor`` (for ReduceLROnPlateau), ``strict`` and ``name``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define configure_optimizers(self)")

    def configure_model(self) -> None:
        """Build parts of the model here when their construction depends on the run; called once on every rank before anything else.

        Under strategies that shard the model, its parameters have no memory until they are sharded; see :meth:`init_weights`.
        """

    def init_weights(self, module: nn.Module) -> None:
        """Initialize one module (without its submodules) that :meth:`configure_model` built without memory.

        Called for each module with parameters of its own, on rank 0.

        Raises:
            ValueError: the module has no ``reset_parameters()``, which is called by default.
        """
        reset(module)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """One validation batch, without gradients; may take ``dataloader_idx`` too, the number of the batch's loader."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """One test batch, without gradients; may take ``dataloader_idx`` too."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """The prediction for one batch; by default ``self(batch)``."""
        return self(batch)

    # -- logging ----------------------------------------------------------------------------------------------------------------

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: str | Callable[..., Any] = "mean", enable_graph: bool = False,
        sync_dist: bool = False, sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: Any = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False, *, reduce: str | Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """Log one number. It stays on its device until a log boundary; it is always reduced over all ranks.

        Args:
            name: of the value; its options must be the same each time.
            value: a number, a tensor with one element, or a torchmetrics ``Metric``: computed over all ranks and reset at the epoch's end,
                separately for each validation loader. With ``on_step``, its value for the step's micro-batches is reported as well.
            prog_bar: show it in the progress bar.
            logger: ``False``: loggers do not get it, only callbacks (``run.metrics``, monitors) and the progress bar.
            on_step: report the latest step's value every ``log_every_n_steps`` steps; default in training steps.
            on_epoch: report the epoch's value; default everywhere else. With both, the names end in ``_step`` and ``_epoch``.
            reduce_fx: ``"mean"`` (weighted by ``batch_size``), ``"sum"``, ``"min"``, ``"max"``, or torch's function of this name.
            enable_graph: values are detached; ``True`` is an error.
            sync_dist, sync_dist_group: values are over all ranks with ``False`` too; a group of fewer ranks is an error.
            add_dataloader_idx: ``False``: with several loaders the name does not end in the loader's number, and only one loader may log it.
            batch_size: the value's weight in a mean; by default the samples in the micro-batch.
            metric_attribute: the name in this module of the torchmetrics object, which is found without it.
            rank_zero_only: rank 0's values only, which every rank then sees; the other ranks may log them or not.
            reduce: another name of ``reduce_fx``.

        Raises:
            TypeError, ValueError: not one number, other options than before, or one that cannot be honoured; both name the key.
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
        """Call :meth:`log` for each entry of ``dictionary``, a dict or a torchmetrics ``MetricCollection``. All entries get the given ``prog_bar``,
        ``logger``, ``on_step``, ``on_epoch``, ``reduce_fx``, ``enable_graph``, ``sync_dist``, ``sync_dist_group``, ``add_dataloader_idx``,
        ``batch_size``, ``rank_zero_only`` and ``reduce``."""
        for name, value in dictionary.items():
            if isinstance(value, Mapping):
                raise TypeError(f"log_dict: the value of {name!r} is a dict; give one flat dict of numbers")
            self.log(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
                add_dataloader_idx, batch_size, rank_zero_only=rank_zero_only, reduce=reduce,
            )  # fmt: skip

    def log_image(self, name: str, image: Any, *, caption: str | None = None) -> None:
        """Log under ``name`` an ``image``: a tensor [height, width], [channels, height, width] or [n, channels, height, width], uint8 or floats
        from 0 to 1, or a PIL image; with a ``caption``.

        This and the other ``log_<kind>`` give rank 0's value to every logger that takes this kind; the other ranks' values are only checked.
        Tensors are copied and may change afterwards; the logger writes them in a thread of its own.

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
        """Keep the arguments of ``__init__`` in :attr:`hparams`, and in every checkpoint. Call it inside ``__init__``, also before
        ``super().__init__()``.

        Args:
            args: keep only the arguments of these names; or one dict, ``argparse.Namespace`` or dataclass object, whose entries are kept.
            ignore: leave these out (modules given as arguments, for example).
            frame: of the constructor, or of what it calls, if not the caller's.
            logger: ``False``: in checkpoints, but not for loggers.
        """
        current = inspect.currentframe()
        save(self, args, ignore, logger, frame or (current.f_back if current else None))

    @property
    def hparams(self) -> HParams:
        """Hyperparameters that :meth:`save_hyperparameters` saved, by name; entries are attributes too."""
        return saved_by(self)

    @property
    def hparams_initial(self) -> HParams:
        """A copy of :attr:`hparams` as they were when they were saved last."""
        return initial(self)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, *, strict: bool | None = True, map_location: Any = None, weights: str | None = None,
        weights_only: bool | None = None, **overrides: Any,
    ) -> Self:  # fmt: skip
        """A new module of this class with a checkpoint's weights, whatever strategy and number of ranks wrote them::

            hyperparameters -> __init__ -> configure_model -> on_load_checkpoint -> weights, in place -> map_location

        Opening a checkpoint runs no code from it: the class is the one this is called on. Each process that calls this reads all of it.

        Args:
            checkpoint_path: a checkpoint, or a folder, whose newest checkpoint is used; a directory or a URL that fsspec knows.
            strict: ``False``: parameters that only one side has, or that have other shapes, are left out and named in a warning.
            map_location: the device to move the module to; by default it stays where its constructor put it.
            weights: ``"trained"``, or those that a callback has kept under a name such as ``"ema"``; by default those that the checkpoint's
                score was measured with.
            weights_only: nothing in a checkpoint is unpickled, whatever is given.
            overrides: other arguments of the constructor; they win over the saved hyperparameters. Saved ones that the constructor does not
                take are left out.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is none, or it is damaged.
            TypeError: a constructor argument is missing, or an override is not one; the message names it.
            ValueError: the weights do not fit, and ``strict`` was asked for; or there are no ``weights`` of this name.
        """
        return load_module(cls, checkpoint_path, strict is not False, map_location, weights, overrides)

    # -- manual optimization ----------------------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of several, of ``configure_optimizers``, for manual optimization; whatever ``use_pl_optimizer`` is."""
        optimizers = self._attached("optimizers()").optimizers
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler, or the list of several, or ``None``; in manual optimization their ``step`` is yours to call."""
        schedulers = [record.scheduler for record in self._attached("lr_schedulers()").schedulers]
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Backward pass from ``loss`` (scaled under fp16); gradients are averaged over the ranks when an optimizer steps."""
        self._attached("manual_backward()").manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip one optimizer's gradients before its ``step`` to ``gradient_clip_val``: their 2-norm or each element.

        ``gradient_clip_algorithm`` is ``"norm"`` or ``"value"``. For manual optimization and :meth:`configure_gradient_clipping`;
        defaults are ``Fit``'s settings.
        """
        self._attached("clip_gradients()").clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Until :meth:`untoggle_optimizer`, only this optimizer's parameters receive gradients; for manual optimization."""
        self._toggled = [*self._toggled, *frozen_except(self, optimizer)]

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo :meth:`toggle_optimizer` of this ``optimizer``."""
        while self._toggled:
            self._toggled.pop().requires_grad_(True)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """:meth:`toggle_optimizer` of this ``optimizer`` for a block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    example_input_array: Any = None
    """An input of ``forward``, for exports: a tensor, a tuple of arguments, or a dict of them by name."""

    def to_onnx(self, file_path: str | Path | IO[bytes] | None = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """``torch.onnx.export(self, input_sample, file_path, **kwargs)`` in eval mode (unless ``training`` is given), on the module's device.

        ``input_sample``: of ``forward``, by default :attr:`example_input_array`. A ``ModuleNotFoundError`` names onnx or onnxscript if it is missing.
        """
        return to_onnx(self, file_path, input_sample, kwargs)

    def to_torchscript(
        self, file_path: str | Path | None = None, method: str = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """The module in eval mode as a ``torch.jit.ScriptModule`` (deprecated by torch: see ``torch.export``), also written to ``file_path``.

        ``method``: ``"script"``, or ``"trace"`` with ``example_inputs`` (by default :attr:`example_input_array`); ``kwargs`` are torch's.
        """
        return to_torchscript(self, file_path, method, example_inputs, kwargs)

    def freeze(self) -> Self:
        """No parameter receives gradients; eval mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """All parameters receive gradients; training mode."""
        return self.requires_grad_(True).train()

    # -- the other ranks --------------------------------------------------------------------------------------------------------

    def all_gather(self, data: Any, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """The tensors in ``data`` of all ranks, stacked along a new dim 0 of ``world_size``, and its numbers as tensors; on one process tensors
        as they are. All ranks call this together.

        With ``sync_grads`` each rank's tensor gets the sum of all ranks' gradients for it. A ``group`` of fewer ranks is an error.
        """
        return self._attached("all_gather()").all_gather(data, group, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print``, on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """The device of the run; outside a run, of the first parameter."""
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
        """Optimizer steps so far; after a run, the steps of that run."""
        return self._context.step if self._context else self._reached[0]

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0; from ``on_train_end`` on, the number of epochs that were started."""
        return self._context.epoch if self._context else self._reached[1]

    global_rank: int
    """This process's number in the job. A module's own attribute of this name, and of the next two, takes precedence."""
    local_rank: int
    """The rank among the ranks of this machine."""
    world_size: int
    """Processes of the job."""

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
        """Enter a run (leave it: ``context`` is ``None``); called by it."""
        if context is None and self._context is not None:
            self._reached = (self._context.step, self._context.epoch, self._context.samples)
        self._context = context
        if context is None:
            self._log_recorder = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside the block the module, if it is in a run, is out of it: for an evaluation that a hook of the run starts.

        Raises:
            RuntimeError: the run's strategy owns the weights and allows no other run beside its own.
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
        parts = [(part, part._context, part._log_recorder) for part in self.modules() if isinstance(part, TrainModule)]
        for part, _, _ in parts:
            part._context = None
        try:
            yield
        finally:
            for part, context, recorder in parts:
                part._context, part._log_recorder = context, recorder

    def log_to(self, recorder: Recorder | ClosedRecorder) -> None:
        """Log to ``recorder`` from now on; called by the run."""
        self._log_recorder = recorder

    # -- events of a run: Lightning's, all optional, in the order of engine/README.md; only overridden ones are called -------------

    def setup(self, stage: str) -> None:
        """Before a run; ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""

    def teardown(self, stage: str) -> None:
        """After a run, also after an error."""

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, loss: Any) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Gradients are whole and unscaled, not yet clipped."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    # -- the step, as in Lightning; overriding one that a strategy cannot call is an error before the first step------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass of one micro-batch; ``loss`` is weighted (and scaled under fp16) already: ``loss.backward()`` is exact."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """One optimizer's step at a window's end.

        Args:
            optimizer_closure: runs the (last micro-batch's) ``training_step`` and backward pass, and gives the window's mean loss over all
                ranks; called again, it zeroes the gradients and evaluates the whole window. Call it, or give it to ``optimizer.step``.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear an optimizer's gradients. Overridden, it is called before a window's first backward pass, as in Lightning."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip one optimizer's gradients, which are whole and unscaled, before its step.

        ``gradient_clip_val`` and ``gradient_clip_algorithm`` are ``Fit``'s.
        """
        clip: Any = self.clip_gradients
        clip(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """One step of one scheduler; ``metric``: what a ``ReduceLROnPlateau`` follows."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # -- data and callbacks -------------------------------------------------------------------------------------------------------

    prepare_data_per_node: bool = True
    """Whether :meth:`prepare_data` runs on one process of each machine, or on rank 0 alone."""

    def prepare_data(self) -> None:
        """Download or convert data on disk, before :meth:`setup`; must not set state, since not every process runs it."""

    def configure_callbacks(self) -> Any:
        """The module's own callback or list of callbacks; they replace ``Fit``'s callbacks of the same classes."""
        return []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device, for your own batch types. A data module's transfer hooks win over the module's."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch, changed or not, on the device (augmentation on the GPU)."""
        return batch

    def on_validation_model_zero_grad(self) -> None:
        """Before validation during training: leftover gradients are cleared."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Before validation: put the module into eval mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """After validation, only if overridden: by default each submodule's own mode is restored."""
        self.train()

    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None:
        """Before testing: put the module into eval mode."""
        self.eval()

    def on_test_model_train(self) -> None:
        """After testing, only if overridden: by default each submodule's own mode is restored."""
        self.train()

    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None:
        """Before prediction: put the module into eval mode."""
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
        """Read the entries of :meth:`on_save_checkpoint` from ``checkpoint``."""

    def on_checkpoint_saved(self, path: Path | str, score: float | None) -> None:
        """Called when the checkpoint at ``path`` is complete, with its ``score``; see :meth:`engine.Callback.on_checkpoint_saved`."""

    def on_checkpoint_removed(self, path: Path | str) -> None:
        """The checkpoint at ``path`` was deleted."""

    # -- the module's own loaders, used when ``Fit`` gets none ---------------------------------------------------------------

    def train_dataloader(self) -> Any:
        """The loader of a training."""

    def val_dataloader(self) -> Any:
        """The loader of a validation; several in a list or a dict, as in the next two."""

    def test_dataloader(self) -> Any:
        """The loader of a test."""

    def predict_dataloader(self) -> Any:
        """The loader of a prediction."""


# torch.jit.script would compile properties, and read annotations.
TrainModule.__jit_unused_properties__ = [n for n, v in vars(TrainModule).items() if isinstance(v, property)]  # type: ignore[attr-defined]
TrainModule.__jit_ignored_attributes__ = list(TrainModule.__annotations__)  # type: ignore[attr-defined]
_OF_RUN: dict[str, Callable[[Any], Any]] = {
    "run": lambda run: run,
    "trainer": lambda run: run.trainer,
    "loggers": lambda run: run.loggers,
    "logger": lambda run: next(iter(run.loggers), None),
    "global_rank": lambda run: run.rank,
    "local_rank": lambda run: run.local_rank,
    "world_size": lambda run: run.world_size,
}


_ALONE = {"global_rank": 0, "local_rank": 0, "world_size": 1}  # outside a run


def overrides(module: TrainModule, name: str) -> bool:
    """Whether the module overrides the method of this name."""
    return overridden(module, name, TrainModule)
