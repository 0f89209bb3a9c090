"""DeepSpeed's configuration: read, completed from the run's settings, and checked for settings that cannot work here."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.settings import Settings
from engine.utils.errors import nearest

KNOWN = frozenset(
    (
        *(
            "activation_checkpointing",
            "aio",
            "amp",
            "autotuning",
            "bf16",
            "bfloat16",
            "checkpoint",
            "comet",
            "comms_logger",
        ),
        *(
            "communication_data_type",
            "compile",
            "compression_training",
            "csv_monitor",
            "curriculum_learning",
            "data_efficiency",
        ),
        *(
            "data_parallel_size",
            "data_types",
            "dataloader_drop_last",
            "datastates_ckpt",
            "disable_allgather",
            "disable_python_gc",
        ),
        *(
            "dump_state",
            "elasticity",
            "expert_parallel",
            "flops_profiler",
            "fp16",
            "gradient_accumulation_steps",
            "gradient_allreduce_op",
        ),
        *(
            "gradient_clipping",
            "gradient_predivide_factor",
            "hybrid_engine",
            "log_level",
            "managed_gradient_accumulation",
        ),
        *(
            "memory_breakdown",
            "optimizer",
            "pipeline",
            "prescale_gradients",
            "scheduler",
            "seq_parallel_communication_data_type",
        ),
        *(
            "sequence_parallel_size",
            "steps_per_print",
            "tensor_parallel",
            "tensorboard",
            "timers",
            "torch_autocast",
            "train_batch_size",
        ),
        *(
            "train_micro_batch_size_per_gpu",
            "use_data_before_expert_parallelism",
            "vocabulary_size",
            "wall_clock_breakdown",
            "wandb",
        ),
        *("weight_quantization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization"),
    )
)
"""Names of sections and values at the top level of a configuration."""

_INSTEAD = {
    "amp": "give precision= instead",
    "torch_autocast": "give precision= instead",
    "data_efficiency": "it needs DeepSpeed's own data loader; sample in your Dataset",
    "curriculum_learning": "it needs DeepSpeed's own data loader; sample in your Dataset",
    "elasticity": "it needs DeepSpeed's own launcher; resume a checkpoint at another world size instead",
    "hybrid_engine": "it is for generation inside training loops with DeepSpeed's own engine",
    "tensor_parallel": "the ranks would not all see different data",
    "autotuning": "it starts its own processes",
    "compression_training": "it changes the model behind the trainer",
}
"""Sections that would replace parts of our training loop, and what to do instead."""
_KEEPS_AUTO = ("data_types.keep_in_fp32_modules",)  # "auto" is one of DeepSpeed's own values there


IN_ZERO = {  # field of our class DeepSpeed -> its name in "zero_optimization"
    "stage": "stage",
    "overlap_comm": "overlap_comm",
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
}
OFFLOAD = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
"""Field of ``DeepSpeed`` -> its section in ``"zero_optimization"``."""


@dataclass(frozen=True, slots=True)
class RequiredValue:
    """A value that the configuration must have, and what requires it."""

    value: Any
    by: str
    """The setting that requires the value, for messages: ``"accumulate_grad_batches=4 (code)"``."""


def read(config: Any) -> tuple[dict[str, Any], str]:
    """A copy of the configuration, and its name in messages.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not valid JSON, or not an object; it has an unknown name, or a section that cannot be used here.
        TypeError: ``config`` is neither a path nor a mapping.
    """
    if config is None:
        return {}, "DeepSpeed(...)"
    if isinstance(config, Mapping):
        settings, where = copy.deepcopy(dict(config)), "DeepSpeed(config={...})"
    elif isinstance(config, (str, Path)):
        where = str(config)
        settings = _file(Path(config).expanduser())
    else:
        raise TypeError(
            f"DeepSpeed(config={config!r:.80}) is of type {type(config).__name__}: give a path to a JSON file, or a dict"
        )
    if "bfloat16" in settings:  # DeepSpeed's older name
        if "bf16" in settings:
            raise ValueError(f"{where} has both 'bf16' and 'bfloat16', which are one setting: leave out 'bfloat16'")
        settings["bf16"] = settings.pop("bfloat16")
    _check(settings, where)
    return settings, where


def _file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"DeepSpeed(config={str(path)!r}): there is no such file (from {Path.cwd()})")
    try:
        settings = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"DeepSpeed(config={str(path)!r}) is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(
            f"DeepSpeed(config={str(path)!r}) has a {type(settings).__name__} at its top: it must be an object, {{...}}"
        )
    return settings


def _check(config: Mapping[str, Any], where: str) -> None:
    """Refuse unknown names, sections that are done by ``Fit`` or ``Engine``, and values that are not possible here."""
    for key, value in config.items():
        if key not in KNOWN:
            raise ValueError(f"{where}: {key!r} is not a DeepSpeed setting{nearest(key, KNOWN)}")
        is_enabled = value.get("enabled", True) if isinstance(value, Mapping) else bool(value)
        if key in _INSTEAD and is_enabled:
            raise ValueError(f"{where}: {key!r} cannot be used with Fit or Engine: {_INSTEAD[key]}")
    for key in ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16"):
        if key in config and not isinstance(config[key], dict):
            raise ValueError(f"{where}: {key}={config[key]!r} must be an object, {{...}}")
    for path, only in (
        ("gradient_allreduce_op", "mean"),
        ("sequence_parallel_size", 1),
        ("managed_gradient_accumulation", False),
    ):
        if get(config, path, only) != only:
            raise ValueError(f"{where}: {path}={get(config, path)!r} is not possible here, only {only!r}: leave it out")


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at ``path``, which is ``"section.name"``, or ``default`` if there is none."""
    for name in path.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return default
        config = config[name]
    return config


def set_value(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at ``path``, which is ``"section.name"``."""
    *sections, name = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[name] = value


def is_set(config: Mapping[str, Any], path: str) -> bool:
    """Whether the configuration has a value other than ``"auto"`` at ``path``."""
    return get(config, path) not in (None, "auto")


def fill_or_check(config: dict[str, Any], path: str, required: RequiredValue, where: str) -> Any:
    """Fill a missing or ``"auto"`` value with the required one; return the value that the configuration then has.

    Raises:
        ValueError: the configuration has another value; the message names both.
    """
    if not is_set(config, path):
        set_value(config, path, required.value)
    elif get(config, path) != required.value:
        raise ValueError(
            f'{path}={get(config, path)!r} in {where} contradicts {required.by}: keep one of them, or write "auto" into the configuration'
        )
    return get(config, path)


def default(config: dict[str, Any], path: str, value: Any) -> None:
    """Fill a missing or ``"auto"`` value with a default."""
    if not is_set(config, path):
        set_value(config, path, value)


def offload(
    config: dict[str, Any], where: str, path: str, name: str, value: bool | str, nvme_path: str | Path | None
) -> None:
    """Write an offload field of ``DeepSpeed``, ``name=value``, into the section at ``path`` of the configuration.

    Raises:
        ValueError: the device is unknown, ``"nvme"`` has no path, or the configuration has another value.
    """
    device = "cpu" if value is True else value
    if device not in ("cpu", "nvme"):
        raise ValueError(f"DeepSpeed({name}={device!r}) is unknown; possible: True, 'cpu', 'nvme', False")
    fill_or_check(config, f"{path}.device", RequiredValue(device, f"DeepSpeed({name}={value!r})"), where)
    if device == "nvme" and nvme_path is None and not is_set(config, f"{path}.nvme_path"):
        raise ValueError(f"DeepSpeed({name}='nvme') needs nvme_path=, a directory on the disk")
    if device == "nvme" and nvme_path is not None:
        fill_or_check(
            config,
            f"{path}.nvme_path",
            RequiredValue(str(nvme_path), f"DeepSpeed(nvme_path={str(nvme_path)!r})"),
            where,
        )


def batch_sizes(
    config: dict[str, Any], where: str, micro: RequiredValue | None, window: RequiredValue | None, world_size: int
) -> None:
    """Set the micro-batch size, the micro-batches in a window and the global batch size: each follows from the other two.

    Raises:
        ValueError: the configuration's sizes contradict each other, the loader or the run.
    """
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, required in zip(names, (micro, window), strict=True):
        if required is not None:
            fill_or_check(config, name, required, where)
        elif not is_set(config, name):
            set_value(config, name, 1)
    product = config[names[0]] * config[names[1]] * world_size
    by = f"{names[0]}={config[names[0]]} * {names[1]}={config[names[1]]} * {world_size} rank(s) = {product}"
    if micro is None and is_set(config, "train_batch_size") and not window:
        set_value(config, "train_batch_size", product)  # without a loader nothing says how it is made up
    fill_or_check(config, "train_batch_size", RequiredValue(product, by), where)


def window(
    settings: Mapping[str, RequiredValue], size: int | None, world_size: int, default: int
) -> RequiredValue | None:
    """The number of micro-batches in a window; ``None``: not known yet.

    Args:
        settings: the values of the run's settings, by name.
        size: samples in a rank's micro-batch; ``None``: not known.
        default: the engine's number, for a loop of the user's own.
    """
    global_batch, accumulation = settings.get("global_batch_size"), settings.get("accumulate_grad_batches")
    if global_batch is not None and global_batch.value is not None:
        samples = global_batch.value.get(0) if isinstance(global_batch.value, dict) else global_batch.value
        if not isinstance(size, int) or not isinstance(
            samples, int
        ):  # of a size in tokens the loader knows the samples
            return None
        return RequiredValue(samples // (size * world_size), global_batch.by)
    if accumulation is None:
        return RequiredValue(default, f"Engine(accumulate_grad_batches={default})")
    return (
        replace(accumulation, value=accumulation.value.get(0, 1))
        if isinstance(accumulation.value, dict)
        else accumulation
    )


def complete(config: dict[str, Any], clip: float, numel: int, pinned: bool) -> None:
    """Set values where DeepSpeed's defaults would be slow, noisy or different from our loop.

    Args:
        clip: the norm to clip gradients to; 0: no clipping.
        numel: elements of the model.
        pinned: whether offloaded memory is page-locked.
    """
    default(config, "gradient_clipping", clip)
    config["managed_gradient_accumulation"] = False  # our loop accumulates
    # By default DeepSpeed logs a line every ten steps, and has a timer that waits for the device.
    config.setdefault("steps_per_print", None)
    default(config, "timers.throughput.enabled", False)
    default(config, "zero_force_ds_cpu_optimizer", False)  # offload with the optimizer that the user chose
    # DeepSpeed allocates its default of 500 million elements whatever the model's size.
    default(config, "zero_optimization.reduce_bucket_size", min(500_000_000, max(numel, 1)))
    zero = config["zero_optimization"]
    for name in [name for name, value in zero.items() if value == "auto"]:
        del zero[name]
    for section in OFFLOAD.values():
        if get(config, f"zero_optimization.{section}.device", "none") != "none":
            default(config, f"zero_optimization.{section}.pin_memory", pinned)


def fill_optimizer(config: dict[str, Any], where: str, lr: float | None) -> None:
    """Fill ``"auto"`` in ``"optimizer"`` and ``"scheduler"``; values other than ``lr`` get the optimizer's own default.

    Raises:
        ValueError: a section has no ``type``, or ``lr`` is ``"auto"`` and not given.
    """
    for section in ("optimizer", "scheduler"):
        if section in config and not isinstance(config[section].get("type"), str):
            raise ValueError(
                f'{where}: {section!r} needs a type, for example {{"type": "AdamW", "params": {{"lr": 1e-3}}}}'
            )
    params = config["optimizer"].setdefault("params", {})
    schedule = config.get("scheduler", {}).setdefault("params", {})
    if params.get("lr") == "auto":
        if lr is None:
            raise ValueError(f'{where}: optimizer.params.lr="auto", and the module has no hparams.lr: write a number')
        params["lr"] = lr
    if schedule.get("warmup_max_lr") == "auto" and "lr" in params:
        schedule["warmup_max_lr"] = params["lr"]
    if schedule.get("warmup_min_lr") == "auto":
        schedule["warmup_min_lr"] = 0.0
    for name in [name for name, value in params.items() if value == "auto"]:
        del params[name]


def scheduler(section: Mapping[str, Any], where: str) -> Any:
    """The scheduler class of DeepSpeed or torch that the section ``"scheduler"`` names.

    Raises:
        ValueError: there is no class of this name.
    """
    import torch
    from deepspeed.runtime import lr_schedules

    for module in (lr_schedules, torch.optim.lr_scheduler):
        if isinstance(getattr(module, section["type"], None), type):
            return getattr(module, section["type"])
    possible = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
    raise ValueError(
        f"{where}: scheduler type {section['type']!r} is unknown{nearest(section['type'], possible)}; possible: {', '.join(possible)}"
    )


def no_auto_left(config: Any, where: str, path: str = "") -> None:
    """Check that every ``"auto"`` has been replaced by a value.

    Raises:
        ValueError: an ``"auto"`` is left; the message says where.
    """
    for key, value in config.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            no_auto_left(value, where, inner)
        elif value == "auto" and inner not in _KEEPS_AUTO:
            raise ValueError(
                f'{where}: {inner}="auto" cannot be filled, because no other setting gives it: write a value, or leave it out'
            )


# -- what DeepSpeed cannot do ------------------------------------------------------------------------------------------------------


def check_names(section: str, names: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    """Check that every name in a section is one of DeepSpeed's (pydantic) ``fields``, or an alias of one.

    Raises:
        ValueError: a name is unknown; the message suggests the nearest one.
    """
    possible = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for name in names:
        if name not in possible:
            raise ValueError(f"{where}: {section}.{name} is not a DeepSpeed setting{nearest(name, possible)}")


def check_offload(config: dict[str, Any], where: str, stage: int) -> None:
    """Check that the configuration offloads only what this stage shards.

    Raises:
        ValueError: it offloads more, or has ``overlap_comm`` at a stage that does not reduce gradients during backward.
    """
    for name, section in OFFLOAD.items():
        device = get(config, f"zero_optimization.{section}.device", "none")
        lowest_stage = 3 if name == "offload_parameters" else 1
        if device != "none" and stage < lowest_stage:
            reason = (
                "parameters are sharded from stage 3"
                if lowest_stage == 3
                else "stage 0 shards nothing that could be offloaded"
            )
            raise ValueError(
                f"{name}={device!r} with stage {stage} ({where}): {reason}; use stage={max(lowest_stage, 2)}, or leave it out"
            )
    if stage < 2 and get(config, "zero_optimization.overlap_comm") is True:
        raise ValueError(
            f"overlap_comm=True with stage {stage} ({where}): stages 0 and 1 reduce within the step; leave it out"
        )


def check_precision(name: str, stage: int, device: str) -> None:
    """Raise ``ValueError`` for a precision that DeepSpeed does not support at this ZeRO stage on this kind of device."""
    if name == "64-true":
        raise ValueError(
            "precision='64-true' under DeepSpeed, whose master copies are fp32: use strategy='ddp' or 'fsdp'"
        )
    if name.startswith("16-") and device == "cpu":
        raise ValueError(
            f"precision={name!r} under DeepSpeed on the CPU: its fp16 needs CUDA; use 'bf16-mixed' or '32-true'"
        )
    if name.startswith("16-") and not stage:
        raise ValueError(f"precision={name!r} with stage 0 under DeepSpeed: use stage=1 or higher, or strategy='ddp'")


def check_clipping(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for clipping by value or by parameter, which DeepSpeed does not support."""
    algorithm = settings.gradient_clip_algorithm
    if settings.gradient_clip_val is not None and algorithm != "norm":
        raise ValueError(
            f"gradient_clip_algorithm={algorithm!r} ({origins.get('gradient_clip_algorithm', 'code')}) under DeepSpeed, which clips by norm only: "
            "use 'norm', or strategy='fsdp'"
        )


def check_no_other(config: Mapping[str, Any], where: str, name: str) -> None:
    """Raise ``ValueError`` if the configuration has an optimizer or a scheduler although an optimizer, of class ``name``, was prepared."""
    if is_set(config, "optimizer"):
        raise ValueError(
            f'{name} was given, and "optimizer" in {where} is {config["optimizer"].get("type")!r}: keep one of them'
        )
    if is_set(config, "scheduler"):
        raise ValueError(f'"scheduler" in {where} needs "optimizer" there: return yours from configure_optimizers')
