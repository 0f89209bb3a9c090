"""The fields of ``transformers.TrainingArguments`` that have another name or no setting here, with what to do instead, and names of values."""

from __future__ import annotations

SETTINGS = {
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "max_grad_norm": "gradient_clip_val",
    **dict.fromkeys(("output_dir", "logging_dir"), "root_dir"),
    "eval_steps": "val_every",
    "num_train_epochs": "max_epochs",
    "max_train_steps": "max_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "logging_steps": "log_every_n_steps",
}
"""Fields that are a setting under another name; ``max_train_steps`` is one of its example scripts."""
OTHERWISE = {
    "tf32": "here it is matmul_precision='high'",
    "deepspeed": "here it is strategy={'name': 'deepspeed', 'stage': 2, ...}",
    **dict.fromkeys(("fsdp", "fsdp_config"), "here it is strategy={'name': 'fsdp', ...}"),
    "report_to": "loggers are callbacks, for example callbacks=[CSVLogger()]",
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint"), "resuming is an argument of run: fit.run(module, loader, resume='auto')"
    ),
}
"""What to do in ``Fit`` instead of fields that are no setting."""
NONE: tuple[object, ...] = (None, False, 0, 0.0, "", "no", "none", "false", [], {})
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_hf", "adamw", "adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
    **{name: name for name in ("adamw_torch_fused", "sgd", "adagrad", "rmsprop")},
    "default_optim": "adamw",
}
LOGGERS = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLflowLogger",
    "trackio": "TrackioLogger",
    "aim": "AimLogger",
}
_RECIPE = "a recipe of a few lines does it: examples/causal_lm.py"
REFUSED = {
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
    "ignore_data_skip": "a resumed run continues in the data where it was; Resume(path, weights_only=True) starts from the beginning",
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
HARMLESS = {
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
USUAL = (*NONE, -1, "passive", "warning", "huggingface", "length")
ON = (
    "eval_do_concat_batches",
    "remove_unused_columns",
    "log_on_each_node",
    "logging_nan_inf_filter",
    "skip_memory_metrics",
    "save_safetensors",
)
"""Harmless fields that are true by default."""
NAMED_AFTER = ("hub_", "trackio_", "push_to_hub_", "xla_")
