"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from engine.interop.lightning.refused import ANY, refused_class, translated
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.deepspeed.strategy import DeepSpeed
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel
from engine.utils.errors import nearest

_UNUSED: dict[str, Any] = {
    "": "ddp",
    "_find_unused_parameters_true": {"name": "ddp", "find_unused_parameters": True},
    "_find_unused_parameters_false": "ddp",
}
NAMES: dict[str, Any] = {
    **{f"ddp{way}{end}": found for way in ("", "_spawn", "_fork", "_notebook") for end, found in _UNUSED.items()},
    **{name: name for name in ("auto", "fsdp", *(f"deepspeed_stage_{n}" for n in (1, 2, 3, "2_offload", "3_offload")))},
    "single_device": "single",
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    "deepspeed": "deepspeed_stage_2",
}
"""Lightning's names of strategies, and the setting of ``Fit``. How processes start is the launcher's, so ``ddp_spawn`` is ``ddp``."""
_ACTIVATIONS = (None, "engine.Fit(activation_checkpointing='full')")
_ELSEWHERE = {
    "accelerator": (None, "Trainer(accelerator=...)"),
    "parallel_devices": (None, "Trainer(devices=...)"),
    "cluster_environment": (None, "processes are detected from the environment (fit env)"),
    "checkpoint_io": (None, "checkpoints have one format"),
    "precision_plugin": (None, "Trainer(precision=...)"),
    "mixed_precision": (None, "Trainer(precision='bf16-mixed')"),
    "process_group_backend": (None, "the device decides"),
    "timeout": (timedelta(minutes=30), "engine.Fit(start_timeout=..., timeout=...)"),
    "start_method": (ANY, ""),
    "model_averaging_period": (None, "gradients are averaged at each step"),
    **dict.fromkeys(
        ("ddp_comm_state", "ddp_comm_wrapper"), (None, "engine.DDP(comm_hook='fp16', 'bf16' or 'powersgd')")
    ),
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_policy"), _ACTIVATIONS),
    **dict.fromkeys(("state_dict_type", "save_distributed_checkpoint"), (ANY, "")),  # sharded on disk, loaded anywhere
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
        raise ValueError(
            f"Trainer(strategy={asked!r}) has no counterpart{nearest(str(asked), NAMES)}; possible: {', '.join(NAMES)}, or an object of "
            "engine.interop.lightning.strategies"
        )
    return NAMES[asked]


def DDPStrategy(**options: Any) -> DDP:
    """Lightning's class as :class:`engine.DDP`; ``ddp_comm_hook`` is one of torch's."""
    found = translated("DDPStrategy", "", (), options, _ELSEWHERE)
    if (hook := found.pop("ddp_comm_hook", None)) is not None:
        name = getattr(hook, "__name__", hook)
        found["comm_hook"] = _HOOKS.get(name, name)
    return DDP(**found)


def FSDPStrategy(**options: Any) -> FSDP:
    """Lightning's class as :class:`engine.FSDP`; ``auto_wrap_policy`` is a set of module classes, or one of torch's two policies."""
    found = translated("FSDPStrategy", "", (), options, _ELSEWHERE)
    kind, policy, mesh = (found.pop(name, None) for name in ("sharding_strategy", "auto_wrap_policy", "device_mesh"))
    kind = getattr(kind, "name", kind) or "FULL_SHARD"
    if kind not in _KEEPS:
        raise ValueError(
            f"FSDPStrategy(sharding_strategy={kind!r}) has no counterpart; possible: {', '.join(_KEEPS)}, or strategy='ddp'"
        )
    known = getattr(policy, "keywords", {})
    if isinstance(policy, (set, frozenset, list, tuple)) or "transformer_layer_cls" in known:
        found["blocks"] = tuple(known.get("transformer_layer_cls", policy))
    elif "min_num_params" in known:
        found["min_size"] = known["min_num_params"]
    elif policy is not None:
        raise ValueError("FSDPStrategy(auto_wrap_policy=...): give a set of module classes")
    if isinstance(mesh, tuple):
        found["dp_replicate"], found["dp_shard"] = mesh
    elif mesh is not None or "HYBRID" in kind:
        raise ValueError("FSDPStrategy: for hybrid sharding give device_mesh=(replicas, shards)")
    if not _KEEPS[kind]:
        found["reshard_after_forward"] = False
    return FSDP(**{**found, "cpu_offload": bool(found.get("cpu_offload"))})


def ModelParallelStrategy(
    data_parallel_size: Any = "auto", tensor_parallel_size: Any = "auto", **options: Any
) -> MeshParallel:
    """Lightning's class as :class:`engine.MeshParallel`; the plan comes from the module's method ``parallelize(mesh)``."""
    found = translated("ModelParallelStrategy", "", (), options, _ELSEWHERE)
    if tensor_parallel_size == "auto":
        raise ValueError("ModelParallelStrategy(tensor_parallel_size='auto'): give a number of ranks")
    return MeshParallel(
        tp=tensor_parallel_size, dp_shard=-1 if data_parallel_size == "auto" else data_parallel_size, **found
    )


def DeepSpeedStrategy(stage: int = 2, **options: Any) -> DeepSpeed:
    """Lightning's class as :class:`engine.DeepSpeed`, for the settings that both have."""
    return DeepSpeed(stage=stage, **translated("DeepSpeedStrategy", "", (), options, _ELSEWHERE))


def SingleDeviceStrategy(device: Any = None, **options: Any) -> Single:
    """One process; the device is ``Trainer``'s."""
    return Single(**translated("SingleDeviceStrategy", "", (), options, _ELSEWHERE))


XLAStrategy = SingleDeviceXLAStrategy = refused_class("XLAStrategy", "XLA devices are not supported")
ParallelStrategy = Strategy
