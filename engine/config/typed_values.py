"""Creates an object from plain options, each of which is checked against the class's annotations.

Options are data: nothing that they name is imported, called or read as a file, because a file of settings may come from anyone.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from engine.config.kinds import unknown_word, wrong_type
from engine.config.named_options import NamedOptions
from engine.utils.errors import nearest

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def dtype(text: str) -> torch.dtype:
    """The dtype with this name: ``"bf16"``, ``"bfloat16"`` and ``"torch.bfloat16"`` are ``torch.bfloat16``."""
    name = text.removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype{nearest(name, _DTYPES)}; possible: {', '.join(_DTYPES)}")
    return _DTYPES[name]


TEXT_READERS: dict[Any, Callable[[str], Any]] = {Path: lambda text: Path(text).expanduser(), torch.dtype: dtype}
"""Type without a form in YAML -> a function that reads its objects from text; :mod:`engine.cli.object_builder` registers these with jsonargparse."""


def construct(setting: str, requested: NamedOptions, make: Callable[..., Any]) -> Any:
    """Call ``make`` with the options of ``requested``, each converted to its annotated type.

    Args:
        setting: the setting's name, for errors.
        requested: the name of the object, and its options.
        make: a class or a function without positional arguments; its public arguments are the options.

    Raises:
        ValueError: an option does not exist, or its value is not possible; the message states its origin and the nearest option.
        TypeError: the value of an option has another type than its annotation.
    """
    option_types = hints(make)
    values = {}
    for key, value in requested.options.items():
        if key not in option_types:
            possible = f"possible: {', '.join(option_types)}" if option_types else "it takes none"
            raise ValueError(
                f"{requested.error_prefix(key)}{requested.name!r} has no setting {key!r}{nearest(key, option_types)}; {possible}"
            )
        try:
            values[key] = converted(option_types[key], value, f"{setting}.{key}")
        except (ValueError, TypeError) as error:
            raise _builtin_class(error)(f"{_prefix_of_innermost(requested, str(error), key)}{error}") from None
    try:
        return make(**values)
    except (ValueError, TypeError, OSError) as error:
        option_name = next((key for key in values if re.search(rf"\b{re.escape(key)}\b", str(error))), "name")
        raise _builtin_class(error)(
            f"{requested.error_prefix(option_name)}{setting} {requested.name!r}: {error}"
        ) from error


def _builtin_class(error: Exception) -> type[Exception]:
    """The built-in class of an error, which can be created from a message alone; a subclass may need more."""
    return next(cls for cls in (TypeError, ValueError, OSError) if isinstance(error, cls))


def _prefix_of_innermost(requested: NamedOptions, message: str, key: str) -> str:
    """The start of an error about the option ``key``: the origin of the innermost key inside it that ``message`` names."""
    inner_paths = [path for path in requested.origins if path.startswith(f"{key}.") and f".{path}=" in message]
    return requested.error_prefix(max(inner_paths, key=len, default=key))


def hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that ``make`` takes by name, each with its type; ``Any`` if the annotation cannot be read."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature_parameters = inspect.signature(make).parameters.items()
    names = [name for name, parameter in signature_parameters if parameter.kind in kinds and not name.startswith("_")]
    annotations: dict[str, Any] = {}
    for source in (make, getattr(make, "__init__", make)) if isinstance(make, type) else (make,):
        try:
            annotations.update(typing.get_type_hints(source))
        except (NameError, TypeError, AttributeError):
            continue  # an annotation names what is imported for type checking only
    return {name: annotations.get(name, Any) for name in names}


NOT_THIS_TYPE: Any = object()  # returned instead of a value that does not have the type
_NULL, _QUOTES = " (null in YAML)", "; in YAML, write it in quotes"
_REBUILT = (tuple, set, frozenset)
_LISTS = (*_REBUILT, list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNIONS = (typing.Union, types.UnionType)
SCALARS = (bool, int, float, str, type(None))


def converted(hint: Any, value: Any, name: str) -> Any:
    """Convert ``value`` to the type ``hint``.

    Text is converted to a path, to a member of an enum, or, for a type without a form in YAML (``timedelta``), to what jsonargparse reads; an
    int to a float; a scalar of numpy or torch to Python's; a list to a tuple or a set; a mapping to a dataclass.

    Raises:
        TypeError: the value has another type.
        ValueError: the value has the type, but is not possible.
    """
    members = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    if getattr(value, "shape", None) == () and not {bool, int, float}.isdisjoint(members):
        value = value.item()
    failed: Exception | None = None
    # Try the value's exact type first, so that 1 stays an int where ints are allowed.
    for member in sorted(members, key=lambda member: member is not type(value)):
        if member is bool and not isinstance(value, bool) and int in members:
            continue  # 1 is a number here
        try:
            result = _by_type(member, value, name)
        except (ValueError, TypeError) as error:
            failed = failed or error
            continue
        if result is not NOT_THIS_TYPE:
            return result
    quotes = _QUOTES if str in members and isinstance(value, (bool, int, float)) else ""
    other_types = [kind for kind in members if typing.get_origin(kind) is not typing.Literal and kind is not type(None)]
    if failed is not None and 0 < len(other_types) < len(members) - (type(None) in members):
        failed = _builtin_class(failed)(f"{failed}, or {', '.join(map(type_text, other_types))}")
    raise failed or wrong_type(name, value, f"{type_text(hint)}{quotes}")


def convert_arguments(call: str, types_by_name: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a Python ``call`` to their types.

    Args:
        call: the name of what is called, for errors.
        types_by_name: the type of each argument; ``Any`` where it is missing.
        values: the arguments.

    Raises:
        TypeError, ValueError: as :func:`converted`.
    """
    try:
        return {name: converted(types_by_name.get(name, Any), value, name) for name, value in values.items()}
    except (ValueError, TypeError) as error:
        message = str(error).replace(_NULL, "").replace(_QUOTES, "")
        raise _builtin_class(error)(f"{call}: {message}") from None


def _by_type(hint: Any, value: Any, name: str) -> Any:
    """Convert a value to a type that is not a union; :data:`NOT_THIS_TYPE` if it has another type."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Annotated:
        return converted(arguments[0], value, name)
    if kind is typing.Literal:
        return _choice(arguments, value, name)
    if kind is Any or not isinstance(kind, type):
        return value
    if issubclass(kind, collections.abc.Mapping) and isinstance(value, Mapping):
        return _mapping(arguments, value, name)
    if kind in _LISTS:
        return _list(kind, arguments, value, name)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _dataclass(kind, value, name)
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)  # environment variables use 1 and 0 for flags
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind):
        return NOT_THIS_TYPE if kind is int and isinstance(value, bool) else value
    return _read(kind, value, name) if isinstance(value, str) and kind not in SCALARS else NOT_THIS_TYPE


def _choice(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """The one of a ``Literal``'s values that is given, enum members by name; :data:`NOT_THIS_TYPE` if the type matches none."""
    choices = {member.name if isinstance(member, Enum) else member: member for member in arguments}
    if type(value) not in map(type, choices):
        return value if any(value is member for member in arguments) else NOT_THIS_TYPE
    if value not in choices:
        raise unknown_word(name, value, map(str, choices), ", ".join(map(repr, choices)))
    return choices[value]


def _mapping(arguments: tuple[Any, ...], value: Mapping[Any, Any], name: str) -> Any:
    """A dict with converted keys and values."""
    key_hint, value_hint = arguments or (Any, Any)
    entries = {}
    for key, item in value.items():
        # In JSON, and so in a checkpoint's manifest, keys are always text.
        typed_key = int(key) if key_hint is int and isinstance(key, str) and key.isdecimal() else key
        typed_key = converted(key_hint, typed_key, f"a key of {name}: {key}")
        entries[typed_key] = converted(value_hint, item, f"{name}.{key}")
    return entries


def _list(kind: Any, arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """A collection of ``kind`` with converted items; :data:`NOT_THIS_TYPE` if the value is no list."""
    if not isinstance(value, (list, kind if kind in _REBUILT else tuple)):
        return NOT_THIS_TYPE
    fixed = kind is tuple and arguments and arguments[-1] is not Ellipsis
    if fixed and len(arguments) != len(value):
        raise ValueError(f"{name}={value!r} has {len(value)} values: give {len(arguments)}")
    item_hints = arguments if fixed else (*arguments, Any)[:1] * len(value)
    items = [converted(item_hints[i], item, f"{name}.{i}") for i, item in enumerate(value)]
    if kind in _REBUILT:
        return kind(items)
    return tuple(items) if isinstance(value, tuple) and kind is not list else items


def _dataclass(kind: Any, value: Mapping[Any, Any], name: str) -> Any:
    """Create a dataclass from a mapping of its fields, each converted to its annotated type."""
    field_types = hints(kind)
    for key in value:
        if key not in field_types:
            problem = f"there is no {key!r}{nearest(key, field_types)}; possible: {', '.join(field_types)}"
            raise ValueError(f"{name}.{key}={value[key]!r}: {problem}")
    values = {key: converted(field_types[key], item, f"{name}.{key}") for key, item in value.items()}
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise _builtin_class(error)(f"{name}={dict(value)!r}: {error}") from error


def _read(kind: type, text: str, name: str) -> Any:
    """Read an object of a type without a form in YAML from text; :data:`NOT_THIS_TYPE` if no reader for the type is known."""
    if issubclass(kind, Enum):
        if text not in kind.__members__:
            raise unknown_word(name, text, kind.__members__, type_text(kind))
        return kind[text]
    reader = TEXT_READERS.get(kind)
    if reader is None:
        from jsonargparse.typing import get_registered_type  # heavy, and rarely used

        registered = get_registered_type(kind)
        if registered is None:
            return NOT_THIS_TYPE
        reader = registered.deserializer
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from None


def is_data(hint: Any) -> bool:
    """Check whether values of a type consist of numbers and text only, alone or in mappings and lists."""
    kind, inner_hints = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Literal or kind is None or kind is Ellipsis:
        return True
    if dataclasses.is_dataclass(kind):
        inner_hints = tuple(hints(kind).values())  # type: ignore[arg-type]
    elif kind not in (*_UNIONS, *_LISTS, *_MAPPINGS, *SCALARS, *TEXT_READERS, typing.Annotated):
        return isinstance(kind, type) and issubclass(kind, Enum)
    return all(map(is_data, inner_hints[:1] if kind is typing.Annotated else inner_hints))


def type_text(hint: Any) -> str:
    """The name of a type in an error message: ``bool, int or None``."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _UNIONS:
        words = list(dict.fromkeys(map(type_text, arguments)))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if kind is typing.Literal:
        return " or ".join(map(repr, arguments))
    if kind is type(None):
        return f"None{_NULL}"
    if kind in _LISTS:
        return f"a list of {type_text(arguments[0])}" if arguments else "a list"
    if not isinstance(kind, type):
        return str(kind)
    if issubclass(kind, Enum):
        return " or ".join(kind.__members__)
    return "a mapping" if issubclass(kind, collections.abc.Mapping) or dataclasses.is_dataclass(kind) else kind.__name__
