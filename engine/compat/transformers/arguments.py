"""The fields of ``transformers.TrainingArguments`` that have another name or no setting here, with advice, and names of their values."""

from __future__ import annotations

from engine.compat.table_rows import Argument

NONE: tuple[object, ...] = (None, False, 0, 0.0, "", "no", "none", "false", [], {})
_RECIPE = "a recipe of a few lines does it: examples/causal_lm.py"
_RESUME = "resuming is an argument of run: fit.run(module, loader, resume='auto')"
ARGUMENTS = {
    "output_dir": Argument(setting="root_dir"),
    "num_train_epochs": Argument(setting="max_epochs"),
    "optim_args": Argument(neutral=NONE, in_file="give them as HFModule(optimizer_args={...})"),
    "optim_target_modules": Argument(neutral=NONE, in_file="give the optimizer itself: HFModule(optimizer=...)"),
    "gradient_accumulation_steps": Argument(setting="accumulate_grad_batches"),
    "max_grad_norm": Argument(setting="gradient_clip_val"),
    "label_smoothing_factor": Argument(neutral=NONE, in_file=f"override HFModule.loss; {_RECIPE}"),
    "bf16_full_eval": Argument(
        neutral=NONE,
        in_file="an evaluation has the training's precision: Fit(precision='bf16-true') converts the model",
    ),
    "fp16_full_eval": Argument(
        neutral=NONE, in_file="an evaluation has the training's precision: Fit(precision='16-true') converts the model"
    ),
    "tf32": Argument(instead="here it is matmul_precision='high'"),
    "gradient_checkpointing": Argument(setting="activation_checkpointing"),
    "use_liger_kernel": Argument(
        neutral=NONE, in_file="apply liger_kernel's function to the model, then give it to HFModule"
    ),
    "liger_kernel_config": Argument(
        neutral=NONE, in_file="apply liger_kernel's function to the model, then give it to HFModule"
    ),
    "use_cache": Argument(in_file="HFModule switches the cache off while it trains"),
    "neftune_noise_alpha": Argument(neutral=NONE, in_file=f"a hook of the embedding adds the noise; {_RECIPE}"),
    "torch_empty_cache_steps": Argument(in_file="memory is not returned within a training"),
    "auto_find_batch_size": Argument(neutral=NONE, in_file="use callbacks.find_batch_size"),
    "logging_steps": Argument(setting="log_every_n_steps"),
    "logging_first_step": Argument(in_file="the first step is always logged"),
    "log_on_each_node": Argument(True, in_file="rank 0 logs"),
    "logging_nan_inf_filter": Argument(True, in_file="values are logged as they are"),
    "include_num_input_tokens_seen": Argument(in_file="run.tokens has the number of trained tokens"),
    "log_level": Argument("passive", in_file="use Python's logging"),
    "log_level_replica": Argument("warning", in_file="use Python's logging"),
    "disable_tqdm": Argument(in_file="add callbacks.RichProgressBar for a progress bar"),
    "report_to": Argument(instead="loggers are callbacks, for example callbacks=[CSVLogger()]"),
    "run_name": Argument(in_file="give it to the logger"),
    "project": Argument("huggingface", in_file="give it to the logger"),
    "eval_steps": Argument(setting="val_every"),
    "eval_delay": Argument(
        neutral=NONE, in_file="start evaluating later with Fit(val_every=) in a second run, or leave it out"
    ),
    "prediction_loss_only": Argument(in_file="validation_step keeps no predictions"),
    "eval_on_start": Argument(neutral=NONE, in_file="call fit.validate(module, loader) before fit.run"),
    "eval_do_concat_batches": Argument(True, in_file="validation_step keeps no predictions"),
    "eval_use_gather_object": Argument(in_file="validation_step keeps no predictions"),
    "eval_accumulation_steps": Argument(in_file="validation_step keeps no predictions"),
    "include_for_metrics": Argument(neutral=NONE, in_file="compute metrics in validation_step, where the batch is"),
    "batch_eval_metrics": Argument(in_file="metrics are computed batch by batch"),
    "save_only_model": Argument(in_file="checkpoints have everything that resuming needs"),
    "save_on_each_node": Argument(
        neutral=NONE, in_file="checkpoints are one directory on a file system that all machines share"
    ),
    "enable_jit_checkpoint": Argument(in_file="SIGTERM always saves"),
    "push_to_hub": Argument(neutral=NONE, in_file="export with 'fit checkpoint export' and upload the folder"),
    "ignore_data_skip": Argument(
        neutral=NONE,
        in_file="a resumed run continues in the data where it was; Resume(path, weights_only=True) starts from the beginning",
    ),
    "restore_callback_states_from_checkpoint": Argument(in_file="callbacks' states are always restored"),
    "parallelism_config": Argument(neutral=NONE, in_file="give Fit(strategy={'name': 'mesh', ...})"),
    "dataloader_multiprocessing_context": Argument(neutral=NONE, in_file="give DataLoader(multiprocessing_context=)"),
    "remove_unused_columns": Argument(True, in_file="the collate function says which columns are in a batch"),
    "label_names": Argument(in_file="labels are in the batch"),
    "length_column_name": Argument("length", in_file="the sampler of the recipe takes the lengths"),
    "ddp_backend": Argument(in_file="follows from the device"),
    "fsdp": Argument(instead="here it is strategy={'name': 'fsdp', ...}"),
    "fsdp_config": Argument(instead="here it is strategy={'name': 'fsdp', ...}"),
    "deepspeed": Argument(instead="here it is strategy={'name': 'deepspeed', 'stage': 2, ...}"),
    "debug": Argument(neutral=NONE, in_file="Fit(detect_anomaly=True) finds where a NaN comes from"),
    "skip_memory_metrics": Argument(True, in_file="callbacks.DeviceStatsMonitor measures memory"),
    "do_train": Argument(in_file="call fit.run"),
    "do_eval": Argument(in_file="call fit.validate"),
    "do_predict": Argument(in_file="call fit.predict"),
    "resume_from_checkpoint": Argument(instead=_RESUME, in_file="give fit.run(..., resume=)"),
    "local_rank": Argument(in_file="is the launcher's"),
    # of earlier versions, and of its example scripts
    "logging_dir": Argument(setting="root_dir", in_file="the run's folder has the logs"),
    "max_train_steps": Argument(setting="max_steps"),
    "resume": Argument(instead=_RESUME),
    "group_by_length": Argument(neutral=NONE, in_file=f"it is a sampler; {_RECIPE}"),
    "past_index": Argument(neutral=NONE, in_file="keep the state in the module"),
    "mp_parameters": Argument(neutral=NONE, in_file="SageMaker's model parallelism has no counterpart"),
    "torchdynamo": Argument(neutral=NONE, in_file="use torch_compile_backend"),
    "tpu_num_cores": Argument(neutral=NONE, in_file="TPUs are not supported"),
    "include_inputs_for_metrics": Argument(
        neutral=NONE, in_file="compute metrics in validation_step, where the batch is"
    ),
    "per_gpu_train_batch_size": Argument(in_file="is per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Argument(in_file="is per_device_eval_batch_size"),
    "include_tokens_per_second": Argument(in_file="callbacks.ThroughputMonitor measures it"),
    "save_safetensors": Argument(True, in_file="checkpoints are always safetensors"),
    "overwrite_output_dir": Argument(in_file="every run has a folder of its own"),
    "ray_scope": Argument(in_file="see callbacks for hyperparameter searches"),
    "use_legacy_prediction_loop": Argument(in_file="there is one loop"),
    "use_mps_device": Argument(in_file="is accelerator='auto'"),
    "half_precision_backend": Argument(in_file="is autocast"),
    "fp16_backend": Argument(in_file="is autocast"),
    "fp16_opt_level": Argument(in_file="is Apex's"),
    "tpu_metrics_debug": Argument(in_file="is for TPUs"),
    "use_ipex": Argument(in_file="is for Intel's extension"),
    "jit_mode_eval": Argument(in_file="evaluations are not traced"),
}
"""The fields, in the order of the class. A field with ``in_file`` and without ``neutral`` is harmless: its value changes nothing here."""
SETTINGS = {name: argument.setting for name, argument in ARGUMENTS.items() if argument.setting}
OTHERWISE = {name: argument.instead for name, argument in ARGUMENTS.items() if argument.instead}
NAMED_AFTER = ("hub_", "trackio_", "push_to_hub_", "xla_")
"""Prefixes of the names of other harmless fields."""
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
