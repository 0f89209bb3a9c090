"""``Engine``: plain PyTorch objects made distributed, for people who keep their own loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from engine import strategies
from engine.config.settings import check
from engine.distributed import collectives, failures, relaunch
from engine.distributed.environment import Environment, detect
from engine.distributed.group import Group, join
from engine.preparing import raw
from engine.states import States
from engine.step import gradients
from engine.step.gradients import Loss
from engine.step.precision import Precision
from engine.step.share import ALONE, Share
from engine.step.stepper import OwnedStepper, Stepper, Then
from engine.step.window import Window
from engine.strategies.base import Strategy
from engine.transforms import batch_norm
from engine.transforms.float8 import FP8, Layers
from engine.transforms.order import Transforms
from engine.utils import accelerator as accelerators
from engine.utils.parameters import parameters_of
from engine.utils.tree import batch_size, map_tensors


class Engine(States):
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

    The processes are those that the environment describes (torchrun's variables, SLURM's, MPI's, ...); without any, there is one. Engines with
    different settings may live side by side.

    Args:
        strategy: a name, ``{"name": "fsdp", ...}`` with settings of its own, or a :class:`engine.Strategy`;
            ``"auto"`` is ``single`` for one process and ``ddp`` for several.
        accelerator: ``"auto"`` (CUDA when present), ``"cpu"``, ``"cuda"``.
        precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``fp8-mixed``, ``bf16-true``, ``16-true``, ``64-true``, or :class:`engine.FP8`.
        accumulate_grad_batches: micro-batches in a window; may be changed between epochs.
        on_nonfinite: ``"raise"`` or ``"skip"`` a step whose gradient norm is not finite; ``None``: not checked (fp16 always skips).
        activation_checkpointing: ``"full"``, ``"selective"`` or n (every n-th block): compute the repeated blocks again in the backward pass.
        compile: ``True``, ``"blocks"`` (each repeated block) or a dict of ``torch.compile``'s options.
        sync_batchnorm: batch norms compute their statistics over the samples of all ranks, as one process would over the whole micro-batch.
        seed: of the data order; by default torch's initial seed on rank 0.
        timeout: for meeting the other processes and for each collective.
        debug: compare the ranks' operations, shapes and dtypes before each collective, and raise where they differ.
        environment: where this process stands; detected when not given.
        group: processes that were joined already.

    Raises:
        ValueError: unknown names, or a strategy that does not fit the processes.
        RuntimeError: the accelerator is not there, or the processes did not meet.
    """

    def __init__(
        self,
        *,
        strategy: str | Mapping[str, Any] | Strategy = "auto",
        accelerator: str = "auto",
        precision: str | Mapping[str, Any] | Precision | FP8 = "32-true",
        accumulate_grad_batches: int = 1,
        on_nonfinite: str | None = None,
        activation_checkpointing: str | int | None = None,
        compile: bool | str | dict[str, Any] = False,
        sync_batchnorm: bool = False,
        seed: int | None = None,
        timeout: timedelta = timedelta(minutes=30),
        debug: bool = False,
        environment: Environment | None = None,
        group: Group | None = None,
    ) -> None:
        if on_nonfinite not in (None, "raise", "skip"):
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown; possible: 'raise', 'skip', None")
        self.precision = Precision.parse(precision)
        if group is None:
            started = relaunch.current()  # by an earlier Fit in this process, rank 0
            environment = environment or (started.environment if started else detect(os.environ))
            failures.attach(environment)
            chosen = strategies.get(strategy, environment.world_size)
            kind = accelerators.device_type(accelerator)
            device = accelerators.device(kind, environment.local_rank, own=environment.binds_devices)
            group = join(environment, device, timeout=timeout, store=started.store if started else None, debug=debug)
        else:
            chosen = strategies.get(strategy, group.world_size)
        self.group, self.strategy = group, chosen
        self.strategy.precision = self.precision
        self.strategy.connect(group)
        transforms = Transforms(check("activation_checkpointing", activation_checkpointing), check("compile", compile))
        transforms.check(self.strategy.compiles_whole, type(self.strategy).__name__)
        self.strategy.transform = transforms.apply
        self.data_group = self.strategy.data_group
        self.window = Window()
        self.accumulate_grad_batches = accumulate_grad_batches
        self.strategy.window = self.window
        self.scaler = self.strategy.scaler()
        self.seed: int = collectives.gather_json(group, torch.initial_seed() if seed is None else seed)[0]
        self._low = Layers(self.precision.fp8, group.device)
        self._norms = batch_norm.Layers(check("sync_batchnorm", sync_batchnorm), self.data_group, lambda: self.window.share.size != 0)
        self._stepper = (OwnedStepper if self.strategy.owns_step else Stepper)(self.window, self.strategy, self.scaler, on_nonfinite)
        self._stepper.describe = self._describe_gradients
        self._models: list[nn.Module] = []
        self._schedulers, self._loaders, self._registered = [], [], []
        self.window.agree, self.window.traces = self._largest, lambda optimizers: self.strategy.traces(optimizers, self._models)
        self._unfed = 0

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches in a full window."""
        return self.window.size

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"accumulate_grad_batches={value!r} must be an int of at least 1")
        self.window.size = value

    # -- a step -----------------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch closes its window, so that gradients are reduced and the optimizer steps.

        After an :meth:`accumulate` block it tells about that block.
        """
        return self.window.share.last if self.window.accumulating else not self.window.held

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch of a window: gradients are reduced, and optimizers and schedulers step, in its last one only.

        A prepared loader knows where its windows end, at the end of an epoch too. Without one, every
        ``accumulate_grad_batches``-th call closes a window.
        """
        self.enter_window(models)
        try:
            yield
        finally:
            window = self.window
            window.accumulating = False
            window.hold({id(p) for model in models for p in model.parameters()} if models and window.only is None else None)
            if window.share.alone < 0:
                window.share = ALONE

    def enter_window(self, models: Sequence[nn.Module] = ()) -> None:
        """What :meth:`accumulate` does on entering; for loops that accumulate throughout."""
        window = self.window
        if window.share is ALONE or window.share.alone < 0:
            self._unfed += 1
            window.share = Share(1, float(window.size), -1.0, last=self._unfed % window.size == 0)
        window.enter()
        self.strategy.sync(models or self._models, window.share.last)

    @contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Forward and backward passes whose gradients are not reduced over the ranks."""
        chosen = models or tuple(self._models)
        self.strategy.sync(chosen, False)
        try:
            yield
        finally:
            self.strategy.sync(chosen, True)

    def autocast(self) -> Any:
        """The context of a forward pass in this precision (for code outside a prepared model's ``forward``)."""
        return self.precision.context(self.device)

    def backward(self, loss: Tensor | Loss, **kwargs: Any) -> None:
        """Backward from a loss, weighted so that the step's gradient is that of one big batch over all ranks and the whole window.

        Args:
            loss: a scalar (the mean over its micro-batch), or :class:`engine.Loss`.
            kwargs: for ``Tensor.backward`(``retain_graph``, ``inputs``).

        Raises:
            TypeError: neither; or both kinds in one window.
            ValueError: no graph, or more than one element.
            RuntimeError: gradients were clipped or unscaled already, and neither used nor cleared.
        """
        window = self.window
        if window.held and not window.accumulating:
            window.release()
        root, divisor = window.root(loss, self.data_group.world_size, self.scaler is not None)
        if divisor == 1.0 and self.scaler is None:
            root.backward(**kwargs)
        else:
            seed = window.seed(divisor, root)
            root.backward(seed if self.scaler is None else self.scaler.seed(seed), **kwargs)
        if window.watching:
            window.attribute()

    def backward_by(self, loss: Tensor | Loss, function: Callable[[Tensor], Any]) -> Tensor:
        """:meth:`backward` by a backward pass of one's own.

        Args:
            function: gets the scalar whose plain ``backward()`` gives this micro-batch's exact part of the gradients (scaled under fp16).

        Returns:
            What this micro-batch adds to the step's loss, in fp64 without a graph. Shape ().

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`backward`.
        """
        window = self.window
        if window.held and not window.accumulating:
            window.release()
        root, divisor = window.root(loss, self.data_group.world_size, self.scaler is not None)
        value = root.detach().double() / divisor
        if self.scaler is not None:
            root = root * self.scaler.seed(window.seed(divisor, root))
        elif divisor != 1.0:
            root = root / divisor
        function(root)
        if window.watching:
            window.attribute()
        return value

    def forward_backward(self, step: Callable[[Any, int], Any], batch: Any) -> Any:
        """The loss of ``step(batch, samples)`` and its backward pass, under every strategy; with a pipeline, in parts of the micro-batch.

        Args:
            step: calls the prepared model once, and returns a scalar or :class:`engine.Loss`.
            batch: samples along dim 0 of its tensors.

        Returns:
            The loss without its graph, on every rank that sees this data.
        """
        if not self.strategy.pipelined:
            loss = step(batch, batch_size(batch) or 1)
            self.backward(loss)
            return map_tensors(Tensor.detach, loss)
        window = self.window
        if window.held and not window.accumulating:
            window.release()
        if self.scaler is not None:
            self.scaler.seed(window.seed(1.0, torch.ones((), device=self.device)))  # ranks without the loss need the scale too

        def root(loss: Tensor | Loss, fraction: float) -> Tensor:
            if isinstance(loss, Loss) and self.scaler is not None:
                raise ValueError("Loss(sum, count) with a pipeline under fp16: the sum may overflow; use precision='bf16-mixed', or return a mean")
            # As with several ranks: the loss is here, but not all that it is divided by.
            start, divisor = window.root(loss, max(2, self.data_group.world_size), False)
            if not isinstance(loss, Loss):
                divisor /= fraction
            seed = window.seed(divisor, start)
            return start * (seed if self.scaler is None else self.scaler.seed(seed))

        found = self.strategy.run_pipeline(step, root, batch, self.sync_gradients)
        if not self.strategy.has_loss:
            window.follow(isinstance(found, Loss))
        if window.watching:
            window.attribute()
        return found

    def backward_nothing(self) -> None:
        """This micro-batch has no loss. Alone, its samples do not count; among several ranks they count with a zero gradient."""
        self._norms.refuse_none()
        window = self.window
        window.drop(self.data_group.world_size, self.scaler is not None)
        if self.group.world_size > 1:
            self.strategy.backward_nothing(self._models, self.sync_gradients)

    def window_has_loss(self) -> bool:
        """Whether some rank had a loss in the window that ends here. For ranks that had none (``window.fed``): others need not ask."""
        return self._stepper.fed()

    def discard_window(self) -> None:
        """End the window without a step: forget its gradients and its losses' weights, on all ranks. For loops that are left in its middle."""
        for optimizer in self._stepper.known:
            optimizer.zero_grad()
        self.strategy.discard(self._models)
        self.window.discard()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make the gradients readable before ``optimizer.step()``: divided by the loss scale and the window's weight."""
        chosen = self._stepper.known if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._stepper.prepare([raw(o) for o in chosen])

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients down to a global norm of at most ``max_norm``; the norm before, shape ``()``; ``None`` inside a window.

        Under DeepSpeed that happens within the step: ``None`` too, and :attr:`grad_norm` afterwards.
        """
        return self._stepper.clip_norm(gradients.listed(parameters), max_norm, norm_type) if self.sync_gradients else None

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp each gradient element to [-clip_value, clip_value]."""
        if self.sync_gradients:
            self._stepper.clip_values(gradients.listed(parameters), clip_value)

    def finish_gradients(
        self, optimizers: Sequence[Any], *, max_norm: float | None = None, max_value: float | None = None, inside: bool = False
    ) -> None:
        """Everything of :meth:`step` before the optimizers' own, once for all of them: later each may step alone, or none.

        Args:
            inside: called within an optimizer's step, after each evaluation of its closure: gradients that are not finite are an error.

        Raises:
            FloatingPointError: they are not.
        """
        self._stepper.finish([raw(o) for o in optimizers], max_norm=max_norm, max_value=max_value, inside=inside)

    def average_gradients(self, optimizer: Any) -> None:
        """Average this optimizer's gradients over the ranks now, for models whose backward passes do not (manual optimization)."""
        self.strategy.average_gradients(parameters_of([raw(optimizer)]))

    def step(
        self, optimizers: Sequence[Any], *, max_norm: float | None = None, max_value: float | None = None, then: Then | None = None
    ) -> None:
        """Finish the window: divide, clip, check and apply the gradients of all ``optimizers`` as one, in as few passes as possible.

        Args:
            optimizers: what :meth:`prepare` gave back, or the plain ones.
            max_norm: clip the global 2-norm to this.
            max_value: clip each element to [-max_value, max_value].
            then: called with whether the step was applied (False: skipped, a gradient was not finite) as soon as that is known: at
                once on a CPU, on CUDA with fused optimizers at the next step or :meth:`settle`.
        """
        self._stepper.step([raw(o) for o in optimizers], max_norm=max_norm, max_value=max_value, then=then)

    def settle(self) -> None:
        """Wait until the verdict of every step is known and ``then`` has been called."""
        self._stepper.settle()

    @property
    def pending_steps(self) -> int:
        """Steps whose verdict is not known yet."""
        return self._stepper.pending

    @property
    def grad_norm(self) -> Tensor | None:
        """The newest step's gradient norm before clipping, shape ``()``; ``None`` when neither clipping nor a check needed it."""
        return self._stepper.norm

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the newest step was left out because a gradient was not finite. Waits for the device."""
        self._stepper.settle()
        return self._stepper.skipped

    def _largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks. Waits for them."""
        largest: list[float] = collectives.all_reduce(self.group, torch.tensor(values, dtype=torch.float64), "max").tolist()
        return largest

    def _describe_gradients(self) -> str:
        named = ((name, p) for model in self._models for name, p in self.unwrap_model(model).named_parameters())
        names = gradients.where_nonfinite(named, self.strategy.local)
        return f"; first in: {', '.join(names[:5])}" if names else ""

