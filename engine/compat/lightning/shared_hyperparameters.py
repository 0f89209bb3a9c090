"""Hyperparameters that a module and its data module both give to loggers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.config.hyperparameters import for_loggers


def check_shared(module: object, datamodule: object) -> None:
    """Check that the two have equal values for the names that both give to loggers.

    Raises:
        RuntimeError: they differ, so loggers could show only one of the values.
    """
    of_module, of_data = for_loggers(module), for_loggers(datamodule)
    differing = [name for name in of_module.keys() & of_data.keys() if not _equal(of_module[name], of_data[name])]
    if differing:
        name = sorted(differing, key=str)[0]
        raise RuntimeError(
            f"module and data module both have the hyperparameter {name!r}, with the values {of_module[name]!r:.80} and {of_data[name]!r:.80}, and "
            "loggers show one of them: rename one, or call save_hyperparameters(logger=False), or with ignore=, in one of the two"
        )


def _equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    return first is second if isinstance(first, Tensor) else bool(first == second)
