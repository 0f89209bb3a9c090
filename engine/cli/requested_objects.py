"""Finds the settings and the objects of a ``fit`` command in the file of settings and on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from engine.callback import Callback
from engine.cli.class_paths import CALLBACKS, load
from engine.cli.terminal import UsageError
from engine.config import yaml_text
from engine.config.described_objects import ObjectKind, check_target
from engine.config.resolve import Resolved, resolve
from engine.config.settings import KINDS
from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.utils.errors import nearest
from engine.utils.log import logger

SECTIONS = ("model", "data", "callbacks")
_KEYS = ("class_path", "init_args")
COMMAND_LINE = "command line"


@runtime_checkable
class Indexed(Protocol):
    """A class whose objects give batches by their index; ``for`` takes it as it takes an ``Iterable``."""

    def __getitem__(self, index: int, /) -> Any: ...


_KINDS_OF_OBJECTS: Mapping[type, ObjectKind] = {
    Callback: ObjectKind((Callback,), "an engine.Callback", annotated=True),
    DataModule: ObjectKind((DataModule, Iterable, Indexed), "an engine.DataModule or a loader of batches"),
}


@dataclass
class Component:
    """A description of an object to build."""

    name: str
    """``"model"``, ``"data"`` or ``"callbacks.0"``."""
    path: str
    """The class or the function, as the user named it."""
    target: Callable[..., Any]
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that the file gives."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted name of a parameter -> the file and line that give it; ``""`` is the object itself."""
    overrides: list[tuple[str, str]] = field(default_factory=list)
    """The dotted names and the values, as text, that the command line gives."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments from a checkpoint, which are passed unchanged and have the lowest priority."""

    @property
    def title(self) -> str:
        """The name of the class or the function."""
        return str(getattr(self.target, "__qualname__", self.path))

    def origin(self, key: str) -> str:
        """The origin of a parameter's value, or of the last change inside it: an option of the command line, or a file and its line."""
        if any(within(name, key) for name, _ in self.overrides):
            return f"{COMMAND_LINE} {self.name}.{key}"
        return self.line(key)

    def line(self, key: str) -> str:
        """The file and line of a parameter's value; if they are unknown, those of the nearest enclosing value (``model`` for ``model.lr``)."""
        while key not in self.origins and key:
            key = key.rpartition(".")[0]
        return self.origins.get(key, COMMAND_LINE)


def within(inner: str, outer: str) -> bool:
    """Check whether the dotted name ``inner`` is ``outer`` or names something inside it; a final ``+``, which appends to a list, is ignored."""
    return f"{inner.removesuffix('+')}.".startswith(f"{outer}.")


@dataclass(frozen=True)
class Components:
    """The settings of a command, and the objects to build."""

    resolved: Resolved
    model: Component
    data: Component | None
    callbacks: list[Component]

    @property
    def objects(self) -> list[Component]:
        """All objects, the model first."""
        return [self.model, *([self.data] if self.data is not None else []), *self.callbacks]


@dataclass(frozen=True)
class EarlierRun:
    """The settings and objects that a checkpoint records of its run, for a command that repeats it. The command line and a file take precedence."""

    origin: str
    settings: Mapping[str, Any]
    """Settings of ``Fit``, as plain values."""
    sections: Mapping[str, Any]
    """Descriptions of objects (:data:`SECTIONS`); building them runs their code."""
    without_model: str
    """The error message if nothing names a model."""

    def origins(self) -> dict[str, str]:
        """The origin of each recorded object, by its section; callbacks also by number."""
        callbacks = [f"callbacks.{index}" for index in range(len(self.sections.get("callbacks", ())))]
        return dict.fromkeys((*self.sections, *callbacks), self.origin)


def components_of(
    target: str | None,
    data: str | None,
    callbacks: Sequence[str],
    overrides: Sequence[str],
    config: str | None,
    earlier: EarlierRun | None = None,
) -> Components:
    """Combine the file of settings and the command line.

    Args:
        target, data, callbacks: classes on the command line; target and data replace those in the file, callbacks are added after the file's.
        overrides: ``NAME=VALUE`` texts; dotted names set parameters of objects, all others are settings of ``Fit``.
        config: the file; ``None``: the one that ``FIT_CONFIG`` names, else ``./fit.yaml`` if there is one.
        earlier: the run to repeat.

    Raises:
        UsageError: nothing names a model, a target or an object does not exist, or a section is malformed.
        ValueError, TypeError, OSError: a setting or the file is wrong; see :func:`engine.config.resolve.resolve`.
    """
    for text in overrides:
        _check_section(text)
    earlier_values = {} if earlier is None else {**earlier.settings, **earlier.sections}
    origin = "" if earlier is None else earlier.origin
    resolved = resolve(
        {}, os.environ, None if config is None else Path(config), overrides, SECTIONS, earlier_values, origin
    )
    sections = resolved.sections
    origins = {
        **({} if earlier is None else earlier.origins()),
        **(_origins_of_file(resolved.file) if sections else {}),
    }
    model = _component("model", target, sections.get("model"), origins, "the target", TrainModule)
    if model is None and earlier is not None:
        raise UsageError(earlier.without_model)
    if model is None:
        reason = (
            f"{resolved.file} has no section model:"
            if resolved.file
            else "there is no ./fit.yaml with a section model:"
        )
        raise UsageError(f"no TrainModule is named: give it as the target, as in my.module:Net or net.py ({reason})")
    if not (isinstance(model.target, type) and issubclass(model.target, TrainModule)):
        raise UsageError(
            f"{model.origin('')}: {model.path!r} is {_kind(model.target)}, not a TrainModule: subclass engine.TrainModule"
        )
    components = Components(
        resolved,
        model,
        _data_component(data, sections.get("data"), origins),
        _callback_components(callbacks, sections.get("callbacks"), origins),
    )
    for text in overrides:
        _override(components, *text.split("=", 1))
    return components


def _origins_of_file(file: Path | None) -> dict[str, str]:
    """The file and line of each key of the file, by dotted name; entries of lists by their number."""
    if file is None:
        return {}
    origin, origins = f"file {file}", {}
    root = yaml_text.compose(yaml_text.read_file(file), origin, lines=True)
    for name, node, line_origin in yaml_text.items_with_lines(root, origin, lines=True):
        origins[name] = line_origin
        nodes = enumerate(node.value) if node.id == "sequence" else [(None, node)]
        for index, value_node in nodes:
            prefix = name if index is None else f"{name}.{index}"
            origins[prefix] = line_origin if index is None else f"{origin}:{value_node.start_mark.line + 1}"
            origins.update(
                {
                    f"{prefix}.{key}": key_origin
                    for key, key_origin in yaml_text.origins_of_keys(value_node, origin, lines=True).items()
                }
            )
    return origins


def _component(
    name: str, requested: str | None, section: Any, origins: Mapping[str, str], role: str, base: type
) -> Component | None:
    """The object that the command line (``requested``) or a section of the file describes; ``None``: neither describes one."""
    origin = origins.get(name, COMMAND_LINE)
    path, init_args = _class_and_parameters(name, section, origin)
    if requested is None and path is None:
        if init_args:
            raise UsageError(f"{origin}: {name} has no class_path: give one, as in 'class_path: my.module:Name'")
        return None
    package = CALLBACKS if base is Callback else None
    chosen = path if requested is None else requested
    target = load(str(chosen), role if requested is not None else f"{origin}: {name}", base, package)
    place = origin if requested is None else role
    if not callable(target):
        raise UsageError(f"{place}: {chosen!r} is {_kind(target)}: name a class or a function")
    try:
        if base in _KINDS_OF_OBJECTS:
            check_target(target, str(chosen), place, _KINDS_OF_OBJECTS[base])
    except TypeError as error:
        raise UsageError(str(error)) from None
    if (
        requested is not None
        and path is not None
        and init_args
        and load(path, f"{origin}: {name}", base, package) is not target
    ):
        logger.warning(
            "%s: the parameters of %s are not used, because %s was given on the command line", origin, path, requested
        )
        init_args = {}
    prefix = f"{name}." if section is None or not set(_KEYS) & set(section) else f"{name}.init_args."
    parameter_origins = {
        key.removeprefix(prefix): key_origin for key, key_origin in origins.items() if key.startswith(prefix)
    }
    return Component(
        name, str(chosen), target, init_args, {**parameter_origins, "": origin if requested is None else COMMAND_LINE}
    )


def _class_and_parameters(name: str, section: Any, origin: str) -> tuple[str | None, dict[str, Any]]:
    """The class path and the parameters in a section, which is text, a mapping of both, or a mapping of parameters alone."""
    if section == "":
        raise UsageError(f"{origin}: {name} is empty: name a class, or remove the line")
    if section is None or isinstance(section, str):
        return section, {}
    if not isinstance(section, Mapping):
        raise UsageError(
            f"{origin}: {name} is of type {type(section).__name__}: give a class, or a mapping with class_path and init_args"
        )
    if not set(_KEYS) & set(section):
        return None, dict(section)
    for key in section:
        if key not in _KEYS:
            raise UsageError(
                f"{origin}: {name} has the key {key!r} besides class_path{nearest(key, _KEYS)}; parameters belong under init_args"
            )
    path, init_args = section.get("class_path"), section.get("init_args") or {}
    if not isinstance(path, str | None) or not isinstance(init_args, Mapping):
        raise UsageError(
            f"{origin}: {name}: class_path is text, as in my.module:Name, and init_args a mapping of parameters"
        )
    return path, dict(init_args)


def _data_component(requested: str | None, section: Any, origins: Mapping[str, str]) -> Component | None:
    return _component("data", requested, section, origins, "--data", DataModule)


def _callback_components(requested: Sequence[str], section: Any, origins: Mapping[str, str]) -> list[Component]:
    """The callbacks of the file, then those of the command line."""
    entries = [] if section is None else section if isinstance(section, list) else [section]
    is_single = section is not None and not isinstance(section, list)
    components = []
    for index, entry in enumerate(entries):
        name = f"callbacks.{index}"
        entry_origins = (
            {
                name + key.removeprefix("callbacks"): key_origin
                for key, key_origin in origins.items()
                if key.startswith("callbacks")
            }
            if is_single
            else origins
        )
        component = _component(name, None, entry, entry_origins, name, Callback)
        if component is None:
            raise UsageError(f"{origins.get(name, name)}: {name} is empty: name a class")
        components.append(component)
    for text in requested:
        component = _component(f"callbacks.{len(components)}", text, None, {}, "--callback", Callback)
        assert component is not None
        components.append(component)
    return components


def _check_section(text: str) -> None:
    """Raise an error for a dotted name whose first part is neither a setting nor a section; the names of settings are checked where they are read."""
    name = text.partition("=")[0]
    first, dot, _ = name.partition(".")
    if dot and first not in SECTIONS and first not in KINDS:
        raise UsageError(f"{COMMAND_LINE} {text}: there is no {first!r} to set{nearest(first, (*SECTIONS, *KINDS))}")


def _override(components: Components, name: str, text: str) -> None:
    """Add the value of a dotted name on the command line to the object that it belongs to."""
    section, _, key = name.partition(".")
    if section not in SECTIONS:
        return
    origin = f"{COMMAND_LINE} {name}"
    if section == "callbacks":
        callback_name, _, key = key.partition(".")
        component: Component | None = _find_callback(components.callbacks, callback_name, origin)
    else:
        component = components.model if section == "model" else components.data
    if component is None:
        raise UsageError(f"{origin}: there is no data: name it with --data, or in the section data: of the file")
    key = key.removeprefix("init_args.")
    if not key:
        raise UsageError(f"{origin}: names no parameter: write {component.name}.PARAMETER=VALUE")
    component.overrides.append((key, text))


def _find_callback(callbacks: list[Component], name: str, origin: str) -> Component:
    """The callback with this number or class name."""
    if name.isdecimal() and int(name) < len(callbacks):
        return callbacks[int(name)]
    matches = [component for component in callbacks if component.title == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{origin}: there are {len(matches)} {name}: name one by its number, {' or '.join(component.name for component in matches)}"
        )
    existing = [f"{component.name} ({component.title})" for component in callbacks]
    hint = nearest(name, [component.title for component in callbacks])
    raise UsageError(f"{origin}: there is no callback {name!r}{hint}; there are: {', '.join(existing) or 'none'}")


def _kind(value: Any) -> str:
    """How an error message names a value: ``the class Net``, ``a list``."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
