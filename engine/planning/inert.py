"""What a plan calls of a user's code has no effect outside of it: callbacks are copies, loggers log nothing, files are not written."""

from __future__ import annotations

import builtins
import copy
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from engine.callback import Callback, of_the_step

_WRITES = frozenset("wax+")
_CHANGES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link")


class Nothing:
    """Has every attribute and takes every call, without effect: what a logger's library gives."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __fspath__(self) -> str:
        return os.devnull

    def __str__(self) -> str:
        return ""


class SilentLogger(Callback):
    """Stands for a logger: ``self.logger.experiment.add_scalar(...)`` of a module works and logs nothing."""

    is_logger = True

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing(), name)


def inert(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Copies of those that may change a step, and a silent logger for each logger."""
    step = {id(each) for each in of_the_step(callbacks)}
    kept = [each for each in callbacks if each.is_logger or id(each) in step]
    return tuple(SilentLogger() if each.is_logger else copied(each) for each in kept)


def copied(value: Any) -> Any:
    """A deep copy, but for attributes that cannot be copied (locks, connections), which it shares."""
    try:
        return copy.deepcopy(value)
    except Exception:
        made = copy.copy(value)
        for name, attribute in vars(value).items():
            try:
                made.__dict__[name] = copy.deepcopy(attribute)
            except Exception:
                continue
        return made


@contextmanager
def without_writing() -> Iterator[None]:
    """Inside the block this thread writes to no file that it opens, and makes, moves and removes none; the code sees no difference."""
    thread = threading.get_ident()

    def opening(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = _WRITES & set(mode) and not isinstance(file, int) and threading.get_ident() == thread
            return (
                real(os.devnull, mode.replace("x", "w"), *args, **kwargs)
                if writes
                else real(file, mode, *args, **kwargs)
            )

        return opened

    def no_effect(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if threading.get_ident() == thread else real(*args, **kwargs)

    with ExitStack() as stack:
        for module in (builtins, io):
            stack.enter_context(patch.object(module, "open", opening(module.open)))
        for name in _CHANGES:
            stack.enter_context(patch.object(os, name, no_effect(getattr(os, name))))
        stack.enter_context(patch.object(torch, "save", no_effect(torch.save)))
        yield
