"""Names of Lightning and Fabric that ours do not have: what to use instead.

``tests/config/test_lightning_names.py`` compares with Lightning itself.
"""

from __future__ import annotations

from dataclasses import fields

from engine.compat.records import Argument, called
from engine.compat.refusals import ANY
from engine.config.settings import Settings

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

SETTINGS = {"gpus": "devices", "num_processes": "devices", "default_root_dir": "root_dir"}
"""Arguments of ``Trainer``, today's and earlier ones, that are a setting under another name."""
OTHERWISE = {
    **{name: argument.instead for name, argument in TRAINER.items() if argument.instead},
    "replace_sampler_ddp": TRAINER["use_distributed_sampler"].instead,
    "loggers": TRAINER["logger"].instead,
    "checkpoint_callback": TRAINER["enable_checkpointing"].instead,
    **dict.fromkeys(
        ("ckpt_path", "resume_from_checkpoint"),
        "resuming is an argument of run: fit.run(module, loader, resume='auto')",
    ),
}
"""What to do instead of arguments of ``Trainer`` and its calls that are no setting."""
_NO_PICKLE = "nothing in a checkpoint is unpickled, so this is always true: leave it out"
_EVALUATION = {
    "model": called("module"),
    **dict.fromkeys(
        ("dataloader", "dataloaders", "loader", "test_dataloaders", "val_dataloaders", "val_loaders"),
        called("loaders"),
    ),
    **dict.fromkeys(
        ("ckpt_path", "resume", "resume_from_checkpoint"), "here it is checkpoint='best', 'last' or a path"
    ),
    "verbose": "the metrics are returned: print them",
    "weights_only": _NO_PICKLE,
}
_OF_LOGGERS = {
    "prefix": "put it into the names that you log",
    **dict.fromkeys(
        ("log_model", "checkpoint_name"),
        "log checkpoints in a callback's on_checkpoint_saved(run, module, path, score): module.log_artifact(name, path)",
    ),
}
CALLS: dict[str, dict[str, str]] = {
    "Fit.run": {
        "model": called("module"),
        **dict.fromkeys(
            ("dataloader", "dataloaders", "loader", "train_dataloader", "train_dataloaders"), called("train_loader")
        ),
        **dict.fromkeys(
            ("eval_dataloader", "val_dataloader", "val_dataloaders", "val_loader", "valid_loader"),
            called("val_loaders"),
        ),
        **dict.fromkeys(
            ("checkpoint", "ckpt_path", "resume_from_checkpoint"), "here it is resume='last', 'auto', 'best' or a path"
        ),
        "weights_only": _NO_PICKLE,
    },
    "Fit.validate": _EVALUATION,
    "Fit.test": _EVALUATION,
    "Fit.predict": _EVALUATION,
    "TrainModule.log": {},  # all of them are ours; here for the nearest name of another one
    "TrainModule.log_dict": {"metric_attribute": "torchmetrics objects are recognized: leave it out"},
    "Engine.__init__": {
        **dict.fromkeys(
            ("devices", "num_nodes", "gpus"),
            "the launcher starts the processes: fit launch, torchrun, or engine.launch",
        ),
        **dict.fromkeys(
            ("callbacks", "logger", "loggers"), "your own loop calls and logs directly; engine.Fit has callbacks"
        ),
        "root_dir": "give a path to save_state and load_state",
        "gradient_clip_val": "call engine.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
    },
    "ModelCheckpoint.__init__": {
        "every_n_epochs": "here it is every='1 epochs'",
        "every_n_train_steps": "here it is every='500 steps'",
        "train_time_interval": "here it is every='10 min'",
        "save_on_train_epoch_end": "with monitor a checkpoint waits for the next validation, without it is saved when due",
        "save_on_exception": "the last complete step is saved after an error: leave it out",
        "save_weights_only": "checkpoints are complete; engine.Resume can load only the weights, and 'fit checkpoint' exports the weights",
        "auto_insert_metric_name": "write the names into filename: 'epoch={epoch}-loss={val_loss:.3f}'",
        "enable_version_counter": "a second checkpoint of one name gets '-step=N': leave it out",
        "verbose": "Result.last_checkpoint and 'fit checkpoint list' name what was saved: leave it out",
        "save_best_only": "here it is save_top_k=1, save_last=False",
    },
    "EarlyStopping.__init__": {
        **dict.fromkeys(
            ("verbose", "log_rank_zero_only"), "Result.stop_reason says why a run has stopped: leave it out"
        ),
        "check_on_train_epoch_end": "it checks after each validation, or without validation after each epoch: leave it out",
    },
    "RichProgressBar.__init__": {
        **dict.fromkeys(("theme", "console_kwargs"), "give a rich console: console=Console(...)"),
        "leave": "each epoch's last line stays: leave it out",
    },
    "TQDMProgressBar.__init__": {
        "process_position": "bars of others scroll above it: leave it out",
        "leave": "each epoch's last line stays: leave it out",
    },
    "CSVLogger.__init__": {
        "save_dir": called("dir"),
        "version": "each run has its own folder: leave it out",
        "prefix": "the columns have the names of the values: put it into the names that you log",
        "flush_logs_every_n_steps": "rows are written when values are logged; see Fit(log_every_n_steps=...)",
    },
    "TensorBoardLogger.__init__": _OF_LOGGERS
    | {
        "save_dir": called("dir"),
        "log_dir": called("dir"),
        **dict.fromkeys(("name", "version", "sub_dir"), "each run has its own folder in dir: leave it out"),
        "log_graph": "the graph is not written: leave it out",
        "default_hp_metric": "no metric is written with the hyperparameters: leave it out",
    },
    "MLflowLogger.__init__": _OF_LOGGERS
    | {
        "save_dir": "give tracking_uri='sqlite:///path/mlflow.db', and artifact_location for the files",
        "run_id": "a resumed run continues the run in MLflow by itself: leave it out",
        "synchronous": "values are always sent by a thread: leave it out",
    },
}
"""Arguments of Lightning's and Fabric's calls, by our call: what to do instead."""
_RESULT = "use the Result that run(...) returns, or the list that validate(...) and test(...) return"


_REFERENCE = "keep a reference to the object that you gave"


_IN_A_RUN = "in a callback or a module, the run knows it: run.rank, run.local_rank, run.world_size, run.device"


OF_SETTINGS = {each.name: f"use settings.{each.name}" for each in fields(Settings)}


_OF_TRAINERS = {
    **OF_SETTINGS,
    "is_global_zero": "use is_main_process",
    **dict.fromkeys(
        ("checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback", "early_stopping_callbacks"),
        _REFERENCE,
    ),
    **dict.fromkeys(("logger", "loggers", "profiler", "progress_bar_callback"), _REFERENCE),
    **dict.fromkeys(("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders"), _REFERENCE),
    "default_root_dir": "use settings.root_dir",
    "precision_plugin": "use settings.precision",
    "num_devices": "use settings.devices, and run.world_size in a callback",
}


_OF_RUN = ("callbacks", "gc_every_n_steps", "loggers", "max_epochs", "max_steps", "val_every")
"""What a run has under the same name."""
ATTRIBUTES: dict[str, dict[str, str]] = {
    "Fit": {
        **_OF_TRAINERS,
        **dict.fromkeys(("fit", "train"), "train with run(module, train_loader, val_loaders)"),
        **dict.fromkeys(("eval", "evaluate"), "use validate(module, loaders) or test(module, loaders)"),
        "tune": "callbacks.find_lr(module, loader) finds a learning rate, callbacks.find_batch_size a batch size",
        **dict.fromkeys(("callback_metrics", "logged_metrics", "progress_bar_metrics"), _RESULT),
        **dict.fromkeys(("current_epoch", "global_step", "interrupted"), _RESULT),
        "log_dir": "use Result.folder",
        **dict.fromkeys(("model", "lightning_module"), "the module that you gave to run has the trained weights"),
        **dict.fromkeys(("optimizers", "lr_scheduler_configs"), "in a callback use run.optimizers and run.schedulers"),
        **dict.fromkeys(("global_rank", "local_rank", "world_size"), _IN_A_RUN),
        **dict.fromkeys(
            ("state", "training", "validating", "testing", "predicting", "sanity_checking"),
            "in a callback use run.stage",
        ),
        "save_checkpoint": "give callbacks=[ModelCheckpoint()], or call run.save_checkpoint() in a callback",
        "should_stop": "in a callback call run.stop(reason)",
        "datamodule": "in a callback use run.datamodule",
        "print": "use print under: if fit.is_main_process",
    },
    "Run": {
        **{name: said for name, said in _OF_TRAINERS.items() if name not in _OF_RUN},
        "current_epoch": "use epoch",
        "global_step": "use step",
        "global_rank": "use rank",
        "logger": "use loggers",
        "should_stop": "call stop(reason)",
        **dict.fromkeys(("callback_metrics", "logged_metrics"), "use metrics"),
        "progress_bar_metrics": "use progress",
        **dict.fromkeys(("model", "lightning_module"), "use module"),
        "lr_scheduler_configs": "use schedulers",
        "log_dir": "use folder",
        "ckpt_path": "resuming is an argument of Fit.run(resume=...)",
        "sanity_checking": "use stage == 'sanity'",
        "training": "use stage == 'fit'",
        "validating": "use stage == 'validate'",
        "testing": "use stage == 'test'",
        "predicting": "use stage == 'predict'",
        "num_training_batches": "use num_train_batches",
        **dict.fromkeys(("num_val_batches", "num_test_batches", "num_predict_batches"), "use num_eval_batches"),
        "train_dataloader": "use train_loader",
        "print": "use print under: if run.is_main_process",
    },
    "Engine": {
        **dict.fromkeys(
            ("setup", "setup_module", "setup_optimizers", "setup_dataloaders"), "use prepare(model, optimizer, loader)"
        ),
        "launch": "the launcher starts the processes: fit launch, torchrun, or engine.launch",
        "accelerator": "use device",
        "call": "your own loop makes the calls; engine.Fit has callbacks",
        "run": "write your own loop, or use engine.Fit",
        "all_gather": "use gather(tree), or gather_for_metrics for objects",
        "all_reduce": "use reduce(tree, 'mean')",
        "barrier": "use wait_for_everyone()",
        "rank_zero_first": "use main_process_first()",
        "is_global_zero": "use is_main_process",
        "global_rank": "use process_index",
        "local_rank": "use local_process_index",
        "world_size": "use num_processes",
        "node_rank": "use process_index // the processes of a machine",
        "clip_gradients": "use clip_grad_norm_ or clip_grad_value_",
        "no_backward_sync": "use no_sync(model)",
        "save": "use save_state(directory), or torch.save under: if engine.is_main_process",
        **dict.fromkeys(("load", "load_raw"), "use load_state(directory)"),
        "seed_everything": "use engine.seed_everything of the package",
        "to_device": "use tensor.to(engine.device)",
        **dict.fromkeys(("init_module", "init_tensor", "sharded_model"), "build it in a block: with engine.device"),
        **dict.fromkeys(("log", "log_dict", "logger", "loggers"), "an Engine has no loggers: call your own"),
    },
}
"""Attributes of ``Trainer`` (``"Fit"``, ``"Run"``) and of Fabric (``"Engine"``), by our class: what to use instead."""
_LOOPS = "the loops are functions without a state of their own: counters are in self.run.state"
VIEW = {
    **dict.fromkeys(
        ("fit", "validate", "test", "predict"), "a run trains and evaluates through the Fit that started it"
    ),
    "accelerator": "use trainer.strategy.root_device, or self.device",
    "barebones": "there is nothing to switch off",
    "distributed_sampler_kwargs": "use trainer.world_size and trainer.global_rank",
    "enable_validation": "use trainer.val_dataloaders",
    **dict.fromkeys(("validate_loop", "test_loop", "predict_loop"), _LOOPS),
    "init_module": "build parts of the model in configure_model",
    "max_time": "use self.run.settings.max_time",
    **dict.fromkeys(("precision_plugin", "scaler"), "use trainer.precision, and self.run.engine"),
    "profiler": "use torch.profiler.record_function(name): callbacks=[Profiler()] shows it",
    "reload_dataloaders_every_n_epochs": "a dataset may read other files from set_epoch or in each pass",
}
"""Names of Lightning's ``Trainer`` that a view does not have: what to use."""
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

_SAVES = (
    "on_checkpoint_saved(self, run, module, path, score) comes after each save, on_checkpoint_removed(self, run, module, path) after each removal; "
    "trainer.save_checkpoint(path) saves at any time"
)
OF_CHECKPOINTS = dict.fromkeys(
    (
        *("_save_checkpoint", "_save_topk_checkpoint", "_save_last_checkpoint", "_save_monitor_checkpoint"),
        *("_save_none_monitor_checkpoint", "_remove_checkpoint"),
    ),
    _SAVES,
)
"""Methods that subclasses of Lightning's ``ModelCheckpoint`` override and that are not called here: what to use instead."""
OF_STRATEGIES = {
    "setup_optimizers": "a run has one set of optimizers: give parameters that are trained later to optimizer.add_param_group, as "
    "callbacks.BaseFinetuning does, or freeze them with requires_grad_(False) until then"
}
"""Attributes of ``trainer.strategy`` that a view of it does not have: what to use instead."""

_LOOP_CLASSES = "the loops are functions: override the module's or a callback's hooks"
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
    **dict.fromkeys(("_EvaluationLoop", "_FitLoop", "_PredictionLoop"), _LOOP_CLASSES),
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
OF_PROFILERS = {
    "filename": (None, "traces are named by rank and step in dirpath"),
    "group_by_input_shapes": (False, "give record_shapes=True"),
    "emit_nvtx": (False, "the phases of a run are named in traces already"),
    "export_to_chrome": (True, "a trace is always written"),
    "sort_by_key": (None, "give sort_by"),
    "record_module_names": (True, "give with_modules"),
    "table_kwargs": (None, "give sort_by and row_limit"),
}
"""The same of profilers."""
OF_LOGGERS = {
    "prefix": ("", "put it into the names that you log"),
    "log_graph": (False, "the graph is not written"),
    "sub_dir": (None, "put it into save_dir"),
    "checkpoint_name": (None, "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"),
    "add_file_policy": ("mutable", "log files with self.log_artifact(name, path)"),
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
