"""Settings as plain JSON values that are safe to show: each with its origin, without secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from engine.config.duration import Duration
from engine.config.named_options import NamedOptions
from engine.config.settings import Settings

Config = dict[str, dict[str, Any]]
"""Setting -> ``value`` and ``origin``, and ``origins`` of the keys of its value where it has some."""
HIDDEN = "***"
"""The replacement for a secret."""


def with_origins(
    settings: Settings, origins: Mapping[str, str], objects: Mapping[str, Any] | None = None, *, hide: bool = True
) -> Config:
    """For each setting its ``value`` and ``origin``; for a strategy or a precision with options also the ``origins`` of these.

    Args:
        origins: the ``origins`` of :class:`engine.config.resolve.Resolved`.
        objects: the created strategy and precision, as :func:`fields_of` objects are shown.
        hide: leave secrets out; ``False`` to show them to their owner.
    """
    config: Config = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        entry: dict[str, Any] = {
            "value": plain_value((objects or {}).get(field.name, value)),
            "origin": _hide_text(origins.get(field.name, "code")),
        }
        if isinstance(value, NamedOptions):
            entry["origins"] = {key: _hide_text(origin) for key, origin in value.origins.items() if key}
        config[field.name] = entry
    visible: Config = without_secrets(config) if hide else config
    return visible


def sections_with_origins(sections: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """The arguments from which ``fit run`` built model, data and callbacks, in the form of :func:`with_origins`, without secrets."""
    config: Config = {
        name: {"value": plain_value(value), "origin": _hide_text(origins.get(name, "command line"))}
        for name, value in sections.items()
    }
    visible: Config = without_secrets(config)
    return visible


def fields_of(instance: Any, name: str) -> dict[str, Any]:
    """An object's public dataclass fields that its constructor takes, ``name`` first."""
    values = {
        field.name: getattr(instance, field.name)
        for field in fields(instance)
        if field.init and not field.name.startswith("_")
    }
    return {"name": name, **values}


def plain_value(value: Any) -> Any:
    """A value as JSON has it; anything that JSON cannot express becomes text."""
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
    # The default text of an object has an address, which differs between processes.
    kind: Any = type(value)
    has_own_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value)[:500] if has_own_text else f"{kind.__module__}:{kind.__qualname__}"


def table_rows(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of name, value and origin from :func:`with_origins`; options of a strategy, and arguments of a class, are in rows below it."""
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


def without_secrets(values: Any, key: str = "") -> Any:
    """A copy of plain values with :data:`HIDDEN` for text that looks like a secret, by its key or by itself."""
    if isinstance(values, Mapping):
        # An object for a parameter "key" is not a secret.
        is_secret = _is_secret_name(key) and "class_path" not in values
        return {name: without_secrets(item, key if is_secret else name) for name, item in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_secrets(item, key) for item in values]
    if type(values) is int and _NUMBERS & _parts(key):
        return HIDDEN
    if not isinstance(values, str) or not values:
        return values
    return HIDDEN if _is_secret_name(key) else _hide_text(values)


_WORDS = frozenset(("token", "key", "apikey", "secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "bearer",
                    "apikeys", "accesskey", "secretkey", "privatekey", "secrets", "passwords", "passcode", "authorization"))  # fmt: skip
_NUMBERS = frozenset(("password", "passwords", "passwd", "pwd", "passcode", "passphrase"))
"""Names whose values are secret even as numbers; ``key_dim`` is not."""
_SPLIT = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
# Each pattern takes a time that grows with the length of the text alone: hyperparameters may be megabytes.
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2})[^/\s]+@")
_GIVEN = re.compile(r"(?<![\w.-])([\w.-]+)(\s*(?:=|:(?!//))\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&}\])]+)")
_ITSELF = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*|\bBearer\s+\S+|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"
    r"|\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|[rs]k_(?:live|test)_|npm_)[\w-]{12,}"
    r"|(?i:\bauthorization\b\W{1,4}\w+\s+[^\s'\"]+)",
    re.DOTALL,
)


def _is_secret_name(name: str) -> bool:
    return bool(_WORDS & _parts(name))


def _parts(name: str) -> set[str]:
    return {part.lower() for part in _SPLIT.split(str(name))}


def _hide_text(text: str) -> str:
    text = _IN_URL.sub(rf"\1{HIDDEN}@", _ITSELF.sub(HIDDEN, text))
    return _GIVEN.sub(lambda match: f"{match[1]}{match[2]}{HIDDEN}" if _is_secret_name(match[1]) else match[0], text)
