"""A setting's value from YAML, by the type of the setting."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine.config import yaml_reader
from engine.config.name_and_options import named
from engine.config.settings import Settings, check
from engine.config.yaml_reader import Node

KINDS: dict[str, str] = {each.name: str(each.type) for each in fields(Settings)}
"""Setting -> its annotation."""
NAMED = ("strategy", "precision")
"""Settings that are a name, or a mapping with a name and options."""


def read_value(name: str, node: Node, origin: str, *, lines: bool = False) -> Any:
    """The checked value of the setting ``name``; ``origin`` starts each error, with the line of the key if ``lines``.

    Raises:
        ValueError, TypeError: it is not possible.
    """
    if name == "callbacks":
        raise ValueError(f"{origin}: callbacks are objects and can only be given in code: Fit(callbacks=[...])")
    file = origin.rpartition(":")[0] if lines else origin
    origins = {} if node is None else yaml_reader.origins_of_keys(node, file, lines=lines)
    try:
        value = _value(name, node)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{origin}: {error}") from None
    if name in NAMED and isinstance(value, dict):
        value = named(name, value, {"": origin, **origins})
    try:
        return check(name, value)
    except (ValueError, TypeError) as error:
        where = next((where for key, where in origins.items() if repr(key) in str(error)), origin)
        raise type(error)(f"{where}: {error}") from None


def _value(name: str, node: Node) -> Any:
    if node is None:
        raise ValueError(f"{name} is empty: give a value, or null for None")
    kind = KINDS[name]
    if yaml_reader.is_text(node) and (kind in ("str", "Path", "Any") or "Duration" in kind):
        return node.value  # "no" is a precision and 2024 may be a directory, though YAML reads them otherwise
    try:
        value = yaml_reader.construct(node)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None
    if name in NAMED and isinstance(value, dict):
        written = {key: each for key, each, _ in yaml_reader.entries(node, "")}
        if "name" in written and yaml_reader.is_text(written["name"]):
            value["name"] = written["name"].value
        return value
    # Environment variables use 1 and 0 for flags.
    return (
        bool(value)
        if kind.startswith("bool") and "int" not in kind and type(value) is int and value in (0, 1)
        else value
    )
