"""Accelerate's settings objects. Plugins for strategies and compilation become sections of its configuration file, which are then translated."""

from __future__ import annotations

import ast
import copy
import enum
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import device_mesh

from engine.config.typed_values import convert_arguments


def _names(name: str, values: str) -> Any:
    make_enum: Any = enum.StrEnum
    return make_enum(name, {value.upper(): value for value in values.split()}, module=__name__)


DistributedType = _names(
    "DistributedType",
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU MULTI_NEURON DEEPSPEED FSDP XLA MEGATRON_LM TP",
)
DDPCommunicationHookType = _names("DDPCommunicationHookType", "no fp16 bf16 power_sgd batched_power_sgd")
PrecisionType = _names("PrecisionType", "no fp8 fp16 bf16")
LoggerType = _names("LoggerType", "all aim tensorboard trackio wandb mlflow")
RNGType = _names("RNGType", "torch cuda mlu sdaa musa npu xla xpu hpu neuron generator")


class KwargsHandler:
    """The base class of objects for ``kwargs_handlers``."""

    def __post_init__(self) -> None:
        types = {item.name: item.type for item in fields(self)}  # type: ignore[arg-type]
        vars(self).update(convert_arguments(type(self).__name__, types, vars(self)))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, copied."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        defaults = {item.name: {} if item.default is MISSING else item.default for item in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in vars(self).items() if value != defaults[name]}


class Plugin:
    """The base class of plugins, each of which is a section of Accelerate's configuration file; ``renamed``: field -> key, where they differ."""

    kind: ClassVar[str] = ""
    section: ClassVar[str] = ""
    prefix: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}

    to_dict, to_kwargs = KwargsHandler.to_dict, KwargsHandler.to_kwargs

    def to_section(self) -> dict[str, Any]:
        """The fields that have a value, as keys and values of the configuration file."""
        section = {name: _file_value(value) for name, value in vars(self).items() if value is not None}
        if "auto_wrap_policy" in section:
            section |= _wrap_policy_fields(section["auto_wrap_policy"])
        return {self.prefix + self.renamed.get(name, name): value for name, value in section.items()}


def _file_value(value: Any) -> Any:
    """Convert a value to its form in the configuration file: enums and classes to their names, torch's policies to plain values."""
    kind = type(value).__name__
    if kind in ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy"):
        return getattr(value, "offload_params", kind == "CPUOffloadPolicy")
    if kind in ("MixedPrecision", "MixedPrecisionPolicy"):
        return dict(vars(value))
    if isinstance(value, (set, tuple, list)):
        return [getattr(item, "__name__", item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value


def _wrap_policy_fields(policy: Any) -> dict[str, Any]:
    """The fields for an auto-wrap policy that is a partial of one of torch's two policy functions; empty for other policies."""
    keywords = getattr(policy, "keywords", {})
    if "transformer_layer_cls" in keywords:
        names = sorted(cls.__name__ for cls in keywords["transformer_layer_cls"])
        return {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": names}
    if "min_num_params" in keywords:
        return {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": keywords["min_num_params"]}
    return {}


def _settings(name: str, fields: str, base: type = KwargsHandler, **namespace: Any) -> Any:
    """Create a dataclass. ``fields``: words ``name=default``, where a missing default is ``None``. Values of bool and number fields are checked."""
    dataclass_fields: list[Any] = []
    for key, _, text in (word.partition("=") for word in fields.split()):
        value = ast.literal_eval(text or "None")
        kind = type(value) if isinstance(value, (bool, int, float)) else Any
        dataclass_fields.append((key, kind, field(default_factory=dict) if value == {} else value))
    return make_dataclass(name, dataclass_fields, bases=(base,), namespace={"__module__": __name__, **namespace})


def _plugin(name: str, kind: str, section: str, prefix: str, fields: str, **renamed: str) -> Any:
    return _settings(name, fields, Plugin, kind=kind, section=section, prefix=prefix, renamed=renamed)


GradientAccumulationPlugin = _settings(
    "GradientAccumulationPlugin",
    "num_steps=1 adjust_scheduler=True sync_with_dataloader=True sync_each_batch=False",
)
DataLoaderConfiguration = _settings(
    "DataLoaderConfiguration",
    "split_batches=False dispatch_batches even_batches=True use_seedable_sampler=False data_seed non_blocking=False "
    "use_stateful_dataloader=False",
)
InitProcessGroupKwargs = _settings("InitProcessGroupKwargs", "backend init_method timeout")
_Scaler: Any = _settings(
    "_Scaler",
    "init_scale=65536.0 growth_factor=2.0 backoff_factor=0.5 growth_interval=2000 enabled=True",
)
AutocastKwargs = _settings("AutocastKwargs", "enabled=True cache_enabled")
_Profile: Any = _settings(
    "_Profile",
    "activities schedule_option on_trace_ready record_shapes=False profile_memory=False with_stack=False with_flops=False "
    "with_modules=False output_trace_dir",
)


class _Directories(KwargsHandler):
    """The folders of a project; ``logging_dir`` defaults to ``project_dir``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: Any = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` if it has no value."""
        self.project_dir = project_dir
        self.logging_dir: Any = self.logging_dir or project_dir


_Project: Any = _settings(
    "_Project",
    "project_dir logging_dir automatic_checkpoint_naming=False total_limit iteration=0 save_on_each_node=False",
    _Directories,
)
_DDP: Any = _settings(
    "_DDP",
    "dim=0 broadcast_buffers=True bucket_cap_mb=25 find_unused_parameters=False check_reduction=False "
    "gradient_as_bucket_view=False static_graph=False comm_hook='no' comm_wrapper='no' comm_state_option={}",
)


class GradScalerKwargs(_Scaler):
    """Settings of the fp16 loss scaler."""

    def tune(self, scaler: torch.amp.GradScaler) -> None:
        """Apply these settings to a scaler that has not been used yet.

        Raises:
            ValueError: the scaler does not support them.
        """
        if not self.enabled or not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(
                "GradScalerKwargs: the strategy owns the loss scaler, or enabled=False, which fp16 cannot do without"
            )
        scaler._init_scale = self.init_scale
        scaler.set_growth_factor(self.growth_factor)
        scaler.set_backoff_factor(self.backoff_factor)
        scaler.set_growth_interval(self.growth_interval)


class ProfileKwargs(_Profile):
    """Arguments of ``torch.profiler.profile``."""

    def build(self) -> torch.profiler.profile:
        """Create the profiler. It writes no files: :meth:`profiling` writes the trace into ``output_trace_dir``."""
        options = self.to_kwargs()
        plan, kinds = options.pop("schedule_option", None), options.pop("activities", None)
        options.pop("output_trace_dir", None)
        if plan is not None:
            options["schedule"] = torch.profiler.schedule(**plan)
        if kinds is not None:
            options["activities"] = [getattr(torch.profiler.ProfilerActivity, kind.upper()) for kind in kinds]
        return torch.profiler.profile(**options)

    @contextmanager
    def profiling(self, rank: int) -> Iterator[torch.profiler.profile]:
        """Profile a block, and write its trace into ``output_trace_dir`` at the end."""
        with self.build() as profiler:
            yield profiler
        if self.output_trace_dir is not None:
            os.makedirs(self.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(self.output_trace_dir, f"profile_{rank}.json"))


class ProjectConfiguration(_Project):
    """The folders of a project, and how its checkpoints are named and how many are kept."""


class DistributedDataParallelKwargs(_DDP):
    """Settings of DDP."""

    HOOKS: ClassVar = {"no": None, "fp16": "fp16", "bf16": "bf16", "power_sgd": "powersgd"}
    STATE: ClassVar = {"matrix_approximation_rank": "powersgd_rank", "start_powerSGD_iter": "powersgd_start"}

    def to_strategy(self) -> dict[str, Any]:
        """Convert the settings to the argument ``strategy`` of ``Engine``.

        Raises:
            ValueError: a setting has no counterpart.
        """
        arguments = self.to_kwargs()
        state, hook_name = arguments.pop("comm_state_option", {}), str(arguments.pop("comm_hook", "no"))
        hook = hook_name.lower()
        wrong = [name for name in ("dim", "check_reduction", "comm_wrapper") if name in arguments]
        wrong += [f"comm_hook={hook_name}"] * (hook not in self.HOOKS) + sorted(state.keys() - self.STATE.keys())
        if wrong:
            raise ValueError(
                f"DistributedDataParallelKwargs: {', '.join(wrong)} has no counterpart; engine.DDP has the other arguments, the hooks "
                f"{', '.join(self.HOOKS)} and for the last {', '.join(self.STATE)}"
            )
        options = {self.STATE[key]: value for key, value in state.items()}
        return {"name": "ddp", "comm_hook": self.HOOKS[hook], **arguments, **options}


FullyShardedDataParallelPlugin = _plugin(
    *("FullyShardedDataParallelPlugin", "FSDP", "fsdp_config", "fsdp_"),
    "fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy cpu_offload "
    "ignored_modules state_dict_type state_dict_config optim_state_dict_config limit_all_gathers use_orig_params param_init_fn "
    "sync_module_states forward_prefetch activation_checkpointing activation_checkpointing_offload cpu_ram_efficient_loading "
    "transformer_cls_names_to_wrap min_num_params",
    fsdp_version="version",
    cpu_offload="offload_params",
    transformer_cls_names_to_wrap="transformer_layer_cls_to_wrap",
)
DeepSpeedPlugin = _plugin(
    *("DeepSpeedPlugin", "DEEPSPEED", "deepspeed_config", ""),
    "hf_ds_config gradient_accumulation_steps gradient_clipping zero_stage is_train_batch_min offload_optimizer_device "
    "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag zero3_save_16bit_model "
    "transformer_moe_cls_names enable_msamp msamp_opt_level",
    hf_ds_config="deepspeed_config_file",
    transformer_moe_cls_names="deepspeed_moe_layer_cls_names",
)
MegatronLMPlugin = _plugin(
    *("MegatronLMPlugin", "MEGATRON_LM", "megatron_lm_config", "megatron_lm_"),
    "tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism recompute_activations recompute_granularity "
    "use_distributed_optimizer",
)
TorchTensorParallelPlugin = _plugin("TorchTensorParallelPlugin", "TP", "tp_config", "", "tp_size torch_device_mesh")


class _Mesh(Plugin):
    """The sizes of dimensions of a mesh; one that is not given is that of its environment variable, or 1."""

    ORDER: ClassVar = ("dp_replicate", "dp_shard", "cp", "sp", "tp")

    def __post_init__(self) -> None:
        for name in self.ORDER:
            size = getattr(self, f"{name}_size")
            if size is None:
                size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
            if size < 1:
                raise ValueError(f"{name}_size must be at least 1, but got {size}")
            setattr(self, f"{name}_size", size)


_Parallelism: Any = _settings(
    "_Parallelism",
    "dp_replicate_size dp_shard_size tp_size cp_size cp_backend sp_size sp_backend tp_handler cp_handler sp_handler",
    _Mesh,
    kind="FSDP",
    section="parallelism_config",
    prefix="parallelism_config_",
)


class _Compilation(Plugin):
    """Settings of ``torch.compile``; one that is not given is that of its environment variable, if any."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            variable = f"ACCELERATE_DYNAMO_{self.renamed.get(item.name, item.name).upper()}"
            if getattr(self, item.name) is None and variable in os.environ:
                setattr(self, item.name, os.environ[variable])


TorchDynamoPlugin = _settings(
    "TorchDynamoPlugin",
    "backend mode fullgraph dynamic options disable use_regional_compilation",
    _Compilation,
    section="dynamo_config",
    prefix="dynamo_",
    renamed={"dynamic": "use_dynamic", "fullgraph": "use_fullgraph"},
)


class ParallelismConfig(_Parallelism):
    """The sizes of the dimensions of a mesh of ranks."""

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions, the outermost first, and their sizes."""
        return {name: getattr(self, f"{name}_size") for name in self.ORDER}

    @property
    def active_mesh_dims(self) -> list[str]:
        """The dimensions with more than one rank."""
        return [name for name, size in self.sizes.items() if size > 1]

    def _active(self, *names: str) -> list[str]:
        return [name for name in self.active_mesh_dims if name in names]

    total_size = property(lambda self: math.prod(self.sizes.values()))
    data_parallel_size = property(lambda self: self.sizes["dp_replicate"] * self.sizes["dp_shard"])
    non_data_parallel_size = property(lambda self: self.total_size // self.data_parallel_size)
    dp_replicate_enabled = property(lambda self: "dp_replicate" in self.active_mesh_dims)
    dp_shard_enabled = property(lambda self: "dp_shard" in self.active_mesh_dims)
    cp_enabled = property(lambda self: "cp" in self.active_mesh_dims)
    sp_enabled = property(lambda self: "sp" in self.active_mesh_dims)
    tp_enabled = property(lambda self: "tp" in self.active_mesh_dims)
    dp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard"))
    dp_shard_cp_dim_names = property(lambda self: self._active("dp_shard", "cp"))
    dp_cp_dim_names = property(lambda self: self._active("dp_replicate", "dp_shard", "cp"))
    non_dp_dim_names = property(lambda self: self._active("tp", "cp", "sp"))

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        names = self.active_mesh_dims
        return (tuple(names), tuple(self.sizes[name] for name in names)) if names else ()

    def build_device_mesh(self, device_type: str) -> device_mesh.DeviceMesh | None:
        """Build the mesh of these dimensions, with the joint ones ``dp``, ``dp_shard_cp`` and ``dp_cp``; ``None`` for a single rank."""
        if not self.active_mesh_dims:
            return None
        names = tuple(self.active_mesh_dims)
        mesh = device_mesh.init_device_mesh(
            device_type, tuple(self.sizes[name] for name in names), mesh_dim_names=names
        )
        for joint in ("dp", "dp_shard_cp", "dp_cp"):
            if parts := getattr(self, f"{joint}_dim_names"):
                mesh[parts]._flatten(joint)
        return mesh
