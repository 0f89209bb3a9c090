"""Public names of Lightning's classes that ours do not have: what to use instead.

``tests/config/test_lightning_names.py`` compares with Lightning itself.
"""

from __future__ import annotations

from typing import Any

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


def refuse_replaced(*owners: Any) -> None:
    """Look for hooks that are never called, in a module and callbacks. One that the class calls itself is a method of its own.

    Raises:
        TypeError: an owner defines one; the message says what to define instead.
    """
    for owner in owners:
        for name, instead in REPLACED.items():
            if callable(getattr(type(owner), name, None)) and not _calls(type(owner), name):
                raise TypeError(f"{type(owner).__name__} defines {name}, which is not called: define {instead}")


def _calls(owner: type, name: str) -> bool:
    """Whether another method of the class names this one."""
    methods = ((key, getattr(method, "__code__", None)) for each in owner.__mro__ for key, method in vars(each).items())
    return any(code is not None and key != name and name in code.co_names for key, code in methods)
