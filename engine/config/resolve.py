"""Where each setting comes from: command line > code > environment (``FIT_PRECISION``) > YAML file > default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from engine.config import command_line as command_line
from engine.config import yaml_reader
from engine.config.duration import Duration
from engine.config.settings import OVERFIT, Settings, fast_dev_run_overrides
from engine.config.yaml_reader import Node
from engine.config.yaml_values import KINDS, read_value
from engine.config.yaml_writer import flow
from engine.utils.extensions import hint
from engine.utils.log import TERMINAL

PREFIX = "FIT_"
RESERVED = ("FIT_CONFIG", "FIT_PARENT_PID", TERMINAL)
"""Variables with our prefix that are not settings: the file's path, and the mark of a rank that ``Fit`` started."""
DEFAULT_FILE = "fit.yaml"
SECTIONS = ("model", "data", "callbacks")
"""Parts of a file that describe a training to ``fit run``, and are not settings."""


class _Unset:
    """The type of :data:`UNSET`."""

    def __repr__(self) -> str:
        return "<default>"

    def __reduce__(self) -> str:
        return "UNSET"  # copies and pickles are the same object


UNSET: Any = _Unset()
"""Marks an argument that was not given; ``None`` is a normal value."""
F = TypeVar("F", bound=Callable[..., None])


def shows_defaults(init: F) -> F:
    """Decorator: where an argument's default is :data:`UNSET`, ``help`` and ``inspect.signature`` show the setting's own default."""
    found = inspect.signature(init)
    defaults = {each.name: each.default for each in fields(Settings)}
    shown = []
    for each in found.parameters.values():
        value = defaults[each.name] if each.default is UNSET else each.default
        if each.kind is not inspect.Parameter.VAR_KEYWORD:
            shown.append(each.replace(default=str(value) if isinstance(value, (Duration, Path)) else value))
    init.__signature__ = found.replace(parameters=shown)  # type: ignore[attr-defined]
    return init


@dataclass(frozen=True)
class Resolved:
    """The settings of a run and where they come from."""

    settings: Settings
    origins: dict[str, str]
    """For each setting: ``"command line seed=1"``, ``"code"``, ``"environment FIT_PRECISION"``, ``"file fit.yaml:3"``, ``"fast_dev_run"``,
    ``"overfit_batches"``
    or ``"default"``. Options of a strategy or a precision have their origins in :attr:`engine.config.name_and_options.Named.origins`."""
    sections: dict[str, Any] = field(default_factory=dict)
    """The requested sections of the file, as plain values."""
    file: Path | None = None
    """The file that was read."""


def resolve(
    given: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    sections: Sequence[str] = (),
    earlier: Mapping[str, Any] | None = None,
    earlier_origin: str = "",
) -> Resolved:
    """Resolve the settings: command line > code > environment > file > earlier run > default.

    Args:
        given: the arguments given in code; :data:`UNSET` marks those not given.
        environ: ``os.environ``. ``FIT_<NAME>`` is a setting as YAML; ``FIT_CONFIG`` names the file.
        file: the YAML file. ``None``: the one that ``FIT_CONFIG`` names, else ``./fit.yaml`` if there is one.
        overrides: ``name=value`` texts of the command line, values as YAML; the last one of a name wins. ``strategy.stage=3`` changes one
            key of a mapping from any source; a plain strategy becomes one. Those of ``sections`` are left to the caller.
        sections: top-level keys of the file that are the caller's (:data:`SECTIONS`); elsewhere they are an error.
        earlier, earlier_origin: settings and sections of an earlier run as plain values, and where they are from.

    Raises:
        ValueError, TypeError: a name or a value that is not possible, with its origin.
        OSError: the file cannot be read; ``FileNotFoundError``: the named file does not exist.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KINDS, "default")
    path = _path(environ, file)
    theirs: dict[str, Any] = {}
    for name, value in (earlier or {}).items():
        if name in sections:
            theirs[name] = value
        else:
            node = yaml_reader.compose(flow(value), earlier_origin)
            _check_name(name, earlier_origin)
            values[name], origins[name] = read_value(name, node, earlier_origin), earlier_origin
    for name, node, origin in _from_file(path) if path is not None else ():
        if name in sections:
            try:
                theirs[name] = yaml_reader.construct(node)
            except ValueError as error:
                raise ValueError(f"{origin}: {name} {error}") from None
        else:
            _check_name(name, origin)
            values[name], origins[name] = read_value(name, node, origin, lines=True), origin
    for name, node, origin in _from_environment(environ):
        values[name], origins[name] = read_value(name, node, origin), origin
    for name, value in given.items():
        if name not in KINDS:
            raise TypeError(
                f"{name!r} is not an argument of Fit{hint('setting', name, KINDS)}; possible: {', '.join(KINDS)}"
            )
        if value is not UNSET:
            values[name], origins[name] = value, "code"
    command_line.apply(overrides, values, origins, sections)
    settings = Settings(**values)
    if settings.overfit_batches:
        origins.update(dict.fromkeys(OVERFIT, "overfit_batches"))
    if settings.fast_dev_run:
        origins.update(dict.fromkeys(fast_dev_run_overrides(1), "fast_dev_run"))
    return Resolved(settings, origins, theirs, path)


_Entries = Iterator[tuple[str, Node, str]]


def _from_environment(environ: Mapping[str, str]) -> _Entries:
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in KINDS or variable != variable.upper():
            known = ", ".join(PREFIX + kind.upper() for kind in KINDS)
            meant = f"; did you mean {variable.upper()}?" if name in KINDS else hint("setting", name, KINDS)
            raise ValueError(
                f"environment {variable}: {name!r} is not a Fit setting{meant}; unset it, or choose from {known}"
            )
        yield name, yaml_reader.compose(text, f"environment {variable}"), f"environment {variable}"


def _path(environ: Mapping[str, str], file: Path | None) -> Path | None:
    named = file if file is not None else environ.get("FIT_CONFIG")
    path, reason = Path(named or DEFAULT_FILE), "is not a file"
    try:
        if path.exists():
            return path
    except OSError as error:  # a name that no file can have, or a folder that may not be searched
        if not named:
            raise
        reason = f"cannot be read ({error.strerror})"
    if named:
        by = "the requested file" if file is not None else "FIT_CONFIG"
        raise FileNotFoundError(f"{by} names {str(path)!r}, which {reason} (current directory: {Path.cwd()})")
    return None


def _from_file(path: Path) -> list[tuple[str, Node, str]]:
    origin = f"file {path}"
    root = yaml_reader.compose(yaml_reader.read_file(path), origin, lines=True)
    if root is None:
        return []
    if root.id != "mapping":
        raise ValueError(f"{origin}: has a {root.id} at its top; write one 'name: value' per line")
    return list(yaml_reader.entries(root, origin, lines=True))


def _check_name(name: str, origin: str) -> None:
    if name in SECTIONS:
        also = "; Fit(callbacks=[...]) takes callbacks in code only" if name == "callbacks" else ""
        raise ValueError(
            f"{origin}: {name!r} is a section that 'fit run' reads; a script with Fit(...) builds its own{also}"
        )
    if name not in KINDS:
        raise ValueError(
            f"{origin}: {name!r} is not a Fit setting{hint('setting', name, KINDS)}; possible: {', '.join(KINDS)}"
        )
