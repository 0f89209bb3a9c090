"""Defaults of ``Trainer``'s arguments from variables such as ``PL_TRAINER_MAX_EPOCHS``, as in Lightning."""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])


def with_environment_defaults(init: Init) -> Init:
    """Decorate an ``__init__`` so that a variable ``PL_<CLASS>_<ARGUMENT>`` gives an argument that is not passed. Its text is a Python value if it
    can be read as one."""
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def with_defaults(self: object, *args: Any, **kwargs: Any) -> None:
        variables = {name: f"PL_{type(self).__name__.upper()}_{name.upper()}" for name in names}
        texts = {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}
        init(self, *args, **{name: _value(text) for name, text in texts.items()} | kwargs)

    return with_defaults  # type: ignore[return-value]


def _value(text: str) -> Any:
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text
