"""Candidates of a search: the strategy that a user has given, then others with mesh degrees that divide the ranks, and micro-batches that keep
the global batch."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from engine import strategies
from engine.config.named_options import NamedOptions
from engine.engine import Engine
from engine.planning.device_table import Hardware
from engine.planning.plan_text import in_python, value_in_python, written
from engine.strategies.base import Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel
from engine.strategies.pipeline_stages import has_parts
from engine.transforms.blocks import repeated_blocks, user_module

RECOMPUTE: tuple[str | None, ...] = (None, "selective", "full")
"""Settings of ``activation_checkpointing``, from the most memory to the least."""
_MOST_TP = 16
"""The maximum degree of tensor parallel: it stays within a node, and beyond this many ranks its products are too small to be worth it."""
_DOUBLINGS = 2
"""How often a search doubles the given micro-batch at most: larger ones gain little, and the user has chosen the given one."""


@dataclass(frozen=True)
class Layout:
    """A strategy with its degrees on all ranks."""

    strategy: Any
    """Value for ``Fit(strategy=...)``: a name, a mapping with a name, or an object."""
    data_ranks: int
    """Ranks that see different samples."""
    shards: int
    """Ranks over which the parameters, gradients and optimizer state of one copy of the model are sharded."""
    offloaded: bool = False
    """Whether parameters or optimizer state are in host memory."""
    sharded_parameters: bool = True
    """Whether parameters and gradients are sharded too, not only the optimizer state."""
    is_requested: bool = False
    """Whether the user has asked for this layout."""
    bounded: bool = True
    """Whether ``shards`` tells how much of the model state a rank holds; false for strategies that the library does not provide."""
    sizes: tuple[tuple[str, int], ...] = ()
    """The degrees of the strategy where ``strategy`` does not state them."""

    def degree(self, axis: str) -> int:
        """The number of ranks along ``"tp"`` or ``"pp"``."""
        stated = self.strategy if isinstance(self.strategy, Mapping) else {}
        return int({**stated, **dict(self.sizes)}.get(axis, 1))

    def __str__(self) -> str:
        return written(self.strategy)


@dataclass(frozen=True)
class Candidate:
    """One combination of the settings that a search changes."""

    layout: Layout
    precision: Any
    activation_checkpointing: str | int | None
    micro_batch: int
    """Samples that a rank trains on at once."""
    window: int
    """Micro-batches of a step; their number keeps the global batch."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as arguments of ``Fit``."""
        return {
            "strategy": self.layout.strategy,
            "precision": self.precision,
            "activation_checkpointing": self.activation_checkpointing,
            "accumulate_grad_batches": self.window,
        }

    def code(self, derived: bool) -> str:
        """The settings as Python code; with ``derived`` without the window, which ``global_batch_size`` gives."""
        parts = {"strategy": in_python(self.layout.strategy), "precision": value_in_python(self.precision)}
        if self.activation_checkpointing is not None:
            parts["activation_checkpointing"] = value_in_python(self.activation_checkpointing)
        if not derived:
            parts["accumulate_grad_batches"] = str(self.window)
        return f"Fit({', '.join(f'{key}={text}' for key, text in parts.items())})"

    def command(self, derived: bool) -> str | None:
        """The settings as options of ``fit run``; ``None``: an object among them cannot be written there."""
        writable = (str, Mapping)
        if not isinstance(self.layout.strategy, writable) or not isinstance(self.precision, str):
            return None
        parts = [f"strategy={written(self.layout.strategy)}", f"precision={self.precision}"]
        if self.activation_checkpointing is not None:
            parts.append(f"activation_checkpointing={self.activation_checkpointing}")
        if not derived:
            parts.append(f"accumulate_grad_batches={self.window}")
        return "--set " + " ".join(shlex.quote(part) for part in parts)

    def __str__(self) -> str:
        recompute = self.activation_checkpointing
        recomputed = "" if recompute is None else f", activation_checkpointing={recompute!r}"
        return (
            f"strategy={self.layout}, precision={str(self.precision)!r}{recomputed}, micro-batches of {self.micro_batch}, "
            f"accumulate_grad_batches={self.window}"
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number, 1 and the number itself included, in order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def layouts(
    model: nn.Module, world_size: int, per_node: int, offload: bool = True, planned: bool = False
) -> list[Layout]:
    """Every layout with which ``model`` could be trained on ``world_size`` ranks, the simplest first.

    Tensor parallel stays within a node and hybrid sharding shards within one. For a model without a plan for tensor parallel, or without
    pipeline stages, one such layout is included all the same: the error of its plan says what the model lacks.

    Args:
        model: the user's module.
        world_size: ranks.
        per_node: ranks of a node.
        offload: whether to include offloading: the devices have memory of their own, apart from the host's.
        planned: whether the strategy has a plan for tensor parallel, so that the model needs none.
    """
    planned = planned or has_plan(model)
    if world_size == 1:
        return [Layout("single", 1, 1), *_zero(1)]
    degrees_in_node = divisors(per_node)[1:]
    all_layouts = [Layout("ddp", world_size, 1), Layout("fsdp", world_size, world_size)]
    for shard in (degree for degree in degrees_in_node if degree < world_size and world_size % degree == 0):
        all_layouts.append(Layout({"name": "fsdp", "dp_replicate": world_size // shard}, world_size, shard))
    all_layouts += _zero(world_size)
    tp_degrees = [degree for degree in degrees_in_node if world_size % degree == 0 and degree <= _MOST_TP]
    pp_degrees = divisors(world_size)[1:]
    if not planned:
        tp_degrees = tp_degrees[:1]
    if not has_parts(user_module(model)):
        pp_degrees = pp_degrees[:1]
    all_layouts += [_mesh(world_size, tp=tp) for tp in tp_degrees]
    all_layouts += [layout for pp in pp_degrees for layout in _pipelines(world_size, pp)]
    if planned and has_parts(user_module(model)):
        all_layouts += [
            _mesh(world_size, pp=pp, tp=tp) for tp in tp_degrees for pp in pp_degrees if world_size % (tp * pp) == 0
        ]
    all_layouts.append(Layout({"name": "fsdp", "cpu_offload": True}, world_size, world_size, offloaded=True))
    return list({str(layout): layout for layout in all_layouts if offload or not layout.offloaded}.values())


def _zero(world_size: int) -> Iterable[Layout]:
    """The layouts with DeepSpeed's stages; none if DeepSpeed is not installed, because their plans could not be run."""
    if importlib.util.find_spec("deepspeed") is None or world_size == 1:
        return
    for stage in (1, 2, 3):
        yield Layout(f"deepspeed_stage_{stage}", world_size, world_size, sharded_parameters=stage == 3)
    for stage in (2, 3):
        yield Layout(f"deepspeed_stage_{stage}_offload", world_size, world_size, offloaded=True)


def _mesh(world_size: int, *, pp: int = 1, tp: int = 1) -> Layout:
    """A mesh with ``pp`` pipeline stages and tensor parallel over ``tp`` ranks, sharded over the ranks that remain."""
    shards = world_size // (pp * tp)
    axes = {"pp": pp, "dp_shard": shards, "tp": tp}
    return Layout(
        {"name": "mesh", **{name: size for name, size in axes.items() if size > 1 or name == "dp_shard"}},
        shards,
        world_size,
    )


def _pipelines(world_size: int, pp: int) -> Iterable[Layout]:
    """The layouts with ``pp`` pipeline stages: one that shards each stage over the remaining ranks, and one that replicates it."""
    yield _mesh(world_size, pp=pp)
    replicas = world_size // pp
    if replicas > 1:
        yield Layout({"name": "mesh", "pp": pp, "dp_replicate": replicas, "dp_shard": 1}, replicas, pp)


def has_plan(model: nn.Module) -> bool:
    """Check whether a model has a plan for tensor parallel."""
    owner = user_module(model)
    if callable(getattr(type(owner), "parallelize", None)):
        return True
    return any(bool(getattr(module, "_tp_plan", None)) for module in model.modules())


def has_blocks(model: nn.Module) -> bool:
    """Check whether activation checkpointing finds blocks. Before ``configure_model`` a model without parameters counts as one that has them."""
    owner = user_module(model)
    return (
        callable(getattr(type(owner), "blocks", None))
        or bool(repeated_blocks(owner))
        or not any(True for _ in owner.parameters())
    )


def micro_batches(start: int, share: int) -> list[int]:
    """The sizes of micro-batches to try that divide a rank's ``share`` of the global batch, ascending: ``start``, its halves and doubles, and 1."""
    sizes = {start * 2**doubling for doubling in range(_DOUBLINGS + 1)} | {1}
    size = start
    while size > 1:
        size //= 2
        sizes.add(size)
    return sorted(size for size in sizes if share % size == 0)


def precisions(setting: Any, device: Hardware, requested: Sequence[Any]) -> list[Any]:
    """The precisions to try: those requested; else the given one, and if that is the default on a GPU also the half precision that the GPU
    supports."""
    if requested:
        return list(requested)
    if str(setting) != "32-true" or device.is_host:
        return [setting]
    if "bfloat16" in device.peaks:
        return [setting, "bf16-mixed"]
    return [setting, "16-mixed"] if "float16" in device.peaks else [setting]


_KINDS: dict[str, type[Strategy]] = {"ddp": DDP, "fsdp": FSDP, "mesh": MeshParallel}
"""Name of a strategy -> its class, for the strategies whose options a search varies."""
_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@dataclass(frozen=True)
class UsersStrategy:
    """The strategy that a user asked for."""

    as_written: Any
    """The value of the setting: a name, a :class:`NamedOptions`, or an object."""
    strategy: Strategy
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options other than degrees that differ from their defaults, if the strategy is of one of :data:`_KINDS`."""

    @property
    def is_searchable(self) -> bool:
        """Check whether a search can vary the strategy: its class is one of :data:`_KINDS`. A subclass may do anything."""
        return type(self.strategy) in _KINDS.values()

    @property
    def brings_plan(self) -> bool:
        """Check whether the strategy has a plan for tensor parallel, so that the model needs none."""
        return self.options.get("plan") is not None

    def layout(self, engine: Engine | None, world_size: int) -> Layout:
        """The layout of the strategy as the user configured it.

        Args:
            engine: the engine of a simulated job with the strategy; ``None``: the strategy refuses the job.
            world_size: ranks.
        """
        strategy = self.as_written.as_dict() if isinstance(self.as_written, NamedOptions) else self.as_written
        if engine is None:
            return Layout(strategy, world_size, 1, is_requested=True, bounded=False)
        sizes = {name: size for name, size in engine.strategy.axes.items() if size > 1}
        shards = 1
        for name, size in sizes.items():
            shards *= size if name != "dp_replicate" else 1
        return Layout(
            strategy,
            engine.data_group.world_size,
            shards,
            offloaded=bool(getattr(engine.strategy, "cpu_offload", False)),
            is_requested=True,
            bounded=self.is_searchable,
            sizes=tuple(sizes.items()),
        )

    def with_its_options(self, layout: Layout) -> Layout:
        """Return ``layout`` with those of the user's options that the class of its strategy has."""
        name = layout.strategy if isinstance(layout.strategy, str) else layout.strategy["name"]
        kind = _KINDS.get(name)
        if kind is None or not self.options:
            return layout
        possible = {option.name for option in fields(kind) if option.init}
        own_options = {key: value for key, value in self.options.items() if key in possible}
        if not own_options:
            return layout
        degrees: dict[str, Any] = {} if isinstance(layout.strategy, str) else layout.strategy
        changed: Any = {**degrees, "name": name, **own_options}
        if isinstance(self.as_written, Strategy):
            del changed["name"]
            changed = kind(**changed)
        sizes = tuple((key, value) for key, value in degrees.items() if key in _DEGREES)
        offloaded = layout.offloaded or bool(own_options.get("cpu_offload"))
        return replace(layout, strategy=changed, offloaded=offloaded, sizes=sizes)

    def notes(self) -> list[str]:
        """Sentences on how the search treats the strategy."""
        text = written(self.as_written.as_dict() if isinstance(self.as_written, NamedOptions) else self.as_written)
        if not self.is_searchable:
            return [
                f"strategy={text} was given and is tried first, with other micro-batches too; its own settings are not varied"
            ]
        addition = f"; others keep {', '.join(self.options)} where they have it" if self.options else ""
        return [f"strategy={text} was given and is tried first; degrees are varied{addition}"]


def users_strategy(setting: Any, origin: str, world_size: int) -> UsersStrategy | None:
    """The strategy of the settings; ``None``: the user asked for none."""
    if origin == "default" or setting == "auto":
        return None
    strategy = strategies.get(setting, world_size)
    options = {}
    if type(strategy) in _KINDS.values():
        options = {
            option.name: getattr(strategy, option.name)
            for option in fields(strategy)
            if option.init and option.name not in _DEGREES and getattr(strategy, option.name) != option.default
        }
    return UsersStrategy(setting, strategy, options)


def layouts_with(first: Layout, users: UsersStrategy, all_layouts: list[Layout]) -> list[Layout]:
    """The layout ``first``, then ``all_layouts`` with the user's options, except those that are the same as ``first``."""

    def degrees(layout: Layout) -> tuple[Any, ...]:
        return layout.data_ranks, layout.shards, layout.degree("tp"), layout.degree("pp"), layout.offloaded

    changed = [users.with_its_options(other) for other in all_layouts]
    kinds = {"ddp": ("ddp",), "fsdp": ("fsdp", "mesh"), "mesh": ("fsdp", "mesh")}
    users_name = next((name for name, kind in _KINDS.items() if type(users.strategy) is kind), None)

    def is_duplicate(before: Layout, after: Layout) -> bool:
        name = before.strategy if isinstance(before.strategy, str) else before.strategy["name"]
        alike = name in kinds.get(users_name, ()) if users_name else before.strategy == first.strategy
        return alike and degrees(after) == degrees(first)

    return [first, *(new for old, new in zip(all_layouts, changed, strict=True) if not is_duplicate(old, new))]
