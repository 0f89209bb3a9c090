"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from engine.config.lightning_names import CLASSES
from engine.interop.refused import ANY, refusing, translated
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.fsdp import FSDP
from engine.utils.errors import nearest

_UNUSED = {"name": "ddp", "find_unused_parameters": True}
_DDP = {"": "ddp", "_find_unused_parameters_true": _UNUSED, "_find_unused_parameters_false": "ddp"}
NAMES: dict[str, Any] = {
    **{f"ddp{way}{end}": found for way in ("", "_spawn", "_fork", "_notebook") for end, found in _DDP.items()},
    **{name: name for name in ("auto", "fsdp", *(f"deepspeed_stage_{n}" for n in (1, 2, 3, "2_offload", "3_offload")))},
    "single_device": "single",
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    "deepspeed": "deepspeed_stage_2",
}
"""Lightning's names of strategies, and the setting of ``Fit``. How processes start is the launcher's, so ``ddp_spawn`` is ``ddp``."""
_WITHOUT = {
    "accelerator": (None, "Trainer(accelerator=...)"),
    "parallel_devices": (None, "Trainer(devices=...)"),
    "cluster_environment": (None, "processes are detected from the environment (fit env)"),
    "checkpoint_io": (None, "checkpoints have one format"),
    **dict.fromkeys(("precision_plugin", "mixed_precision"), (None, "Trainer(precision='bf16-mixed')")),
    "process_group_backend": (None, "the device decides"),
    "timeout": (timedelta(minutes=30), "engine.Fit(start_timeout=..., timeout=...)"),
    "model_averaging_period": (None, "gradients are averaged at each step"),
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_wrapper"), (None, "engine.DDP(comm_hook='powersgd', ...)")),
    **dict.fromkeys(
        ("activation_checkpointing", "activation_checkpointing_policy"),
        (None, "engine.Fit(activation_checkpointing='full')"),
    ),
    **dict.fromkeys(("state_dict_type", "start_method"), (ANY, "")),  # sharded on disk, loaded anywhere
}
_HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
_KEEPS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def strategy(asked: Any) -> Any:
    """``Fit``'s setting for a strategy by Lightning's name, or an object.

    Raises:
        ValueError: an unknown name, or an object of another kind.
    """
    if isinstance(asked, Strategy):
        return asked
    if asked not in NAMES:
        known = f"{', '.join(NAMES)}, or an object of engine.interop.lightning.strategies"
        raise ValueError(
            f"Trainer(strategy={asked!r}) has no counterpart{nearest(str(asked), NAMES)}; possible: {known}"
        )
    return NAMES[asked]


class _Translated(type):
    """A class of Lightning's whose objects are those of its base, which ``made`` makes from Lightning's arguments."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.made(*args, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__)


class DDPStrategy(DDP, metaclass=_Translated):
    """Lightning's class as :class:`engine.DDP`; ``ddp_comm_hook`` is one of torch's."""

    @staticmethod
    def made(**options: Any) -> DDP:
        found = translated("DDPStrategy", "", (), options, _WITHOUT)
        hook = found.pop("ddp_comm_hook", None)
        return DDP(**found, comm_hook=_HOOKS.get(getattr(hook, "__name__", ""), hook))


def FSDPStrategy(**options: Any) -> FSDP:
    """Lightning's class as :class:`engine.FSDP`; ``auto_wrap_policy`` is a set of module classes, or one of torch's two policies."""
    found = translated("FSDPStrategy", "", (), options, _WITHOUT)
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
    return FSDP(**{**found, "cpu_offload": bool(found.get("cpu_offload"))})


def SingleDeviceStrategy(device: Any = None, **options: Any) -> Single:
    """One process; the device is ``Trainer``'s."""
    return Single(**translated("SingleDeviceStrategy", "", (), options, _WITHOUT))


ParallelStrategy = Strategy
__getattr__ = refusing(__name__, CLASSES)
