"""Public names of Lightning's classes that ours do not have: what to use instead.

``tests/config/test_lightning_names.py`` compares with Lightning itself.
"""

from __future__ import annotations

import inspect
from typing import Any

from engine.config.other_trainers import ANY

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


def refused_hook(name: str, function: Any) -> str:
    """What to define instead of a method of this name; ``""`` if it is not a hook of an earlier version.

    ``on_epoch_start`` and ``on_epoch_end`` took no argument in a module, and two in a callback: with any other number, a class calls its own method.
    """
    if name in ("on_epoch_start", "on_epoch_end"):
        parameters = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
        if len(parameters) not in (1, 3):  # with self
            return ""
    return REPLACED.get(name, "")


def refuse_replaced(*owners: Any) -> None:
    """Look for hooks that are never called, in a module and callbacks.

    Raises:
        TypeError: an owner defines one; the message says what to define instead.
    """
    for owner in owners:
        for name in REPLACED:
            method = getattr(type(owner), name, None)
            if callable(method) and (instead := refused_hook(name, method)):
                raise TypeError(f"{type(owner).__name__} defines {name}, which is not called: define {instead}")
