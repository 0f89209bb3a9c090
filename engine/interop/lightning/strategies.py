"""Strategies by Lightning's names and classes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from engine.interop.lightning.refused import leave_out, refused_class, unknown
from engine.strategies.base import Single, Strategy
from engine.strategies.ddp import DDP
from engine.strategies.deepspeed.strategy import DeepSpeed
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel
from engine.utils.errors import nearest

_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
}
NAMES: dict[str, Any] = {
    **{
        f"ddp{start}{unused}": {"name": "ddp", **options} if options else "ddp"
        for start in ("", "_spawn", "_fork", "_notebook")
        for unused, options in _UNUSED.items()
    },
    **{name: name for name in ("fsdp", *(f"deepspeed_stage_{n}" for n in (1, 2, 3, "2_offload", "3_offload")))},
    "auto": "auto",
    "single_device": "single",
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    "deepspeed": "deepspeed_stage_2",
}
"""Lightning's names of strategies, and the setting of ``Fit``. How processes start is the launcher's, so ``ddp_spawn`` is ``ddp``."""


def strategy(asked: Any) -> Any:
    """``Fit``'s setting for a strategy by Lightning's name, or an object.

    Raises:
        ValueError: an unknown name.
        TypeError: an object of another kind.
    """
    if isinstance(asked, Strategy):
        return asked
    if not isinstance(asked, str):
        raise TypeError(
            f"Trainer(strategy={type(asked).__name__}(...)): give a name, or an object of engine.interop.lightning.strategies"
        )
    if asked not in NAMES:
        raise ValueError(
            f"Trainer(strategy={asked!r}) has no counterpart{nearest(asked, NAMES)}; possible: {', '.join(NAMES)}"
        )
    return NAMES[asked]


_PROCESSES = {
    "accelerator": (None, "Trainer(accelerator=...)"),
    "parallel_devices": (None, "Trainer(devices=...)"),
    "cluster_environment": (None, "processes are detected from the environment (fit env)"),
    "checkpoint_io": (None, "checkpoints have one format"),
    "precision_plugin": (None, "Trainer(precision=...)"),
    "process_group_backend": (None, "the device decides: nccl, gloo, ..."),
    "timeout": (timedelta(minutes=30), "engine.Fit(start_timeout=..., timeout=...)"),
    "model_averaging_period": (None, "gradients are averaged at each step"),
    "ddp_comm_state": (None, "DDPStrategy(ddp_comm_hook='powersgd')"),
    "ddp_comm_wrapper": (None, "DDPStrategy(ddp_comm_hook='fp16') or 'bf16'"),
    "mixed_precision": (None, "Trainer(precision='bf16-mixed')"),
    "activation_checkpointing": (None, "engine.Fit(activation_checkpointing='full')"),
    "activation_checkpointing_policy": (None, "engine.Fit(activation_checkpointing='full')"),
}
_HOOKS = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
_SHARDING = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def _fields(call: str, given: dict[str, Any], kind: type[Strategy]) -> Any:
    leave_out(call, given, _PROCESSES)
    left = {name: value for name, value in given.items() if name not in (*_PROCESSES, "start_method")}
    known = {name: left.pop(name) for name in list(left) if name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    unknown(call, left)
    return kind(**known)


def DDPStrategy(*, ddp_comm_hook: Any = None, **options: Any) -> DDP:
    """Lightning's class as :class:`engine.DDP`; ``ddp_comm_hook`` is one of torch's, or a name."""
    if ddp_comm_hook is not None:
        name = getattr(ddp_comm_hook, "__name__", ddp_comm_hook)
        options["comm_hook"] = _HOOKS.get(name, name)
    built: DDP = _fields("DDPStrategy", options, DDP)
    return built


def FSDPStrategy(
    *,
    cpu_offload: Any = None,
    auto_wrap_policy: Any = None,
    sharding_strategy: Any = "FULL_SHARD",
    state_dict_type: str = "full",
    device_mesh: Any = None,
    **options: Any,
) -> FSDP:
    """Lightning's class as :class:`engine.FSDP`. ``auto_wrap_policy``: a set of module classes; ``state_dict_type``: checkpoints are sharded on
    disk and load anywhere, so both values mean the same."""
    kind = getattr(sharding_strategy, "name", sharding_strategy)
    if kind == "NO_SHARD":
        raise ValueError("FSDPStrategy(sharding_strategy='NO_SHARD') has no counterpart: use strategy='ddp'")
    if kind not in _SHARDING:
        raise ValueError(f"FSDPStrategy(sharding_strategy={kind!r}) is unknown; possible: {', '.join(_SHARDING)}")
    if callable(auto_wrap_policy) and not isinstance(auto_wrap_policy, type):
        classes = getattr(auto_wrap_policy, "keywords", {}).get("transformer_layer_cls")
        least = getattr(auto_wrap_policy, "keywords", {}).get("min_num_params")
        if classes is None and least is None:
            raise ValueError(
                "FSDPStrategy(auto_wrap_policy=...): give a set of module classes, or engine.FSDP(blocks=...)"
            )
        options |= {"blocks": tuple(classes)} if classes is not None else {"min_size": least}
    elif auto_wrap_policy is not None:
        options["blocks"] = auto_wrap_policy if isinstance(auto_wrap_policy, type) else tuple(auto_wrap_policy)
    if not _SHARDING[kind]:
        options["reshard_after_forward"] = False
    if isinstance(device_mesh, tuple):
        options["dp_replicate"], options["dp_shard"] = device_mesh
    elif device_mesh is not None or kind.lstrip("_").startswith("HYBRID"):
        raise ValueError("FSDPStrategy: give device_mesh=(replicas, shards) for hybrid sharding")
    built: FSDP = _fields("FSDPStrategy", {**options, "cpu_offload": bool(cpu_offload)}, FSDP)
    return built


def ModelParallelStrategy(
    data_parallel_size: int | str = "auto", tensor_parallel_size: int | str = "auto", **options: Any
) -> MeshParallel:
    """Lightning's class as :class:`engine.MeshParallel`; the module's plan comes from its method ``parallelize(mesh)``."""
    leave_out(
        "ModelParallelStrategy", options, {"save_distributed_checkpoint": (True, "checkpoints are always sharded")}
    )
    options.pop("save_distributed_checkpoint", None)
    if tensor_parallel_size == "auto":
        raise ValueError("ModelParallelStrategy(tensor_parallel_size='auto'): give a number of ranks")
    return MeshParallel(
        tp=int(tensor_parallel_size),
        dp_shard=-1 if data_parallel_size == "auto" else int(data_parallel_size),
        **options,
    )


def DeepSpeedStrategy(stage: int = 2, **options: Any) -> DeepSpeed:
    """Lightning's class as :class:`engine.DeepSpeed`, for the settings that both have."""
    built: DeepSpeed = _fields("DeepSpeedStrategy", {"stage": stage, **options}, DeepSpeed)
    return built


def SingleDeviceStrategy(device: Any = "cpu", **options: Any) -> Single:
    """One process; the device is ``Trainer``'s."""
    unknown("SingleDeviceStrategy", {name: value for name, value in options.items() if value is not None})
    return Single()


XLAStrategy = refused_class("XLAStrategy", "XLA devices are not supported")
SingleDeviceXLAStrategy = refused_class("SingleDeviceXLAStrategy", "XLA devices are not supported")
ParallelStrategy = Strategy
