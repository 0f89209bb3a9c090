"""``Engine``: makes plain PyTorch objects distributed, for your own training loop."""

from __future__ import annotations

import builtins
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from engine import strategies
from engine.checkpoint.export import export_tensors
from engine.checkpoint.writer import CheckpointWriter
from engine.config.combinations import check_offload_and_compile
from engine.config.settings import KINDS
from engine.data.combined import CombinedLoader
from engine.data.loader import PreparedLoader
from engine.distributed import collectives
from engine.distributed.comparison import check_equal, plain_text, sum_of
from engine.distributed.environments import Environment
from engine.distributed.group import Group
from engine.distributed.join import join_here, own_environment
from engine.distributed.rank_work import F, Trigger, before_others, only, part
from engine.engine_snapshot import EngineCheckpoints, EngineSnapshot
from engine.metrics.recorder import Recorder
from engine.optim import divides_work
from engine.prepared import Prepared, raw
from engine.step import gradients, missing_loss, own_loop
from engine.step.autocast_forward import AutocastForward
from engine.step.gradients import Loss
from engine.step.optimizer_random import OptimizerRandom
from engine.step.optimizer_step import Optimizers
from engine.step.passes import Passes
from engine.step.precision import Precision
from engine.step.skipped_steps import IN_A_ROW
from engine.step.verdicts import NonFiniteStep, Then
from engine.step.window import Window
from engine.step.wrappers import PreparedOptimizer, PreparedScheduler
from engine.strategies import quantized_weights
from engine.strategies.base import Strategy, check_groups
from engine.strategies.foreign_wrappers import check_plain
from engine.strategies.rank_differences import RankDifferences, compare_forms
from engine.transforms import batch_norm
from engine.transforms.compile import Transforms, is_whole
from engine.transforms.float8 import FP8, Layers
from engine.transforms.offload import check_offload, offload_for
from engine.utils import accelerator
from engine.utils.extensions import guard_model, with_advice
from engine.utils.parameters import parameters_of
from engine.utils.paths import expanded


@with_advice
class Engine:
    """Makes a plain PyTorch loop distributed, in mixed precision, with exact gradient accumulation::

        engine = Engine(accumulate_grad_batches=4)
        model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader, scheduler)
        for batch in loader:
            with engine.accumulate(model):
                loss = loss_of(model(batch))
                engine.backward(loss)
                engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    The environment (variables of torchrun, SLURM, MPI, ...) says which processes there are; by default there is one. Engines with
    different settings can be used side by side.

    Args:
        strategy: a name, ``{"name": "fsdp", ...}`` with its settings, or a :class:`engine.Strategy`;
            ``"auto"`` is ``single`` for one process and ``ddp`` for several.
        accelerator: ``"auto"`` (what torch.accelerator finds, else the CPU), ``"gpu"`` (any accelerator), or ``"cpu"``, ``"cuda"``, ``"mps"``, ...
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``fp8-mixed``, ``bf16-true``, ``16-true``, ``64-true``, or :class:`engine.FP8`.
        accumulate_grad_batches: micro-batches in an accumulation window; may be changed between epochs.
        on_nonfinite: ``"raise"`` an error at, or ``"skip"``, a step whose gradient norm is not finite; ``None``: no check (fp16 always skips).
        max_skipped_steps: maximum number of steps in a row that are skipped because a gradient is not finite: the last of them is an error, under
            fp16 once its loss scale is at most 1. ``None``: no limit.
        activation_checkpointing: recompute the repeated blocks in the backward pass: ``"full"``, ``"selective"`` or n (every n-th block).
        activation_offload: move what the forward pass saves to the host's pinned memory, and back ahead of its use. ``True``: all that is saved
            before the last repeated block; ``"blocks"``: only what repeated blocks save; n: only what the first n save.
        compile: ``True``, ``"blocks"`` (each repeated block) or a dict of ``torch.compile``'s options.
        sync_batchnorm: batch norms compute their statistics over the samples of all ranks, as one process would over the whole micro-batch.
        seed: the seed of the data order; by default torch's initial seed on rank 0.
        timeout: the maximum time for joining the other processes, and for each collective.
        debug: compare the ranks' operations, shapes and dtypes before each collective, and raise an error where they differ.
        environment: rank, world size and addresses of this process; detected by default.
        group: an existing process group to use.

    Raises:
        ValueError: unknown names, or a strategy that does not fit the processes.
        RuntimeError: the accelerator is not available, or the processes could not connect.
    """

    def __init__(
        self,
        *,
        strategy: str | Mapping[str, Any] | Strategy = "auto",
        accelerator: str = "auto",
        precision: str | Mapping[str, Any] | Precision | FP8 = "32-true",
        accumulate_grad_batches: int = 1,
        on_nonfinite: str | None = None,
        max_skipped_steps: int | None = IN_A_ROW,
        activation_checkpointing: str | int | None = None,
        activation_offload: bool | str | int = False,
        compile: bool | str | dict[str, Any] = False,
        sync_batchnorm: bool = False,
        seed: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        debug: bool = False,
        environment: Environment | None = None,
        group: Group | None = None,
    ) -> None:
        on_nonfinite = KINDS["on_nonfinite"].normalized("on_nonfinite", on_nonfinite)
        max_skipped_steps = KINDS["max_skipped_steps"].normalized("max_skipped_steps", max_skipped_steps)
        recompute = KINDS["activation_checkpointing"].normalized("activation_checkpointing", activation_checkpointing)
        offload = KINDS["activation_offload"].normalized("activation_offload", activation_offload)
        compile = KINDS["compile"].normalized("compile", compile)
        check_offload_and_compile(offload, compile)
        sync_batchnorm = KINDS["sync_batchnorm"].normalized("sync_batchnorm", sync_batchnorm)
        self.precision = Precision.parse(precision)
        processes = group or own_environment(environment)
        self.strategy = strategies.get(strategy, processes.world_size)
        self.group = (
            processes
            if isinstance(processes, Group)
            else join_here(processes, accelerator, timeout=timeout, debug=debug)
        )
        self.strategy.precision = self.precision
        self.strategy.connect(self.group)
        check_offload(offload, type(self.strategy).__name__, self.strategy.keeps_activations)
        self.activation_offload = offload_for(offload, self.group)
        """Moves activations to the host's memory; ``None`` without the setting, and on CPUs."""
        self.strategy.transform_by(Transforms(recompute, compile))
        self._compile = compile
        self.data_group, self.loss_group = self.strategy.data_group, self.strategy.loss_group
        if self.loss_group is not self.data_group:
            check_groups(self.strategy)
        models: list[nn.Module] = []
        self.window = Window(gradient_sync=self.strategy, models=models)
        self.accumulate_grad_batches = accumulate_grad_batches
        self.strategy.window = self.window
        self.scaler = self.strategy.scaler()
        self._stepper = self.strategy.stepper(self.scaler, on_nonfinite)
        self.skips = self._stepper.skips
        """Counts the steps that were skipped because a gradient was not finite: ``engine.skips.count``."""
        self.skips.limit, self.skips.is_told_here = max_skipped_steps, self.group.is_main
        self._stepped: tuple[list[Any], list[Any]] = [], []  # the latest step's optimizers: arguments, unwrapped
        settings = {
            "strategy": type(self.strategy).__name__,
            "precision": self.precision.name,
            "accumulate_grad_batches": str(accumulate_grad_batches),
            "on_nonfinite": str(on_nonfinite),
            "activation_checkpointing": str(recompute),
            "activation_offload": str(offload),
            "compile": plain_text(compile),
            "sync_batchnorm": str(sync_batchnorm),
        }
        row = [torch.initial_seed() if seed is None else seed, sum_of(settings)]
        seeds, sums = zip(*collectives.gather_json(self.group, row), strict=True)
        if len(set(sums)) > 1:
            check_equal(self.group, "settings", settings, "Give all ranks the same")
        data_seed = seeds[0]
        self.precision.check(self.group.device)
        optimizer_random = OptimizerRandom(self.strategy, data_seed)
        self.prepared = Prepared(self.strategy, self._stepper, data_seed, optimizer_random, models)
        """The objects prepared by this engine."""
        self.models: Sequence[nn.Module] = models
        """Every prepared model, as :meth:`prepare` returned it."""
        position = self.window.position
        self._float8_layers = Layers(self.precision.fp8, self.group)
        self._batch_norms = batch_norm.Layers(sync_batchnorm, self.loss_group, lambda: position.share.size != 0)
        self.snapshot = EngineSnapshot(self.prepared, self.scaler)
        """The state of the prepared objects, for checkpoints."""
        self.checkpoint_writer = CheckpointWriter(self.group)
        """Writes the checkpoints of :meth:`save_state` and of a run; call its ``hold()`` before you change weights outside of a step."""
        self.loop_checkpoints = EngineCheckpoints(self.prepared, self.snapshot, self.checkpoint_writer)
        """The checkpoints of :meth:`save_state`."""
        self._trigger = Trigger(self.group)
        self._differences: RankDifferences | None = None
        self._compares_at_step = False

    @property
    def seed(self) -> int:
        """The seed of the data order."""
        return self.prepared.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.prepared.seed = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches in a full accumulation window. Another number holds from the next pass over a prepared loader on."""
        return self.window.position.size

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            schedule = (
                ". For a schedule, set engine.accumulate_grad_batches in your loop before each pass over the loader"
            )
            raise ValueError(
                f"accumulate_grad_batches={value!r} must be an int of at least 1{schedule * isinstance(value, Mapping)}"
            )
        self.window.position.size = value

    # -- preparing objects ----------------------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this job's processes; a single object is returned without a tuple.

        Objects of other kinds, and objects that are prepared already, are returned unchanged. Overridden ``prepare_model``, ``prepare_optimizer``,
        ... of a subclass are used.

        Raises:
            TypeError: an object is the entry of a scheduler for ``configure_optimizers``, rather than the scheduler.
        """
        prepared = tuple(map(self._prepare_one, objects))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, item: Any) -> Any:
        if isinstance(item, (PreparedLoader, PreparedOptimizer, PreparedScheduler)):
            return item
        if isinstance(item, nn.Module):
            return self.prepare_model(item)
        if isinstance(item, Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, LRScheduler) or _is_scheduler(item):
            return self.prepare_scheduler(item)
        if isinstance(item, (DataLoader, CombinedLoader)):
            return self.prepare_data_loader(item)
        if isinstance(item, dict) and isinstance(item.get("scheduler"), LRScheduler):
            raise TypeError(
                "prepare() got an lr_scheduler of configure_optimizers, as lr_schedule() returns it: give the scheduler in it, "
                "entry['scheduler'], and call its step() in your loop"
            )
        return item

    def prepare_model(self, model: nn.Module, *, autocast: bool = True) -> nn.Module:
        """Move the model to its device and wrap it by the strategy; a model that was prepared before is returned as it is.

        Args:
            autocast: under mixed precision, run the forward pass in autocast and return half-precision outputs as fp32.
                With ``False``, use :meth:`autocast` yourself.
        """
        if (prepared_before := self.prepared.form_of(model)) is not None:
            return prepared_before
        check_plain(model)
        guard_model(model)
        compare_forms(self.group, self.strategy, model)
        self._check_quantized(model)
        self.strategy.place(self._with_own_layers(model))
        if not self.strategy.pipelined:
            quantized_weights.compare(self.group, model)
        if autocast and self.precision.autocast is not None:
            AutocastForward(self.precision, self.device).attach(model, is_whole(self._compile))
        prepared = self.strategy.setup(model)
        if self.activation_offload is not None:
            self.activation_offload.attach(model)
        self.prepared.models.append(prepared)
        self.window.weights.agreement.lockstep = self.group.world_size > 1
        for optimizer in self.prepared.optimizers:
            self.strategy.repoint(optimizer)
        return prepared

    def place_model(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and dtype, with rank 0's values on every rank, but do not wrap it: for evaluation and manual optimization."""
        check_plain(model)
        guard_model(model)
        self._check_quantized(model)
        self.precision.convert(self._with_own_layers(model))
        model.to(self.device)
        self.strategy.share_parameters(model)
        return model

    def _check_quantized(self, model: nn.Module) -> None:
        """Check that the precision leaves quantized weights as they are, and keep evaluations from changing them."""
        quantized_weights.check_dtype(model, self.precision.parameters, f"precision={self.precision.name!r}")
        quantized_weights.keep_trainable(model)

    def _with_own_layers(self, model: nn.Module) -> nn.Module:
        """Replace linear layers by fp8 layers and batch norms by ones over all ranks, as the settings say; return the model."""
        return self._float8_layers.convert(self._batch_norms.convert(model))

    def prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        """Wrap an optimizer, so that it steps at the end of each accumulation window, with exact gradients."""
        self.add_optimizer(optimizer)
        return PreparedOptimizer(optimizer, self._stepper, self.window)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take an optimizer without wrapping it, for loops that step with :meth:`step` only."""
        if not parameters_of([optimizer]):
            raise ValueError(f"{type(optimizer).__name__} has no parameters: give it model.parameters()")
        self.strategy.repoint(optimizer)
        if self.group.world_size > 1 and divides_work(optimizer) and not self.strategy.optimizer_parts_differ:
            raise ValueError(
                f"engine.optim.whole({type(optimizer).__name__}, divide_work=True) under {type(self.strategy).__name__}, which cannot divide an "
                "optimizer's work: leave divide_work out, or use strategy='ddp' or 'fsdp'"
            )
        self._stepper.add(optimizer)
        self.prepared.optimizer_random.add(optimizer)
        self.snapshot.check_after_first_step(optimizer)
        if self.group.world_size > 1 and not self.strategy.pipelined and not self._compares_at_step:
            self._compares_at_step = True
            self.before_step(self._compare_ranks)

    def _compare_ranks(self) -> None:
        """Compare, before the next step of optimizers that were prepared, what must be the same on all ranks; from then on each save compares it.

        A run compares it by itself, more often (:func:`engine.loop.rank_checks.watch_differences`).

        Raises:
            CheckError: ranks differ; raised on all ranks, with the differences.
        """
        self._compares_at_step = False
        writer = self.checkpoint_writer
        if writer.compared is self._differences:
            models = [self.unwrap_model(model) for model in self.models]
            self._differences = RankDifferences(self.group, self.strategy, models, self._stepper.optimizers)
            writer.compared = self._differences
            self._differences.compare_all()

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Wrap a scheduler, so that it steps only when the optimizer has stepped."""
        prepared = PreparedScheduler(scheduler, self._stepper, self.window)
        self.prepared.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(self, loader: Any, *, place: bool = True, group: Group | None = None) -> PreparedLoader:
        """Wrap a loader, so that it gives this process its share of the data, on the device. Any iterable will do, also a list of batches.

        Args:
            place: move the batches to the device (and floating point inputs to a ``*-true`` precision's dtype).
            group: the ranks to which the samples are dealt, by default ``data_group``. ``Fit`` gives an evaluation's loaders ``loss_group``.
        """
        if isinstance(loader, PreparedLoader):
            return loader
        dtype, seed = self.precision.parameters, self.prepared.seed
        prepared = PreparedLoader(
            loader, group=group or self.data_group, window=self.window, seed=seed, dtype=dtype, place=place
        )
        self.prepared.loaders.append(prepared)
        return prepared

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> PreparedLoader:
        """Return a loader that continues in the middle of an epoch: its first pass skips ``num_batches`` micro-batches on each process.

        Skipping is free for indexed data; streams are read up to that position. Later passes are complete. A pass over the returned loader
        counts as an epoch of ``loader``: the next pass over ``loader`` is the next epoch, unless ``set_epoch`` is called.

        Args:
            loader: a prepared or a plain loader.
            num_batches: a multiple of the accumulation window, so that later windows contain the same batches as without the skip.

        Raises:
            ValueError: ``num_batches`` is negative.
        """
        # Not self.prepare_data_loader: a subclass may override it to wrap the loader, and a wrapper has no skipping().
        return Engine.prepare_data_loader(self, loader).skipping(num_batches)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The user's module that was passed to :meth:`prepare`."""
        return self.prepared.unwrap(model)

    def share_buffers(self, model: nn.Module) -> None:
        """Copy rank 0's buffers, the ones that checkpoints save, to every rank. All ranks call this before an evaluation in their own loop."""
        self.strategy.share_buffers(self.unwrap_model(model))

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and empty the device's cache; return one ``None`` for each of ``objects``, to assign to their names."""
        Engine.release(self)
        gc.collect()
        accelerator.empty_cache(self.device)
        return [None] * len(objects)

    def release(self) -> None:
        """Release every prepared model and optimizer."""
        self._stepped = [], []
        if self.checkpoint_writer.compared is self._differences:
            self.checkpoint_writer.compared = None
        self._differences = None
        self.strategy.release()
        if self.activation_offload is not None:
            self.activation_offload.release()
        self._float8_layers.restore()
        self._batch_norms.restore()
        self._stepper.leave()
        self.snapshot.leave()
        self.prepared.optimizer_random.leave()
        self.prepared.forget()

    # -- a step ---------------------------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the micro-batch of the current or latest :meth:`accumulate` block ends its accumulation window, so that the optimizer steps."""
        position = self.window.position
        return position.share.last if position.accumulating else not position.held

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run the block as one micro-batch of an accumulation window: gradients are reduced, and optimizers and schedulers step, only in its last.

        A prepared loader knows where its windows end, at the end of an epoch too. Without one, every
        ``accumulate_grad_batches``-th call ends a window.
        """
        self.enter_window(models)
        try:
            yield
        except Exception as error:
            if text := self.strategy.explain(error, "the accumulate block"):
                raise RuntimeError(text) from error
            raise
        finally:
            own_loop.leave(self.window, models)

    def enter_window(self, models: Sequence[nn.Module] = ()) -> None:
        """Begin a micro-batch of ``models`` as :meth:`accumulate` does, but without a block that ends it; for loops that always accumulate."""
        own_loop.enter(self.window)
        self.strategy.sync(models or self.models, self.window.position.share.last)

    def no_sync(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Inside the block, backward passes do not reduce gradients over the ranks."""
        return self.strategy.no_sync(models or self.models)

    def autocast(self) -> Any:
        """The context for computations in this precision outside of a prepared model's ``forward``."""
        return self.precision.context(self.device)

    def backward(self, loss: Tensor | Loss, **kwargs: Any) -> None:
        """Run the backward pass, weighted so that the step's gradient is that of one big batch over all ranks and the whole window.

        Args:
            loss: a scalar (the mean over its micro-batch), or an :class:`engine.Loss`.
            kwargs: arguments for ``Tensor.backward`` (``retain_graph``, ``inputs``, ``create_graph``). With ``create_graph=True`` gradients have a
                graph, for optimizers that differentiate them (AdaHessian): on one process, for losses whose weight is known before the pass.

        Raises:
            TypeError: ``loss`` is neither a scalar nor an ``engine.Loss``, or one window has losses of both kinds.
            ValueError: the loss has no graph, or more than one element.
            RuntimeError: gradients were clipped or unscaled already, and not yet used or cleared; or ``create_graph=True`` would give others than
                those of one big batch.
        """
        if kwargs and kwargs.get("create_graph"):
            self._check_graph(loss)
        position, weights = self.window.position, self.window.weights
        if position.held and not position.accumulating:
            own_loop.release(self.window)
        root, divisor = weights.weigh(loss, self.loss_group.world_size, self.scaler is not None)
        position.passes += 1
        if position.passes > position.reduced_passes:
            self.strategy.follow_pass()
        try:
            if divisor == 1.0 and self.scaler is None:
                root.backward(**kwargs)
            else:
                seed = weights.seed(divisor, root)
                root.backward(seed if self.scaler is None else self.scaler.seed(seed), **kwargs)
        except Exception as error:
            if text := self.strategy.explain(error, "the backward pass"):
                raise RuntimeError(text) from error
            raise
        if weights.watched is not None:
            weights.attribute()

    def _check_graph(self, loss: Tensor | Loss) -> None:
        """Check that a backward pass with ``create_graph=True`` gives gradients whose graph is that of the whole batch.

        Raises:
            RuntimeError: ranks would reduce them outside of the graph, or they are divided at the step, where their graph stays as it was.
        """
        reason = (
            f"{type(self.strategy).__name__} reduces gradients over {self.group.world_size} ranks outside of their graph"
            if self.group.world_size > 1
            else "under fp16 gradients are divided by the loss scale at the step, and their graph is not: use precision='bf16-mixed' or '32-true'"
            if self.scaler is not None
            else "a window of several micro-batches divides the gradients of Loss(sum, count) at its end, and not their graph: return a mean"
            if isinstance(loss, Loss) and self.window.position.accumulating and self.window.position.size > 1
            else ""
        )
        if reason:
            raise RuntimeError(
                f"backward(create_graph=True): {reason}. For a penalty of gradients take torch.autograd.grad(..., create_graph=True) in training_step"
            )

    @cached_property
    def _passes(self) -> Passes:
        """Gives backward passes that other code runs the window's weights; created when first used, because few trainings have such passes."""
        return self.strategy.passes(self.scaler)

    def backward_by(self, loss: Tensor | Loss, function: Callable[[Tensor], Any]) -> Tensor:
        """Run :meth:`backward` with your own backward pass.

        ``function`` receives a scalar whose plain ``backward()`` gives this micro-batch's exact share of the gradients (scaled under fp16).
        Return this micro-batch's contribution to the step's loss: fp64, without a graph, shape (). Raise the errors of :meth:`backward`.
        """
        return self._passes.by(loss, function)

    def forward_backward(self, step: Callable[[Any, int], Any], batch: Any) -> Any:
        """Compute the loss ``step(batch, samples)`` and its backward pass, under every strategy; a pipeline splits the micro-batch.

        Args:
            step: a function that calls the prepared model once and returns a scalar or an :class:`engine.Loss`.
            batch: a micro-batch, with its samples along dim 0 of its tensors.

        Returns:
            The detached loss, on every rank that sees this data.
        """
        return self._passes.forward_backward(step, batch, self.backward, self.sync_gradients)

    def backward_nothing(self) -> None:
        """Call this instead of :meth:`backward` for a micro-batch without a loss. On one process its samples do not count; on several ranks they
        count with a zero gradient."""
        self._batch_norms.refuse_none()
        missing_loss.drop(self.window, self.loss_group.world_size, self.scaler is not None)
        if self.group.world_size > 1:
            self.strategy.backward_nothing(self.models, self.sync_gradients)
            if self.window.position.share.size:
                missing_loss.warn_of_zero()

    def window_has_loss(self) -> bool:
        """Whether any rank had a loss in the window that ends here. Only a rank without one (``window.weights.fed`` is false) needs to ask."""
        return missing_loss.makes_step(self.window, self.loss_group)

    def discard_window(self) -> None:
        """End the accumulation window without a step: discard its gradients and its losses' weights. For loops that stop inside a window, on all
        ranks."""
        for optimizer in self.prepared.optimizers:
            optimizer.zero_grad()
        self.strategy.discard(self.models)
        self.window.discard()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale and the window's weight, so that they can be read before ``optimizer.step()``.

        ``optimizer``: one or a list; ``None``: all.
        """
        optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._stepper.early.prepare(self._stepper.optimizers if optimizer is None else [raw(o) for o in optimizers])

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Scale the gradients to a global norm (``norm_type``: 2, 1, inf) of at most ``max_norm``.

        Return the norm before clipping, shape ``()``; ``None`` inside a window, and under DeepSpeed, which clips in its step. ``inf`` clips nothing.

        Raises:
            ValueError: ``max_norm`` is 0, negative or NaN. To train without clipping, leave the call out.
        """
        gradients.check_limit("clip_grad_norm_(max_norm", max_norm)
        return (
            self._stepper.early.clip_norm(gradients.listed(parameters), max_norm, norm_type)
            if self.sync_gradients
            else None
        )

    def clip_grad_norm_per_parameter_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float) -> Tensor | None:
        """Scale each parameter's gradient to a 2-norm of at most ``max_norm``, over all its shards; at most one collective.

        All ranks call this with the same parameters. Return the global norm before clipping, shape ``()``; ``None`` inside a window.

        Raises:
            ValueError: ``max_norm`` is 0, negative or NaN, or the strategy steps by itself.
        """
        gradients.check_limit("clip_grad_norm_per_parameter_(max_norm", max_norm)
        if not self.sync_gradients:
            return None
        return self._stepper.early.clip_readable_norms(gradients.listed(parameters), max_norm)

    def grad_norms(self, model: nn.Module, norm_type: float = 2.0, *, optimizer: Any = None) -> dict[str, Tensor]:
        """The ``norm_type``-norm of each gradient before a step, by the parameter's name; the norm of these norms is the global norm.

        ``optimizer``: only the parameters of this one. ``{}`` inside a window. All ranks call this together.
        """
        optimizers = [] if optimizer is None else [raw(optimizer)]
        if not self.sync_gradients:
            return {}
        return self._stepper.early.named_norms(self.unwrap_model(model), norm_type, optimizers)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp each gradient element to [-clip_value, clip_value].

        Raises:
            ValueError: ``clip_value`` is 0, negative or NaN. To train without clipping, leave the call out.
        """
        gradients.check_limit("clip_grad_value_(clip_value", clip_value)
        if self.sync_gradients:
            self._stepper.early.clip_values(gradients.listed(parameters), clip_value)

    def finish_gradients(
        self,
        optimizers: Optimizers,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        max_parameter_norm: float | None = None,
        inside: bool = False,
    ) -> None:
        """Divide, clip and check the gradients of all ``optimizers`` as :meth:`step` does, but do not step; each may step on its own later.

        Args:
            max_norm, max_value, max_parameter_norm: as in :meth:`step`.
            inside: whether this is called within an optimizer's step, after an evaluation of its closure: gradients that are not finite are an
                error then, because such a step cannot be skipped.

        Raises:
            FloatingPointError: a gradient is not finite.
            ValueError: a limit is 0, negative or NaN.
        """
        _check_limits(max_norm, max_value, max_parameter_norm)
        raw_optimizers = [raw(o) for o in optimizers]
        finish = self._stepper.finish_inside if inside else self._stepper.finish
        finish(raw_optimizers, max_norm=max_norm, max_value=max_value, max_parameter_norm=max_parameter_norm)

    def average_gradients(self, optimizer: Any) -> None:
        """Average this optimizer's gradients over the ranks now; for models whose backward passes do not reduce gradients (manual optimization)."""
        self.strategy.average_gradients(parameters_of([raw(optimizer)]))

    def step(
        self,
        optimizers: Optimizers,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        max_parameter_norm: float | None = None,
        then: Then | None = None,
    ) -> None:
        """End the accumulation window: divide, clip, check and apply the gradients of all ``optimizers`` together, in as few passes as possible.

        Args:
            optimizers: prepared or plain optimizers.
            max_norm, max_value: clip the global 2-norm to ``max_norm``, each element to [-max_value, max_value].
            max_parameter_norm: clip the 2-norm of each parameter's gradient, over all its shards, to this; at most one collective.
            then: called with ``True`` when the step was applied, with ``False`` when it was skipped because a gradient was not finite. The call
                comes as soon as that is known: with fused optimizers on CUDA at the next step or :meth:`settle`.

        Raises:
            ValueError: a limit is 0, negative or NaN.
        """
        if (
            (max_norm is not None and not max_norm > 0)
            or (max_value is not None and not max_value > 0)
            or max_parameter_norm is not None
        ):
            _check_limits(max_norm, max_value, max_parameter_norm)
        if optimizers != self._stepped[0]:  # usually the same list in every step
            self._stepped = list(optimizers), [raw(o) for o in optimizers]
        self._stepper.step(
            self._stepped[1], max_norm=max_norm, max_value=max_value, max_parameter_norm=max_parameter_norm, then=then
        )

    def settle(self) -> None:
        """Wait until it is known of every step whether it was applied or skipped, and ``then`` has been called.

        Raises:
            RuntimeError: gradients of the latest step were not reduced, because its loss did not depend on some parameters.
        """
        self._stepper.await_verdicts()
        self.strategy.settle()

    @property
    def pending_steps(self) -> int:
        """The number of steps of which it is not known yet whether they were applied or skipped."""
        return self._stepper.pending

    @property
    def nonfinite_step(self) -> NonFiniteStep | None:
        """The step that ``on_nonfinite="raise"`` has refused; ``None``: there is none."""
        return self._stepper.failure

    @property
    def grad_norm(self) -> Tensor | None:
        """The latest step's gradient norm before clipping, shape ``()``; ``None`` when neither clipping nor a check needed it."""
        return self._stepper.norm

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step was skipped because a gradient was not finite. Waits for the device."""
        self._stepper.await_verdicts()
        return self._stepper.skipped

    # -- checkpoints; the names are Accelerate's ------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load the state of these objects too, also in checkpoints of :class:`engine.Fit`. Register them in the same order in every run.

        Raises:
            TypeError: an object lacks ``state_dict`` or ``load_state_dict``.
        """
        for item in objects:
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise TypeError(
                    f"register_for_checkpointing got {type(item).__name__}: it needs state_dict() and load_state_dict(state)"
                )
        self.prepared.registered += objects

    def save_state(
        self, output_dir: str | Path, *, wait: bool = True, facts: dict[str, Any] | None = None
    ) -> Path | str:
        """Save models, optimizers, schedulers, loaders' positions, loss scale, random number states and registered objects; all ranks call this.

        Call this between two steps, not inside an accumulation window. A checkpoint in ``output_dir`` is replaced once the new one is complete.

        Args:
            output_dir: the checkpoint folder to write, or a URL that fsspec supports.
            wait: ``False``: return as soon as copying has started. :meth:`wait_for_checkpoint`, the next save and the end of the process wait
                for the checkpoint.
            facts: small JSON values to put in the manifest (counters, metrics).

        Raises:
            TypeError: a value cannot be stored; the message says where in the state it is.
            OSError, RankError: the checkpoint cannot be written; the earlier one is unchanged.
        """
        return self.loop_checkpoints.save(output_dir, wait, facts or {})

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            RuntimeError: it could not be written.
        """
        self.loop_checkpoints.wait()

    def load_state(self, input_dir: str | Path, *, strict: bool = True) -> dict[str, Any]:
        """Load a checkpoint of :meth:`save_state`, at any world size and under any strategy; prepare the same objects before. All ranks call this.

        A checkpoint of :class:`engine.Fit` works too: the first loader gets its position in the data; the states of callbacks, and averages of
        the weights, are ignored.

        Args:
            input_dir: a checkpoint folder or a URL.
            strict: ``False``: ignore parameters that only the checkpoint or only the model has.

        Returns:
            The manifest: the saved ``facts`` and the library's own entries.

        Raises:
            FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or it is damaged.
            ValueError: the checkpoint does not fit the prepared objects.
        """
        return self.loop_checkpoints.load(input_dir, strict)

    def save_model(self, model: nn.Module, save_directory: str | Path, max_shard_size: int | str = "5GB") -> list[Path]:
        """Write a prepared model's weights as ``.safetensors`` files that ``transformers`` and ``load_file`` read; all ranks call this.

        Args:
            save_directory: a folder, created if missing.
            max_shard_size: the maximum size of a file, in bytes or as ``"5GB"``; several files have a ``model.safetensors.index.json`` too.

        Returns:
            The paths of the files; empty except on the main process.
        """
        state = self.get_state_dict(model)
        directory = Path(expanded(save_directory))
        return export_tensors(state, directory, max_shard_size=max_shard_size) if self.group.is_main else []

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Full parameters and buffers of a prepared model by name, on the main process (other ranks may get fewer); all ranks call this."""
        return self.strategy.model_state(self.unwrap_model(model))

    # -- the processes; the names are Accelerate's ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.group.device

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among the processes of its machine."""
        return self.group.local_rank

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.group.world_size

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0."""
        return self.group.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process is the first one of its machine."""
        return self.group.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process is the last rank."""
        return self.group.rank == self.group.world_size - 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the main process only."""
        if self.is_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: F) -> F:
        """Decorator: run the function on the main process only; it returns ``None`` elsewhere."""
        return only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: run the function on one process of each machine."""
        return only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: F) -> F:
        """Decorator: run the function on the last process only."""
        return only(function, lambda: self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int = 0) -> Any:
        """Decorator: run the function on the process ``process_index`` only."""
        return only(function, lambda: self.process_index == process_index)

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this."""
        self.group.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main process runs the block before the other processes do (to download or build something once)."""
        return before_others(self.group, self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """On each machine, the main process runs the block before the machine's other processes do."""
        return before_others(self.group, self.is_local_main_process)

    def gather(self, tree: Any) -> Any:
        """The tensors in ``tree`` of all processes, concatenated along dim 0 (scalars: stacked), on every process. Lengths may differ."""
        return collectives.gather(self.group, tree)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like :meth:`gather` of ``input_data``, but without micro-batches that a rank repeats only to run as many as the other ranks.

        Ranks that hold shards of one model see the same samples, which are returned once. Values without tensors (all values, with
        ``use_gather_object``) are gathered as objects: the processes' lists are concatenated.
        """
        return collectives.gather_samples(
            self.loss_group, input_data, self.window.position.share.size != 0, use_gather_object
        )

    def reduce(self, tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``tree`` reduced over the processes by ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, times ``scale``.

        Raises:
            ValueError: an unknown ``reduction``.
        """
        return collectives.all_reduce(self.group, tree, reduction, scale)

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """The tensors in ``tree`` of ``from_process``, on every process."""
        return collectives.broadcast(self.group, tree, from_process)

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The tensors in ``tree``, padded along ``dim`` with ``pad_index`` to the maximum length over all processes; ``pad_first``: in front."""
        return collectives.pad_across_processes(self.group, tree, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous slice of ``inputs``, a list, tuple, tensor, or dict of them; the first processes may get one more item.

        Args:
            apply_padding: repeat the last item so that all slices have the same length.

        Raises:
            TypeError: ``inputs`` is of another type.
            ValueError: the values of a dict differ in length.
        """
        yield part(inputs, self.process_index, self.num_processes, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag that :meth:`check_trigger` reports on every process."""
        self._trigger.set()

    def check_trigger(self) -> bool:
        """Return whether any process has set the flag since the last check, and clear it. All processes call this together."""
        return self._trigger.check()

    def recorder(self, *, on_step: bool, on_epoch: bool, suffix: str = "", parts: int = 1) -> Recorder:
        """Create a recorder of logged values over this engine's ranks.

        ``on_step`` and ``on_epoch``: the defaults for names logged without these options; ``suffix``: appended to all names; ``parts``: the
        ranks that log values of the same samples.
        """
        return Recorder(self.group, self.loss_group, self.strategy.is_counted, on_step, on_epoch, suffix, parts)

    def before_step(self, function: Callable[[], None]) -> None:
        """Call ``function`` once, before the next optimizer step; functions that were passed before are called too."""
        self._stepper.before_step(function)


def _check_limits(max_norm: float | None, max_value: float | None, max_parameter_norm: float | None) -> None:
    """Check the limits of a step's clipping; ``None``: no clipping."""
    if max_norm is not None:
        gradients.check_limit("step(max_norm", max_norm)
    if max_value is not None:
        gradients.check_limit("step(max_value", max_value)
    if max_parameter_norm is not None:
        gradients.check_limit("step(max_parameter_norm", max_parameter_norm)
        if max_norm is not None:
            raise ValueError(
                "step(max_norm=, max_parameter_norm=): clip either the global norm or that of each parameter"
            )


def _is_scheduler(item: Any) -> bool:
    """Whether an object that is no torch scheduler has the methods of one, as timm's do."""
    refers_to_optimizer = hasattr(item, "optimizer") and not hasattr(item, "zero_grad")  # and is none itself
    methods = ("step", "state_dict", "load_state_dict")
    return refers_to_optimizer and all(callable(getattr(item, name, None)) for name in methods)
