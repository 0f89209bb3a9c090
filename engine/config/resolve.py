"""Determines the value of each setting and where it comes from: command line > code > environment (``FIT_PRECISION``) > YAML file > default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from engine.config import combinations, yaml_text
from engine.config.duration import Duration
from engine.config.kinds import ByName
from engine.config.named_options import NamedOptions
from engine.config.settings import KINDS, Settings
from engine.config.yaml_text import Node, flow
from engine.utils.extensions import hint
from engine.utils.log import TERMINAL
from engine.utils.paths import expanded

PREFIX = "FIT_"
RESERVED = ("FIT_CONFIG", "FIT_PARENT_PID", TERMINAL)
"""Variables with our prefix that are not settings: the path of the file, and the marks of a rank that ``Fit`` or ``fit launch`` has started."""
DEFAULT_FILE = "fit.yaml"
SECTIONS = ("model", "data", "callbacks")
"""Keys of a file that are not settings, but describe the objects of a training to ``fit run``."""


class _Unset:
    """The type of :data:`UNSET`."""

    def __repr__(self) -> str:
        return "<default>"

    def __reduce__(self) -> str:
        return "UNSET"  # copying and unpickling give the same object


UNSET: Any = _Unset()
"""Marks an argument that was not given, because ``None`` is a possible value."""
F = TypeVar("F", bound=Callable[..., Any])


def with_real_defaults_in_help(method: F) -> F:
    """Decorate a method of ``Fit`` so that ``help`` and ``inspect.signature`` do not show ``**unknown``, and where an argument's default is
    :data:`UNSET` they show the setting's default, or none: a module has to be given."""
    signature = inspect.signature(method)
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    parameters = []
    for parameter in signature.parameters.values():
        value = defaults.get(parameter.name, parameter.empty) if parameter.default is UNSET else parameter.default
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter.replace(default=str(value) if isinstance(value, (Duration, Path)) else value))
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Resolved:
    """The settings of a run, and where each of them comes from."""

    settings: Settings
    origins: dict[str, str]
    """For each setting: ``"command line seed=1"``, ``"code"``, ``"environment FIT_PRECISION"``, ``"file fit.yaml:3"``, ``"fast_dev_run"``,
    ``"overfit_batches"`` or ``"default"``. The origins of a strategy's or a precision's options are in
    :attr:`engine.config.named_options.NamedOptions.origins`."""
    sections: dict[str, Any] = field(default_factory=dict)
    """The requested sections of the file, as plain values."""
    file: Path | None = None
    """The file that was read."""


def resolve(
    arguments: Mapping[str, object],
    environ: Mapping[str, str],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    sections: Sequence[str] = (),
    earlier: Mapping[str, Any] | None = None,
    earlier_origin: str = "",
) -> Resolved:
    """Determine the settings: command line > code > environment > file > earlier run > default.

    Args:
        arguments: arguments of ``Fit`` in code; :data:`UNSET` marks those that were not given.
        environ: ``os.environ``. ``FIT_<NAME>`` is a setting as YAML; ``FIT_CONFIG`` names the file.
        file: the YAML file. ``None``: the one that ``FIT_CONFIG`` names, else ``./fit.yaml`` if there is one.
        overrides: ``name=value`` texts of the command line, with values in YAML; the last text for a name wins. ``strategy.stage=3`` changes
            one key of a mapping from any source, and turns the name of a strategy into a mapping. Texts for ``sections`` are left to the caller.
        sections: top-level keys of the file that the caller reads (:data:`SECTIONS`); other sections in the file are an error.
        earlier, earlier_origin: settings and sections of an earlier run as plain values, and where these come from.

    Raises:
        ValueError, TypeError: a name or a value is not possible; the message states its origin.
        OSError: the file cannot be read; ``FileNotFoundError``: the named file does not exist.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KINDS, "default")
    path = _path(environ, file)
    section_values: dict[str, Any] = {}
    for name, value in (earlier or {}).items():
        if name in sections:
            section_values[name] = value
        else:
            node = yaml_text.compose(flow(value), earlier_origin)
            _check_name(name, earlier_origin)
            values[name], origins[name] = read_value(name, node, earlier_origin), earlier_origin
    for name, node, origin in _from_file(path) if path is not None else ():
        if name in sections:
            try:
                section_values[name] = yaml_text.construct(node)
            except ValueError as error:
                raise ValueError(f"{origin}: {name} {error}") from None
        else:
            _check_name(name, origin)
            values[name], origins[name] = read_value(name, node, origin, lines=True), origin
    for name, node, origin in _from_environment(environ):
        values[name], origins[name] = read_value(name, node, origin), origin
    for name, value in arguments.items():
        if name not in KINDS:
            raise TypeError(
                f"{name!r} is not an argument of Fit{hint('setting', name, KINDS)}; possible: {', '.join(KINDS)}"
            )
        if value is not UNSET:
            values[name], origins[name] = value, "code"
    _apply_command_line(overrides, values, origins, sections)
    settings = Settings(**values)
    origins.update(combinations.implied_origins(settings))
    return Resolved(settings, origins, section_values, path)


_Entries = Iterator[tuple[str, Node, str]]


def _from_environment(environ: Mapping[str, str]) -> _Entries:
    """Yield the name, the YAML node and the origin of each setting in the environment."""
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in KINDS or variable != variable.upper():
            names = ", ".join(PREFIX + kind.upper() for kind in KINDS)
            suggestion = f"; did you mean {variable.upper()}?" if name in KINDS else hint("setting", name, KINDS)
            raise ValueError(
                f"environment {variable}: {name!r} is not a Fit setting{suggestion}; unset it, or choose from {names}"
            )
        yield name, yaml_text.compose(text, f"environment {variable}"), f"environment {variable}"


def _path(environ: Mapping[str, str], file: Path | None) -> Path | None:
    """The path of the file of settings; ``None``: no file is requested, and there is none in the current directory."""
    requested = file if file is not None else environ.get("FIT_CONFIG")
    path, reason = Path(expanded(requested or DEFAULT_FILE)), "is not a file"
    try:
        if path.exists():
            return path
    except OSError as error:  # a name that no file can have, or a folder that may not be searched
        if not requested:
            raise
        reason = f"cannot be read ({error.strerror})"
    if requested:
        source = "the requested file" if file is not None else "FIT_CONFIG"
        raise FileNotFoundError(f"{source} names {str(path)!r}, which {reason} (current directory: {Path.cwd()})")
    return None


def _from_file(path: Path) -> list[tuple[str, Node, str]]:
    """The name, the YAML node and the origin of each top-level key of a file."""
    origin = f"file {path}"
    root = yaml_text.compose(yaml_text.read_file(path), origin, lines=True)
    if root is None:
        return []
    if root.id != "mapping":
        raise ValueError(f"{origin}: has a {root.id} at its top; write one 'name: value' per line")
    return list(yaml_text.items_with_lines(root, origin, lines=True))


def _check_name(name: str, origin: str) -> None:
    """Raise an error unless ``name`` is a setting."""
    if name in SECTIONS:
        code_hint = "; Fit(callbacks=[...]) takes callbacks in code only" if name == "callbacks" else ""
        if origin.startswith("file "):
            code_hint += ". Rename the file, and give it to 'fit run' with --config NAME"
        raise ValueError(
            f"{origin}: {name!r} is a section that 'fit run' reads; a script with Fit(...) builds its own{code_hint}"
        )
    if name not in KINDS:
        raise ValueError(
            f"{origin}: {name!r} is not a Fit setting{hint('setting', name, KINDS)}; possible: {', '.join(KINDS)}"
        )


def read_value(name: str, node: Node, origin: str, *, lines: bool = False) -> Any:
    """Read and check the value of the setting ``name``. Errors start with ``origin``, or, if it ends in a line (``lines``), with the line of the
    wrong key.

    Raises:
        ValueError, TypeError: the value is not possible.
    """
    kind = KINDS[name]
    try:
        value = kind.from_yaml(node)
    except ValueError as error:
        raise ValueError(f"{origin}: {name} {error}") from None
    file = origin.rpartition(":")[0] if lines else origin
    origins = yaml_text.origins_of_keys(node, file, lines=lines)
    if isinstance(kind, ByName) and isinstance(value, dict):
        value = kind.from_mapping(name, value, {"": origin, **origins})
    try:
        return kind.normalized(name, value)
    except (ValueError, TypeError) as error:
        key_origin = next((key_origin for key, key_origin in origins.items() if repr(key) in str(error)), origin)
        raise type(error)(f"{key_origin}: {error}") from None


def _apply_command_line(
    overrides: Sequence[str], values: dict[str, Any], origins: dict[str, str], sections: Sequence[str]
) -> None:
    """Apply texts such as ``max_epochs=3`` and ``strategy.stage=3`` to ``values`` and ``origins``: first whole settings, then single keys, each in
    order.

    Raises:
        ValueError, TypeError: a text without ``=``, an unknown setting, or a value that is not possible.
    """
    settings: list[tuple[str, Node, str]] = []
    keys: list[tuple[list[str], Node, str]] = []
    for text in overrides:
        name, equals, yaml = text.partition("=")
        path = name.strip().split(".")
        origin = f"command line {text}"
        if path[0] in sections:
            continue
        if not equals or not all(path):
            raise ValueError(f"{origin}: write name=value, such as max_epochs=3 or strategy.stage=3")
        if path[0] not in KINDS:
            raise ValueError(
                f"{origin}: {path[0]!r} is not a Fit setting{hint('setting', path[0], KINDS)}; possible: {', '.join(KINDS)}"
            )
        node = yaml_text.compose(yaml, origin)
        if len(path) > 1:
            keys.append((path, node, origin))
        else:
            settings.append((path[0], node, origin))
    for name, node, origin in settings:
        values[name], origins[name] = read_value(name, node, origin), origin
    for path, node, origin in keys:
        _set_key(path, node, origin, values, origins)


def _set_key(path: list[str], node: Node, origin: str, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Set one key of the mapping that is the setting's value, from whatever source it comes."""
    setting, *keys = path
    if node is None:
        raise ValueError(f"{origin}: {'.'.join(path)} is empty: give a value, or null for None")
    kind, current = KINDS[setting], values.get(setting, _DEFAULTS[setting])
    mapping = kind.as_mapping(current)
    if mapping is None:
        if isinstance(kind, ByName):
            raise ValueError(
                f"{origin}: {setting} was given as an object in code ({current!r:.60}), which has its own settings; "
                "give a name there"
            )
        raise ValueError(f"{origin}: {setting} is not a mapping and has no keys; write {setting}=VALUE")
    target = mapping
    for key in map(_key, keys[:-1]):
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ValueError(f"{origin}: {setting} has the value {target!r} at {key!r}, which is not a mapping")
    try:
        is_name = isinstance(kind, ByName) and keys == ["name"] and yaml_text.is_text(node)
        target[_key(keys[-1])] = node.value if is_name else yaml_text.construct(node)
    except ValueError as error:
        raise ValueError(f"{origin}: {'.'.join(path)} {error}") from None
    if isinstance(kind, ByName):
        current_origins = current.origins if isinstance(current, NamedOptions) else {"name": origins[setting]}
        key = ".".join(keys)
        remaining_origins = {
            inner_key: key_origin
            for inner_key, key_origin in current_origins.items()
            if not inner_key.startswith(f"{key}.")
        }
        values[setting] = kind.from_mapping(setting, mapping, {**remaining_origins, key: origin})
        origins[setting] = origin if origins[setting] == "default" else origins[setting]
        return
    try:
        values[setting] = kind.normalized(setting, mapping)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{origin}: {error}") from None
    origins[setting] = origin if origins[setting] == "default" else f"{origin}, over {origins[setting]}"


_DEFAULTS: dict[str, Any] = {name: getattr(Settings(), name) for name in KINDS}


def _key(text: str) -> Any:
    """A key of a mapping; digits become an int."""
    return int(text) if text.isdecimal() else text
