"""``Accelerator``: an :class:`engine.Engine` with Accelerate's arguments and attributes and, on demand, its arithmetic."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from engine.compat.accelerate import arguments as translation
from engine.compat.accelerate import data_loader as loaders
from engine.compat.accelerate.checkpoints import Checkpoints
from engine.compat.accelerate.optimizer import AcceleratedOptimizer
from engine.compat.accelerate.padded_loaders import Loader, split_over
from engine.compat.accelerate.scheduler import AcceleratedScheduler
from engine.compat.accelerate.state import AcceleratorState, GradientState, PartialState
from engine.compat.accelerate.tracking import trackers_for
from engine.compat.accelerate.utils import dataclasses as settings
from engine.compat.accelerate.utils import modeling, other
from engine.compat.checked_arguments import checking_arguments
from engine.distributed.collectives import broadcast_object
from engine.engine import Engine
from engine.step import own_loop
from engine.step.position import Share
from engine.step.wrappers import PreparedScheduler
from engine.utils.tree import leaves, map_tensors


class Accelerator(Engine):
    """Accelerate's interface to :class:`engine.Engine`: an Accelerate script runs once its import is changed.

    With ``rules="exact"`` the engine's guarantees hold: each sample counts once (no padding), the last accumulation window of an epoch is divided by
    its actual size, micro-batches and ranks are weighted by their samples, a scheduler steps once per optimizer step, and the order of data depends
    only on seed and epoch. With ``rules="accelerate"`` all of these are as in Accelerate, to compare two trainings step by step.

    Args:
        dataloader_config, ...: as in Accelerate; an argument without a counterpart raises an error that says what to use.
        rules: ``"exact"`` or ``"accelerate"``; by default what ``install`` was given, or else ``"exact"``.

    Raises:
        ValueError: an argument cannot be honoured.
    """

    state: AcceleratorState = None  # type: ignore[assignment]
    gradient_state: GradientState = None  # type: ignore[assignment]
    project_configuration: Any = None
    trackers: list[Any] = []
    usual_rules: Literal["exact", "accelerate"] = "exact"
    """The rules of an object that is made without any."""
    step: int = 0  # type: ignore[assignment]
    """The number of :meth:`accumulate` blocks since a loader last ended. It hides :meth:`engine.Engine.step`: call ``optimizer.step()``."""

    @checking_arguments()
    def __init__(
        self, device_placement: bool = True, split_batches: bool | None = None, mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1, cpu: bool = False, dataloader_config: Any = None, deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None, torch_tp_plugin: Any = None, megatron_lm_plugin: Any = None, rng_types: list[Any] | None = None,
        log_with: Any = None, project_dir: Any = None, project_config: Any = None, gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True, kwargs_handlers: list[Any] | None = None, dynamo_backend: Any = None,
        dynamo_plugin: Any = None, deepspeed_plugins: Any = None, parallelism_config: Any = None, *,
        rules: Literal["exact", "accelerate"] | None = None,
    ) -> None:  # fmt: skip
        rules = rules or self.usual_rules
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        handlers = self.handlers = translation.handlers_by_name(kwargs_handlers or [])
        process_group = handlers.get("InitProcessGroupKwargs") or settings.InitProcessGroupKwargs()
        engine_arguments, facts = translation.engine_settings(
            self._arguments, handlers.get("DistributedDataParallelKwargs")
        )
        super().__init__(group=PartialState(cpu, **vars(process_group)).group, **engine_arguments)
        self.rules = rules
        if "GradScalerKwargs" in handlers and self.scaler is not None:
            handlers["GradScalerKwargs"].tune(self.scaler)
        self._describe(facts)
        self._plugin, self.step = translation.accumulation(self._arguments, self.accumulate_grad_batches), 0
        self._returned: list[Any] = []
        """The optimizers, schedulers and loaders that :meth:`prepare` has returned."""
        self._unreduced: list[nn.Module] = []
        """The models of the enclosing :meth:`no_sync` blocks."""
        self.gradient_state = GradientState(self._plugin)
        self.gradient_accumulation_steps = int(self._plugin.num_steps)
        self.checkpoints = Checkpoints(self, self.project_configuration)

    def _describe(self, facts: dict[str, Any]) -> None:
        """Set the attributes that scripts read and change: the state, and settings that take effect later."""
        arguments, kind = self._arguments, facts.pop("kind")
        if kind != "NO" and (self.num_processes > 1 or kind == "DEEPSPEED"):
            facts["distributed_type"] = settings.DistributedType[kind]
        self.state = AcceleratorState(cpu=arguments["cpu"], **facts)
        self.dataloader_config = arguments["dataloader_config"] or settings.DataLoaderConfiguration()
        if arguments["split_batches"] is not None:
            self.dataloader_config.split_batches = arguments["split_batches"]
        self.project_configuration = arguments["project_config"] or settings.ProjectConfiguration()
        if arguments["project_dir"] is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(arguments["project_dir"]))
        self.device_placement = arguments["device_placement"]
        self.step_scheduler_with_optimizer = arguments["step_scheduler_with_optimizer"]
        self.rng_types = ["generator"] if arguments["rng_types"] is None else arguments["rng_types"]
        self.log_with = trackers_for(arguments["log_with"], self.logging_dir)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ({name: value for name, value in self._arguments.items() if name != "log_with"},)

    def __deepcopy__(self, memo: Any) -> Accelerator:
        return self

    # -- Accelerate's attributes ------------------------------------------------------------------------------------------------

    distributed_type = property(attrgetter("state.distributed_type"))
    mixed_precision = property(attrgetter("state.mixed_precision"))
    use_distributed = property(lambda self: self.num_processes > 1)
    project_dir = property(attrgetter("project_configuration.project_dir"))
    logging_dir = property(attrgetter("project_configuration.logging_dir"))
    save_iteration = property(attrgetter("project_configuration.iteration"))
    split_batches = property(attrgetter("dataloader_config.split_batches"))
    dispatch_batches = property(attrgetter("dataloader_config.dispatch_batches"))
    use_seedable_sampler = property(attrgetter("dataloader_config.use_seedable_sampler"))
    non_blocking = property(attrgetter("dataloader_config.non_blocking"))
    use_stateful_dataloader = property(attrgetter("dataloader_config.use_stateful_dataloader"))

    even_batches = property(
        attrgetter("dataloader_config.even_batches"),
        lambda self, value: setattr(self.dataloader_config, "even_batches", value),
    )

    _models = property(lambda self: list(self.models))
    _optimizers = property(
        lambda self: [prepared for prepared in self._returned if isinstance(prepared, AcceleratedOptimizer)]
    )
    _schedulers = property(
        lambda self: [prepared for prepared in self._returned if isinstance(prepared, AcceleratedScheduler)]
    )
    _dataloaders = property(
        lambda self: [prepared for prepared in self._returned if issubclass(type(prepared), Loader)]
    )
    is_fsdp2 = property(lambda self: self.distributed_type == "FSDP")
    parallelism_config = property(lambda self: self._arguments["parallelism_config"])

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.accumulate_grad_batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulate_grad_batches = self._plugin.num_steps = value
        if (
            self.rules == "accelerate"
        ):  # every loss is divided by the full window, even if the last one of an epoch is shorter
            self.window.begin(Share(-1, float(value), float(value), last=True))

    # -- preparing objects ------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare objects; see :meth:`engine.Engine.prepare`. ``device_placement``: per object; ``False`` leaves a loader's batches on the CPU."""
        if device_placement is None:
            return super().prepare(*args)
        if len(device_placement) != len(args):
            raise ValueError(f"device_placement has {len(device_placement)} entries for {len(args)} objects")
        prepared = []
        for item, place in zip(args, device_placement, strict=True):
            is_model, is_loader = (isinstance(item, kind) for kind in (nn.Module, DataLoader))
            prepare_item = self.prepare_model if is_model else self.prepare_data_loader if is_loader else None
            prepared.append(super().prepare(item) if prepare_item is None else prepare_item(item, place))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:  # type: ignore[override]
        place = self.device_placement if device_placement is None else device_placement
        if not place and any(p.device != self.device for p in model.parameters()):
            raise ValueError(
                f"device_placement=False: {type(model).__name__} is not on {self.device}; move it there, or leave it out"
            )
        if evaluation_mode:
            return self.place_model(model)
        autocast = self.handlers.get("AutocastKwargs")
        prepared: Any = super().prepare_model(model, autocast=autocast is None or autocast.enabled)
        prepared._is_accelerate_prepared = True
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = super().prepare_optimizer(optimizer)
        prepared.__class__ = AcceleratedOptimizer
        prepared.follows = self.rules == "accelerate"  # type: ignore[attr-defined]
        return self._noted(prepared)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:  # type: ignore[override]
        """Prepare a scheduler to step once per optimizer step; under Accelerate's rules once per process and step, unless batches are split."""
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        follows = self.rules == "accelerate"
        times = self.num_processes if follows and not self.dataloader_config.split_batches else 1
        prepared = scheduler if isinstance(scheduler, PreparedScheduler) else super().prepare_scheduler(scheduler)
        return self._noted(AcceleratedScheduler(prepared, self, times * self.step_scheduler_with_optimizer, follows))

    def prepare_data_loader(  # type: ignore[override]
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Loader:
        if isinstance(data_loader, Loader):
            return data_loader
        config, place = self.dataloader_config, self.device_placement if device_placement is None else device_placement
        if self.rules == "accelerate":
            padded = loaders.prepare_data_loader(
                *(data_loader, self.device, self.num_processes, self.process_index, config.split_batches, place),
                *(self.rng_types, config.dispatch_batches, config.even_batches, slice_fn_for_dispatch),
                *(config.use_seedable_sampler, config.data_seed),
            )
            return self._noted(self.checkpoints.following(padded))
        if config.dispatch_batches or slice_fn_for_dispatch is not None:
            raise ValueError(
                "dispatch_batches: every process reads its own samples, unless Accelerator(rules='accelerate') is given"
            )
        if not self.prepared.loaders:  # the seed may have been set after the Accelerator was made
            seed = torch.initial_seed() if config.data_seed is None else config.data_seed
            self.seed = broadcast_object(self.group, seed)
        if config.split_batches:
            data_loader = split_over(data_loader, self.num_processes)
        other_types = [kind for kind in self.rng_types if str(kind) != "generator"]
        prepared = super().prepare_data_loader(data_loader, place=place)
        prepared.use.ranks_draw_apart = True  # left to the script, as Accelerate does
        reading = self.gradient_state.dataloader_references
        return self._noted(Loader(prepared, self.group, reading, other_types))

    def _noted(self, prepared: Any) -> Any:
        """Take note of an object that is prepared now, as scripts look for it; return the object."""
        self._returned.append(prepared)
        prepared._is_accelerate_prepared = True
        return prepared

    skip_first_batches = staticmethod(loaders.skip_first_batches)  # type: ignore[assignment]

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        return super().unwrap_model(model)

    def free_memory(self, *objects: Any) -> list[None]:
        self.step = 0
        self._returned.clear()
        self.checkpoints.forget()
        return super().free_memory(*objects)

    clear = free_memory

    # -- a step -----------------------------------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the latest micro-batch ends its window."""
        return super().sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        raise AttributeError(
            "sync_gradients cannot be set: accumulate(model) decides where a window ends, and no_sync(model) keeps gradients on their rank"
        )

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Run a micro-batch; see :meth:`engine.Engine.accumulate`. Under Accelerate's rules, losses are divided by the full accumulation window."""
        state, steps = self.gradient_state, self.gradient_accumulation_steps
        self.step = 0 if self._plugin.sync_with_dataloader and state.end_of_dataloader else self.step + 1
        if self.rules == "accelerate":
            self.window.begin(Share(-1, float(steps), float(steps), last=self.step % steps == 0))
        self.enter_window(models)
        state.sync_gradients = self.sync_gradients
        if self._plugin.sync_each_batch:
            self.strategy.sync(models or self.models, True)
        if self._unreduced:
            self.strategy.sync(self._unreduced, False)
        try:
            yield
        finally:
            own_loop.leave(self.window, models)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run the backward pass; see :meth:`engine.Engine.backward`. Outside of :meth:`accumulate`, a scalar is divided by
        ``gradient_accumulation_steps``, as in Accelerate: scripts that accumulate without the block rely on it."""
        steps = self.gradient_accumulation_steps
        if steps > 1 and self.rules == "exact" and not self.window.position.accumulating and torch.is_tensor(loss):
            loss = loss / steps
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, *models: nn.Module, model: nn.Module | None = None) -> Iterator[None]:
        """Reduce no gradients in this block, as with :meth:`engine.Engine.no_sync`, not even when an :meth:`accumulate` block in it ends a window.

        ``model``: a model by Accelerate's name of the argument.
        """
        models = models if model is None else (*models, model)
        before = self._unreduced
        self._unreduced = [*before, *(models or self.models)]
        try:
            with super().no_sync(*models):
                yield
        finally:
            self._unreduced = before

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: Any) -> Iterator[None]:
        """Under DDP, reduce a model's gradients in the backward pass in this block, including those that earlier passes left unreduced."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])  # the forward pass has not prepared it
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks run out of batches at different times, under Accelerate's rule. Under exact rules they never do."""
        replicated = str(self.distributed_type).startswith("MULTI_")
        if self.use_distributed and not replicated:
            message = "join_uneven_inputs is only supported for multi-GPU training with DDP, and has no effect"
            warnings.warn(message, stacklevel=3)
        if self.rules == "exact" or not replicated:
            yield
            return
        even = self.even_batches if even_batches is None else even_batches
        changed = contextlib.nullcontext() if even_batches is None else self.checkpoints.evened(even)
        with changed, Join(joinables, enable=not even, throw_on_early_termination=False):
            yield

    def autocast(self, autocast_handler: Any = None) -> Any:
        handler = autocast_handler or self.handlers.get("AutocastKwargs")
        dtype = self.precision.autocast
        if handler is None or dtype is None:
            return super().autocast()
        return torch.autocast(self.device.type, dtype, enabled=handler.enabled, cache_enabled=handler.cache_enabled)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather all ranks' values; see :meth:`engine.Engine.gather_for_metrics`.

        Under Accelerate's rules, remove the samples that padded the last global batch.
        """
        gathered, state = super().gather_for_metrics(input_data, use_gather_object), self.gradient_state
        if self.rules == "exact" or not state.end_of_dataloader or state.remainder <= 0:
            return gathered
        if isinstance(gathered, list) and not leaves(gathered):
            return gathered[: state.remainder]
        return map_tensors(lambda tensor: tensor[: state.remainder], gathered)

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        handler = profile_handler or self.handlers.get("ProfileKwargs") or settings.ProfileKwargs()
        with handler.profiling(self.process_index) as profiler:
            yield profiler

    on_local_process = PartialState.on_local_process

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        return self.checkpoints.hook(self.checkpoints.before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        return self.checkpoints.hook(self.checkpoints.before_load, hook)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save a checkpoint; see :meth:`engine.Engine.save_state`. Under ``automatic_checkpoint_naming`` the folder is numbered automatically."""
        if not safe_serialization:
            message = "safe_serialization=False: this checkpoint is safetensors and JSON all the same, and load_state reads it; leave it out"
            warnings.warn(message, stacklevel=2)
        return self.checkpoints.save(output_dir, **options)

    def load_state(self, input_dir: Any = None, load_kwargs: None = None, *, strict: bool = True) -> dict[str, Any]:
        """Load a checkpoint; see :meth:`engine.Engine.load_state`. Loaders restart their epoch, unless ``use_stateful_dataloader`` is set."""
        if load_kwargs:
            raise ValueError("load_kwargs: nothing is unpickled, and tensors go where they belong; leave it out")
        return self.checkpoints.load(input_dir, strict, self.dataloader_config.use_stateful_dataloader)

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> list[Path]:
        """Write a model's weights; see :meth:`engine.Engine.save_model`. Without ``safe_serialization``, into a pickle ``pytorch_model.bin``."""
        if safe_serialization:
            return super().save_model(model, save_directory, max_shard_size)
        state = self.get_state_dict(model)
        return modeling.pickled(state, save_directory, max_shard_size) if self.is_main_process else []

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        return super().get_state_dict(model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        on_each_node = self.project_configuration.save_on_each_node
        if self.is_local_main_process if on_each_node else self.is_main_process:
            other.written(obj, f, safe_serialization)

    # -- trackers ---------------------------------------------------------------------------------------------------------------

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None) -> None:
        options = init_kwargs or {}
        self.trackers = [
            tracker.started_tracker(project_name, self.logging_dir, config or {}, options.get(tracker.name, {}))
            for tracker in self.log_with
        ]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        trackers = {tracker.name: tracker for tracker in self.trackers}
        if name not in trackers:
            raise ValueError(f"{name!r} is not a tracker of this Accelerator; there are: {[*trackers]}")
        return trackers[name].tracker if unwrap else trackers[name]

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def end_training(self) -> None:
        self.wait_for_checkpoint()
        for tracker in self.trackers:
            tracker.finish()


def _unpickled(arguments: dict[str, Any]) -> Accelerator:
    """Recreate an Accelerator from a pickle.

    Raises:
        RuntimeError: this process is not a rank of the job, a data loader's worker for example.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and not dist.is_initialized():
        raise RuntimeError("an Accelerator of several processes was unpickled in a process that is not one of them")
    return Accelerator(**arguments)
