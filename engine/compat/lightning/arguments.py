"""Arguments of Lightning's classes and methods that ours lack: the setting with the same meaning, or what to do instead.

Names other than arguments are in :mod:`engine.compat.lightning.names`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from engine.compat.table_rows import ANY, Argument, called

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
        instead="a dataset may read other files from set_epoch or in each pass; a loader is created once per run",
    ),
    "default_root_dir": Argument(),
    "enable_autolog_hparams": Argument(
        True, neutral=(True,), instead="hyperparameters are logged by the logger callbacks that are given"
    ),
    "model_registry": Argument(neutral=(None,), instead="use a callback with on_save_checkpoint"),
}
"""The arguments of ``Trainer``, in the order of its signature."""

SETTINGS = {"gpus": "devices", "num_processes": "devices", "default_root_dir": "root_dir"}
"""Arguments of ``Trainer``, current and earlier ones -> the name of the setting with the same meaning."""
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
"""Arguments of ``Trainer`` and its methods without a setting -> what to do instead."""
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
    "TrainModule.log": {},  # Lightning has no other arguments; the row lets errors about unknown ones suggest the nearest name
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
}
"""Our method -> arguments of its counterpart in ``Trainer``, ``LightningModule`` or ``Fabric`` that it lacks -> what to do instead."""

_CONSOLE = Argument(
    neutral=(None,),
    instead="give a rich console: console=Console(...)",
    drop_in="give callbacks.RichProgressBar(console=...)",
)
_LEAVE = Argument(neutral=ANY, instead="each epoch's last line stays: leave it out")
_OWN_MEANING = Argument(neutral=ANY)
_AVERAGES_DEVICE = Argument(neutral=(None,), instead="averages are on the device of the weights")
CALLBACKS: dict[str, dict[str, Argument]] = {
    "ModelCheckpoint": {
        "verbose": Argument(
            instead="Result.last_checkpoint and 'fit checkpoint list' name what was saved: leave it out"
        ),
        "save_on_exception": Argument(instead="the last complete step is saved after an error: leave it out"),
        "save_weights_only": Argument(
            instead="checkpoints are complete; engine.Resume can load only the weights, and 'fit checkpoint' exports the weights"
        ),
        "auto_insert_metric_name": Argument(
            instead="write the names into filename: 'epoch={epoch}-loss={val_loss:.3f}'"
        ),
        "every_n_train_steps": Argument(instead="here it is every='500 steps'"),
        "train_time_interval": Argument(instead="here it is every='10 min'"),
        "every_n_epochs": Argument(instead="here it is every='1 epochs'"),
        "save_on_train_epoch_end": Argument(
            instead="with monitor a checkpoint waits for the next validation, without it is saved when due",
        ),
        "enable_version_counter": Argument(instead="a second checkpoint of one name gets '-step=N': leave it out"),
        "save_best_only": Argument(instead="here it is save_top_k=1, save_last=False"),
    },
    "EarlyStopping": {
        **dict.fromkeys(
            ("verbose", "log_rank_zero_only"),
            Argument(instead="Result.stop_reason says why a run has stopped: leave it out"),
        ),
        "check_on_train_epoch_end": Argument(
            instead="it checks after each validation, or without validation after each epoch: leave it out",
        ),
    },
    "WeightAveraging": {"device": _AVERAGES_DEVICE},
    "EMAWeightAveraging": {"device": _AVERAGES_DEVICE},
    "StochasticWeightAveraging": {"device": Argument(neutral=ANY)},
    "BackboneFinetuning": {
        "initial_denom_lr": Argument(neutral=(10.0,), instead="give backbone_initial_ratio_lr"),
        **dict.fromkeys(("verbose", "rounding"), Argument(neutral=ANY)),
    },
    "RichProgressBar": {
        "refresh_rate": _OWN_MEANING,
        "leave": _LEAVE,
        **dict.fromkeys(("theme", "console_kwargs"), _CONSOLE),
    },
    "TQDMProgressBar": {
        "refresh_rate": _OWN_MEANING,
        "process_position": Argument(neutral=ANY, instead="bars of others scroll above it: leave it out"),
        "leave": _LEAVE,
    },
    "PyTorchProfiler": {
        "filename": Argument(neutral=(None,), instead="traces are named by rank and step in dirpath"),
        "group_by_input_shapes": Argument(neutral=(False,), instead="give record_shapes=True"),
        "emit_nvtx": Argument(neutral=(False,), instead="the phases of a run are named in traces already"),
        "export_to_chrome": Argument(neutral=(True,), instead="a trace is always written"),
        "sort_by_key": Argument(neutral=(None,), instead="give sort_by"),
        "record_module_names": Argument(neutral=(True,), instead="give with_modules"),
        "table_kwargs": Argument(neutral=(None,), instead="give sort_by and row_limit"),
    },
}
"""Lightning's callback or profiler class -> its arguments that ours lack. (``save_best_only`` is an argument of Keras.)"""
_FOLDER = Argument(setting="dir")
_PREFIX = Argument(neutral=("",), instead="put it into the names that you log")
_LOG_CHECKPOINTS = (
    "log checkpoints in a callback's on_checkpoint_saved(run, module, path, score): module.log_artifact(name, path)"
)
_LOG_CHECKPOINTS_DROP_IN = "log checkpoints in on_checkpoint_saved with self.log_artifact(name, path)"
_CHECKPOINTS = {
    "log_model": Argument(neutral=(False,), instead=_LOG_CHECKPOINTS, drop_in=_LOG_CHECKPOINTS_DROP_IN),
    "checkpoint_name": Argument(instead=_LOG_CHECKPOINTS),
}
_OWN_FOLDER = Argument(instead="each run has its own folder in dir: leave it out")
LOGGERS: dict[str, dict[str, Argument]] = {
    "TensorBoardLogger": {
        **dict.fromkeys(("save_dir", "log_dir"), _FOLDER),
        **dict.fromkeys(("name", "version"), _OWN_FOLDER),
        "log_graph": Argument(
            neutral=(False,), instead="the graph is not written: leave it out", drop_in="the graph is not written"
        ),
        "default_hp_metric": Argument(
            neutral=ANY, instead="no metric is written with the hyperparameters: leave it out"
        ),
        "prefix": _PREFIX,
        "sub_dir": _OWN_FOLDER,
        **_CHECKPOINTS,
    },
    "CSVLogger": {
        "save_dir": _FOLDER,
        "version": Argument(instead="each run has its own folder: leave it out"),
        "prefix": replace(
            _PREFIX,
            instead=f"the columns have the names of the values: {_PREFIX.instead}",
            drop_in=_PREFIX.instead,
        ),
        "flush_logs_every_n_steps": Argument(
            neutral=ANY, instead="rows are written when values are logged; see Fit(log_every_n_steps=...)"
        ),
    },
    "WandbLogger": {
        "id": Argument(neutral=(None,), drop_in="a resumed run continues by itself"),
        "log_model": Argument(neutral=(False,), drop_in=_LOG_CHECKPOINTS_DROP_IN),
        "experiment": Argument(neutral=(None,), drop_in="the logger makes the run: use logger.experiment"),
        "prefix": replace(_PREFIX, instead="", drop_in=_PREFIX.instead),
        "checkpoint_name": Argument(neutral=(None,), drop_in=_LOG_CHECKPOINTS_DROP_IN),
        "add_file_policy": Argument(neutral=("mutable",), drop_in="log files with self.log_artifact(name, path)"),
    },
    "MLFlowLogger": {
        "save_dir": Argument(
            instead="give tracking_uri='sqlite:///path/mlflow.db', and artifact_location for the files"
        ),
        **_CHECKPOINTS,
        "prefix": _PREFIX,
        "run_id": Argument(
            neutral=(None,),
            instead="a resumed run continues the run in MLflow by itself: leave it out",
            drop_in="a resumed run continues by itself",
        ),
        "synchronous": Argument(neutral=ANY, instead="values are always sent by a thread: leave it out"),
    },
}
"""Lightning's logger class -> its arguments that ours lack. Our W&B logger passes unknown arguments on to ``wandb``, without an error."""
_TRAINER_ARGUMENTS = {
    "accelerator": Argument(neutral=(None,), instead="Trainer(accelerator=...)"),
    "checkpoint_io": Argument(neutral=(None,), instead="checkpoints have one format"),
    "precision_plugin": Argument(neutral=(None,), instead="Trainer(precision='bf16-mixed')"),
}
_PROCESS_ARGUMENTS = {
    "parallel_devices": Argument(neutral=(None,), instead="Trainer(devices=...)"),
    "cluster_environment": Argument(neutral=(None,), instead="processes are detected from the environment (fit env)"),
    "mixed_precision": _TRAINER_ARGUMENTS["precision_plugin"],
    "process_group_backend": Argument(neutral=(None,), instead="the device decides"),
    "timeout": Argument(neutral=(timedelta(minutes=30),), instead="engine.Fit(start_timeout=..., timeout=...)"),
}
STRATEGIES: dict[str, dict[str, Argument]] = {
    "DDPStrategy": {
        **_TRAINER_ARGUMENTS,
        **_PROCESS_ARGUMENTS,
        **dict.fromkeys(
            ("ddp_comm_state", "ddp_comm_wrapper"),
            Argument(neutral=(None,), instead="engine.DDP(comm_hook='powersgd', ...)"),
        ),
        "model_averaging_period": Argument(neutral=(None,), instead="gradients are averaged at each step"),
        "start_method": Argument(neutral=ANY),
    },
    "FSDPStrategy": {
        **_TRAINER_ARGUMENTS,
        **_PROCESS_ARGUMENTS,
        **dict.fromkeys(
            ("activation_checkpointing", "activation_checkpointing_policy"),
            Argument(neutral=(None,), instead="engine.Fit(activation_checkpointing='full')"),
        ),
        "state_dict_type": Argument(neutral=ANY),  # sharded on disk, loaded anywhere
    },
    "SingleDeviceStrategy": {**_TRAINER_ARGUMENTS, "device": Argument(neutral=ANY)},
}
"""Lightning's strategy class -> its arguments that ours lack."""
_UNUSED = {"name": "ddp", "find_unused_parameters": True}
_DDP = {"": "ddp", "_find_unused_parameters_true": _UNUSED, "_find_unused_parameters_false": "ddp"}
STRATEGY_NAMES: dict[str, Any] = {
    **{
        f"ddp{start_method}{end}": setting
        for start_method in ("", "_spawn", "_fork", "_notebook")
        for end, setting in _DDP.items()
    },
    **{name: name for name in ("auto", "fsdp", *(f"deepspeed_stage_{n}" for n in (1, 2, 3, "2_offload", "3_offload")))},
    "single_device": "single",
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    "deepspeed": "deepspeed_stage_2",
}
"""Lightning's name of a strategy -> the value of ``Fit``'s setting. ``ddp_spawn`` equals ``ddp``, because the launcher starts the processes."""

OURS = {
    "EMAWeightAveraging": "EMA",
    "MLFlowLogger": "MLflowLogger",
    "PyTorchProfiler": "Profiler",
    "StochasticWeightAveraging": "SWA",
}
"""Lightning's classes -> our callbacks that have another name."""
CALLS |= {
    f"{OURS.get(name, name)}.__init__": answers
    for name, arguments in (CALLBACKS | LOGGERS).items()
    if (answers := {argument: row.answer for argument, row in arguments.items() if row.answer})
}
