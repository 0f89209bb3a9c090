"""What Lightning, Accelerate and others call settings, arguments and attributes, and what is used here instead."""

from __future__ import annotations

from dataclasses import fields

from engine.compat.lightning.names import TRAINER
from engine.config.settings import Settings

NAMES = {
    **dict.fromkeys(("gpus", "num_gpus", "num_processes", "nproc_per_node"), "devices"),
    **dict.fromkeys(("num_machines", "nnodes"), "num_nodes"),
    **dict.fromkeys(("mixed_precision", "dtype"), "precision"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "accumulate_grad_batches"),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "gradient_clipping"), "gradient_clip_val"),
    **dict.fromkeys(("default_root_dir", "output_dir", "project_dir", "logging_dir"), "root_dir"),
    "eval_steps": "val_every",
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "max_epochs"),
    **dict.fromkeys(("max_train_steps", "num_steps"), "max_steps"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "activation_checkpointing"),
    "logging_steps": "log_every_n_steps",
    "detect_nan": "on_nonfinite",
    "dynamo_backend": "compile",
    "float32_matmul_precision": "matmul_precision",
}


OTHERWISE = {
    **{name: argument.instead for name, argument in TRAINER.items() if argument.instead},
    "cpu": "here it is accelerator='cpu'",
    "replace_sampler_ddp": TRAINER["use_distributed_sampler"].instead,
    **dict.fromkeys(
        ("split_batches", "dispatch_batches", "even_batches"),
        "samples are divided exactly among the ranks; see global_batch_size",
    ),
    **dict.fromkeys(("tf32", "allow_tf32"), "here it is matmul_precision='high'"),
    "dataloader_config": "the DataLoader that you give keeps its own settings",
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins", "deepspeed"),
        "here it is strategy={'name': 'deepspeed', 'stage': 2, ...}",
    ),
    **dict.fromkeys(("fsdp_plugin", "fsdp", "fsdp_config"), "here it is strategy={'name': 'fsdp', ...}"),
    **dict.fromkeys(("megatron_lm_plugin", "parallelism_config"), "here it is strategy={'name': 'mesh', 'tp': 2, ...}"),
    "dynamo_plugin": "here it is compile: True, 'blocks', or a dict of torch.compile's options",
    "gradient_accumulation_plugin": "here it is accumulate_grad_batches",
    "kwargs_handlers": "arguments of DDP, FSDP and the scaler are fields of strategy={'name': 'ddp', ...} and precision={'name': ...}",
    "rng_types": "random numbers of every rank are in checkpoints, and seed determines the data's order",
    "step_scheduler_with_optimizer": "schedulers step once per step that happened; in Fit, 'interval' in configure_optimizers sets when",
    "device_placement": "everything prepared is on its device; choose it with accelerator and devices",
    "project_config": "here it is root_dir",
    **dict.fromkeys(("loggers", "log_with", "report_to"), TRAINER["logger"].instead),
    "checkpoint_callback": TRAINER["enable_checkpointing"].instead,
    **dict.fromkeys(
        ("ckpt_path", "resume_from_checkpoint", "resume"),
        "resuming is an argument of run: fit.run(module, loader, resume='auto')",
    ),
}
"""What to do instead of an argument that is no setting: Lightning's, Accelerate's and transformers'."""


def _called(name: str) -> str:
    return f"here it is called {name!r}"


_NO_PICKLE = "nothing in a checkpoint is unpickled, so this is always true: leave it out"


_SAFETENSORS = "weights are always written as safetensors: leave it out"


_EVALUATION = {
    "model": _called("module"),
    **dict.fromkeys(
        ("dataloader", "dataloaders", "loader", "test_dataloaders", "val_dataloaders", "val_loaders"),
        _called("loaders"),
    ),
    **dict.fromkeys(
        ("ckpt_path", "resume", "resume_from_checkpoint"), "here it is checkpoint='best', 'last' or a path"
    ),
    "verbose": "the metrics are returned: print them",
    "weights_only": _NO_PICKLE,
}


_LAUNCHER = "the launcher starts the processes: fit launch, torchrun, or engine.launch"


_DEVICE = "prepared objects are on their device"


_OF_LOGGERS = {
    "prefix": "put it into the names that you log",
    **dict.fromkeys(
        ("log_model", "checkpoint_name"),
        "log checkpoints in a callback's on_checkpoint_saved(run, module, path, score): module.log_artifact(name, path)",
    ),
}


ARGUMENTS: dict[str, dict[str, str]] = {
    "Fit.run": {
        "model": _called("module"),
        **dict.fromkeys(
            ("dataloader", "dataloaders", "loader", "train_dataloader", "train_dataloaders"), _called("train_loader")
        ),
        **dict.fromkeys(
            ("eval_dataloader", "val_dataloader", "val_dataloaders", "val_loader", "valid_loader"),
            _called("val_loaders"),
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
        **dict.fromkeys(("devices", "num_processes", "num_nodes", "num_machines", "gpus"), _LAUNCHER),
        **dict.fromkeys(
            ("callbacks", "log_with", "logger", "loggers"),
            "your own loop calls and logs directly; engine.Fit has callbacks",
        ),
        **dict.fromkeys(("project_dir", "project_config", "root_dir"), "give a path to save_state and load_state"),
        **dict.fromkeys(
            ("gradient_clip_val", "max_grad_norm"),
            "call engine.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
        ),
        "torch_tp_plugin": "here it is strategy={'name': 'mesh', 'tp': 2, ...}",
        "step_scheduler_with_optimizer": "a prepared scheduler steps when the optimizer did",
    },
    "Engine.prepare": {
        "device_placement": f"{_DEVICE}; prepare_data_loader(loader, place=False) leaves batches where they are",
        "move_to_device": f"{_DEVICE}: leave it out",
    },
    "Engine.prepare_model": {
        "device_placement": f"{_DEVICE}: leave it out",
        "evaluation_mode": "without training: place_model(model)",
    },
    "Engine.prepare_optimizer": {"device_placement": f"{_DEVICE}: leave it out"},
    "Engine.prepare_data_loader": {
        **dict.fromkeys(("data_loader", "dataloader"), _called("loader")),
        **dict.fromkeys(("device_placement", "move_to_device"), _called("place")),
        "slice_fn_for_dispatch": "samples are divided among the ranks by index: leave it out",
        "use_distributed_sampler": "samples are divided among the ranks for any sampler: leave it out",
    },
    "Engine.skip_first_batches": {"dataloader": _called("loader")},
    "Engine.save_state": {"safe_serialization": _SAFETENSORS},
    "Engine.load_state": {"weights_only": _NO_PICKLE},
    "Engine.save_model": {"safe_serialization": _SAFETENSORS},
    "Engine.unwrap_model": {
        **dict.fromkeys(
            ("keep_fp32_wrapper", "keep_torch_compile"),
            "the result is the module that you gave to prepare: leave it out",
        )
    },
    "Engine.gather": {"tensor": _called("tree")},
    "Engine.reduce": {"tensor": _called("tree"), "reduce_op": _called("reduction")},
    "Engine.broadcast": {"tensor": _called("tree"), "obj": _called("tree"), "src": _called("from_process")},
    "Engine.pad_across_processes": {"tensor": _called("tree")},
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
        "save_dir": _called("dir"),
        "version": "each run has its own folder: leave it out",
        "prefix": "the columns have the names of the values: put it into the names that you log",
        "flush_logs_every_n_steps": "rows are written when values are logged; see Fit(log_every_n_steps=...)",
    },
    "TensorBoardLogger.__init__": _OF_LOGGERS
    | {
        "save_dir": _called("dir"),
        "log_dir": _called("dir"),
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
"""Arguments of other trainers, by our call: what to do instead."""


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
        "tune": "there is no tuner: give learning rate and batch size yourself",
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
        "launch": _LAUNCHER,
        "accelerator": "use device",
        "call": "your own loop makes the calls; engine.Fit has callbacks",
        "run": "write your own loop, or use engine.Fit",
        **dict.fromkeys(("all_gather", "gather_object"), "use gather(tree), or gather_for_metrics for objects"),
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
        **dict.fromkeys(("seed_everything",), "use engine.seed_everything of the package"),
        "to_device": "use tensor.to(engine.device)",
        **dict.fromkeys(("init_module", "init_tensor", "sharded_model"), "build it in a block: with engine.device"),
        **dict.fromkeys(("log", "log_dict", "logger", "loggers"), "an Engine has no loggers: call your own"),
        **dict.fromkeys(("trackers", "init_trackers", "get_tracker"), "an Engine has no trackers: call your own"),
        "end_training": "nothing needs to be closed: leave it out",
        "clear": "use free_memory()",
        "gradient_accumulation_steps": "use accumulate_grad_batches",
        "mixed_precision": "use precision",
        "distributed_type": "use strategy",
        "state": "use process_index, num_processes, device",
        "gradient_state": "use sync_gradients",
        "use_distributed": "use num_processes > 1",
        "on_local_process": "use on_local_main_process",
        "join_uneven_inputs": "a rank without data runs repeated batches that do not count: leave it out",
        "profile": "use torch.profiler.profile()",
        **dict.fromkeys(
            ("register_save_state_pre_hook", "register_load_state_pre_hook"), "use register_for_checkpointing(objects)"
        ),
        "trigger_sync_in_backward": "use accumulate(model)",
        **dict.fromkeys(
            ("project_dir", "logging_dir", "project_configuration"), "give a path to save_state and load_state"
        ),
        **dict.fromkeys(("deepspeed_plugin", "parallelism_config", "torch_device_mesh"), "use strategy"),
    },
}
"""Attributes of other trainers' objects, by our class: what to use instead."""

_LOOPS = "the loops are functions without a state of their own: counters are in self.run.state"
ELSEWHERE = {
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
