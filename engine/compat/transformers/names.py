"""Names of ``transformers.Trainer`` and its parts, and what to use instead: the rows of ``from_transformers.md``, as ``fit migrate`` prints them.

``tests/compat/migrate/test_transformers_trainer.py`` compares with transformers itself.
"""

from __future__ import annotations

from engine.compat.transformers.arguments import ARGUMENTS, NAMED_AFTER

_TRAINER = (
    "Fit(...).run(HFModule(model, ...), loader, val_loader) trains; engine.huggingface has HFModule. Or the Trainer stays, on our Accelerator: "
    "engine.interop.accelerate.install() in the script's first line"
)
_ARGUMENTS = (
    "'fit config --from-training-args FILE' writes the settings, and the lines of code for HFModule and the DataLoader"
)
_CALLBACK = "subclass engine.Callback; its events get (run, module, ...)"
_LOGGER = "loggers are callbacks, for example callbacks=[CSVLogger()]"
_GENERATE = "HFModule(generation={...}) lets fit.predict generate; in validation_step call module.generate(...)"
CLASSES = {
    "Trainer": _TRAINER,
    "Seq2SeqTrainer": f"{_TRAINER}; {_GENERATE}",
    "TrainingArguments": _ARGUMENTS,
    "Seq2SeqTrainingArguments": f"{_ARGUMENTS}; {_GENERATE}",
    "TrainerCallback": _CALLBACK,
    "TrainerControl": "run.stop() ends a training; saving and validating have intervals, ModelCheckpoint(every=) and Fit(val_every=)",
    "TrainerState": "run.state has the counters: run.step, run.epoch",
    "EarlyStoppingCallback": "use callbacks.EarlyStopping('val/loss', patience=...)",
    "DefaultFlowCallback": "intervals are arguments: Fit(log_every_n_steps=, val_every=), ModelCheckpoint(every=)",
    "PrinterCallback": "without a logger Fit logs a line an interval; callbacks.RichProgressBar shows progress",
    "ProgressCallback": "use callbacks.RichProgressBar or TQDMProgressBar",
    "NotebookProgressCallback": "use callbacks.RichProgressBar or TQDMProgressBar",
    "HfArgumentParser": "fit run builds module, data and settings from a file and the command line",
    "get_last_checkpoint": "fit.run(..., resume='last') continues from the newest checkpoint",
    "CallbackHandler": _CALLBACK,
    "CodeCarbonCallback": _CALLBACK,
    "TensorBoardCallback": "use callbacks.TensorBoardLogger()",
    "WandbCallback": "use callbacks.WandbLogger()",
    "MLflowCallback": "use callbacks.MLflowLogger()",
    "TrackioCallback": "use callbacks.TrackioLogger()",
}
"""Classes and functions of transformers that belong to its ``Trainer`` -> what to use instead."""
SUFFIXES = {"Trainer": _TRAINER, "TrainingArguments": _ARGUMENTS, "Callback": _LOGGER}
"""Endings of the names of other classes of this kind -> what to use instead; the first that fits counts."""
HEIRS = ("trl", "sentence_transformers", "setfit")
"""Packages whose classes with these endings inherit from those of transformers."""

_LOADER = "give fit.run the DataLoader itself, with this sampler or these arguments"
_OPTIMIZER = "HFModule(optimizer=, lr=, scheduler=), or override HFModule.configure_optimizers"
_STEP = "override HFModule.training_step"
_EVALUATION = "override HFModule.validation_step, and log values or torchmetrics objects in it"
_LOG = "self.log(name, value) in the module; a callback's on_log sees all values"
_SAVE = "callbacks.ModelCheckpoint(every=) saves; 'fit checkpoint export' writes the folder for from_pretrained"
_EXPORT = (
    "'fit checkpoint export', or with fit.gathered(module): module.model.save_pretrained(folder) on the main process"
)
_ATTACH = "give Fit(callbacks=[...])"
_HUB = "export with 'fit checkpoint export' and upload the folder"
_RANK = "use fit.is_main_process"
_LOSS = "override HFModule.loss(outputs, batch)"
_PLACED = "the run moves batches and model to the device"
METHODS = {
    "train": "fit.run(module, loader, val_loader); resume_from_checkpoint= is resume=",
    "evaluate": "fit.validate(module, loader), or val_loader of fit.run",
    "predict": "fit.predict(module, loader)",
    "hyperparameter_search": "a search of your own calls Fit(...).run; callbacks.find_lr finds a learning rate",
    **dict.fromkeys(("save_model", "_save"), _EXPORT),
    **dict.fromkeys(("save_state", "_save_checkpoint"), _SAVE),
    **dict.fromkeys(("log", "log_metrics", "save_metrics", "metrics_format"), _LOG),
    **dict.fromkeys(("push_to_hub", "create_model_card", "init_hf_repo"), _HUB),
    **dict.fromkeys(("add_callback", "remove_callback", "pop_callback", "callback_handler"), _ATTACH),
    **dict.fromkeys(("is_world_process_zero", "is_local_process_zero"), _RANK),
    "compute_loss": _LOSS,
    "training_step": _STEP,
    "_inner_training_loop": "write the loop with Engine, or use the hooks of TrainModule and Callback",
    **dict.fromkeys(("prediction_step", "evaluation_loop", "prediction_loop"), _EVALUATION),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"), _LOADER),
    **dict.fromkeys(("_get_train_sampler", "_get_eval_sampler", "num_examples", "_remove_unused_columns"), _LOADER),
    **dict.fromkeys(
        ("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"),
        _OPTIMIZER,
    ),
    **dict.fromkeys(("optimizer", "lr_scheduler"), "in a callback run.optimizers and run.schedulers"),
    **dict.fromkeys(("get_learning_rates", "get_optimizer_group"), "in a callback run.optimizers"),
    "get_decay_parameter_names": "HFModule(weight_decay=) leaves the same parameters out, as engine.huggingface.parameter_groups",
    "get_num_trainable_parameters": "callbacks.ModelSummary counts them",
    **dict.fromkeys(("floating_point_ops", "store_flos"), "callbacks.ThroughputMonitor measures the speed"),
    **dict.fromkeys(("_prepare_inputs", "_prepare_input", "_move_model_to_device", "_wrap_model"), _PLACED),
    **dict.fromkeys(
        ("compute_loss_context_manager", "autocast_smart_context_manager"), "Fit(precision='bf16-mixed') is autocast"
    ),
    **dict.fromkeys(("get_batch_samples", "loss_is_scaled_for_ga"), "HFModule(count=) gives the weight of a loss"),
    "create_accelerator_and_postprocess": "Fit(...) has the settings of the accelerator",
    "call_model_init": "build the model before HFModule(model), or with HFModule.from_pretrained",
    **dict.fromkeys(("get_tp_size", "get_cp_size", "get_sp_size"), "in a callback run.engine.strategy"),
    **dict.fromkeys(("get_total_train_batch_size", "set_initial_training_values"), "Fit(global_batch_size=) fixes it"),
    "load_generation_config": _GENERATE,
    "end": "a run ends by itself",
    "state": "run.state in a callback, the Result of fit.run after it",
    "args": "fit.settings",
    "control": "run.stop() ends a training",
    "model": "module.model of the HFModule",
    "model_wrapped": "module.model of the HFModule",
    "accelerator": "in a callback run.engine",
    **dict.fromkeys(("processing_class", "tokenizer"), "HFModule(tokenizer=)"),
    **dict.fromkeys(("train_dataset", "eval_dataset", "data_collator"), "the DataLoader that you gave has it"),
    "compute_metrics": _EVALUATION,
    "label_smoother": _LOSS,
}
"""Methods and attributes of ``Trainer``, called or overridden -> what to use instead."""
TRAINER_ARGUMENTS = {
    "model": "HFModule(model)",
    "args": _ARGUMENTS,
    "data_collator": "DataLoader(..., collate_fn=)",
    "train_dataset": "fit.run(module, DataLoader(train_dataset, ...))",
    "eval_dataset": "fit.run(module, loader, DataLoader(eval_dataset, ...)); several: a dict of loaders",
    **dict.fromkeys(("processing_class", "tokenizer"), "HFModule(tokenizer=)"),
    "model_init": METHODS["call_model_init"],
    "compute_loss_func": _LOSS,
    "compute_metrics": _EVALUATION,
    "callbacks": "Fit(callbacks=[...]), of engine.Callback",
    **dict.fromkeys(("optimizers", "optimizer_cls_and_kwargs"), _OPTIMIZER),
    "preprocess_logits_for_metrics": _EVALUATION,
}
"""Arguments of ``Trainer`` -> where they go."""
EVENTS = {
    "on_init_end": "define __init__ or setup(self, run, module, stage)",
    "on_train_begin": "define on_train_start(self, run, module)",
    "on_train_end": "define on_train_end(self, run, module)",
    "on_epoch_begin": "define on_train_epoch_start(self, run, module)",
    "on_epoch_end": "define on_train_epoch_end(self, run, module)",
    "on_step_begin": "define on_train_batch_start(self, run, module, batch, batch_idx)",
    "on_substep_end": "define on_train_batch_end(self, run, module, outputs, batch, batch_idx), which comes after each micro-batch",
    "on_step_end": "define on_train_batch_end(self, run, module, outputs, batch, batch_idx), which comes after each micro-batch",
    "on_pre_optimizer_step": "define on_before_optimizer_step(self, run, module, optimizer)",
    "on_optimizer_step": "define on_before_zero_grad(self, run, module, optimizer)",
    "on_evaluate": "define on_validation_end(self, run, module)",
    "on_prediction_step": "define on_validation_batch_end(self, run, module, outputs, batch, batch_idx, dataloader_idx)",
    "on_predict": "define on_predict_end(self, run, module)",
    "on_save": "define on_checkpoint_saved(self, run, module, path, score)",
    "on_log": "define on_log(self, run, module, metrics, step)",
    "on_push_begin": _HUB,
}
"""Events of ``TrainerCallback`` -> the events of ``engine.Callback``."""
CONTROL = {
    "should_training_stop": "call run.stop(reason)",
    "should_epoch_stop": "return -1 from on_train_batch_start",
    "should_save": "callbacks.ModelCheckpoint(every=) saves, or call run.save_checkpoint()",
    "should_evaluate": "Fit(val_every=) is the interval",
    "should_log": "Fit(log_every_n_steps=) is the interval",
}
"""Attributes of ``TrainerControl`` -> what to use instead."""
STATE = {
    "global_step": "run.step",
    "epoch": "run.epoch, which counts whole epochs",
    "max_steps": "run.max_steps",
    "num_train_epochs": "run.max_epochs",
    "log_history": "run.metrics has the newest values; CSVLogger and JSONLLogger write all",
    **dict.fromkeys(("best_metric", "best_model_checkpoint", "best_global_step"), "callbacks.ModelCheckpoint knows it"),
    "num_input_tokens_seen": "run.tokens",
    "logging_steps": "run.settings.log_every_n_steps",
    "eval_steps": "run.val_every",
    **dict.fromkeys(("save_steps", "stateful_callbacks"), "callbacks.ModelCheckpoint has it"),
    "train_batch_size": "the DataLoader has it",
    "total_flos": METHODS["floating_point_ops"],
    **dict.fromkeys(("is_hyper_param_search", "trial_name", "trial_params"), METHODS["hyperparameter_search"]),
    **dict.fromkeys(("is_world_process_zero", "is_local_process_zero"), "run.is_main_process"),
}
"""Attributes of ``TrainerState`` -> what to use instead."""
_HF_MODULE = (
    "an argument of HFModule: optimizer=, lr=, weight_decay=, scheduler=, scheduler_args=, warmup=, optimizer_args="
)
_DATA_LOADER = "an argument of your DataLoader"
_PRECISION = "here it is Fit(precision='bf16-mixed' or '16-mixed')"
_CHECKPOINTS = "callbacks.ModelCheckpoint(every=, save_top_k=, monitor=, mode=)"
_CONVERTED = {
    "per_device_train_batch_size": "DataLoader(batch_size=)",
    "per_device_eval_batch_size": "the batch_size of the validation's DataLoader",
    "max_steps": "Fit(max_steps=)",
    "seed": "Fit(seed=)",
    "data_seed": "the order follows from Fit(seed=)",
    **dict.fromkeys(("bf16", "fp16"), _PRECISION),
    **dict.fromkeys(("use_cpu", "no_cuda"), "Fit(accelerator='cpu')"),
    "full_determinism": "Fit(deterministic=True)",
    "accelerator_config": "each sample is used once, by the rank whose turn it is",
    "average_tokens_across_devices": "losses are always means over the tokens of all ranks",
    "train_sampling_strategy": "DataLoader(shuffle=), or a sampler",
    "logging_strategy": "Fit(log_every_n_steps=)",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "Fit(val_every=)"),
    **dict.fromkeys(("save_strategy", "save_steps", "save_total_limit"), _CHECKPOINTS),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), _CHECKPOINTS),
    "load_best_model_at_end": "Fit(reload_best=True) and ModelCheckpoint(monitor='val/loss')",
    "activation_checkpointing": "Fit(activation_checkpointing='full')",
    **dict.fromkeys(
        ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), "Fit(activation_checkpointing='full')"
    ),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "Fit(compile=)"),
    "ddp_timeout": "Fit(timeout=)",
    **dict.fromkeys(("sortish_sampler",), _DATA_LOADER),
    **dict.fromkeys(
        ("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"), _GENERATE
    ),
    **dict.fromkeys(
        ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim"),
        _HF_MODULE,
    ),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), _HF_MODULE),
}
"""Fields of ``TrainingArguments`` whose values the conversion of a file knows -> where they go."""
_PREFIXES = {
    "dataloader_": _DATA_LOADER,
    "ddp_": "Fit(strategy={'name': 'ddp', ...})",
    "fsdp": "Fit(strategy={'name': 'fsdp', ...})",
}


def training_argument(name: str) -> str | None:
    """Say where a field of ``TrainingArguments`` goes. A field without an effect here gets an empty string, an unknown field ``None``."""
    if name in _CONVERTED:
        return _CONVERTED[name]
    if name in ARGUMENTS:
        argument = ARGUMENTS[name]
        # A field with a note and without refused values is harmless.
        return argument.answer or (argument.in_file if argument.neutral else "")
    if name.startswith(NAMED_AFTER):
        return ""
    return next((sentence for prefix, sentence in _PREFIXES.items() if name.startswith(prefix)), None)


def sentence_for(name: str) -> str:
    """Say what to use instead of a class or function of transformers; empty if it does not belong to its ``Trainer``."""
    if name in CLASSES:
        return CLASSES[name]
    return next((sentence for suffix, sentence in SUFFIXES.items() if name.endswith(suffix)), "")
