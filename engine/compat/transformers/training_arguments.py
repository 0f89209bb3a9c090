"""Converts ``transformers.TrainingArguments`` to settings of this library, and to arguments of the module, the loaders and the callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.compat.accelerate import config_strategies as strategies
from engine.compat.key_file import KeyFile, flag
from engine.compat.transformers.arguments import ARGUMENTS, LOGGERS, NAMED_AFTER, NONE, OPTIMIZERS
from engine.config import yaml_text

_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")
"""The learning rate schedules for which transformers ignores ``warmup_steps``."""


class Arguments(KeyFile):
    """A file of ``TrainingArguments``, and the result of its conversion: settings, arguments and code."""

    def __init__(self, values: Mapping[str, Any], origin: str, origins: Mapping[str, str]) -> None:
        super().__init__(values, origin, origins)
        self.module: dict[str, Any] = {}
        """Arguments of ``HFModule``."""
        self.loader: dict[str, Any] = {}
        """Arguments of the training ``DataLoader``."""
        self.callbacks: list[str] = []
        """The callbacks, as Python expressions."""

    def code(self) -> list[str]:
        """Lines of Python for what a file of settings cannot express."""
        module = ", ".join(f"{name}={value!r}" for name, value in self.module.items())
        loader = ", ".join(f"{name}={value!r}" for name, value in self.loader.items())
        return [
            f"HFModule(model, {module})",
            f"DataLoader(dataset, {loader}, collate_fn=...)",
            f"Fit(callbacks=[{', '.join(self.callbacks)}])",
        ]


def read(path: Path) -> Arguments:
    """Read a file of ``TrainingArguments``; return settings, code, notes and refusals.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not a JSON or YAML file of ``TrainingArguments``.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix in (".bin", ".pt", ".pkl"):
        raise ValueError(
            f"{path} is a pickle, which can run code when it is opened. Where you trust it, write its values as JSON:\n"
            f'    open("training_args.json", "w").write(torch.load({str(path)!r}, weights_only=False).to_json_string())'
        )
    origin = f"file {path}"
    node = yaml_text.compose(yaml_text.read_file(path), origin, lines=True)
    values = None if node is None else yaml_text.construct(node)
    if not isinstance(values, dict) or not values.keys() & {
        "output_dir",
        "learning_rate",
        "num_train_epochs",
        "max_steps",
    }:
        raise ValueError(
            f"{origin}: has none of 'output_dir', 'learning_rate', 'num_train_epochs', 'max_steps'; TrainingArguments.to_json_string() writes them"
        )
    file = Arguments(values, origin, yaml_text.origins_of_keys(node, origin, lines=True))
    _length(file)
    _intervals(file)
    _numbers(file)
    _strategy(file)
    _module(file)
    _loader(file)
    file.refuse_others({name: argument.in_file for name, argument in ARGUMENTS.items() if argument.neutral}, NONE)
    harmless = {name: argument for name, argument in ARGUMENTS.items() if argument.in_file and not argument.neutral}
    for key, value in file.values.items():
        if key in harmless and value not in (*NONE, -1, harmless[key].usual):
            file.note(key, harmless[key].in_file)
        elif key in harmless or key.startswith(NAMED_AFTER):
            file.take_value(key)
    file.finish(())
    return file


def _length(file: Arguments) -> None:
    """Set the length of the training, the root folder and the seed."""
    epochs, steps = float(file.take_value("num_train_epochs", 3.0)), int(file.take_value("max_steps", -1))
    if steps > 0:
        file.set("max_steps", steps)
    elif epochs == int(epochs):
        file.set("max_epochs", int(epochs))
    else:
        file.refuse("num_train_epochs", "is not whole: give max_steps instead")
    file.set("root_dir", str(file.take_value("output_dir", "trainer_output")))
    file.set("seed", int(file.take_value("seed", 42)))
    if file.take_value("data_seed") not in (None, file.settings["seed"]):
        file.refuse("data_seed", f"the data order follows from seed: {file.settings['seed']}")


def _every(file: Arguments, kind: str, key: str, default: Any) -> str | None:
    """The interval that ``<kind>_strategy`` and ``key`` ask for, such as ``"500 steps"``; ``None``: never."""
    strategy = str(file.take_value(f"{kind}_strategy", "no" if kind == "eval" else "steps")).lower()
    interval = file.take_value(key, default)
    if strategy in ("no", "false"):
        return None
    if strategy == "epoch":
        return "1 epochs"
    interval = float(interval if interval else default)
    if interval < 1:
        if "max_steps" not in file.settings:
            file.refuse(key, "is a fraction of the training, whose steps are not known here: give a number of steps")
            return None
        interval = math.ceil(interval * file.settings["max_steps"])
    return f"{int(interval)} steps"


def _intervals(file: Arguments) -> None:
    """Set when to log and validate, and add the callbacks for checkpoints and loggers."""
    if "evaluation_strategy" in file.values:  # the name before 4.46
        file.values["eval_strategy"] = file.take_value("evaluation_strategy")
    log = _every(file, "logging", "logging_steps", 500)
    file.set("log_every_n_steps", int(log.split()[0]) if log and log.endswith("steps") else 0)
    file.set("val_every", _every(file, "eval", "eval_steps", file.take_value("logging_steps", 500)))
    best = str(file.take_value("save_strategy", "steps")).lower() == "best"
    if best:
        file.values["save_strategy"] = file.take_value("eval_strategy", "epoch")
    every, limit = _every(file, "save", "save_steps", 500), file.take_value("save_total_limit")
    metric, greater = file.take_value("metric_for_best_model"), file.take_value("greater_is_better")
    options: dict[str, Any] = {"every": every}
    if flag(file.take_value("load_best_model_at_end", False)) or metric or best:
        name = str(metric or "loss").removeprefix("eval_")
        options["monitor"] = f"val/{name}"
        if greater if greater is not None else not name.endswith("loss"):
            options["mode"] = "max"
    if flag(file.take_value("load_best_model_at_end", False)):
        file.set("reload_best", True)
    if limit is None:
        options["save_top_k"] = -1
    elif "monitor" in options:
        options["save_top_k"] = max(1, int(limit) - 1)
    elif int(limit) != 1:
        file.refuse(
            "save_total_limit",
            "is 1 or all without a metric: give callbacks.ModelCheckpoint(keep_every=...) for older ones",
        )
    if every is not None:
        file.callbacks.append(f"ModelCheckpoint({', '.join(f'{name}={value!r}' for name, value in options.items())})")
    names = file.take_value("report_to", "none")
    for name in [names] if isinstance(names, str) else names:
        if name in LOGGERS:
            file.callbacks.append(f"{LOGGERS[name]}()")
        elif name != "none":
            file.refuse("report_to", f"{name!r} has no counterpart; possible: {', '.join(LOGGERS)}")


def _numbers(file: Arguments) -> None:
    """Set accumulation, clipping, precision, activation checkpointing, compilation, determinism and timeouts."""
    file.set("accumulate_grad_batches", int(file.take_value("gradient_accumulation_steps", 1)))
    clip = float(file.take_value("max_grad_norm", 1.0))
    file.set("gradient_clip_val", clip or None)
    halves = [name for name in ("bf16", "fp16") if flag(file.take_value(name, False))]
    if len(halves) > 1:
        file.refuse("fp16", "contradicts bf16: true")
    elif halves:
        file.set("precision", {"bf16": "bf16-mixed", "fp16": "16-mixed"}[halves[0]])
    if (tf32 := file.take_value("tf32")) is not None:
        file.set("matmul_precision", "high" if flag(tf32) else "highest")
    if _any(file, "gradient_checkpointing", "activation_checkpointing"):
        file.set("activation_checkpointing", "full")
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        checkpointing = file.take_value(name)
        if isinstance(checkpointing, Mapping) and checkpointing.keys() - {"use_reentrant"}:
            file.refuse(name, "only use_reentrant is known, which has no effect here")
    backend, mode = file.take_value("torch_compile_backend"), file.take_value("torch_compile_mode")
    if flag(file.take_value("torch_compile", False)) or backend or mode:
        options = {name: value for name, value in (("backend", backend), ("mode", mode)) if value}
        file.set("compile", options or True)
    if flag(file.take_value("full_determinism", False)):
        file.set("deterministic", True)
    if _any(file, "use_cpu", "no_cuda"):
        file.set("accelerator", "cpu")
    if not flag(file.take_value("average_tokens_across_devices", True)):
        file.refuse(
            "average_tokens_across_devices", "losses are always means over the tokens of all ranks: leave it out"
        )
    if (wait := int(file.take_value("ddp_timeout", 1800))) != 1800:
        file.set("timeout", f"{wait} s")


def _any(file: Arguments, *names: str) -> bool:
    """Whether one of the arguments ``names`` is true; all of them count as handled."""
    flags = [flag(file.take_value(name, False)) for name in names]
    return any(flags)


def _strategy(file: Arguments) -> None:
    """Set the strategy: DeepSpeed, FSDP, or DDP with options."""
    sharding, deepspeed = file.take_value("fsdp"), file.take_value("deepspeed")
    words = sharding.split() if isinstance(sharding, str) else [str(word) for word in sharding or ()]
    config = file.take_value("fsdp_config")
    if deepspeed:
        file.set("strategy", {"name": "deepspeed", "config": deepspeed})
    elif words and words != ["False"]:
        entries = config if isinstance(config, Mapping) else {}
        _fsdp(file, words, {str(key).removeprefix("fsdp_"): value for key, value in entries.items()})
    fields = {
        "find_unused_parameters": "bool",
        "bucket_cap_mb": "number",
        "broadcast_buffers": "bool",
        "static_graph": "bool",
    }
    options = {name: value for name in fields if (value := file.take_value(f"ddp_{name}")) is not None}
    if options and "strategy" not in file.settings:
        file.set("strategy", {"name": "ddp", **options})
    elif options:
        file.notes.append(f"{', '.join(f'ddp_{name}' for name in options)}: of data parallel, which was not chosen")


def _fsdp(file: Arguments, words: list[str], config: dict[str, Any]) -> None:
    """Translate FSDP's ``words`` and ``config`` to the keys of Accelerate's file, and those to settings."""
    possible = {
        "full_shard",
        "shard_grad_op",
        "no_shard",
        "hybrid_shard",
        "hybrid_shard_zero2",
        "offload",
        "auto_wrap",
        "True",
    }
    if unknown := [word for word in words if word not in possible]:
        file.refuse("fsdp", f"{unknown[0]!r} is unknown; possible: {', '.join(sorted(possible))}")
        return
    if any(flag(config.pop(name, False)) for name in ("xla", "xla_fsdp_v2")):
        file.refuse("fsdp_config", "xla is for TPUs, which are not supported")
    for name in ("xla_fsdp_settings", "xla_fsdp_grad_ckpt", "limit_all_gathers"):
        config.pop(name, None)
    shard = next((word.upper() for word in words if "shard" in word), None)
    if shard and str(config.get("version", 1)) == "1":
        config.setdefault("sharding_strategy", shard)
    if "offload" in words:
        config["offload_params"] = True
    if config.get("transformer_layer_cls_to_wrap"):
        config.setdefault("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    elif config.get("min_num_params"):
        config.setdefault("auto_wrap_policy", "SIZE_BASED_WRAP")
    accelerate_file = KeyFile({"fsdp_config": config}, file.origin_of("fsdp_config"), {})
    accelerate_file.settings.update(file.settings)
    strategies.convert(accelerate_file, "FSDP")
    accelerate_file.finish(("fsdp_config",))
    file.settings.update(accelerate_file.settings)
    file.notes += accelerate_file.notes
    file.refused += accelerate_file.refused


def _module(file: Arguments) -> None:
    """Collect the arguments of ``HFModule``: the optimizer and the learning rate schedule."""
    name = str(file.take_value("optim", "default_optim")).lower().removeprefix("optimizernames.")
    options: dict[str, Any] = {}
    if name not in OPTIMIZERS:
        file.refuse("optim", f"give the optimizer's class, HFModule(optimizer=...); by name: {', '.join(OPTIMIZERS)}")
    chosen = OPTIMIZERS.get(name, "adamw")
    if chosen == "adamw_torch_fused":
        chosen, options["fused"] = "adamw", True
    betas = float(file.take_value("adam_beta1", 0.9)), float(file.take_value("adam_beta2", 0.999))
    epsilon = float(file.take_value("adam_epsilon", 1e-8))
    if chosen == "adamw" and betas != (0.9, 0.999):
        options["betas"] = betas
    if chosen == "adamw" and epsilon != 1e-8:
        options["eps"] = epsilon
    warmup: Any = file.take_value("warmup_steps", 0) or file.take_value("warmup_ratio", 0.0)
    file.take_value("warmup_ratio")
    schedule = str(file.take_value("lr_scheduler_type", "linear")).lower().removeprefix("schedulertype.")
    if schedule in _WITHOUT_WARMUP:
        warmup = 0
    file.module = {
        "optimizer": chosen,
        "lr": float(file.take_value("learning_rate", 5e-5)),
        "weight_decay": float(file.take_value("weight_decay", 0.0)),
        "scheduler": schedule,
        "warmup": int(warmup) if warmup >= 1 or not warmup else float(warmup),
        **({"optimizer_args": options} if options else {}),
    }
    scheduler_args = file.take_value("lr_scheduler_kwargs")
    if isinstance(scheduler_args, Mapping):
        file.module |= {"scheduler_args": dict(scheduler_args)} if scheduler_args else {}
    elif scheduler_args is not None:
        file.refuse("lr_scheduler_kwargs", "must be a mapping")


def _loader(file: Arguments) -> None:
    """Collect the arguments of the ``DataLoader``."""
    order = str(file.take_value("train_sampling_strategy", "random")).lower()
    if order not in ("random", "sequential"):
        file.refuse("train_sampling_strategy", ARGUMENTS["group_by_length"].in_file)
    file.loader = {"batch_size": int(file.take_value("per_device_train_batch_size", 8)), "shuffle": order == "random"}
    names = {
        "drop_last": False,
        "num_workers": 0,
        "pin_memory": True,
        "persistent_workers": False,
        "prefetch_factor": None,
        "in_order": True,
    }
    for name, default in names.items():
        value = file.take_value(f"dataloader_{name}", default)
        if value != default or (name == "pin_memory" and value):
            file.loader[name] = value
    if file.settings["val_every"] is not None:
        file.note("per_device_eval_batch_size", "the batch_size of the validation's DataLoader")
    file.take_value("per_device_eval_batch_size")
    accelerator_config = file.take_value("accelerator_config")
    if isinstance(accelerator_config, Mapping):
        if flag(accelerator_config.get("split_batches", False)):
            file.refuse(
                "accelerator_config",
                "split_batches: batch_size is that of one rank; Fit(global_batch_size=) fixes the whole",
            )
        if accelerator_config.get("even_batches", True) is False or accelerator_config.get("dispatch_batches"):
            file.notes.append(
                "accelerator_config: each sample is used once, by the rank whose turn it is; no batch is filled up"
            )
