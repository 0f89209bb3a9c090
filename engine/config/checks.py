"""Checks of settings: each takes the name and a value, and returns the value in its normal form or raises an error that names both."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.utils.errors import nearest

Check = Callable[[str, Any], Any]


def wrong(name: str, value: object, possible: str) -> ValueError:
    return ValueError(f"{name}={value!r} is not possible: give {possible}")


def wrong_type(name: str, value: object, possible: str) -> TypeError:
    return TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {possible}")


def unknown(name: str, value: object, names: Iterable[str], possible: str) -> ValueError:
    return ValueError(f"{name}={value!r} is unknown{nearest(value, names)}; possible: {possible}")


def is_int(value: object) -> bool:
    """Also numpy's integers, but not bools: ``max_steps=True`` is a mistake."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def an_int(least: int, *, none: str = "", most: int | None = None) -> Check:
    """An int in [least, most]; also ``None`` if ``none`` says what it means."""
    possible = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
    possible += f", or None for {none}" if none else ""

    def run(name: str, value: Any) -> int | None:
        if value is None and none:
            return None
        if not is_int(value):
            raise wrong_type(name, value, possible)
        number = operator.index(value)
        if number < least or (most is not None and number > most):
            raise wrong(name, value, possible)
        return number

    return run


def a_choice(*names: str, none: str = "", aliases: Mapping[str, str] | None = None) -> Check:
    """One of ``names``; also ``None`` if ``none`` says what it means."""
    possible = " or ".join(map(repr, names)) + (f", or None for {none}" if none else "")

    def run(name: str, value: Any) -> str | None:
        if value is None and none:
            return None
        if not isinstance(value, str):
            raise wrong_type(name, value, possible)
        known = (aliases or {}).get(value.lower(), value.lower())
        if known not in names:
            raise unknown(name, value, names, possible)
        return known

    return run


def a_bool(*names: str, none: str = "") -> Check:
    """A bool, or one of ``names``; also ``None`` if ``none`` says what it means."""
    possible = " or ".join(["True", "False", *map(repr, names)]) + (f", or None for {none}" if none else "")

    def run(name: str, value: Any) -> bool | str | None:
        if value is None and none:
            return None
        if isinstance(value, bool) or (isinstance(value, str) and value in names):
            return value
        if isinstance(value, str):
            raise unknown(name, value, names, possible)
        raise wrong_type(name, value, possible)

    return run
