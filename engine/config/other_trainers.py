"""What Lightning, Accelerate and others call the settings of ``Fit``: who comes from there is told the name here."""

from __future__ import annotations

from collections.abc import Iterable

from engine.utils.errors import nearest

_NAMES = {
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
}
_OTHERWISE = {
    "check_val_every_n_epoch": "here it is val_every='1 epochs' (a plain number counts optimizer steps)",
    "val_check_interval": "here it is val_every: 0.25 of an epoch, '500 steps' of the optimizer (a plain number counts these too), '10 min'",
    "cpu": "here it is accelerator='cpu'",
    "profiler": "profile with torch.profiler: with torch.profiler.profile() as p: fit.run(...), or in a callback; Result.times has the seconds",
    "enable_model_summary": "print(module), or a callback with on_fit_start, shows the model",
    "inference_mode": "evaluation runs under torch.no_grad(), so that what it gives may be trained on",
    **dict.fromkeys(
        ("use_distributed_sampler", "replace_sampler_ddp"),
        "samples are dealt to the ranks whatever the sampler; a loader or sampler with presharded = True is each rank's own",
    ),
    **dict.fromkeys(("split_batches", "dispatch_batches", "even_batches"), "samples are dealt to the ranks exactly; see global_batch_size"),
    "dataloader_config": "the DataLoader that you give keeps its own settings",
    "plugins": "a precision is Fit(precision=...), a strategy Fit(strategy=...); processes are found in the environment (fit env)",
    **dict.fromkeys(("deepspeed_plugin", "deepspeed_plugins", "deepspeed"), "here it is strategy={'name': 'deepspeed', 'stage': 2, ...}"),
    **dict.fromkeys(("fsdp_plugin", "fsdp", "fsdp_config"), "here it is strategy={'name': 'fsdp', ...}"),
    **dict.fromkeys(("megatron_lm_plugin", "parallelism_config"), "here it is strategy={'name': 'mesh', 'tp': 2, ...}"),
    "dynamo_plugin": "here it is compile: True, 'blocks', or a dict of torch.compile's options",
    "gradient_accumulation_plugin": "here it is accumulate_grad_batches",
    "kwargs_handlers": "arguments of DDP, FSDP and the scaler are fields of strategy={'name': 'ddp', ...} and precision={'name': ...}",
    "reload_dataloaders_every_n_epochs": "a dataset may read other files from set_epoch or in each pass; a loader is made once a run",
    "barebones": "there is nothing to leave out: without callbacks a run logs one line an interval",
    "enable_autolog_hparams": "hyperparameters are logged by the logger callbacks that are given",
    "model_registry": "a registry is the business of a callback with on_save_checkpoint",
    "rng_types": "random numbers of every rank are in checkpoints, and the data's order comes from seed",
    "step_scheduler_with_optimizer": "schedulers step once a step that happened; in Fit, 'interval' in configure_optimizers says when",
    "device_placement": "everything that is prepared is on its device; give accelerator and devices to choose it",
    "project_config": "here it is root_dir",
    **dict.fromkeys(("logger", "loggers", "log_with", "report_to"), "loggers are callbacks, for example callbacks=[CSVLogger()]"),
    "enable_progress_bar": "a progress bar is a callback: callbacks=[RichProgressBar()]",
    **dict.fromkeys(("enable_checkpointing", "checkpoint_callback"), "checkpoints are written by a callback: callbacks=[ModelCheckpoint()]"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint", "resume"), "resuming is an argument of run: fit.run(module, loader, resume='auto')"),
}


def hint(name: str, known: Iterable[str]) -> str:
    """What an error about the unknown setting ``name`` adds: its name here, how it is done here, or the nearest of ``known``."""
    if name in _NAMES:
        return f"; here it is called {_NAMES[name]!r}"
    if name in _OTHERWISE:
        return f"; {_OTHERWISE[name]}"
    return nearest(name, known)
