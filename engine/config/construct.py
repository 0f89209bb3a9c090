"""Creates an object from plain options, each checked against the class's annotations."""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.config.name_and_options import Named
from engine.utils.errors import nearest

Readers = Mapping[Any, Callable[[str], Any]]
"""For types without a YAML form: a function that converts text, or raises a ValueError that lists the possible values."""


def construct(setting: str, given: Named, make: Callable[..., Any], readers: Readers | None = None) -> Any:
    """``make(**given.options)``.

    Args:
        setting: the setting's name, for errors.
        make: a class or a function without positional arguments; its public arguments are the options.

    Raises:
        ValueError: an option that does not exist or is not possible, with its origin and the nearest one.
        TypeError: an option of another type than its annotation.
    """
    known = parameters(make)
    values = {}
    for key, value in given.options.items():
        if key not in known:
            few = f"possible: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"{given.at(key)}{given.name!r} has no setting {key!r}{nearest(key, known)}; {few}")
        try:
            values[key] = converted(known[key], value, f"{setting}.{key}", readers or {})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{_origin(given, str(error), key)}{error}") from None
    try:
        return make(**values)
    except (ValueError, TypeError, OSError) as error:
        guilty = next((key for key in values if re.search(rf"\b{re.escape(key)}\b", str(error))), "name")
        kind = next(each for each in (TypeError, ValueError, OSError) if isinstance(error, each))
        raise kind(f"{given.at(guilty)}{setting} {given.name!r}: {error}") from error


def _origin(given: Named, message: str, key: str) -> str:
    """The origin of the innermost key that an error names."""
    inner = [path for path in given.origins if path.startswith(f"{key}.") and f".{path}=" in message]
    return given.at(max(inner, key=len, default=key))


def parameters(make: Callable[..., Any]) -> dict[str, Any]:
    """The options that ``make`` takes by name, each with its type; ``Any`` if the annotation cannot be read."""
    wanted = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(make).parameters.items()
    names = [name for name, each in taken if each.kind in wanted and not name.startswith("_")]
    hints: dict[str, Any] = {}
    for source in (make, getattr(make, "__init__", make)) if isinstance(make, type) else (make,):
        try:
            hints.update(typing.get_type_hints(source))
        except (NameError, TypeError, AttributeError):
            continue  # names that are imported for type checking only
    return {name: hints.get(name, Any) for name in names}


def converted(hint: Any, value: Any, name: str, readers: Readers) -> Any:
    """``value`` as the type ``hint``: text becomes a path, a whole number a float, a list a tuple.

    Raises:
        TypeError: it is of another type.
        ValueError: it has the type, but is not a possible value.
    """
    found = _converted(hint, value, name, readers)
    if found is _NO:
        hidden = "; in YAML, write it in quotes" if _takes(hint, str) and isinstance(value, (bool, int, float)) else ""
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {describe(hint)}{hidden}")
    return found


_NO: Any = object()  # "not of this type"; an error ends the search, this continues with a union's next member


def _converted(hint: Any, value: Any, name: str, readers: Readers) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    if origin is typing.Union or origin is types.UnionType:
        return _member(arguments, value, name, readers)
    if origin is typing.Annotated:
        return _converted(arguments[0], value, name, readers)
    if origin is typing.Literal:
        if value in arguments and type(value) in map(type, arguments):
            return value
        if type(value) in map(type, arguments):
            raise ValueError(
                f"{name}={value!r} is unknown{nearest(value, map(str, arguments))}; possible: {', '.join(map(repr, arguments))}"
            )
        return _NO
    if origin is type:
        return value if isinstance(value, type) else _NO
    if hint is None or hint is type(None):
        return None if value is None else _NO
    kind = origin or hint
    if not isinstance(kind, type):
        return value
    if issubclass(kind, collections.abc.Mapping):
        return _mapping(arguments, value, name, readers)
    if kind in _LISTS:
        return _list(kind, arguments, value, name, readers)
    if kind in readers and isinstance(value, str):
        try:
            return readers[kind](value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
    return _scalar(kind, value)


def _member(members: tuple[Any, ...], value: Any, name: str, readers: Readers) -> Any:
    """The first member of a union that accepts the value; those of its exact type first, so that 1 stays an int where ints are allowed."""
    for member in sorted(members, key=lambda member: member is not type(value)):
        if member is bool and not isinstance(value, bool) and any(_takes(other, int) for other in members):
            continue  # 1 is a number here
        found = _converted(member, value, name, readers)
        if found is not _NO:
            return found
    return _NO


def _mapping(arguments: tuple[Any, ...], value: Any, name: str, readers: Readers) -> Any:
    if not isinstance(value, Mapping):
        return _NO
    if not arguments:
        return dict(value)
    key_hint, value_hint = arguments
    return {
        converted(key_hint, key, f"a key of {name}: {key}", readers): converted(
            value_hint, each, f"{name}.{key}", readers
        )
        for key, each in value.items()
    }


_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def _list(kind: Any, arguments: tuple[Any, ...], value: Any, name: str, readers: Readers) -> Any:
    if not isinstance(value, (list, tuple)):
        return _NO
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise ValueError(f"{name}={value!r} has {len(value)} values: give {len(arguments)}")
        return tuple(
            converted(hint, each, f"{name}.{i}", readers)
            for i, (hint, each) in enumerate(zip(arguments, value, strict=True))
        )
    inner = arguments[0] if arguments else Any
    items = [converted(inner, each, f"{name}.{i}", readers) for i, each in enumerate(value)]
    return tuple(items) if kind is tuple else items


def _scalar(kind: type, value: Any) -> Any:
    if kind is bool:
        # Environment variables use 1 and 0 for flags.
        return bool(value) if isinstance(value, bool) or (type(value) is int and value in (0, 1)) else _NO
    if kind in (int, float) and isinstance(value, bool):
        return _NO
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    return value if isinstance(value, kind) else _NO


def _takes(hint: Any, kind: type) -> bool:
    return hint is kind or any(
        _takes(each, kind)
        for each in typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
    )


def describe(hint: Any) -> str:
    """A readable type: ``bool, int or None``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or origin is types.UnionType:
        words = list(dict.fromkeys(map(describe, arguments)))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if hint is None or hint is type(None):
        return "None (null in YAML)"
    kind = origin or hint
    if kind in _LISTS:
        return f"a list of {describe(arguments[0])}" if arguments else "a list"
    if isinstance(kind, type) and issubclass(kind, collections.abc.Mapping):
        return "a mapping"
    return getattr(kind, "__name__", str(kind))
