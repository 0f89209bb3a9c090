"""Environment variables: read, set and restored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from engine.compat.key_file import flag

_PREFIX = "ACCELERATE_"


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Convert a text such as ``"yes"`` or ``"off"`` to 1 or 0, or to a bool.

    Raises:
        ValueError: it is neither.
    """
    text = value.lower()
    if text not in ("y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"):
        raise ValueError(f"invalid truth value {text}")
    result = text[0] in ("y", "t", "1") or text == "on"
    return result if to_bool else int(result)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether an environment variable is set to a true value."""
    return flag(os.environ.get(key, str(default)))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of an environment variable."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """The first of these environment variables that is a number of at least 0."""
    return next((number for key in env_keys if (number := int(os.environ.get(key, -1))) >= 0), default)


def convert_dict_to_env_variables(current_env: dict[str, str]) -> list[str]:
    """The lines ``NAME=value`` of a file of environment variables; one that such a file cannot hold is left out, with a warning."""
    lines = []
    for name, text in current_env.items():
        if not name or not text or any(sign in name + text for sign in "; \n<>"):
            warnings.warn(
                f"{name}={text} is left out: it is empty, or has one of the signs ; < > or a space", stacklevel=2
            )
        else:
            lines.append(f"{name}={text}\n")
    return lines


@contextmanager
def _restored(prefix: str = "") -> Iterator[None]:
    """Restore, at the end of the block, the environment variables whose names begin with ``prefix``."""
    before = {name: text for name, text in os.environ.items() if name.startswith(prefix)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(prefix) and name not in before]:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables, whose names are written in capitals, in this block."""
    names = [name.upper() for name in kwargs]
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict(zip(names, map(str, kwargs.values()), strict=True)))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run this block without any environment variables."""
    with _restored():
        os.environ.clear()
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or a class of tests, so that it leaves the variables ``ACCELERATE_...`` as they were."""
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)

    def purge_tests(cls: type) -> None:
        for name in [name for name in dir(cls) if name.startswith("test") and callable(getattr(cls, name))]:
            setattr(cls, name, _purged(getattr(cls, name)))

    purge_tests(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(lambda cls, **options: purge_tests(cls))  # type: ignore[assignment]
    return func_or_cls


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "is_purged"):
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _restored(_PREFIX):
            return function(*args, **kwargs)

    run.is_purged = True  # type: ignore[attr-defined]
    return run
