"""torch's default dtype in steps and in ``configure_model`` under ``*-true`` precisions, as in Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from engine.module import TrainModule, overrides

_METHODS = ("configure_model", "training_step", "validation_step", "test_step", "predict_step")


@contextmanager
def default_dtype(module: TrainModule, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block, the module's steps and ``configure_model`` have ``dtype`` as torch's default dtype; ``None``: nothing changes."""
    if dtype is None:
        yield
        return
    names = [name for name in _METHODS if overrides(module, name)]
    attributes = vars(module)
    before = {name: attributes[name] for name in names if name in attributes}
    attributes.update({name: _in_dtype(getattr(module, name), dtype) for name in names})
    try:
        yield
    finally:
        for name in names:
            del attributes[name]
        attributes.update(before)


def _in_dtype(method: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The method with ``dtype`` as the default; one that is bound stays bound, so that a copy of its module calls the copy's."""
    function = method.__func__ if isinstance(method, MethodType) else method

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)

    return MethodType(call, method.__self__) if isinstance(method, MethodType) else call
