"""What a search tries: strategies with mesh degrees that divide the ranks, and micro-batches that keep the global batch."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from engine.planning.device_table import Hardware
from engine.strategies.pipeline_stages import has_parts
from engine.transforms.blocks import repeated, user_module

RECOMPUTE: tuple[str | None, ...] = (None, "selective", "full")
"""Settings of ``activation_checkpointing``, from the most memory to the least."""
_MOST_TP = 16
"""Tensor parallel stays within a node, and beyond this many ranks its products are too small to be worth it."""
_DOUBLINGS = 2
"""A search goes up to four times the given micro-batch: larger ones gain little, and the given one is somebody's choice."""


@dataclass(frozen=True)
class Layout:
    """A strategy with its degrees, on all ranks."""

    strategy: Any
    """As ``Fit(strategy=...)`` takes it: a name, a mapping with a name, or an object."""
    data_ranks: int
    """Ranks that see different samples."""
    shards: int
    """Ranks that share the parameters, gradients and optimizer state of one copy of the model."""
    offloaded: bool = False
    """Parameters or optimizer state are in host memory."""
    sharded_parameters: bool = True
    """Whether parameters and gradients are shared too, not only the optimizer state."""
    given: bool = False
    """Somebody has asked for it."""
    bounded: bool = True
    """Whether ``shards`` says how much of the model state a rank has; not of strategies that others wrote."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Its degrees, if ``strategy`` does not state them."""

    def degree(self, axis: str) -> int:
        """Ranks along ``"tp"`` or ``"pp"``."""
        stated = self.strategy if isinstance(self.strategy, Mapping) else {}
        return int({**stated, **dict(self.sizes)}.get(axis, 1))

    def __str__(self) -> str:
        return written(self.strategy)


@dataclass(frozen=True)
class Candidate:
    """One way to train: the settings that a search changes."""

    layout: Layout
    precision: Any
    activation_checkpointing: str | int | None
    micro_batch: int
    """Samples that a rank trains on at once."""
    window: int
    """Micro-batches of a step, so that the global batch is the one asked for."""

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of ``Fit``."""
        return {
            "strategy": self.layout.strategy,
            "precision": self.precision,
            "activation_checkpointing": self.activation_checkpointing,
            "accumulate_grad_batches": self.window,
        }

    def code(self, derived: bool) -> str:
        """The arguments in Python; ``derived``: ``global_batch_size`` gives the window."""
        parts = {"strategy": in_python(self.layout.strategy), "precision": _value(self.precision)}
        if self.activation_checkpointing is not None:
            parts["activation_checkpointing"] = _value(self.activation_checkpointing)
        if not derived:
            parts["accumulate_grad_batches"] = str(self.window)
        return f"Fit({', '.join(f'{key}={text}' for key, text in parts.items())})"

    def command(self, derived: bool) -> str | None:
        """The same as options of ``fit run``; ``None``: an object cannot be written there."""
        named = (str, Mapping)
        if not isinstance(self.layout.strategy, named) or not isinstance(self.precision, str):
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


def in_python(strategy: Any) -> str:
    """A strategy as one types it in a script: ``"fsdp"``, ``{"name": "mesh", "tp": 2}``, or ``MeshParallel(tp=2)``."""
    if isinstance(strategy, str):
        return f'"{strategy}"'
    if isinstance(strategy, Mapping):
        return "{" + ", ".join(f'"{key}": {_value(value)}' for key, value in strategy.items()) + "}"
    if not is_dataclass(strategy):
        return f"{type(strategy).__name__}(...)"
    told = [
        f"{each.name}={_value(getattr(strategy, each.name))}"
        for each in fields(strategy)
        if each.init and each.repr and getattr(strategy, each.name) != _default(each)
    ]
    return f"{type(strategy).__name__}({', '.join(told)})"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def _default(of: Any) -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def written(strategy: Any) -> str:
    """A strategy as one types it after ``strategy=``: ``fsdp``, or ``{name: mesh, tp: 2}``; an object as in a script."""
    if isinstance(strategy, str):
        return strategy
    if not isinstance(strategy, Mapping):
        return in_python(strategy)
    return (
        "{"
        + ", ".join(
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in strategy.items()
        )
        + "}"
    )


def divisors(number: int) -> list[int]:
    """Of a number, 1 and itself included, in order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def layouts(
    model: nn.Module, world_size: int, per_node: int, offload: bool = True, planned: bool = False
) -> list[Layout]:
    """Every strategy that could train ``model`` on these ranks, the simplest first.

    Tensor parallel stays within a node and hybrid sharding shards within one. A model without a plan for tensor parallel, or without pipeline
    stages, has one layout of the kind all the same: planning it says what the model lacks.

    Args:
        model: the user's module.
        world_size: ranks.
        per_node: ranks of a node.
        offload: whether devices have memory apart from the host's.
        planned: a plan for tensor parallel is given, so that the model needs none.
    """
    planned = planned or has_plan(model)
    if world_size == 1:
        return [Layout("single", 1, 1), *_zero(1)]
    node = divisors(per_node)[1:]
    found = [Layout("ddp", world_size, 1), Layout("fsdp", world_size, world_size)]
    for shard in (each for each in node if each < world_size and world_size % each == 0):
        found.append(Layout({"name": "fsdp", "dp_replicate": world_size // shard}, world_size, shard))
    found += _zero(world_size)
    tensor = [each for each in node if world_size % each == 0 and each <= _MOST_TP]
    depth = divisors(world_size)[1:]
    if not planned:
        tensor = tensor[:1]
    if not has_parts(user_module(model)):
        depth = depth[:1]
    found += [_mesh(world_size, tp=tp) for tp in tensor]
    found += [each for pp in depth for each in _pipelines(world_size, pp)]
    if planned and has_parts(user_module(model)):
        found += [_mesh(world_size, pp=pp, tp=tp) for tp in tensor for pp in depth if world_size % (tp * pp) == 0]
    found.append(Layout({"name": "fsdp", "cpu_offload": True}, world_size, world_size, offloaded=True))
    return list({str(each): each for each in found if offload or not each.offloaded}.values())


def _zero(world_size: int) -> Iterable[Layout]:
    """DeepSpeed's stages; none where it is not installed, as a plan of them could not be run."""
    if importlib.util.find_spec("deepspeed") is None or world_size == 1:
        return
    for stage in (1, 2, 3):
        yield Layout(f"deepspeed_stage_{stage}", world_size, world_size, sharded_parameters=stage == 3)
    for stage in (2, 3):
        yield Layout(f"deepspeed_stage_{stage}_offload", world_size, world_size, offloaded=True)


def _mesh(world_size: int, *, pp: int = 1, tp: int = 1) -> Layout:
    """Parts along ``pp`` and ``tp``, shards over the other ranks."""
    rest = world_size // (pp * tp)
    axes = {"pp": pp, "dp_shard": rest, "tp": tp}
    return Layout(
        {"name": "mesh", **{name: size for name, size in axes.items() if size > 1 or name == "dp_shard"}},
        rest,
        world_size,
    )


def _pipelines(world_size: int, pp: int) -> Iterable[Layout]:
    yield _mesh(world_size, pp=pp)
    rest = world_size // pp
    if rest > 1:
        yield Layout({"name": "mesh", "pp": pp, "dp_replicate": rest, "dp_shard": 1}, rest, pp)


def has_plan(model: nn.Module) -> bool:
    """Whether a model says how tensor parallel cuts it."""
    owner = user_module(model)
    if callable(getattr(type(owner), "parallelize", None)):
        return True
    return any(bool(getattr(module, "_tp_plan", None)) for module in model.modules())


def has_blocks(model: nn.Module) -> bool:
    """Whether activation checkpointing finds blocks, as far as it is known before ``configure_model``."""
    owner = user_module(model)
    return (
        callable(getattr(type(owner), "blocks", None))
        or bool(repeated(owner))
        or not any(True for _ in owner.parameters())
    )


def micro_batches(given: int, share: int) -> list[int]:
    """Sizes that divide a rank's ``share`` of the global batch: the given one, its halves and doubles, and 1; in order."""
    wanted = {given * 2**up for up in range(_DOUBLINGS + 1)} | {1}
    size = given
    while size > 1:
        size //= 2
        wanted.add(size)
    return sorted(size for size in wanted if share % size == 0)


def precisions(given: Any, device: Hardware, asked: Sequence[Any]) -> list[Any]:
    """The precisions to try: those asked for, else full precision and beside it the half one for which a GPU has units."""
    if asked:
        return list(asked)
    if str(given) != "32-true" or device.is_host:
        return [given]
    if "bfloat16" in device.peaks:
        return [given, "bf16-mixed"]
    return [given, "16-mixed"] if "float16" in device.peaks else [given]
