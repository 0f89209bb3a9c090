"""Where each setting comes from: code > environment (``FIT_PRECISION``) > YAML file > default."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.schema import Settings, check, fast_dev_run_overrides
from engine.errors import nearest

if TYPE_CHECKING:
    import yaml

PREFIX = "FIT_"
RESERVED = ("FIT_CONFIG", "FIT_PARENT_PID")
"""Variables with our prefix that are no settings: the file's path, and the mark of a rank that ``Fit`` started."""
DEFAULT_FILE = "fit.yaml"

_KINDS: dict[str, str] = {field.name: str(field.type) for field in fields(Settings)}


class _Unset:
    """The type of :data:`UNSET`."""

    def __repr__(self) -> str:
        return "<default>"

    def __reduce__(self) -> str:
        return "UNSET"  # copies and pickles stay the one object


UNSET: Any = _Unset()
"""An argument that was not given. ``None`` is a value and means what it says."""


@dataclass(frozen=True)
class Resolved:
    """The settings of a run and where they come from."""

    settings: Settings
    origins: dict[str, str]
    """For each setting: ``"code"``, ``"environment FIT_PRECISION"``, ``"file fit.yaml:3"``, ``"fast_dev_run"`` or ``"default"``."""


def resolve(given: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None) -> Resolved:
    """Put the settings together: code > environment > file > default.

    Args:
        given: the arguments given in code; those that are :data:`UNSET` were not.
        environ: ``os.environ``. ``FIT_<NAME>`` gives a setting as YAML; ``FIT_CONFIG`` names the file.
        file: the YAML file. ``None``: the one that ``FIT_CONFIG`` names, else ``./fit.yaml`` if there is one.

    Raises:
        ValueError, TypeError: a name or a value that is not possible, with its origin.
        FileNotFoundError: the named file does not exist.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_KINDS, "default")
    for name, node, origin in (*_from_file(environ, file), *_from_environment(environ)):
        values[name], origins[name] = _checked(name, node, origin), origin
    for name, value in given.items():
        if name not in _KINDS:
            raise TypeError(f"{name!r} is no argument of Fit{nearest(name, _KINDS)}; possible: {', '.join(_KINDS)}")
        if value is not UNSET:
            values[name], origins[name] = value, "code"
    settings = Settings(**values)
    if settings.fast_dev_run:
        origins.update(dict.fromkeys(fast_dev_run_overrides(1), "fast_dev_run"))
    return Resolved(settings, origins)


_Node = Any  # a yaml.Node, whose stub leaves out its fields, or None for an empty document
_Found = Iterator[tuple[str, _Node, str]]


def _from_environment(environ: Mapping[str, str]) -> _Found:
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _KINDS or variable != variable.upper():
            known = ", ".join(PREFIX + kind.upper() for kind in _KINDS)
            hint = nearest(name, _KINDS)
            raise ValueError(f"environment {variable}: {name!r} is no setting of Fit{hint}; unset it, or choose from {known}")
        yield name, _compose(text, f"environment {variable}"), f"environment {variable}"


def _from_file(environ: Mapping[str, str], file: Path | None) -> _Found:
    named = file if file is not None else environ.get("FIT_CONFIG")
    path = Path(named or DEFAULT_FILE)
    if not path.is_file():
        if named:
            by = "the file asked for" if file is not None else "FIT_CONFIG"
            raise FileNotFoundError(f"{by} names {str(path)!r}, which is no file (current directory: {Path.cwd()})")
        return
    root = _compose(path.read_text(encoding="utf-8"), f"file {path}")
    if root is None:
        return
    if root.id != "mapping":
        raise ValueError(f"file {path}: holds a {root.id}; write one 'name: value' a line")
    seen: dict[str, str] = {}
    for key, value in root.value:
        name, origin = str(key.value), f"file {path}:{key.start_mark.line + 1}"
        if name not in _KINDS:
            raise ValueError(f"{origin}: {name!r} is no setting of Fit{nearest(name, _KINDS)}; possible: {', '.join(_KINDS)}")
        if name in seen:
            raise ValueError(f"{origin}: {name!r} was given already in {seen[name]}; keep one of them")
        seen[name] = origin
        yield name, value, origin


def _checked(name: str, node: _Node, origin: str) -> Any:
    if name == "callbacks":
        raise ValueError(f"{origin}: callbacks are objects and can be given in code only: Fit(callbacks=[...])")
    try:
        return check(name, _value(name, node))
    except (ValueError, TypeError) as error:
        raise type(error)(f"{origin}: {error}") from None


def _value(name: str, node: _Node) -> Any:
    """The Python value of a YAML node, read by the type of the setting ``name``."""
    if node is None:
        raise ValueError(f"{name} is empty: give a value, or null for None")
    kind, plain = _KINDS[name], node.id == "scalar" and node.tag != "tag:yaml.org,2002:null"
    if plain and (kind in ("str", "Path", "Any") or "Duration" in kind):
        return node.value  # "no" is a precision and 2024 may be a directory, whatever YAML makes of them
    loader = _loader()("")
    try:
        value = loader.construct_document(node)
    except Exception as error:
        raise ValueError(f"{name} cannot be read: {_one_line(error)}") from None
    finally:
        loader.dispose()
    # Flags are set to 1 and 0 in environments.
    return bool(value) if kind.startswith("bool") and "int" not in kind and type(value) is int and value in (0, 1) else value


def _compose(text: str, origin: str) -> _Node:
    import yaml

    try:
        return yaml.compose(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: is no YAML: {_one_line(error)}") from None


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader with YAML 1.2's numbers: 1e-3 is one (1.1: text), and 10:30 is not (1.1: 630)."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[Any, Any] = {}

    flags = r"true|false|yes|no|on|off"
    for tag, pattern in (
        ("null", r"~|null|none"),
        ("bool", flags),
        ("int", r"[-+]?[0-9][0-9_]*"),
        ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$", re.IGNORECASE), None)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    return Loader


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
