"""Public names of Lightning's classes that ours do not have: what to use instead.

``tests/config/test_lightning_names.py`` compares with Lightning itself.
"""

from __future__ import annotations

from engine.compat.records import Argument
from engine.compat.refusals import ANY

TRAINER = {
    "accelerator": Argument("auto", setting="accelerator"),
    "strategy": Argument("auto"),
    "devices": Argument("auto"),
    "num_nodes": Argument(1, setting="num_nodes"),
    "precision": Argument(setting="precision"),
    "logger": Argument(
        instead="loggers are callbacks, for example callbacks=[CSVLogger()]", in_file="a logger is one of the callbacks"
    ),
    "callbacks": Argument(in_file="list them under 'callbacks' of the file, with their arguments here"),
    "fast_dev_run": Argument(False, setting="fast_dev_run"),
    "max_epochs": Argument(),
    "min_epochs": Argument(setting="min_epochs"),
    "max_steps": Argument(-1),
    "min_steps": Argument(setting="min_steps"),
    "max_time": Argument(),
    "limit_train_batches": Argument(setting="limit_train_batches"),
    "limit_val_batches": Argument(setting="limit_val_batches"),
    "limit_test_batches": Argument(setting="limit_test_batches"),
    "limit_predict_batches": Argument(setting="limit_predict_batches"),
    "overfit_batches": Argument(0.0, setting="overfit_batches"),
    "val_check_interval": Argument(
        instead="here it is val_every: 0.25 of an epoch, '500 steps' of the optimizer (a plain number counts these too), '10 min'"
    ),
    "check_val_every_n_epoch": Argument(
        1, instead="here it is val_every='1 epochs' (a plain number counts optimizer steps)"
    ),
    "num_sanity_val_steps": Argument(setting="num_sanity_val_steps"),
    "log_every_n_steps": Argument(setting="log_every_n_steps"),
    "enable_checkpointing": Argument(
        instead="a callback writes checkpoints: callbacks=[ModelCheckpoint()]",
        in_file="checkpoints are saved by the callback ModelCheckpoint",
    ),
    "enable_progress_bar": Argument(
        instead="a progress bar is a callback: callbacks=[RichProgressBar()]",
        in_file="a progress bar is one of the callbacks",
    ),
    "enable_model_summary": Argument(
        instead="a summary is a callback: callbacks=[ModelSummary()]", in_file="a summary is the callback ModelSummary"
    ),
    "accumulate_grad_batches": Argument(1, setting="accumulate_grad_batches"),
    "gradient_clip_val": Argument(setting="gradient_clip_val"),
    "gradient_clip_algorithm": Argument(setting="gradient_clip_algorithm"),
    "deterministic": Argument(setting="deterministic"),
    "benchmark": Argument(setting="benchmark"),
    "inference_mode": Argument(
        True,
        instead="evaluation runs under torch.no_grad(), so that its outputs can be used in training",
        in_file="evaluation runs without gradients",
    ),
    "use_distributed_sampler": Argument(
        True,
        instead="samples are divided among the ranks for any sampler; a loader or sampler with presharded = True is each rank's own",
        in_file="samples are divided among the ranks for any sampler",
    ),
    "profiler": Argument(
        instead="profilers are callbacks: callbacks=[Profiler()] or [SimpleProfiler()]; Result.times has the seconds",
        in_file="a profiler is one of the callbacks",
    ),
    "detect_anomaly": Argument(False, setting="detect_anomaly"),
    "barebones": Argument(
        False, instead="there is nothing to switch off: without callbacks a run logs one line per interval"
    ),
    "plugins": Argument(
        instead="a precision is Fit(precision=...), a strategy Fit(strategy=...); processes are detected from the environment (fit env)"
    ),
    "sync_batchnorm": Argument(False, setting="sync_batchnorm"),
    "reload_dataloaders_every_n_epochs": Argument(
        0,
        neutral=(0,),
        instead="a dataset may read other files from set_epoch or in each pass; a loader is created once per run",
    ),
    "default_root_dir": Argument(),
    "enable_autolog_hparams": Argument(
        True, neutral=(True,), instead="hyperparameters are logged by the logger callbacks that are given"
    ),
    "model_registry": Argument(neutral=(None,), instead="use a callback with on_save_checkpoint"),
}
"""The arguments of ``Trainer``, in its order."""

_KEYS = "hyperparameters are part of every checkpoint (save_hyperparameters, load_from_checkpoint)"
MODULE = {
    "CHECKPOINT_HYPER_PARAMS_KEY": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_NAME": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_TYPE": _KEYS,
    "allow_zero_length_dataloader_with_multiple_devices": "a rank without data runs repeated batches that do not count",
    "device_mesh": "strategy='mesh' or a MeshParallel object has the mesh",
    "fabric": "your own loop uses engine.Engine",
    "remove_ignored_hparams": "use save_hyperparameters(ignore=...)",
    "to_tensorrt": "use torch_tensorrt.compile(module)",
}
DATA = {
    "CHECKPOINT_HYPER_PARAMS_KEY": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_NAME": _KEYS,
    "CHECKPOINT_HYPER_PARAMS_TYPE": _KEYS,
    "allow_zero_length_dataloader_with_multiple_devices": "a rank without data runs repeated batches that do not count",
    "name": "define it yourself where you need it",
    "remove_ignored_hparams": "use save_hyperparameters(ignore=...)",
}
REPLACED = {
    "configure_sharded_model": "configure_model",
    "on_batch_end": "on_train_batch_end",
    "on_batch_start": "on_train_batch_start",
    "on_epoch_end": "on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_epoch_start": "on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_init_end": "__init__",
    "on_init_start": "__init__",
    "on_keyboard_interrupt": "on_exception",
    "on_post_move_to_device": "on_fit_start",
    "on_predict_dataloader": "on_predict_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_pretrain_routine_start": "on_fit_start",
    "on_test_dataloader": "on_test_start",
    "on_train_dataloader": "on_train_start",
    "on_val_dataloader": "on_validation_start",
    "predict_epoch_end": "on_predict_epoch_end",
    "tbptt_split_batch": "manual optimization (automatic_optimization = False) over the chunks",
    "test_epoch_end": "on_test_epoch_end, with what test_step kept in an attribute",
    "test_step_end": "test_step",
    "training_epoch_end": "on_train_epoch_end, with what training_step kept in an attribute",
    "training_step_end": "training_step",
    "validation_epoch_end": "on_validation_epoch_end, with what validation_step kept in an attribute",
    "validation_step_end": "validation_step",
}
"""Hooks of earlier versions that are never called; a class that defines one is refused."""

_WEIGHTS = (
    "weights are stored apart from these entries, in parts: override state_dict() to leave some out, and set strict_loading = False for those that "
    "differ; engine.Resume and load_from_checkpoint have strict=False"
)
_STORED = "the run stores and restores it"
CHECKPOINT = {
    "state_dict": _WEIGHTS,
    "optimizer_states": f"{_STORED}; self.optimizers() has the optimizers",
    "lr_schedulers": f"{_STORED}; self.lr_schedulers() has the schedulers",
    "callbacks": f"{_STORED}; a callback's state is its state_dict()",
    "loops": _STORED,
    "pytorch-lightning_version": "this is not a checkpoint of Lightning",
}
"""Entries that Lightning's checkpoints have and these do not: why, and what to do."""

_LOOPS = "the loops are functions: override the module's or a callback's hooks"
_LOGGERS = "give Lightning's own, or a Logger with log_metrics"
CLASSES = {
    "Accelerator": "give Trainer(accelerator='cpu' or 'gpu')",
    "CPUAccelerator": "give Trainer(accelerator='cpu')",
    "AdvancedProfiler": "use SimpleProfiler, PyTorchProfiler, or python -m cProfile",
    "BatchSizeFinder": "call callbacks.find_batch_size(module, loader), and set what it finds",
    "LearningRateFinder": "call callbacks.find_lr(module, loader), and set what it finds",
    "Tuner": "call callbacks.find_lr(module, loader) or find_batch_size, and set what it finds",
    "ModelPruning": "use callbacks.Pruning(...)",
    "OnExceptionCheckpoint": "ModelCheckpoint saves the last complete step after an error",
    "SpikeDetection": "use callbacks.SpikeGuard()",
    "ThroughputMonitor": "use callbacks.ThroughputMonitor()",
    "Timer": "give Trainer(max_time=...)",
    **dict.fromkeys(("CometLogger", "NeptuneLogger"), _LOGGERS),
    "DeepSpeedStrategy": "give engine.DeepSpeed(stage=2, ...), or its name, 'deepspeed_stage_2'",
    "ModelParallelStrategy": "give engine.MeshParallel(tp=..., dp_shard=...)",
    **dict.fromkeys(("XLAStrategy", "SingleDeviceXLAStrategy"), "XLA devices are not supported"),
    **dict.fromkeys(("_EvaluationLoop", "_FitLoop", "_PredictionLoop"), _LOOPS),
}
"""Classes without a counterpart of the same kind."""

_TALK = (ANY, "")
OF_CALLBACKS = {
    "device": (None, "averages are on the device of the weights"),
    "initial_denom_lr": (10.0, "give backbone_initial_ratio_lr"),
    **dict.fromkeys(("theme", "console_kwargs"), (None, "give callbacks.RichProgressBar(console=...)")),
    **dict.fromkeys(("verbose", "rounding", "refresh_rate", "leave", "process_position", "log_rank_zero_only"), _TALK),
}
"""Arguments of callbacks that have no counterpart: the value that asks for nothing, and what to do instead of another."""
OF_LOGGERS = {
    "prefix": ("", "put it into the names that you log"),
    "log_graph": (False, "the graph is not written"),
    "sub_dir": (None, "put it into save_dir"),
    "log_model": (False, "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"),
    "experiment": (None, "the logger makes the run: use logger.experiment"),
    **dict.fromkeys(("id", "run_id"), (None, "a resumed run continues by itself")),
    **dict.fromkeys(("default_hp_metric", "flush_logs_every_n_steps", "synchronous"), (ANY, "")),
}
"""The same of loggers."""
MODULES = {
    "callbacks": """callbacks profilers serve serve.servable_module serve.servable_module_validator callbacks.callback callbacks.checkpoint
        callbacks.device_stats_monitor callbacks.early_stopping callbacks.finetuning callbacks.gradient_accumulation_scheduler
        callbacks.lambda_function callbacks.lr_finder callbacks.lr_monitor callbacks.model_checkpoint callbacks.model_summary
        callbacks.batch_size_finder callbacks.prediction_writer callbacks.progress callbacks.progress.rich_progress
        callbacks.progress.tqdm_progress callbacks.progress.progress_bar callbacks.pruning callbacks.stochastic_weight_avg callbacks.timer
        callbacks.weight_averaging callbacks.on_exception_checkpoint callbacks.rich_model_summary""",
    "core": "core core.module core.datamodule core.mixins core.hooks core.optimizer core.saving",
    "loggers": "loggers loggers.logger loggers.base loggers.csv_logs loggers.tensorboard loggers.wandb loggers.mlflow",
    "strategies": "strategies strategies.ddp strategies.fsdp strategies.deepspeed strategies.strategy strategies.model_parallel",
    "trainer": "trainer trainer.trainer trainer.connectors trainer.connectors.accelerator_connector",
    "utilities": """utilities utilities.types utilities.rank_zero utilities.exceptions utilities.combined_loader utilities.seed utilities.enums
        utilities.model_helpers utilities.parsing utilities.grads utilities.distributed utilities.model_summary utilities.apply_func
        utilities.memory trainer.states trainer.connectors.logger_connector.result tuner tuner.tuning accelerators accelerators.accelerator
        loops loops.evaluation_loop loops.fit_loop loops.prediction_loop plugins plugins.io plugins.io.torch_io fabric fabric.utilities
        fabric.utilities.cloud_io fabric.utilities.types fabric.utilities.seed fabric.utilities.rank_zero""",
    "cli": "cli",
}
"""Lightning's modules, by the module of ``engine.interop.lightning`` that has their content."""
