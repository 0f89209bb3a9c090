"""Descriptions of what would run: the parameters of its classes, and its whole configuration as a file."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from engine.cli.building import Component, Parsed, parameters, parser_of, type_of
from engine.config.masked import readable
from engine.config.resolve import Resolved
from engine.config.yaml_text import flow


def config_text(resolved: Resolved, parsed: Sequence[Parsed]) -> str:
    """A file of settings that runs the same: settings with their origins, each object with all of its parameters.

    Defaults without a text form (an object created in the signature) are named in a comment, and apply again when the file is used.
    """
    lines = ["# settings of Fit, and where each comes from"]
    for name, entry in readable(resolved.settings, resolved.origins, hide=False).items():
        if name != "callbacks":
            lines.append(f"{name}: {flow(entry['value'])}  # {' '.join(entry['origin'].split())}")
    by_name = {each.component.name: each for each in parsed}
    for name in ("model", "data"):
        if name in by_name:
            lines += ["", f"{name}:", *_described(by_name[name], "  ")]
    callbacks = [each for name, each in by_name.items() if name.startswith("callbacks.")]
    if callbacks:
        lines += ["", "callbacks:"]
    for each in callbacks:
        first, *rest = _described(each, "    ")
        lines += [f"  - {first.strip()}", *rest]
    return "\n".join(lines) + "\n"


def _described(parsed: Parsed, indent: str) -> list[str]:
    values, left_out = parsed.plain()
    lines = [f"class_path: {flow(parsed.component.path)}"]
    if values:
        lines += ["init_args:", *(f"  {name}: {flow(value)}" for name, value in values.items())]
    lines += [f"# {name}: the default of {parsed.component.title}, an object without a text form" for name in left_out]
    return [f"{indent}{line}" for line in lines]


def class_help(command: str, components: Sequence[Component]) -> str:
    """The parameters of each class: name, type, default and documentation."""
    lines = [f"usage: fit {command} TARGET --set NAME=VALUE ...", ""]
    for component in components:
        bare = (
            inspect.isclass(component.target) and component.target.__doc__ is None
        )  # then getdoc would describe the base class
        about = "" if bare else (inspect.getdoc(component.target) or "").split("\n\n")[0]
        about = _plain(about)
        lines += [f"{component.name}: {component.path}", *([f"  {about}"] if about else [])]
        rows = [
            (f"{component.name}.{name}", *_about(action)) for name, action in parameters(parser_of(component)).items()
        ]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]] if rows else []
        for name, kind, rest in rows:
            lines.append(f"    {name:<{widths[0]}}  {kind:<{widths[1]}}  {rest}".rstrip())
        lines += [] if rows else ["    (no parameters)"]
        lines.append("")
    return "\n".join(
        [
            *lines,
            "settings of Fit: 'fit config --default' writes each with its documentation, 'fit env' prints each with its value",
        ]
    )


def _about(action: argparse.Action) -> tuple[str, str]:
    """A parameter's type, and its default with its documentation."""
    kind = type_of(action)
    default = "required" if action.required else f"default {_shown(action.default)}"
    return _type_text(kind), f"{default}{f'; {_plain(action.help)}' if action.help else ''}"


def _plain(text: str) -> str:
    """A docstring in one line, with the targets of its roles: ``:class:`engine.Every``` is engine.Every."""
    return _ROLE.sub(r"\1", " ".join(text.split()))


_ROLE = re.compile(r":[\w:]+:`~?([^`<]+?)(?: <[^`]*>)?`")


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{kind.__name__} {{{', '.join(kind.__members__)}}}"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(text for part in get_args(kind) if (text := _type_text(part)) != "any") or "any"
    if kind is NoneType:
        return "None"
    text = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)
    return "any" if text in ("None", "Untyped") else text.replace("typing.", "")


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return (
        str(value)
        if isinstance(value, (str, int, float, Path)) or value is None
        else " ".join(repr(value).split())[:80]
    )
