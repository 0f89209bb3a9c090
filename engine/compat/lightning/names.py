"""Names of Lightning and Fabric that this library's counterparts lack, and what to use instead.

``tests/config/test_lightning_names.py`` compares with Lightning itself.
"""

from __future__ import annotations

from dataclasses import fields

from engine.compat.lightning.arguments import OTHERWISE
from engine.config.settings import Settings

_RESULT = "use the Result that run(...) returns, or the list that validate(...) and test(...) return"


_REFERENCE = "keep a reference to the object that you gave"


_IN_A_RUN = "in a callback or a module, the run knows it: run.rank, run.local_rank, run.world_size, run.device"


OF_SETTINGS = {setting.name: f"use settings.{setting.name}" for setting in fields(Settings)}


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
"""Attributes of a run that have the same name as in Lightning."""
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
        **{name: advice for name, advice in _OF_TRAINERS.items() if name not in _OF_RUN},
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
    "Result": {
        "best_model_path": "use best_checkpoint",
        "last_model_path": "use last_checkpoint",
        "callback_metrics": "use metrics",
        "current_epoch": "use epoch",
        "global_step": "use step",
        "log_dir": "use folder",
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
"""Our class -> attributes of ``Trainer`` (``"Fit"``, ``"Run"``, ``"Result"``) or Fabric (``"Engine"``) that it lacks -> what to use instead."""
VIEW = {
    **dict.fromkeys(
        ("fit", "validate", "test", "predict"), "a run trains and evaluates through the Fit that started it"
    ),
    "accelerator": "use trainer.strategy.root_device, or self.device",
    "barebones": "there is nothing to switch off",
    "distributed_sampler_kwargs": "use trainer.world_size and trainer.global_rank",
    "enable_validation": "use trainer.val_dataloaders",
    "init_module": "build parts of the model in configure_model",
    "max_time": "use self.run.settings.max_time",
    **dict.fromkeys(("precision_plugin", "scaler"), "use trainer.precision, and self.run.engine"),
    "reload_dataloaders_every_n_epochs": "a dataset may read other files from set_epoch or in each pass",
}
"""Attributes of Lightning's ``Trainer`` that a :class:`TrainerView` lacks -> what to use instead."""
OF_RUN = "self.run is the run: run.settings, run.engine, run.stop(), ..."
"""Advice about any other attribute that a :class:`TrainerView` lacks."""
OF_LOOPS = "the loops are functions without a state of their own; counters are in self.run.state, and Fit's arguments end a training"
"""Advice about attributes that ``trainer.fit_loop`` and its parts lack."""
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
"""Hooks of earlier Lightning versions that are never called -> what to define instead. A class that defines one is refused."""

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
"""Entries of Lightning's checkpoint dict that ours lacks -> why, and what to do."""
FILES = {
    "last.ckpt": "ModelCheckpoint writes no file of this name: resume with ckpt_path='last' (in Fit: resume='last'); ModelCheckpoint.last_model_path "
    "has the newest one's path"
}
"""Files that Lightning writes and a run here does not -> what to use instead."""

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
"""Methods that subclasses of Lightning's ``ModelCheckpoint`` override but that are never called here -> what to use instead."""
OF_STRATEGIES = {
    "setup_optimizers": "a run has one set of optimizers: give parameters that are trained later to optimizer.add_param_group, as "
    "callbacks.BaseFinetuning does, or freeze them with requires_grad_(False) until then"
}
"""Attributes that :class:`StrategyView` lacks -> what to use instead."""
OF_STRATEGY = "the strategy itself is self.run.engine.strategy"
"""Advice about any other attribute that :class:`StrategyView` lacks."""

_LOOP_CLASSES = "the loops are functions: override the module's or a callback's hooks"
_LOGGERS = "give Lightning's own, or a Logger with log_metrics"
CLASSES = {
    "Accelerator": "give Trainer(accelerator='cpu' or 'gpu')",
    "CPUAccelerator": "give Trainer(accelerator='cpu')",
    "AdvancedProfiler": "use SimpleProfiler, PyTorchProfiler, or python -m cProfile",
    "ModelPruning": "use callbacks.Pruning (from callbacks import Pruning), which takes the same pruning_fn, amount and parameters_to_prune, and "
    "prunes before an epoch",
    "SpikeDetection": "use callbacks.SpikeGuard (from callbacks import SpikeGuard)",
    "ThroughputMonitor": "use callbacks.ThroughputMonitor (from callbacks import ThroughputMonitor), which needs no batch_size_fn",
    **dict.fromkeys(("CometLogger", "NeptuneLogger"), _LOGGERS),
    "DeepSpeedStrategy": "give engine.DeepSpeed(stage=2, ...), or its name, 'deepspeed_stage_2'",
    "ModelParallelStrategy": "give engine.MeshParallel(tp=..., dp_shard=...)",
    **dict.fromkeys(("XLAStrategy", "SingleDeviceXLAStrategy"), "XLA devices are not supported"),
    **dict.fromkeys(("_EvaluationLoop", "_FitLoop", "_PredictionLoop"), _LOOP_CLASSES),
    "Fabric": "use engine.Engine",
}
"""Lightning's classes without a class of this name here -> what to use instead."""
BOUND = {
    **{name: CLASSES[name] for name in ("ModelPruning", "ThroughputMonitor")},
    "BatchSizeFinder": "call callbacks.find_batch_size(module, loader), and set what it finds",
    "LearningRateFinder": "call callbacks.find_lr(module, loader), and set what it finds",
    "OnExceptionCheckpoint": "ModelCheckpoint saves the last complete step after an error",
    "BasePredictionWriter": "subclass callbacks.BasePredictionWriter",
    "DeviceStatsMonitor": "use callbacks.DeviceStatsMonitor()",
    "EMAWeightAveraging": "use callbacks.EMA(decay=...)",
    "GradientAccumulationScheduler": "give Fit(accumulate_grad_batches={first epoch: micro-batches}), or the Trainer of engine.interop.lightning "
    "the class of this name there",
    "LearningRateMonitor": "use callbacks.LearningRateMonitor()",
    "StochasticWeightAveraging": "use callbacks.SWA(swa_lrs=...)",
    "WeightAveraging": "use callbacks.WeightAveraging()",
}
"""Callbacks of the installed Lightning that cannot work here, because they need private parts of its ``Trainer``, the weights in its checkpoints or
its order of events after an error -> what to use instead."""

RENAMED = {
    "LightningModule": "TrainModule",
    "LightningDataModule": "DataModule",
    "Trainer": "Fit",
    "Callback": "Callback",
    "CombinedLoader": "CombinedLoader",
    "Fabric": "Engine",
    "seed_everything": "seed_everything",
}
"""Lightning's names -> the names of their counterparts in ``engine``."""
SAME_PARTS = {"callbacks": "callbacks", "loggers": "callbacks.loggers"}
"""Part of Lightning -> our package with classes of the same names and meaning."""
PARTS = {
    "strategies": "give Fit(strategy=...) a name, or an object such as DDP, FSDP, DeepSpeed or MeshParallel of engine",
    "plugins": OTHERWISE["plugins"],
    "profilers": OTHERWISE["profiler"],
    "loggers": OTHERWISE["loggers"],
    "tuner": ATTRIBUTES["Fit"]["tune"],
    "cli": "fit run builds a module, its data and its callbacks from a file of settings and the command line",
}
"""Part of Lightning -> what to do about names in it that have no counterpart."""

_HELPER = (
    "Lightning uses it inside its own Trainer: copy it into your project, or import it from the installed Lightning"
)
PLACES = {
    "": _HELPER,
    "fabric.": "Fabric's parts have no counterpart: a loop of your own uses engine.Engine",
    "pytorch.accelerators.": CLASSES["Accelerator"],
    "pytorch.callbacks.": "use a callback of engine.interop.lightning.callbacks, or write one of your own",
    "pytorch.cli.": PARTS["cli"],
    "pytorch.demos.": "lightning.pytorch.demos of the installed Lightning has its toys, which Fit and this Trainer take as they are",
    "pytorch.loggers.": _LOGGERS,
    "pytorch.loops.": _LOOP_CLASSES,
    "pytorch.plugins.": PARTS["plugins"],
    "pytorch.profilers.": CLASSES["AdvancedProfiler"],
    "pytorch.strategies.": "give Trainer(strategy=...) a name, or an object such as DDP, FSDP, DeepSpeed or MeshParallel of engine",
    "pytorch.trainer.": "it is inside Lightning's Trainer; self.trainer.run has what a run is made of",
    "pytorch.tuner.": "Tuner(trainer).lr_find and scale_batch_size search before a training",
}
"""Beginning of a module's path in the package ``lightning`` -> what to use instead of its names that have no counterpart."""
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
        utilities.model_helpers utilities.parsing utilities.grads utilities.distributed utilities.apply_func
        utilities.memory trainer.states trainer.connectors.logger_connector.result accelerators accelerators.accelerator
        loops loops.evaluation_loop loops.fit_loop loops.prediction_loop plugins plugins.io plugins.io.torch_io""",
    "cli": "cli",
    "tuner": "tuner tuner.tuning",
}
"""Module of ``engine.interop.lightning`` -> the paths of Lightning's modules whose content it has."""
