"""An object by name, with options: ``{name: deepspeed, stage: 3}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config.checks import unknown, wrong_type

PRECISIONS: dict[str, str] = {
    **{name: name for name in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "fp8-mixed")},
    "no": "32-true",  # Accelerate's
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "fp8-mixed",
    "32": "32-true",  # Lightning's short ones
    "16": "16-mixed",
    "64": "64-true",
}
"""Accepted precision name -> the name that the library uses."""


@dataclass(frozen=True)
class Named:
    """A strategy or a precision by name, with options that its class will check. Created by :func:`named`."""

    name: str
    options: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict, compare=False)
    """Where the name and each option come from, inner keys by their dotted path; what is missing here comes from code."""

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {value}" for key, value in self.as_dict().items()) + "}"

    def as_dict(self) -> dict[str, Any]:
        """As a mapping, name first."""
        return {"name": self.name, **self.options}

    def at(self, key: str = "name") -> str:
        """The start of an error about an option: its origin, unless that is the code."""
        origin = self.origins.get(key, "code")
        return "" if origin == "code" else f"{origin}: "


def named(setting: str, value: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Named | str:
    """The object for a mapping with a ``name``; the name alone if it has no options.

    Raises:
        ValueError: there is no ``name``, or one without options.
        TypeError: ``name`` or a key is not a string.
    """
    given_by = dict(origins or {})
    first = next(iter(given_by.values()), "code")
    where = "" if first == "code" else f"{first}: "
    name = value.get("name")
    if "name" not in value:
        raise ValueError(
            f"{where}{setting}={dict(value)!r} has no 'name': give the mapping one, such as {{name: {_EXAMPLES[setting]}}}"
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"{where}{setting}.name={name!r} is of type {type(name).__name__}: give the name as text")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{given_by.get(str(key), first)}: {setting} has the key {key!r}, which is not a name")
    options = {key: each for key, each in value.items() if key != "name"}
    return Named(name, options, given_by) if options else name


_LISTS = (list, tuple, set, frozenset)
_EXAMPLES = {"strategy": "deepspeed, stage: 3", "precision": "fp8-mixed, recipe: rowwise"}


def precision_name(value: object) -> str:
    """The library's name of a precision, e.g. ``"bf16"`` -> ``"bf16-mixed"``.

    Raises:
        ValueError: an unknown name; the message gives the nearest one.
    """
    name = PRECISIONS.get(str(value).lower())
    if name is None:
        raise unknown("precision", value, PRECISIONS, ", ".join(PRECISIONS))
    return name


def strategy_setting(name: str, value: Any) -> Any:
    """The setting ``strategy``: a name, a :class:`Named`, or an object, which is not checked here.

    Raises:
        ValueError, TypeError: anything else.
    """
    if isinstance(value, Mapping):
        value = named(name, value)
    if value is None or value == "" or isinstance(value, (bool, int, float, type, *_LISTS)):
        possible = "the name of a strategy, a mapping with its name and settings, or a strategy object"
        raise wrong_type(name, value, possible)
    if isinstance(value, Named) and value.name == "auto":
        first = next(iter(value.options))
        raise ValueError(
            f"{value.at(first)}strategy 'auto' takes no settings, and {first!r} was given: give name: ddp, fsdp, ... with it"
        )
    return value


def precision_setting(name: str, value: Any) -> Any:
    """The setting ``precision``: the library's name of one, a :class:`Named`, or an object, which is not checked here.

    Raises:
        ValueError, TypeError: anything else.
    """
    if isinstance(value, Mapping):
        value = named(name, value)
    if isinstance(value, Named):
        known, first = precision_name(value.name), next(iter(value.options))
        if known != "fp8-mixed":
            raise ValueError(
                f"{value.at(first)}precision {value.name!r} takes no settings, and {first!r} was given: only 'fp8-mixed' does"
            )
        return replace(value, name=known)
    if isinstance(value, _LISTS):
        raise wrong_type(name, value, "the name of a precision, or a mapping with its name and settings")
    return precision_name(value) if value is None or isinstance(value, (str, bool, int, float, type)) else value
