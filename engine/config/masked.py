"""Settings as plain JSON values that can be shown safely: each with its origin, and without secrets."""

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
"""Name of a setting -> its ``value`` and ``origin``, and the ``origins`` of the keys of its value if it has some."""
HIDDEN = "***"
"""The text that is shown instead of a secret."""


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
            "origin": _hide_text(origins.get(field.name, "code")),
        }
        if isinstance(value, NamedOptions):
            entry["origins"] = {key: _hide_text(origin) for key, origin in value.origins.items() if key}
        config[field.name] = entry
    visible: Config = without_secrets(config) if hide else config
    return visible


def sections_with_origins(sections: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """The arguments with which ``fit run`` built the model, the data and the callbacks, in the form of :func:`with_origins`, without secrets."""
    config: Config = {
        name: {"value": plain_value(value), "origin": _hide_text(origins.get(name, "command line"))}
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


def without_secrets(values: Any, key: str = "") -> Any:
    """A copy of plain values in which :data:`HIDDEN` replaces text that looks like a secret, by its key or by itself."""
    if isinstance(values, Mapping):
        # The description of an object is not a secret, even if its key is a word such as "key".
        is_secret = _is_secret_name(key) and "class_path" not in values
        return {name: without_secrets(item, key if is_secret else name) for name, item in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_secrets(item, key) for item in values]
    if type(values) is int and _SECRET_NUMBERS & _words_of(key):
        return HIDDEN
    if not isinstance(values, str) or not values:
        return values
    return HIDDEN if _is_secret_name(key) else _hide_text(values)


_SECRET_WORDS = frozenset(("token", "key", "apikey", "secret", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "bearer",
                    "apikeys", "accesskey", "secretkey", "privatekey", "secrets", "passwords", "passcode", "authorization"))  # fmt: skip
_SECRET_NUMBERS = frozenset(("password", "passwords", "passwd", "pwd", "passcode", "passphrase"))
"""Names whose values are secret even if they are numbers; ``key_dim`` is not among them."""
_WORD_BOUNDARY = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")
# The time of each pattern is linear in the length of the text, because hyperparameters may be megabytes.
_PASSWORD_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2})[^/\s]+@")
_NAMED_VALUE = re.compile(r"(?<![\w.-])([\w.-]+)(\s*(?:=|:(?!//))\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&}\])]+)")
_SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*|\bBearer\s+\S+|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"
    r"|\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|[rs]k_(?:live|test)_|npm_)[\w-]{12,}"
    r"|(?i:\bauthorization\b\W{1,4}\w+\s+[^\s'\"]+)",
    re.DOTALL,
)


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_WORDS & _words_of(name))


def _words_of(name: str) -> set[str]:
    """The words of a name in lower case, split at case changes and at other characters."""
    return {part.lower() for part in _WORD_BOUNDARY.split(str(name))}


def _hide_text(text: str) -> str:
    """The text with :data:`HIDDEN` for passwords in URLs, for text that is a secret in itself, and for values of secret names."""
    text = _PASSWORD_IN_URL.sub(rf"\1{HIDDEN}@", _SECRET_TEXT.sub(HIDDEN, text))
    return _NAMED_VALUE.sub(
        lambda match: f"{match[1]}{match[2]}{HIDDEN}" if _is_secret_name(match[1]) else match[0], text
    )
