"""``transformers.TrainingArguments`` as settings of this library, and as arguments of the module, the loaders and the callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import yaml_reader
from engine.config.from_accelerate import strategies
from engine.config.from_accelerate.keys import File, flag

_NONE = (None, False, 0, 0.0, "", "no", "none", "false", [], {})
_OPTIMIZERS = {
    **{name: "adamw" for name in ("adamw_torch", "adamw_hf", "adamw", "adamw_torch_xla", "adamw_torch_npu_fused")},
    **{name: name for name in ("adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
    "default_optim": "adamw",
}
_LOGGERS = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLflowLogger",
    "trackio": "TrackioLogger",
    "aim": "AimLogger",
}
_RECIPE = "a recipe of a few lines does it: examples/causal_lm.py"
_REFUSED = {
    "label_smoothing_factor": f"override HFModule.loss; {_RECIPE}",
    "neftune_noise_alpha": f"a hook of the embedding adds the noise; {_RECIPE}",
    "group_by_length": f"it is a sampler; {_RECIPE}",
    "auto_find_batch_size": "use callbacks.BatchSizeFinder or callbacks.find_batch_size",
    "use_liger_kernel": "apply liger_kernel's function to the model, then give it to HFModule",
    "optim_target_modules": "give the optimizer itself: HFModule(optimizer=...)",
    "optim_args": "give them as HFModule(optimizer_args={...})",
    "eval_delay": "start evaluating later with Fit(val_every=) in a second run, or leave it out",
    "eval_on_start": "call fit.validate(module, loader) before fit.run",
    "bf16_full_eval": "an evaluation has the training's precision: Fit(precision='bf16-true') converts the model",
    "fp16_full_eval": "an evaluation has the training's precision: Fit(precision='16-true') converts the model",
    "push_to_hub": "export with 'fit checkpoint export' and upload the folder",
    "ignore_data_skip": "a resumed run continues in the data where it was; Resume(path, weights_only=True) starts anew",
    "save_on_each_node": "checkpoints are one directory on a file system that all machines share",
    "parallelism_config": "give Fit(strategy={'name': 'mesh', ...})",
    "debug": "Fit(detect_anomaly=True) finds where a NaN comes from",
    "past_index": "keep the state in the module",
    "mp_parameters": "SageMaker's model parallelism has no counterpart",
    "torchdynamo": "use torch_compile_backend",
    "tpu_num_cores": "TPUs are not supported",
    "liger_kernel_config": "apply liger_kernel's function to the model, then give it to HFModule",
    "include_inputs_for_metrics": "compute metrics in validation_step, where the batch is",
    "include_for_metrics": "compute metrics in validation_step, where the batch is",
    "dataloader_multiprocessing_context": "give DataLoader(multiprocessing_context=)",
}
"""Fields that have an effect and no setting -> what to do; ``0``, ``false`` and the like are harmless."""
_HARMLESS = {
    "do_train": "call fit.run",
    "do_eval": "call fit.validate",
    "do_predict": "call fit.predict",
    "resume_from_checkpoint": "give fit.run(..., resume=)",
    "restore_callback_states_from_checkpoint": "callbacks' states are always restored",
    "remove_unused_columns": "the collate function says which columns are in a batch",
    "label_names": "labels are in the batch",
    "length_column_name": "the sampler of the recipe takes the lengths",
    "prediction_loss_only": "validation_step keeps no predictions",
    "per_gpu_train_batch_size": "is per_device_train_batch_size",
    "per_gpu_eval_batch_size": "is per_device_eval_batch_size",
    "eval_accumulation_steps": "validation_step keeps no predictions",
    "eval_do_concat_batches": "validation_step keeps no predictions",
    "eval_use_gather_object": "validation_step keeps no predictions",
    "batch_eval_metrics": "metrics are computed batch by batch",
    "include_num_input_tokens_seen": "run.tokens has the number of trained tokens",
    "include_tokens_per_second": "callbacks.ThroughputMonitor measures it",
    "torch_empty_cache_steps": "memory is not returned within a training",
    "save_safetensors": "checkpoints are always safetensors",
    "save_only_model": "checkpoints have everything that resuming needs",
    "enable_jit_checkpoint": "SIGTERM always saves",
    "log_on_each_node": "rank 0 logs",
    "logging_nan_inf_filter": "values are logged as they are",
    "logging_first_step": "the first step is always logged",
    "log_level": "use Python's logging",
    "log_level_replica": "use Python's logging",
    "disable_tqdm": "add callbacks.RichProgressBar for a progress bar",
    "logging_dir": "the run's folder has the logs",
    "overwrite_output_dir": "every run has a folder of its own",
    "use_cache": "HFModule switches the cache off while it trains",
    "skip_memory_metrics": "callbacks.DeviceStatsMonitor measures memory",
    "ray_scope": "see callbacks for hyperparameter searches",
    "run_name": "give it to the logger",
    "project": "give it to the logger",
    "local_rank": "is the launcher's",
    "ddp_backend": "follows from the device",
    "use_legacy_prediction_loop": "there is one loop",
    "use_mps_device": "is accelerator='auto'",
    "half_precision_backend": "is autocast",
    "fp16_backend": "is autocast",
    "fp16_opt_level": "is Apex's",
    "tpu_metrics_debug": "is for TPUs",
    "use_ipex": "is for Intel's extension",
    "jit_mode_eval": "evaluations are not traced",
}
_USUAL = (*_NONE, -1, "passive", "warning", "huggingface", "length")
_ON = ("eval_do_concat_batches", "remove_unused_columns", "log_on_each_node", "logging_nan_inf_filter", "skip_memory_metrics", "save_safetensors")
"""Harmless fields that are true by default."""
_NAMED_AFTER = ("hub_", "trackio_", "push_to_hub_", "xla_")


class Arguments(File):
    """The file, and the result."""

    def __init__(self, values: Mapping[str, Any], origin: str, origins: Mapping[str, str]) -> None:
        super().__init__(values, origin, origins)
        self.module: dict[str, Any] = {}
        """Arguments of ``HFModule``."""
        self.loader: dict[str, Any] = {}
        """Arguments of the training's ``DataLoader``."""
        self.callbacks: list[str] = []
        """The callbacks, as code."""

    def code(self) -> list[str]:
        """The lines of a script that a file of settings cannot have."""
        module = ", ".join(f"{name}={value!r}" for name, value in self.module.items())
        loader = ", ".join(f"{name}={value!r}" for name, value in self.loader.items())
        return [
            f"HFModule(model, {module})",
            f"DataLoader(dataset, {loader}, collate_fn=...)",
            f"Fit(callbacks=[{', '.join(self.callbacks)}])",
        ]


def read(path: Path) -> Arguments:
    """A file with ``TrainingArguments`` as settings, code, notes and refusals.

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
    node = yaml_reader.compose(yaml_reader.read_file(path), origin, lines=True)
    values = None if node is None else yaml_reader.construct(node)
    if not isinstance(values, dict) or not values.keys() & {"output_dir", "learning_rate", "num_train_epochs", "max_steps"}:
        raise ValueError(
            f"{origin}: has none of 'output_dir', 'learning_rate', 'num_train_epochs', 'max_steps': TrainingArguments.to_json_string() writes such a file"
        )
    file = Arguments(values, origin, yaml_reader.origins_of_keys(node, origin, lines=True))
    _length(file)
    _intervals(file)
    _numbers(file)
    _strategy(file)
    _module(file)
    _loader(file)
    file.refuse_others(_REFUSED, _NONE)
    for key in file.values:
        usual = file.values[key] in _USUAL or (key in _ON and file.values[key] is True)
        if key in _HARMLESS and not usual:
            file.note(key, _HARMLESS[key])
        elif key in _HARMLESS or key.startswith(_NAMED_AFTER):
            file.take(key)
    file.finish(())
    return file


def _length(file: Arguments) -> None:
    epochs, steps = float(file.take("num_train_epochs", 3.0)), int(file.take("max_steps", -1))
    if steps > 0:
        file.set("max_steps", steps)
    elif epochs == int(epochs):
        file.set("max_epochs", int(epochs))
    else:
        file.refuse("num_train_epochs", "is not whole: give max_steps instead")
    file.set("root_dir", str(file.take("output_dir", "trainer_output")))
    file.set("seed", int(file.take("seed", 42)))
    if file.take("data_seed") not in (None, file.settings["seed"]):
        file.refuse("data_seed", f"the data order follows from seed: {file.settings['seed']}")


def _every(file: Arguments, kind: str, key: str, default: Any) -> str | None:
    """A duration from ``<kind>_strategy`` and ``<key>``; ``None``: never."""
    how = str(file.take(f"{kind}_strategy", "no" if kind == "eval" else "steps")).lower()
    each = file.take(key, default)
    if how in ("no", "false"):
        return None
    if how == "epoch":
        return "1 epochs"
    each = float(default if not each else each)
    if each < 1:
        if "max_steps" not in file.settings:
            file.refuse(key, "is a fraction of the training, whose steps are not known here: give a number of steps")
            return None
        each = math.ceil(each * file.settings["max_steps"])
    return f"{int(each)} steps"


def _intervals(file: Arguments) -> None:
    if "evaluation_strategy" in file.values:  # the name before 4.46
        file.values["eval_strategy"] = file.take("evaluation_strategy")
    log = _every(file, "logging", "logging_steps", 500)
    file.set("log_every_n_steps", int(log.split()[0]) if log and log.endswith("steps") else 0)
    file.set("val_every", _every(file, "eval", "eval_steps", file.take("logging_steps", 500)))
    best = str(file.take("save_strategy", "steps")).lower() == "best"
    if best:
        file.values["save_strategy"] = file.take("eval_strategy", "epoch")
    every, most = _every(file, "save", "save_steps", 500), file.take("save_total_limit")
    metric, greater = file.take("metric_for_best_model"), file.take("greater_is_better")
    options: dict[str, Any] = {"every": every}
    if flag(file.take("load_best_model_at_end", False)) or metric or best:
        name = str(metric or "loss").removeprefix("eval_")
        options["monitor"] = f"val/{name}"
        if greater if greater is not None else not name.endswith("loss"):
            options["mode"] = "max"
    if flag(file.take("load_best_model_at_end", False)):
        file.set("reload_best", True)
    if most is None:
        options["save_top_k"] = -1
    elif "monitor" in options:
        options["save_top_k"] = max(1, int(most) - 1)
    elif int(most) != 1:
        file.refuse("save_total_limit", "is 1 or all without a metric: give callbacks.ModelCheckpoint(keep_every=...) for older ones")
    if every is not None:
        file.callbacks.append(f"ModelCheckpoint({', '.join(f'{name}={value!r}' for name, value in options.items())})")
    told = file.take("report_to", "none")
    for name in [told] if isinstance(told, str) else told:
        if name in _LOGGERS:
            file.callbacks.append(f"{_LOGGERS[name]}()")
        elif name != "none":
            file.refuse("report_to", f"{name!r} has no counterpart; possible: {', '.join(_LOGGERS)}")


def _numbers(file: Arguments) -> None:
    file.set("accumulate_grad_batches", int(file.take("gradient_accumulation_steps", 1)))
    clip = float(file.take("max_grad_norm", 1.0))
    file.set("gradient_clip_val", clip or None)
    halves = [name for name in ("bf16", "fp16") if flag(file.take(name, False))]
    if len(halves) > 1:
        file.refuse("fp16", "contradicts bf16: true")
    elif halves:
        file.set("precision", {"bf16": "bf16-mixed", "fp16": "16-mixed"}[halves[0]])
    if (tf32 := file.take("tf32")) is not None:
        file.set("matmul_precision", "high" if flag(tf32) else "highest")
    if any([flag(file.take(name, False)) for name in ("gradient_checkpointing", "activation_checkpointing")]):
        file.set("activation_checkpointing", "full")
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        given = file.take(name)
        if isinstance(given, Mapping) and given.keys() - {"use_reentrant"}:
            file.refuse(name, "only use_reentrant is known, which has no effect here")
    backend, mode = file.take("torch_compile_backend"), file.take("torch_compile_mode")
    if flag(file.take("torch_compile", False)) or backend or mode:
        options = {name: value for name, value in (("backend", backend), ("mode", mode)) if value}
        file.set("compile", options or True)
    if flag(file.take("full_determinism", False)):
        file.set("deterministic", True)
    if any([flag(file.take(name, False)) for name in ("use_cpu", "no_cuda")]):
        file.set("accelerator", "cpu")
    if not flag(file.take("average_tokens_across_devices", True)):
        file.refuse("average_tokens_across_devices", "losses are always means over the tokens of all ranks: leave it out")
    if (wait := int(file.take("ddp_timeout", 1800))) != 1800:
        file.set("timeout", f"{wait} s")


def _strategy(file: Arguments) -> None:
    sharding, deepspeed = file.take("fsdp"), file.take("deepspeed")
    words = sharding.split() if isinstance(sharding, str) else [str(word) for word in sharding or ()]
    config = file.take("fsdp_config")
    if deepspeed:
        file.set("strategy", {"name": "deepspeed", "config": deepspeed})
    elif words and words != ["False"]:
        given = config if isinstance(config, Mapping) else {}
        _fsdp(file, words, {str(key).removeprefix("fsdp_"): value for key, value in given.items()})
    fields = {"find_unused_parameters": "bool", "bucket_cap_mb": "number", "broadcast_buffers": "bool", "static_graph": "bool"}
    options = {name: value for name in fields if (value := file.take(f"ddp_{name}")) is not None}
    if options and "strategy" not in file.settings:
        file.set("strategy", {"name": "ddp", **options})
    elif options:
        file.notes.append(f"{', '.join(f'ddp_{name}' for name in options)}: of data parallel, which was not chosen")


def _fsdp(file: Arguments, words: list[str], config: dict[str, Any]) -> None:
    """Transformers' words and keys are Accelerate's, which are translated there."""
    known = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap", "True"}
    if strange := [word for word in words if word not in known]:
        file.refuse("fsdp", f"{strange[0]!r} is unknown; possible: {', '.join(sorted(known))}")
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
    inner = File({"fsdp_config": config}, file.origin_of("fsdp_config"), {})
    inner.settings.update(file.settings)
    strategies.convert(inner, "FSDP")
    inner.finish(("fsdp_config",))
    file.settings.update(inner.settings)
    file.notes += inner.notes
    file.refused += inner.refused


def _module(file: Arguments) -> None:
    name = str(file.take("optim", "default_optim")).lower().removeprefix("optimizernames.")
    options: dict[str, Any] = {}
    if name not in _OPTIMIZERS:
        file.refuse("optim", f"give the optimizer's class, HFModule(optimizer=...); by name: {', '.join(_OPTIMIZERS)}")
    chosen = _OPTIMIZERS.get(name, "adamw")
    if chosen == "adamw_torch_fused":
        chosen, options["fused"] = "adamw", True
    betas = float(file.take("adam_beta1", 0.9)), float(file.take("adam_beta2", 0.999))
    epsilon = float(file.take("adam_epsilon", 1e-8))
    if chosen == "adamw" and betas != (0.9, 0.999):
        options["betas"] = betas
    if chosen == "adamw" and epsilon != 1e-8:
        options["eps"] = epsilon
    warmup: Any = file.take("warmup_steps", 0) or file.take("warmup_ratio", 0.0)
    file.take("warmup_ratio")
    schedule = str(file.take("lr_scheduler_type", "linear")).lower().removeprefix("schedulertype.")
    file.module = {
        "optimizer": chosen,
        "lr": float(file.take("learning_rate", 5e-5)),
        "weight_decay": float(file.take("weight_decay", 0.0)),
        "scheduler": schedule,
        "warmup": int(warmup) if warmup >= 1 or not warmup else float(warmup),
        **({"optimizer_args": options} if options else {}),
    }
    more = file.take("lr_scheduler_kwargs")
    if isinstance(more, Mapping):
        file.module |= {"scheduler_args": dict(more)} if more else {}
    elif more is not None:
        file.refuse("lr_scheduler_kwargs", "must be a mapping")


def _loader(file: Arguments) -> None:
    order = str(file.take("train_sampling_strategy", "random")).lower()
    if order not in ("random", "sequential"):
        file.refuse("train_sampling_strategy", _REFUSED["group_by_length"])
    file.loader = {"batch_size": int(file.take("per_device_train_batch_size", 8)), "shuffle": order == "random"}
    names = {"drop_last": False, "num_workers": 0, "pin_memory": True, "persistent_workers": False, "prefetch_factor": None, "in_order": True}
    for name, usual in names.items():
        value = file.take(f"dataloader_{name}", usual)
        if value != usual or (name == "pin_memory" and value):
            file.loader[name] = value
    if file.settings["val_every"] is not None:
        file.note("per_device_eval_batch_size", "the batch_size of the validation's DataLoader")
    file.take("per_device_eval_batch_size")
    more = file.take("accelerator_config")
    if isinstance(more, Mapping):
        if flag(more.get("split_batches", False)):
            file.refuse("accelerator_config", "split_batches: batch_size is that of one rank; Fit(global_batch_size=) fixes the whole")
        if more.get("even_batches", True) is False or more.get("dispatch_batches"):
            file.notes.append("accelerator_config: each sample is used once, by the rank whose turn it is; no batch is filled up")
