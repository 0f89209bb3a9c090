"""Strategies by name. Each file is imported when its strategy is asked for."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from engine.errors import nearest
from engine.strategies.base import Single, Strategy

_BUILT_IN = {
    "single": ("engine.strategies.base", "Single"),
    "ddp": ("engine.strategies.ddp", "DDP"),
    "fsdp": ("engine.strategies.fsdp", "FSDP"),
    "deepspeed": ("engine.strategies.deepspeed", "DeepSpeed"),
    "deepspeed_stage_0": ("engine.strategies.deepspeed", "stage_0"),
    "deepspeed_stage_1": ("engine.strategies.deepspeed", "stage_1"),
    "deepspeed_stage_2": ("engine.strategies.deepspeed", "stage_2"),
    "deepspeed_stage_3": ("engine.strategies.deepspeed", "stage_3"),
    "deepspeed_stage_2_offload": ("engine.strategies.deepspeed", "stage_2_offload"),
    "deepspeed_stage_3_offload": ("engine.strategies.deepspeed", "stage_3_offload"),
    "tp": ("engine.strategies.mesh_parallel", "tensor_parallel_only"),
    "pp": ("engine.strategies.mesh_parallel", "pipeline_parallel_only"),
}


def get(name: str | Strategy, world_size: int = 1) -> Strategy:
    """The strategy of that name; ``"auto"`` is ``single`` for one process and ``ddp`` for several. An instance is used as it is.

    Third parties register theirs in the entry-point group ``engine.strategies``: a callable without arguments.

    Raises:
        ValueError: for a name that does not exist, with the names that do.
    """
    if isinstance(name, Strategy):
        return name
    if name == "auto":
        name = "single" if world_size == 1 else "ddp"
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        built: Strategy = getattr(importlib.import_module(module), attribute)()
        return built
    others = {point.name: point for point in entry_points(group="engine.strategies")}
    if name in others:
        made: Strategy = others[name].load()()
        return made
    known = ["auto", *_BUILT_IN, *others]
    raise ValueError(f"strategy={name!r} is unknown{nearest(name, known)}; possible: {', '.join(known)}, or a Strategy object")


__all__ = ["Single", "Strategy", "get"]
