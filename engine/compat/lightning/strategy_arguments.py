"""Lightning's strategies, by name or by class and arguments, as ``Fit``'s setting ``strategy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.compat.lightning.arguments import STRATEGIES, STRATEGY_NAMES
from engine.compat.refusals import translated
from engine.utils.errors import nearest

_HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
_KEEPS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def strategy(asked: str) -> Any:
    """The setting for a strategy of Lightning's name.

    Raises:
        ValueError: an unknown name.
    """
    if asked not in STRATEGY_NAMES:
        known = f"{', '.join(STRATEGY_NAMES)}, or an object of engine.compat.lightning.strategies"
        raise ValueError(
            f"Trainer(strategy={asked!r}) has no counterpart{nearest(str(asked), STRATEGY_NAMES)}; possible: {known}"
        )
    return STRATEGY_NAMES[asked]


def ddp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``DDPStrategy`` as those of :class:`engine.DDP`; ``ddp_comm_hook`` is one of torch's."""
    found = translated("DDPStrategy", options, STRATEGIES["DDPStrategy"])
    hook = found.pop("ddp_comm_hook", None)
    return {**found, "comm_hook": _HOOKS.get(getattr(hook, "__name__", ""), hook)}


def fsdp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``FSDPStrategy`` as those of :class:`engine.FSDP`; ``auto_wrap_policy`` is a set of module classes, or one of torch's policies."""
    found = translated("FSDPStrategy", options, STRATEGIES["FSDPStrategy"])
    kind, policy, mesh = (found.pop(name, None) for name in ("sharding_strategy", "auto_wrap_policy", "device_mesh"))
    kind, known = getattr(kind, "name", kind) or "FULL_SHARD", getattr(policy, "keywords", {})
    if kind not in _KEEPS or (mesh is None) != ("HYBRID" not in kind):
        raise ValueError(
            f"FSDPStrategy(sharding_strategy={kind!r}, device_mesh={mesh!r}) has no counterpart; possible: {', '.join(_KEEPS)}, HYBRID ones with "
            "device_mesh=(replicas, shards); instead of NO_SHARD strategy='ddp'"
        )
    if mesh is not None:
        found["dp_replicate"], found["dp_shard"] = mesh
    if "min_num_params" in known:
        found["min_size"] = known["min_num_params"]
    elif policy is not None:
        found["blocks"] = tuple(known.get("transformer_layer_cls", policy))
    if not _KEEPS[kind]:
        found["reshard_after_forward"] = False
    return {**found, "cpu_offload": bool(found.get("cpu_offload"))}


def single(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``SingleDeviceStrategy`` as those of :class:`engine.Single`; the device is ``Trainer``'s."""
    return translated("SingleDeviceStrategy", options, STRATEGIES["SingleDeviceStrategy"])


CLASSES: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "DDPStrategy": ("ddp", ddp),
    "FSDPStrategy": ("fsdp", fsdp),
    "SingleDeviceStrategy": ("single", single),
}
"""Of each class: the name here, and its arguments."""
