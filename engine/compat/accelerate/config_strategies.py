"""Translates the strategies in Accelerate's configuration file: data parallel, FSDP 1 and 2, DeepSpeed, Megatron-LM, tensor parallel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.compat.key_file import KeyFile, Section, flag
from engine.config.yaml_text import read_file


def convert(file: KeyFile, kind: str) -> None:
    """Translate the section of the strategy ``kind``, and set ``strategy`` and related settings of ``file``."""
    sections = {
        "FSDP": "fsdp_config",
        "DEEPSPEED": "deepspeed_config",
        "MEGATRON_LM": "megatron_lm_config",
        "TP": "tp_config",
    }
    for name in sections.values():
        if name != sections.get(kind):
            file.drop(name)
    translate: Callable[[KeyFile], Any] = {
        "FSDP": _fsdp,
        "DEEPSPEED": _deepspeed,
        "MEGATRON_LM": _megatron,
        "TP": _tp,
    }.get(kind, lambda file: _ddp(kind))
    strategy = translate(file)
    file.set("strategy", strategy if not isinstance(strategy, dict) or len(strategy) > 1 else strategy["name"])
    if kind != "FSDP":
        file.drop("parallelism_config")


def _ddp(kind: str) -> str:
    return "auto" if kind == "NO" else "ddp"


_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def _fsdp(file: KeyFile) -> Any:
    """Translate ``fsdp_config`` (FSDP 1 or 2) and ``parallelism_config`` to the options of our strategy."""
    part = file.section("fsdp_config", "fsdp_")
    version = int(part.take_value("version", 1))
    options: dict[str, Any] = {"name": "fsdp"}
    if version == 2:
        options["reshard_after_forward"] = flag(part.take_value("reshard_after_forward", True))
        part.note("sharding_strategy", "is FSDP 1's; Accelerate does not use it in version 2 either")
        part.refuse_others({"forward_prefetch": "FSDP 2 has none"})
    elif version == 1:
        sharding = _sharding(part)
        if sharding == "NO_SHARD":
            options = {"name": "ddp"}
        if sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
            options["reshard_after_forward"] = False
        if sharding.startswith("HYBRID") and (machines := int(file.take_value("num_machines", 1))) > 1:
            options["dp_replicate"] = machines
        part.note("forward_prefetch", "FSDP 2 fetches ahead by itself")
        part.remark(
            "fsdp_version: 1: FSDP 2 does the same here; it replaces flat parameters, and checkpoints have each parameter by its name"
        )
    else:
        part.refuse("version", "has no counterpart; possible: 1, 2")
    if flag(part.take_value("offload_params", False)):
        if options["name"] == "ddp":
            part.refuse("offload_params", "NO_SHARD means data parallel here, which cannot offload")
        options["cpu_offload"] = True
    if options["name"] == "fsdp":
        _blocks(part, options)
        half = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(str(file.settings.get("precision")))
        _mixed(part, options, half)
        if half and "reduce_dtype" not in options:
            part.remark(
                f"Accelerate reduces FSDP's gradients in {half}; here fp32 is used, unless strategy.reduce_dtype: {half} is added"
            )
    if flag(part.take_value("activation_checkpointing", False)):
        file.set("activation_checkpointing", "full")
    part.refuse_others(
        {
            "activation_checkpointing_offload": "there is no offload of activations",
            "ignored_modules": "is a pattern of modules; name their parameters in strategy.ignore, with * (ignore: ['head.*'])",
        }
    )
    part.note("backward_prefetch", "FSDP 2 fetches ahead by itself")
    for key in ("state_dict_type", "state_dict_config", "optim_state_dict_config"):
        part.note(key, "checkpoints have shards of full tensors in safetensors, and any strategy reads them")
    part.note("limit_all_gathers", "FSDP 2 limits them by itself")
    part.note("use_orig_params", "FSDP 2 always keeps the model's own parameters")
    part.note("sync_module_states", "all ranks always start with rank 0's values")
    part.note("cpu_ram_efficient_loading", "what configure_model() builds has no memory until it is sharded")
    return _parallelism(file, options)


def _mixed(part: Section, options: dict[str, Any], half: str | None) -> None:
    """Translate ``mixed_precision_policy``: a name, or torch's policy of either FSDP version as a mapping. ``half``: the run's 16-bit dtype."""
    policy = part.take_value("mixed_precision_policy")
    if policy is None:
        return
    policy_fields = (
        policy if isinstance(policy, Mapping) else {"param_dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(policy)}
    )
    formats = {
        key: str(value).removeprefix("torch.")
        for key, value in policy_fields.items()
        if key.endswith("dtype") and value
    }
    inputs = policy_fields.get(
        "cast_root_forward_inputs", policy_fields.get("cast_forward_inputs", True)
    )  # FSDP 1 casts at the root only
    if formats.get("param_dtype", "float32") != (half or "float32"):
        part.refuse("mixed_precision_policy", "param_dtype differs from mixed_precision, which decides the format here")
    elif policy_fields.get("output_dtype") or policy_fields.get("keep_low_precision_grads") or not inputs:
        part.refuse("mixed_precision_policy", "only param_dtype, reduce_dtype and buffer_dtype can be chosen")
    if "buffer_dtype" in formats:
        part.remark("mixed_precision_policy: buffers keep the format that the model gives them")
    if "reduce_dtype" in formats:
        options["reduce_dtype"] = formats["reduce_dtype"]


def _sharding(part: Section) -> str:
    """The name of FSDP 1's sharding strategy, which either of two keys gives by name or by number."""
    names = {}
    for key in ("sharding_strategy", "reshard_after_forward"):
        value = part.take_value(key)
        text = str(value).upper()
        if value is None:
            continue
        if text.isdecimal() and 1 <= int(text) <= len(_SHARDING):
            text = _SHARDING[int(text) - 1]
        if text not in _SHARDING:
            part.refuse(key, f"is not a sharding strategy of FSDP 1; possible: {', '.join(_SHARDING)}")
            continue
        names[key] = text
    if len(set(names.values())) > 1:
        part.refuse(
            "reshard_after_forward",
            f"contradicts fsdp_sharding_strategy: {names['sharding_strategy']}; keep one of them",
        )
    return next(iter(names.values()), "FULL_SHARD")


def _blocks(part: Section, options: dict[str, Any]) -> None:
    """Translate ``auto_wrap_policy`` to the options ``blocks`` or ``min_size``."""
    policy = str(part.take_value("auto_wrap_policy", "NO_WRAP")).upper()
    classes = part.take_value("transformer_layer_cls_to_wrap")
    min_num_params = part.take_value("min_num_params")
    if policy == "TRANSFORMER_BASED_WRAP":
        if classes:
            names = classes if isinstance(classes, list) else [name.strip() for name in str(classes).split(",")]
            options["blocks"] = [name for name in names if name]
        else:
            part.remark(
                "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP without classes: blocks are the model's repeated ones, or its blocks()"
            )
    elif policy == "SIZE_BASED_WRAP":
        options["min_size"] = 100_000_000 if min_num_params is None else int(float(min_num_params))
    elif policy == "NO_WRAP":
        part.note(
            "auto_wrap_policy",
            "blocks are the model's repeated ones; the results are those of one block, with less memory",
        )
    else:
        part.refuse("auto_wrap_policy", "is unknown; possible: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP")


def _parallelism(file: KeyFile, options: dict[str, Any]) -> Any:
    """Add the sizes in ``parallelism_config`` to the options of FSDP; with tensor parallelism the strategy becomes ``mesh``."""
    part = file.section("parallelism_config", "parallelism_config_")
    if not part.values:
        return options
    part.refuse_others(
        {"cp_size": "context parallel is not supported", "sp_size": "DeepSpeed's sequence parallel is not supported"}
    )
    part.drop_rest(
        "cp_backend",
        "cp_comm_strategy",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    )
    tp = int(part.take_value("tp_size", 1))
    options |= {
        "dp_replicate": int(part.take_value("dp_replicate_size", 1)),
        "dp_shard": int(part.take_value("dp_shard_size", 1)),
    }
    if tp > 1:
        options |= {"name": "mesh", "tp": tp}
        part.remark("tensor parallel follows the model's own plan (Hugging Face), its parallelize(), or strategy.plan")
    return options


def _deepspeed(file: KeyFile) -> Any:
    """Translate ``deepspeed_config``, which may name a DeepSpeed configuration, to the options of our strategy."""
    part = file.section("deepspeed_config", "deepspeed_")
    options: dict[str, Any] = {"name": "deepspeed"}
    config = part.take_value("config_file")
    if config not in (None, "none"):
        options["config"] = config if isinstance(config, Mapping) else str(config)
        _precision_of(file, part, config)
        part.remark('deepspeed_config_file: values that are "auto" or missing there come from the settings here')
        for key in (
            "zero_stage",
            "offload_optimizer_device",
            "offload_param_device",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ):
            if part.take_value(key) not in (None, "none", "auto"):
                part.refuse(key, "is given besides deepspeed_config_file; write it only there")
    else:
        options["stage"] = int(part.take_value("zero_stage", 2))
        _offload(part, options)
        steps, clip = part.take_value("gradient_accumulation_steps"), part.take_value("gradient_clipping")
        if steps not in (None, "auto"):
            file.set("accumulate_grad_batches", int(steps))
        if clip not in (None, "auto", "none"):
            file.set("gradient_clip_val", float(clip))
    part.refuse_others({"moe_layer_cls_names": "mixtures of experts are not supported"})
    part.note("zero3_init_flag", "what configure_model() builds at stage 3 has no memory until it is sharded")
    part.note(
        "zero3_save_16bit_model",
        "checkpoints have the fp32 weights; fit checkpoint export --dtype bf16 writes them in half the size",
    )
    for key in ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter"):
        part.note(key, "'fit launch' on each machine starts the processes")
    part.drop_rest("fields_from_accelerate_config", "offload_optimizer_nvme_path", "offload_param_nvme_path")
    return options


def _offload(part: Section, options: dict[str, Any]) -> None:
    """Translate the devices and NVMe paths of offloading to options of our strategy."""
    paths = []
    for key, name in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_parameters")):
        device, path = str(part.take_value(f"{key}_device", "none")).lower(), part.take_value(f"{key}_nvme_path")
        if device not in ("none", "cpu", "nvme"):
            part.refuse(f"{key}_device", "is unknown; possible: none, cpu, nvme")
        elif device != "none":
            options[name] = device
            if device == "nvme":
                paths.append("/nvme" if path in (None, "none") else str(path))
    if paths:
        options["nvme_path"] = paths[0]
        if len(set(paths)) > 1:
            part.refuse(
                "offload_param_nvme_path",
                f"differs from the optimizer's, {paths[0]}; give one path, or a DeepSpeed configuration",
            )


def _precision_of(file: KeyFile, part: Section, config: Any) -> None:
    """Set the precision from DeepSpeed's configuration (a mapping or the path of a file), unless Accelerate's file gives one."""
    if isinstance(config, Mapping):
        content: Any = config
    elif not Path(str(config)).is_file():
        part.refuse("config_file", f"the file does not exist (current directory: {Path.cwd()})")
        return
    else:
        try:
            content = json.loads(read_file(Path(str(config))))
        except ValueError as error:
            part.refuse("config_file", f"is not valid JSON: {error}")
            return
    enabled = [
        kind
        for kind in ("bf16", "fp16")
        if isinstance(content.get(kind), dict) and content[kind].get("enabled") is True
    ]
    if enabled and "precision" not in file.settings:
        file.set("precision", {"bf16": "bf16-mixed", "fp16": "16-mixed"}[enabled[0]])


_MEGATRON = {
    "expert_model_parallel_size": "mixtures of experts are not supported",
    "expert_tensor_parallel_size": "mixtures of experts are not supported",
    "context_parallel_size": "context parallel is not supported",
    "optimizer_cpu_offload": "offload is only supported under FSDP and DeepSpeed",
    "use_precision_aware_optimizer": "there is no such optimizer",
    "recompute_method": "is specific to Megatron-LM; activation_checkpointing: n recomputes every n-th block",
    "recompute_num_layers": "is specific to Megatron-LM; activation_checkpointing: n recomputes every n-th block",
    "decoder_last_pipeline_num_layers": "name the modules that start the stages in strategy.split",
    "eod_mask_loss": "belongs to the model: return Loss(sum, count) over the tokens that count",
    "calculate_per_token_loss": "belongs to the model: return Loss(sum, count) over the tokens that count",
    "attention_dropout": "belongs to the model",
    "hidden_dropout": "belongs to the model",
    "attention_softmax_in_fp32": "belongs to the model",
    "use_rotary_position_embeddings": "belongs to the model",
    "no_load_optim": "is an argument of the run: Resume(path, optimizer=False)",
    "no_save_optim": "checkpoints always have optimizers; fit checkpoint export writes the weights alone",
}


def _megatron(file: KeyFile) -> Any:
    """Translate ``megatron_lm_config`` to the options of the strategy ``mesh``."""
    part = file.section("megatron_lm_config", "megatron_lm_")
    options: dict[str, Any] = {
        "name": "mesh",
        "tp": int(part.take_value("tp_degree", 1)),
        "pp": int(part.take_value("pp_degree", 1)),
    }
    options |= {"dp_replicate": -1, "dp_shard": 1}
    if (parts := part.take_value("num_micro_batches")) is not None and options["pp"] > 1:
        options["num_microbatches"] = int(parts)
    if flag(part.take_value("sequence_parallelism", False)):
        options["sequence_parallel"] = True
    clip = float(part.take_value("gradient_clipping", 1.0))
    if clip:
        file.set("gradient_clip_val", clip)
    granularity = part.take_value("recompute_granularity")
    if granularity in ("full", "selective"):
        file.set("activation_checkpointing", granularity)
    elif flag(part.take_value("recompute_activations", False)):
        file.set("activation_checkpointing", "selective")
    part.drop_rest("recompute_activations")
    part.note(
        "use_distributed_optimizer",
        "dp_replicate: 1 and dp_shard: -1 would shard parameters and optimizer states over the data ranks",
    )
    part.note("use_custom_fsdp", "dp_shard: -1 shards with FSDP 2")
    part.note("attention_backend", "belongs to the model")
    part.note("overlap_cpu_optimizer_d2h_h2d", "nothing is offloaded")
    part.refuse_others(_MEGATRON)
    part.remark(
        "the model's parallelize() and pipeline_stages(), or strategy.plan, shard it, rather than Megatron-LM's classes"
    )
    return options


def _tp(file: KeyFile) -> Any:
    part = file.section("tp_config", "tp_")
    part.remark("tensor parallel follows the model's own plan (Hugging Face), its parallelize(), or strategy.plan")
    return {"name": "mesh", "tp": int(part.take_value("size", 1)), "dp_replicate": -1, "dp_shard": 1}
