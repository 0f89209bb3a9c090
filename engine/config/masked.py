"""Settings as plain JSON values that can be shown safely: each with its origin, and without secrets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from engine.config.duration import Duration
from engine.config.named_options import NamedOptions
from engine.config.secret_text import hidden_in, without_secrets
from engine.config.settings import Settings

Config = dict[str, dict[str, Any]]
"""Name of a setting -> its ``value`` and ``origin``, and the ``origins`` of the keys of its value if it has some."""


def with_origins(
    settings: Settings, origins: Mapping[str, str], objects: Mapping[str, Any] | None = None, *, hide: bool = True
) -> Config:
    """The ``value`` and the ``origin`` of each setting; for a strategy or a precision with options also the ``origins`` of the options.

    Args:
        origins: the ``origins`` of :class:`engine.config.resolve.Resolved`.
        objects: the created strategy and precision, as :func:`fields_of` returns them, to be shown instead of their settings.
        hide: whether to hide secrets; ``False`` to show them to their owner.
    """
    config: Config = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        entry: dict[str, Any] = {
            "value": plain_value((objects or {}).get(field.name, value)),
            "origin": hidden_in(origins.get(field.name, "code")),
        }
        if isinstance(value, NamedOptions):
            entry["origins"] = {key: hidden_in(origin) for key, origin in value.origins.items() if key}
        config[field.name] = entry
    visible: Config = without_secrets(config) if hide else config
    return visible


def sections_with_origins(sections: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """The arguments with which ``fit run`` built the model, the data and the callbacks, in the form of :func:`with_origins`, without secrets."""
    config: Config = {
        name: {"value": plain_value(value), "origin": hidden_in(origins.get(name, "command line"))}
        for name, value in sections.items()
    }
    visible: Config = without_secrets(config)
    return visible


def fields_of(instance: Any, name: str) -> dict[str, Any]:
    """The public fields of a dataclass object that its constructor takes, after the entry ``name``."""
    values = {
        field.name: getattr(instance, field.name)
        for field in fields(instance)
        if field.init and not field.name.startswith("_")
    }
    return {"name": name, **values}


def plain_value(value: Any) -> Any:
    """Convert a value to what JSON can express; anything else becomes text."""
    if isinstance(value, NamedOptions):
        return plain_value(value.as_dict())
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain_value(fields_of(value, type(value).__name__))
    # The default text of an object contains its address, which differs between processes.
    kind: Any = type(value)
    has_own_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value)[:500] if has_own_text else f"{kind.__module__}:{kind.__qualname__}"


def table_rows(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of name, value and origin for the result of :func:`with_origins`; options of a strategy and arguments of a class have rows of their own
    below it."""
    lines = []
    for name, entry in config.items():
        value, origin, origins = entry["value"], entry["origin"], entry.get("origins", {})
        classes = (
            {name: value}
            if name != "callbacks"
            else {f"{name}.{index}": description for index, description in enumerate(value)}
        )
        if classes and all(
            isinstance(description, Mapping) and "class_path" in description for description in classes.values()
        ):
            for row_name, description in classes.items():
                lines.append((row_name, str(description["class_path"]), origin))
                lines += [(f"  {key}", str(argument), "") for key, argument in description.get("init_args", {}).items()]
            continue
        if not isinstance(value, Mapping) or "name" not in value:
            lines.append((name, str(value), origin))
            continue
        lines.append((name, str(value["name"]), origins.get("name", origin)))
        lines += [
            (f"  {key}", str(option), origins.get(key, "default")) for key, option in value.items() if key != "name"
        ]
    return lines
