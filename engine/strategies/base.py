"""The base class of strategies. It implements training in a single process, where most methods do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.checkpoint.reader import Report, Source, empty_tensor, own_state
from engine.checkpoint.tensor_files import Stored
from engine.config.settings import Settings
from engine.distributed.collectives import all_reduce, maximum_over_ranks
from engine.distributed.group import Group
from engine.step.gradient_sync import GradientSync, StepStream
from engine.step.missing_loss import zero_with_graph
from engine.step.optimizer_step import Stepper
from engine.step.optimizers import is_of_torch
from engine.step.passes import Passes
from engine.step.precision import Precision
from engine.step.scaler import Scaler
from engine.step.window import Window
from engine.strategies import deferred_init
from engine.strategies.tensor_class_states import flat, unflat
from engine.transforms.blocks import user_module
from engine.transforms.compile import Transforms
from engine.utils import accelerator

_RENAMED = "{}.speaks is called is_counted now: whether losses and logged values of this rank count. Rename it"


@dataclass(kw_only=True)
class Strategy(GradientSync):
    """The way in which several processes train one model. Subclass it, override what differs, and pass an instance or register its name.

    Implementations: :class:`Single`, :class:`engine.strategies.ddp.DDP`, :class:`engine.strategies.fsdp.FSDP`,
    :class:`engine.strategies.mesh_parallel.MeshParallel` and :class:`engine.strategies.deepspeed.strategy.DeepSpeed` override methods of this
    class and of :class:`engine.step.gradient_sync.GradientSync`.

    Arguments have the same names in all methods:

    - ``group``: all processes of the job.
    - ``model``, ``models``: what :meth:`setup` returned; ``module``: the user's module that :meth:`setup` was given.
    - ``parameters``, ``grads``: tensors of the model and their gradients, DTensors under strategies that shard.
    - ``optimizers``: the user's, not prepared ones; ``divisor``: of the summed gradients; ``max_norm``, ``norm_type``, ``max_value``: clipping.
    - ``enabled``: whether gradients are reduced; ``value``, ``flag``: a number of this rank.
    - ``scaler``: the fp16 loss scaler, or ``None``; ``on_nonfinite``: as in :class:`engine.Engine`; ``transforms``: recomputation, compilation.
    - ``source``: an opened checkpoint; ``stored``: one of its tensors.
    """

    unreduced: bool = field(default=False, init=False, repr=False)
    """Whether backward passes of the open window have left gradients unreduced, so that :meth:`reduce_rest` must be called at its end."""
    matched_forward: bool = field(default=False, init=False, repr=False)
    """Whether forward passes contain collectives, so that all ranks must run equally many, also in evaluation."""
    matched_backward: bool = field(default=False, init=False, repr=False)
    """Whether every backward pass contains collectives, not only a window's last one."""
    fused: str | None = field(default=None, init=False, repr=False)
    """Ends "a strategy which ..." in an error: the work that the strategy does in one call that cannot be divided; ``None``: there is none."""
    group: Group = field(init=False, repr=False)
    data_group: Group = field(init=False, repr=False)
    _loss_group: Group | None = field(default=None, init=False, repr=False)
    owns_weights: bool = field(default=False, init=False, repr=False)
    """Whether the strategy keeps master copies of the weights and their gradients, which the module does not have. Such a strategy trains
    only the parameters that require a gradient when it sets up the model."""
    pipelined: bool = field(default=False, init=False, repr=False)
    """Whether forward and backward passes run together, by :class:`engine.strategies.pipelined_passes.PipelinedPasses`."""
    role: str = field(default="", init=False, repr=False)
    """The part of the model that only some ranks have, such as ``"pipeline stage 1 of 4"``; empty if all ranks have the same."""
    is_counted: bool = field(default=True, init=False, repr=False)
    """Whether losses and logged values of this rank count; true on exactly one of the ranks that compute the same losses."""
    random_stream: int = field(default=0, init=False, repr=False)
    """The number of this rank's stream of random numbers: ranks with equal numbers draw equal ones (for dropout, for example). Ranks that see the
    same samples must augment them alike, so it follows ``data_group``."""
    parts_differ: bool = field(default=False, init=False, repr=False)
    """Whether ranks return tensors of different names in :meth:`model_parts` and :meth:`optimizer_parts`."""
    optimizer_parts_differ: bool = field(default=False, init=False, repr=False)
    """Whether ranks return states of different parameters in :meth:`optimizer_parts` alone, because they divide an optimizer's steps."""
    precision: Precision = field(default=Precision.parse("32-true"), init=False, repr=False)
    """Number formats; set by the engine before ``connect``."""
    transform: Callable[[nn.Module], None] = field(default=lambda model: None, init=False, repr=False)
    """Applies recomputation and compilation to a model (see :meth:`transform_by`); called once, after stages are cut and before sharding."""
    compiles_whole: str | None = field(default=None, init=False, repr=False)
    """Why a model can only be compiled block by block under this strategy; ``None``: it can be compiled as a whole."""
    keeps_activations: str | None = field(default=None, init=False, repr=False)
    """Why activations cannot be moved to the host's memory under this strategy; ``None``: they can. Known after ``connect``."""
    window: Window = field(default_factory=Window, init=False, repr=False)
    """The engine's accumulation window; set by the engine."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "speaks" in vars(cls) or "speaks" in inspect.get_annotations(cls):
            raise TypeError(_RENAMED.format(cls.__name__))
        for method, verb, caller in (
            ("step", "stepper", "engine.strategies.owned_step.OwnedStepper"),
            ("run_pipeline", "passes", "engine.strategies.pipelined_passes.PipelinedPasses"),
        ):
            if hasattr(cls, method) and getattr(cls, verb) is getattr(Strategy, verb):
                raise TypeError(
                    f"{cls.__name__}.{method} would never be called: override {verb}() to return a {caller}"
                )

    @property
    def speaks(self) -> Never:
        """The old name of :attr:`is_counted`, which is refused: a strategy that set it would count the same data several times."""
        raise AttributeError(_RENAMED.format(type(self).__name__))

    @speaks.setter
    def speaks(self, value: object) -> None:
        raise AttributeError(_RENAMED.format(type(self).__name__))

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        """Check the run's settings; ``Fit`` calls this before processes start.

        Args:
            origins: where each setting comes from.
            world_size: the number of processes of the job, if known.

        Raises:
            ValueError: settings that cannot work under this strategy, or with this many processes.
        """

    def connect(self, group: Group) -> None:
        """Take the processes of the job. Called once, before ``setup``.

        Raises:
            ValueError: the strategy cannot work on these processes.
        """
        self.group = self.data_group = group
        self._loss_group = None
        self.random_stream = group.rank

    @property
    def loss_group(self) -> Group:
        """The ranks whose losses are averaged into one gradient and whose logged values count: ``data_group``, unless ``connect`` sets others."""
        return self.data_group if self._loss_group is None else self._loss_group

    @loss_group.setter
    def loss_group(self, group: Group) -> None:
        self._loss_group = group

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks on each axis of the mesh; known after ``connect``."""
        return {"dp_replicate": self.group.world_size}

    def transform_by(self, transforms: Transforms) -> None:
        """Take the transforms of models. Called once, after ``connect``. Raises ``ValueError`` if this strategy does not allow them."""
        transforms.check(self.compiles_whole, type(self).__name__)
        self.transform = transforms.apply

    def configure(self, settings: Settings, origins: Mapping[str, str]) -> Settings:
        """Return the run's settings, with values from the strategy's own configuration where the user gave none.

        Args:
            origins: where each setting comes from (``"default"``: not given).

        Raises:
            ValueError: the strategy's own configuration contradicts a setting.
        """
        return settings

    def building(self) -> AbstractContextManager[Any]:
        """The context in which ``TrainModule.configure_model`` runs; it may change how modules create their parameters."""
        return nullcontext()

    def scaler(self) -> Scaler | None:
        """The loss scaler under fp16, which a strategy that owns the step may replace by an object with the same methods, such as the
        ``LossScale`` of :mod:`engine.strategies.deepspeed`; ``None`` under other precisions."""
        return Scaler(self.group.device) if self.precision.scaled else None

    def stepper(self, scaler: Scaler | None, on_nonfinite: str | None) -> Stepper:
        """Create the object that closes windows and steps optimizers."""
        return Stepper(self.window, self, scaler, on_nonfinite)

    def passes(self, scaler: Scaler | None) -> Passes:
        """Create the object that gives other code's backward passes the window's weights."""
        return Passes(self.window, self.loss_group, scaler)

    def train_with(self, loader: Any) -> None:
        """Take the training's loader. ``Fit`` calls this before :meth:`place`."""

    def own_optimizers(self, model: nn.Module) -> Any:
        """Optimizers and schedulers that the strategy's own configuration names for ``model``, in the form of ``configure_optimizers``."""
        return None

    def place(self, model: nn.Module) -> None:
        """Move the model to its device and dtype, in place, and initialize parameters without values. Called before ``setup``."""
        if deferred_init.is_deferred(model):
            deferred_init.materialise(model, self.group.device, deferred_init.initialiser(model))
        self.precision.convert(model)
        model.to(self.group.device)
        self.transform(model)

    def setup(self, model: nn.Module) -> nn.Module:
        """Return the model to call in training, wrapped or sharded as this strategy needs it. Called after :meth:`place`."""
        return model

    def repoint(self, optimizer: Optimizer) -> None:
        """Give an optimizer that was created before ``setup`` the parameters with which ``setup`` replaced its own, and their state."""

    def release(self) -> None:
        """Undo what ``setup`` has changed outside the models. Called when the engine releases them."""

    def sync(self, models: Sequence[nn.Module], enabled: bool) -> None:
        """Set whether the next forward and backward passes reduce gradients over the ranks (only a window's last one needs to)."""

    @contextmanager
    def no_sync(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Reduce no gradients in the forward and backward passes inside the block."""
        self.sync(models, False)
        try:
            yield
        finally:
            self.sync(models, True)

    def expect(self, models: Sequence[nn.Module], root: Tensor) -> None:
        """Prepare for a backward pass that starts at ``root``, which no forward pass has returned."""

    def backward_nothing(self, models: Sequence[nn.Module], last: bool) -> None:
        """Take part in other ranks' gradient reduction for a micro-batch without a loss, if it is the window's ``last``."""
        trained = [p for model in models for p in model.parameters() if p.requires_grad]
        if not last or not trained:
            return
        root = zero_with_graph(trained)
        self.expect(models, root)
        root.backward()

    def largest(self, values: Sequence[float]) -> list[float]:
        return maximum_over_ranks(self.group, values)

    def settle(self) -> None:
        """Raise if the latest backward pass has not finished its reductions. Called between steps, before a save, a validation or the like."""

    def discard(self, models: Sequence[nn.Module]) -> None:
        """Discard gradients kept outside the parameters' ``grad``, because their window ends without a step."""

    def share_parameters(self, model: nn.Module) -> None:
        """Broadcast rank 0's parameters and buffers, for a model that is trained without ``setup`` (manual optimization)."""

    @torch.no_grad()
    def share_buffers(self, module: nn.Module) -> None:
        """Give every rank the buffers of the first rank with the same part of the model, because checkpoints contain that rank's buffers."""
        broadcast_from_rank_0(
            self.loss_group, [b for b in module.buffers() if not b.is_meta and not hasattr(b, "placements")]
        )

    def step_stream(self, optimizer: Optimizer) -> StepStream | None:
        return StepStream(0) if self.group.world_size > 1 else None

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the ranks now, for loops that decide when to step (manual optimization)."""

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """The shape of a whole parameter, of which this rank may have a part. Not a collective; works inside :meth:`building`, too."""
        return parameter.shape

    def flat_range(self, parameter: Tensor) -> tuple[int, int] | None:
        """This rank's range of a parameter that the strategy flattens before sharding: its first element, and the one after its last.

        ``None``: shards keep the parameter's dimensions, as ``DTensor`` does. In :meth:`local` these elements come first; padding may follow.
        """
        return None

    # -- checkpoints: by names, so that each strategy reads what another wrote ----------------------------------------------------------------

    def model_parts(self, module: nn.Module) -> dict[str, Any]:
        """This rank's parameters and buffers by name: whole, sharded (``DTensor``), or missing. All ranks call this."""
        return own_state(module)

    def load_model(self, module: nn.Module, source: Source, strict: bool = True) -> Report:
        """Read this rank's part of a checkpoint into the model. All ranks call this.

        Raises:
            ValueError: the checkpoint does not fit, and ``strict`` is true.
        """
        return source.load_model(module, own_state(module), strict)

    def optimizer_parts(self, optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
        """This rank's ``optimizer.state_dict()``, with parameter names from ``module`` instead of numbers. All ranks call this."""
        return named_state(optimizer, module)

    def load_optimizer(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any], source: Source) -> None:
        """Load a state in the form of :meth:`optimizer_parts`, or with numbered parameters; ``source`` reads its tensors.

        Raises:
            ValueError: the parameters in a group are not those of the optimizer; the message names some.
        """
        numbered = numbered_state(optimizer, module, state)
        for group, optimizer_group in zip(numbered["param_groups"], optimizer.param_groups, strict=True):
            if group.get("capturable") and all(
                parameter.device.type == "cpu" for parameter in optimizer_group["params"]
            ):
                group["capturable"] = False  # saved on a GPU; on CPU parameters torch refuses it
        numbers = [i for group in numbered["param_groups"] for i in group["params"]]
        parameters = dict(zip(numbers, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
        entries = {i: entry for i, entry in numbered["state"].items() if i in parameters}
        targets: dict[str, Tensor] = {}
        for i, entry in entries.items():
            for stored, existing in _stored_tensors(entry, optimizer.state.get(parameters[i])):
                part = self.part_like(stored, parameters[i])
                targets[stored.name] = existing if _can_hold(existing, part) else part
        for stored, existing in _stored_tensors(numbered.get(BESIDE), optimizer.state):
            targets[stored.name] = empty_tensor(stored).to(getattr(existing, "device", "cpu"))
        read = source.read_optim(
            {**numbered, "state": entries}, lambda stored: targets.get(stored.name, empty_tensor(stored))
        )
        beside = read.pop(BESIDE, {})
        optimizer.load_state_dict(
            {**read, "state": {**beside, **{i: unflat(entry) for i, entry in read["state"].items()}}}
        )
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            names = dict(zip(parameters, parameter_names(optimizer, module).values(), strict=True))
            for i, entry in read["state"].items():
                _keep_dtypes(optimizer.state[parameters[i]], entry, source.stored(str(names[i])).dtype, parameters[i])

    def part_like(self, stored: Stored, parameter: Tensor) -> Tensor:
        """An empty tensor for this rank's shard of an entry of a parameter's optimizer state."""
        return torch.empty(
            stored.shape, dtype=stored.dtype, device=parameter.device if stored.shape == parameter.shape else "cpu"
        )

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Full parameters and buffers by name, on rank 0 (other ranks may return less). All ranks call this."""
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in self.model_parts(module).items()
        }


@dataclass(kw_only=True)
class Single(Strategy):
    """Training in one process on one device."""

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None:
        if world_size is not None and world_size > 1 and (settings.devices != "auto" or settings.num_nodes > 1):
            setting = f"devices={settings.devices!r}" if settings.num_nodes == 1 else f"num_nodes={settings.num_nodes}"
            raise ValueError(
                f"strategy='single' and {setting}: one process cannot use {world_size} devices; use strategy='ddp' or 'auto'"
            )

    def connect(self, group: Group) -> None:
        if group.world_size > 1:
            raise ValueError(
                f"strategy='single' was asked for, but this job has {group.world_size} processes; use strategy='ddp' or 'auto'"
            )
        super().connect(group)


def check_groups(strategy: Strategy) -> None:
    """Check the groups that ``connect`` has set.

    Raises:
        ValueError: ``loss_group`` lacks a rank of ``data_group``, or has no equal number of ranks for each.
    """
    data_ranks, loss_ranks = strategy.data_group.ranks, strategy.loss_group.ranks
    if not set(data_ranks) <= set(loss_ranks) or len(loss_ranks) % len(data_ranks):
        raise ValueError(
            f"{type(strategy).__name__}: data_group has the ranks {data_ranks}, loss_group {loss_ranks}; the losses of all ranks that see different "
            "samples must be averaged, and each sample must have equally many ranks: set loss_group to a group that contains data_group"
        )


def trained_parameters(model: nn.Module) -> Iterable[Any]:
    """The parameters that require gradients."""
    return (p for p in model.parameters() if p.requires_grad)


def class_name(model: nn.Module) -> str:
    """The class name of the user's module in ``model``."""
    return type(user_module(model)).__name__


def broadcast_from_rank_0(group: Group, tensors: Iterable[Tensor]) -> None:
    """Overwrite ``tensors`` with rank 0's values."""
    if group.world_size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=group.cpu if tensor.device.type == "cpu" else group.wide, group_src=0)


def sum_over_ranks(group: Group, value: Tensor | float, is_counted: bool = True) -> Tensor | float:
    """The sum of a number over all ranks that count (``is_counted``), in fp64, or fp32 on devices without.

    With several ranks the result is a tensor on the device whatever ``value`` is: a rank that sent a Python number through another backend
    than a rank with a tensor would hang with it.
    """
    if group.world_size == 1:
        return value
    tensor = torch.as_tensor(value, dtype=accelerator.wide(group.device)).detach().to(group.device, non_blocking=True)
    summed: Tensor = all_reduce(group, tensor if is_counted else torch.zeros_like(tensor), "sum")
    return summed


BESIDE = "beside_parameters"
"""The key of entries in an optimizer's state that belong to no parameter, such as MADGRAD's ``state["k"]``."""


def named_state(optimizer: Any, module: nn.Module) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with names instead of numbers for the parameters that ``module`` has.

    Raises:
        ValueError: it has another form than torch's optimizers return.
    """
    state, names = optimizer.state_dict(), parameter_names(optimizer, module)
    if not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            f"{type(optimizer).__name__}: its state_dict() has {', '.join(map(repr, state))}, and not 'state' and 'param_groups', as torch's "
            "optimizers have, so its tensors cannot be kept under the parameters' names: return the optimizer that it wraps"
        )
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    # torch's own compute with their states element by element, and DeepSpeed has flat ones: there the order of dims does not matter.
    is_of_others = isinstance(optimizer, Optimizer) and not is_of_torch(optimizer)
    parameters = dict(enumerate(_parameters(optimizer))) if is_of_others else dict.fromkeys(names)
    beside = {key: value for key, value in state["state"].items() if key not in names}
    return {
        **state,
        "state": {names[i]: flat(entry, parameters[i]) for i, entry in state["state"].items() if i in names},
        "param_groups": groups,
        **({BESIDE: beside} if beside else {}),
    }


def numbered_state(optimizer: Any, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of :func:`named_state` or ``optimizer.state_dict`` into the form that ``optimizer.load_state_dict`` takes."""
    names, optimizer_groups = parameter_names(optimizer, module), optimizer.state_dict()["param_groups"]
    saved = [group["params"] for group in state["param_groups"]]
    if all(isinstance(i, int) for ids in saved for i in ids):
        return state
    groups = [group["params"] for group in optimizer_groups]
    if [{names[i] for i in ids} for ids in groups] != [set(ids) for ids in saved]:
        current, stored = {names[i] for ids in groups for i in ids}, {name for ids in saved for name in ids}
        raise ValueError(
            f"the saved state of {type(optimizer).__name__} has other parameters: {len(saved)} group(s) of {[len(ids) for ids in saved]}, "
            f"the optimizer has {len(groups)} of {[len(ids) for ids in groups]}; only in the checkpoint: {sorted(map(str, stored - current))[:5]}, "
            f"only in the optimizer: {sorted(map(str, current - stored))[:5]}; "
            "start it fresh with Resume(path, optimizer=False), or load what fits with strict=False. Add groups that the training added "
            "again before the optimizer is loaded: in on_load_checkpoint of the callback or module, where run.epoch and run.step are known"
        )
    merged = [{**group, "params": ids} for group, ids in zip(state["param_groups"], groups, strict=True)]
    entries = {i: state["state"][names[i]] for i in names if names[i] in state["state"]}
    return {**state, "state": entries, "param_groups": merged}


def _stored_tensors(entry: Any, existing: Any) -> Iterator[tuple[Stored, Any]]:
    """The stored tensors in a parameter's saved state, each with what the optimizer has in its place.

    Args:
        entry: the saved state, or a part of it.
        existing: the optimizer's; ``None`` if there is none.
    """
    if isinstance(entry, Stored):
        yield entry, existing
        return
    for key, value in _items(entry):
        yield from _stored_tensors(value, dict(_items(existing)).get(key))


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a dict or a list in an optimizer's state, with their keys or numbers; nothing for another value."""
    if isinstance(container, Mapping):
        return container.items()
    return enumerate(container) if isinstance(container, (list, tuple)) else ()


def _keep_dtypes(entry: Any, read: Any, saved: torch.dtype, parameter: Tensor) -> None:
    """Put tensors back whose dtype torch has converted to the parameter's, though they had another than the parameter when they were saved: codes
    of 8 bits, counters, master copies in fp32.

    Args:
        entry: the parameter's state after loading, or a dict or list in it.
        read: the same as it was read.
        saved: the dtype of the parameter in the checkpoint.
    """
    for key, value in _items(read):
        loaded = dict(_items(entry)).get(key)
        is_converted = isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype
        if is_converted and key != "step" and (value.dtype != saved or not value.is_floating_point()):
            entry[key] = value.to(parameter.device)
        elif type(loaded) is tuple and type(value) is tuple:
            items = list(loaded)
            _keep_dtypes(items, value, saved, parameter)
            entry[key] = tuple(items)
        elif loaded is not None and not isinstance(value, Tensor):
            _keep_dtypes(loaded, value, saved, parameter)


def _can_hold(existing: Any, target: Tensor) -> bool:
    """Whether an existing tensor has the form of ``target``, so that values can be read into it."""
    same_form = (
        type(existing) is type(target)
        and existing.shape == target.shape
        and existing.dtype == target.dtype
        and existing.device == target.device
    )
    return same_form and getattr(existing, "placements", None) == getattr(target, "placements", None)


def parameter_names(optimizer: Any, module: nn.Module) -> dict[int, str | int]:
    """The name of each of the optimizer's parameters, by its number; the number again for parameters that the module does not have."""
    names = {id(p): name for name, p in module.named_parameters()}
    return {i: names.get(id(p), i) for i, p in enumerate(_parameters(optimizer))}


def _parameters(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer, in the order of their numbers in its ``state_dict``."""
    return [p for group in optimizer.param_groups for p in group["params"]]
