"""What Lightning, Accelerate and others call the settings of ``Fit``: who comes from there is told the name here."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import nearest

_NAMES = {
    **dict.fromkeys(("gpus", "num_gpus", "num_processes", "nproc_per_node"), "devices"),
    **dict.fromkeys(("num_machines", "nnodes"), "num_nodes"),
    **dict.fromkeys(("mixed_precision", "dtype"), "precision"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"), "accumulate_grad_batches"),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "gradient_clipping"), "gradient_clip_val"),
    **dict.fromkeys(("default_root_dir", "output_dir", "project_dir", "logging_dir"), "root_dir"),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch", "eval_steps"), "val_every"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "max_epochs"),
    **dict.fromkeys(("max_train_steps", "num_steps"), "max_steps"),
    **dict.fromkeys(("gradient_checkpointing", "recompute"), "activation_checkpointing"),
    "logging_steps": "log_every_n_steps",
    "detect_nan": "on_nonfinite",
    "cpu": "accelerator",
}
_OTHERWISE = {
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
