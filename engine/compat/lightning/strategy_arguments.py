"""Translates Lightning's strategies, given by name or by class and arguments, to ``Fit``'s setting ``strategy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.compat.lightning.arguments import STRATEGIES, STRATEGY_NAMES
from engine.compat.refusals import translated
from engine.utils.errors import nearest

_COMM_HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "_HYBRID_SHARD_ZERO2": False,
}


def strategy(name: str) -> Any:
    """The value of ``Fit``'s setting for the name of one of Lightning's strategies.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in STRATEGY_NAMES:
        possible = f"{', '.join(STRATEGY_NAMES)}, or an object of engine.compat.lightning.strategies"
        raise ValueError(
            f"Trainer(strategy={name!r}) has no counterpart{nearest(str(name), STRATEGY_NAMES)}; possible: {possible}"
        )
    return STRATEGY_NAMES[name]


def ddp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the arguments of ``DDPStrategy`` for :class:`engine.DDP`; ``ddp_comm_hook`` is a function of torch."""
    arguments = translated("DDPStrategy", options, STRATEGIES["DDPStrategy"])
    hook = arguments.pop("ddp_comm_hook", None)
    return {**arguments, "comm_hook": _COMM_HOOKS.get(getattr(hook, "__name__", ""), hook)}


def fsdp(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the arguments of ``FSDPStrategy`` for :class:`engine.FSDP`; ``auto_wrap_policy``: module classes, or a policy of torch."""
    arguments = translated("FSDPStrategy", options, STRATEGIES["FSDPStrategy"])
    kind, policy, mesh = (
        arguments.pop(name, None) for name in ("sharding_strategy", "auto_wrap_policy", "device_mesh")
    )
    kind, keywords = getattr(kind, "name", kind) or "FULL_SHARD", getattr(policy, "keywords", {})
    if kind not in _RESHARDS or (mesh is None) != ("HYBRID" not in kind):
        raise ValueError(
            f"FSDPStrategy(sharding_strategy={kind!r}, device_mesh={mesh!r}) has no counterpart; possible: {', '.join(_RESHARDS)}, HYBRID ones with "
            "device_mesh=(replicas, shards); instead of NO_SHARD strategy='ddp'"
        )
    if mesh is not None:
        arguments["dp_replicate"], arguments["dp_shard"] = mesh
    if "min_num_params" in keywords:
        arguments["min_size"] = keywords["min_num_params"]
    elif policy is not None:
        arguments["blocks"] = tuple(keywords.get("transformer_layer_cls", policy))
    if not _RESHARDS[kind]:
        arguments["reshard_after_forward"] = False
    return {**arguments, "cpu_offload": bool(arguments.get("cpu_offload"))}


def single(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the arguments of ``SingleDeviceStrategy`` for :class:`engine.Single`; the device is an argument of ``Trainer``."""
    return translated("SingleDeviceStrategy", options, STRATEGIES["SingleDeviceStrategy"])


CLASSES: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "DDPStrategy": ("ddp", ddp),
    "FSDPStrategy": ("fsdp", fsdp),
    "SingleDeviceStrategy": ("single", single),
}
"""Lightning's class -> the name of the strategy here, and the function that translates its arguments."""
