"""A short training on a copy of the module, used by ``find_lr`` and ``find_batch_size``."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from engine import Callback, DataModule, Fit, TrainModule, isolated

_SWITCHED_OFF = {
    "fast_dev_run": False,
    "log_every_n_steps": 0,
    "max_epochs": None,
    "max_time": None,
    "max_duration": None,
    "min_epochs": None,
    "min_steps": None,
    "num_sanity_val_steps": 0,
    "val_every": None,
}


def train_copy(
    module: TrainModule,
    loader: Any,
    datamodule: DataModule | None,
    fit: Fit | None,
    callback: Callback,
    **settings: Any,
) -> None:
    """Train a copy of ``module`` for ``max_steps`` with ``fit``'s settings, ``callback`` as its only callback, without validation or checkpoints.

    Module, data module, the loader's generators and all other random number generators are restored afterwards, even after an error.

    Args:
        settings: values that replace settings of ``fit``; ``max_steps`` is one of them.

    Raises:
        TypeError: the module cannot be copied.
        ValueError: the loader can be read only once.
    """
    if isinstance(loader, DataModule):
        loader, datamodule = None, loader
    if isinstance(loader, Iterator):
        raise ValueError(
            f"the loader is a {type(loader).__name__}, which can be read only once, so a trial would take batches from the training: "
            "give a DataLoader, a list of batches, or an object whose __iter__ starts again"
        )
    try:
        trained = copy.deepcopy(module)
    except Exception as error:
        raise TypeError(f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error})") from error
    trained.configure_callbacks = list  # type: ignore[method-assign]  # none
    with isolated(), _restored_generators(loader), tempfile.TemporaryDirectory(prefix="fit-trial-") as folder:
        trial = Fit(
            **{**_changed_settings(fit), **_SWITCHED_OFF, **settings, "callbacks": [callback], "root_dir": folder}
        )
        trial.names_what_fits = False  # larger sizes are tried until one is too large
        trial.run(trained, loader, datamodule=copy.copy(datamodule))


def is_main(fit: Fit | None) -> bool:
    """Whether this process is the one that logs and saves the result of a search."""
    return (Fit() if fit is None else fit).is_main_process


def log() -> logging.Logger:
    """Return the logger for results."""
    return logging.getLogger("engine")


def _changed_settings(fit: Fit | None) -> dict[str, Any]:
    """The settings of ``fit`` that are not the defaults."""
    if fit is None:
        return {}
    return {name: getattr(fit.settings, name) for name, origin in fit.origins.items() if origin != "default"}


@contextlib.contextmanager
def _restored_generators(loader: Any) -> Iterator[None]:
    """Restore the generators of a loader and its samplers after the block."""
    owners = [loader]
    for name in ("batch_sampler", "sampler"):  # a batch sampler has a sampler, too
        owners += [getattr(owner, name) for owner in list(owners) if getattr(owner, name, None) is not None]
    generators = [
        value
        for owner in owners
        for value in getattr(owner, "__dict__", {}).values()
        if isinstance(value, torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
