"""Translates arguments of ``Accelerator`` and environment variables of ``accelerate launch`` to settings of :class:`engine.Engine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from engine.compat.accelerate.config_file import convert
from engine.compat.accelerate.utils import dataclasses as settings
from engine.compat.key_file import flag

_KINDS = {
    "FSDP": settings.FullyShardedDataParallelPlugin,
    "DEEPSPEED": settings.DeepSpeedPlugin,
    "MEGATRON_LM": settings.MegatronLMPlugin,
}


_HANDLERS = [
    "AutocastKwargs",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
]


def handlers_by_name(handlers: list[Any]) -> dict[str, Any]:
    """Map the class name of each of the ``kwargs_handlers`` to the object.

    Raises:
        ValueError: a handler has no counterpart, or two have the same class.
    """
    by_name: dict[str, Any] = {}
    for handler in handlers:
        name = type(handler).__name__
        if name not in _HANDLERS or name in by_name:
            raise ValueError(
                f"kwargs_handlers: {name} is given twice, or has no counterpart; there are {', '.join(_HANDLERS)}"
            )
        by_name[name] = handler
    return by_name


def flag_of(name: str) -> bool:
    """Whether the environment variable ``name`` is set to a true value."""
    return flag(os.environ.get(name, ""))


def engine_settings(arguments: Mapping[str, Any], ddp: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for the engine, and the attributes for :class:`AcceleratorState`.

    Args:
        arguments: ``Accelerator``'s arguments by name.
        ddp: the :class:`DistributedDataParallelKwargs` among the handlers, or ``None``.

    Raises:
        ValueError: an argument or an environment variable has no counterpart; the message says which and why.
    """
    plugins = {"fsdp_plugin": None, "deepspeed_plugin": None, "megatron_lm_plugin": None, **_plugins(arguments)}
    chosen = [plugin for plugin in plugins.values() if plugin is not None]
    if len(chosen) > 1:
        raise ValueError(f"{', '.join(type(plugin).__name__ for plugin in chosen)}: give one of them")
    kind = chosen[0].kind if chosen else "NO"
    mixed = arguments["mixed_precision"] or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    values: dict[str, Any] = {
        "distributed_type": kind,
        "mixed_precision": str(mixed),
        "dynamo_config": _dynamo(arguments),
    }
    values |= {
        chosen_plugin.section: {**_launcher_settings(chosen_plugin.kind), **chosen_plugin.to_section()}
        for chosen_plugin in chosen
    }
    mesh = arguments["parallelism_config"]
    if mesh is not None:
        values |= {"distributed_type": "FSDP", mesh.section: mesh.to_section()}
    if (steps := arguments["gradient_accumulation_steps"]) == 1:
        steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")  # None: a plugin may have it
    file = convert({**values, "gradient_accumulation_steps": steps}, "Accelerator")
    engine_arguments = {name: value for name, value in file.settings.items() if name not in ("devices", "accelerator")}
    if engine_arguments.pop("gradient_clip_val", None) is not None:
        file.refused.append(
            "gradient_clipping: call accelerator.clip_grad_norm_(model.parameters(), ...) before optimizer.step()"
        )
    if file.refused:
        raise ValueError("; ".join(file.refused))
    if ddp is not None and kind == "NO" and mesh is None:
        engine_arguments["strategy"] = ddp.to_strategy()
    return engine_arguments, {"mixed_precision": str(mixed), "kind": values["distributed_type"], **plugins}


def accumulation(arguments: Mapping[str, Any], num_steps: int) -> Any:
    """The user's :class:`GradientAccumulationPlugin`, or a new one with the engine's ``num_steps``.

    Raises:
        ValueError: the plugin contradicts another argument.
    """
    plugin = arguments["gradient_accumulation_plugin"]
    if plugin is None:
        return settings.GradientAccumulationPlugin(num_steps=num_steps)
    if arguments["gradient_accumulation_steps"] != 1:
        raise ValueError("gradient_accumulation_steps and gradient_accumulation_plugin: give one of them")
    if arguments["rules"] == "exact" and not plugin.sync_with_dataloader:
        raise ValueError(
            "sync_with_dataloader=False: windows end with an epoch, unless Accelerator(rules='accelerate') is given"
        )
    return plugin


def _plugins(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The plugins among the arguments, or else those that the launcher's environment variables ask for, by the name of the argument."""
    if flag_of("ACCELERATE_USE_PARALLELISM_CONFIG") and arguments["parallelism_config"] is None:
        raise ValueError(
            "ACCELERATE_USE_PARALLELISM_CONFIG: give Accelerator(parallelism_config=ParallelismConfig(...)) in the script"
        )
    if arguments["torch_tp_plugin"] is not None:
        raise ValueError(
            f"torch_tp_plugin: give parallelism_config=ParallelismConfig(tp_size={arguments['torch_tp_plugin'].tp_size})"
        )
    if isinstance(arguments["deepspeed_plugin"] or arguments["deepspeed_plugins"], dict):
        raise ValueError(
            "deepspeed_plugin: several configurations in one job are several Engines here; give one DeepSpeedPlugin"
        )
    plugins = {
        "fsdp_plugin": arguments["fsdp_plugin"],
        "deepspeed_plugin": arguments["deepspeed_plugin"] or arguments["deepspeed_plugins"],
        "megatron_lm_plugin": arguments["megatron_lm_plugin"],
    }
    for name, kind in zip(plugins, _KINDS, strict=True):
        if plugins[name] is None and flag_of(f"ACCELERATE_USE_{kind}"):
            plugins[name] = _KINDS[kind]()
    return plugins


def _launcher_settings(kind: str) -> dict[str, Any]:
    """Settings of a strategy in environment variables of ``accelerate launch``, under the keys of its configuration file."""
    prefix = {"FSDP": "FSDP_", "DEEPSPEED": "ACCELERATE_DEEPSPEED_", "MEGATRON_LM": "MEGATRON_LM_"}[kind]
    variables = {
        name.removeprefix(prefix).lower(): text for name, text in os.environ.items() if name.startswith(prefix)
    }
    if kind != "DEEPSPEED":
        renamed = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}
        return {prefix.lower() + renamed.get(name, name): text for name, text in variables.items() if text != "None"}
    renamed = {
        "config_file": "deepspeed_config_file",
        "zero3_init": "zero3_init_flag",
        "moe_layer_cls_names": "deepspeed_moe_layer_cls_names",
    }
    if clip := os.environ.get("ACCELERATE_GRADIENT_CLIPPING"):
        variables["gradient_clipping"] = clip
    return {renamed.get(name, name): text for name, text in variables.items()}


def _dynamo(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``torch.compile`` from the plugin, the backend or environment variables, as in the file's ``dynamo_config``."""
    if arguments["dynamo_plugin"] is not None and arguments["dynamo_backend"] is not None:
        raise ValueError("dynamo_plugin and dynamo_backend: give one of them")
    plugin = arguments["dynamo_plugin"] or settings.TorchDynamoPlugin(backend=arguments["dynamo_backend"])
    section: dict[str, Any] = plugin.to_section()
    return section
