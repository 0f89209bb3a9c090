"""Files of settings as text: a file with every setting and its documentation, which is the docstring under its field, and a file with a run's
settings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.config.masked import plain_value
from engine.config.settings import KINDS, Settings
from engine.config.yaml_text import flow

WIDTH = 110
"""Columns of a line of documentation in a file."""
CODE_ONLY = tuple(name for name, kind in KINDS.items() if kind.code_only)
"""Settings that a file cannot contain."""


@functools.cache
def field_texts(cls: type = Settings) -> dict[str, str]:
    """Name of a field -> the docstring under the field in the source, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if is_text and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def documentation(cls: type = Settings) -> dict[str, str]:
    """Name of a field -> the docstring under the field as text without markup, with YAML's ``null`` for ``None``."""
    return {name: _without_markup(text) for name, text in field_texts(cls).items()}


def _without_markup(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    return text.replace("``None``", "null").replace("``", "")


def document(values: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """The text of a file with every setting and its documentation. Settings in ``values`` have these values; all others are in comments, with their
    defaults.

    Args:
        values: settings as plain values; a strategy or a precision may be a mapping with its name.
        head: lines of comment to add at the top.
    """
    texts = documentation()
    lines = [f"# {line}".rstrip() for line in (*_HEAD, *head)]
    for field in fields(Settings):
        if field.name in CODE_ONLY:
            continue
        lines += [
            "",
            *textwrap.wrap(
                texts[field.name], WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False
            ),
        ]
        if field.name in values:
            lines += _block(field.name, values[field.name])
        else:
            lines.append(f"# {field.name}: {flow(plain_value(field.default))}")
    return "\n".join([*lines, ""])


def as_yaml(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the result of :func:`engine.config.masked.with_origins` as a file of settings with lines ``name: value  # origin``.

    Callbacks that were created in code are commented out.
    """
    lines = []
    for name, entry in config.items():
        line = f"{name}: {flow(entry['value'])}  # {' '.join(entry['origin'].split())}"
        is_code = name == "callbacks" and not all(isinstance(callback, Mapping) for callback in entry["value"])
        lines.append(f"# {line}" if is_code else line)
    return "\n".join([*lines, ""])


_HEAD = (
    "Settings of Fit and of the command 'fit', read from the current directory, or as FIT_CONFIG=this/file.",
    "FIT_<NAME> variables, arguments in code, and --set on the command line win over them. 'fit env' shows the result.",
)


def _block(name: str, value: Any) -> list[str]:
    """The lines for one setting; a mapping has one line per key."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return [f"{name}:", *(f"  {key}: {flow(inner)}" for key, inner in value.items())]
    return [f"{name}: {flow(value)}"]
