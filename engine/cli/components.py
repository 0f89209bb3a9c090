"""The objects and settings of a ``fit`` command, from the file of settings and the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.callback import Callback
from engine.cli.class_paths import CALLBACKS, load
from engine.cli.terminal import UsageError
from engine.config import yaml_text
from engine.config.resolve import Resolved, resolve
from engine.config.settings import KINDS
from engine.data.datamodule import DataModule
from engine.module import TrainModule
from engine.utils.errors import nearest
from engine.utils.log import logger

SECTIONS = ("model", "data", "callbacks")
_KEYS = ("class_path", "init_args")
COMMAND_LINE = "command line"


@dataclass
class Component:
    """An object to build."""

    name: str
    """``"model"``, ``"data"`` or ``"callbacks.0"``."""
    path: str
    """The class or function, as the user named it."""
    target: Callable[..., Any]
    init_args: Mapping[str, Any] = field(default_factory=dict)
    """The file's values."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """The lines of the file's values, by the parameter's dotted name; ``""`` is the object itself."""
    overrides: list[tuple[str, str]] = field(default_factory=list)
    """Dotted names and texts of the command line."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are passed unchanged with the lowest priority: those recorded in a checkpoint."""

    @property
    def title(self) -> str:
        """The class's own name."""
        return str(getattr(self.target, "__qualname__", self.path))

    def origin(self, key: str) -> str:
        """The origin of a parameter's value: the last source of it, or of something in it."""
        if any(within(given, key) for given, _ in self.overrides):
            return f"{COMMAND_LINE} {self.name}.{key}"
        return self.line(key)

    def line(self, key: str) -> str:
        """The line of the file that a parameter's value is from, or something around it."""
        while key not in self.origins and key:
            key = key.rpartition(".")[0]
        return self.origins.get(key, COMMAND_LINE)


def within(inner: str, outer: str) -> bool:
    """Whether the dotted name ``inner`` is ``outer``, or names something in it; a last ``+`` appends to a list."""
    return f"{inner.removesuffix('+')}.".startswith(f"{outer}.")


@dataclass(frozen=True)
class Components:
    """Settings, and the objects to build."""

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
    """A checkpoint's account of its run, for a command that repeats it; taken where neither the command line nor a file says otherwise."""

    origin: str
    settings: Mapping[str, Any]
    """Settings of ``Fit``, as plain values."""
    sections: Mapping[str, Any]
    """Descriptions of objects (:data:`SECTIONS`), whose code will run."""
    without_model: str
    """The error if nothing names a model."""

    def origins(self) -> dict[str, str]:
        """The origin of each object."""
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
    """Combine the file and the command line.

    Args:
        target, data, callbacks: classes of the command line; the first two replace those of the file, the last are added after its.
        overrides: ``NAME=VALUE`` texts; dotted names set parameters of objects, all others are settings of ``Fit``.
        config: the file; ``None``: the one that ``FIT_CONFIG`` names, else ``./fit.yaml`` if there is one.
        earlier: the run to repeat.

    Raises:
        UsageError: no model, an unknown target or object, or a malformed section.
        ValueError, TypeError, OSError: a setting or the file is wrong, as of :func:`engine.config.resolve.resolve`.
    """
    for text in overrides:
        _check_section(text)
    below = {} if earlier is None else {**earlier.settings, **earlier.sections}
    origin = "" if earlier is None else earlier.origin
    resolved = resolve({}, os.environ, None if config is None else Path(config), overrides, SECTIONS, below, origin)
    sections = resolved.sections
    origins = {
        **({} if earlier is None else earlier.origins()),
        **(_origins_of_file(resolved.file) if sections else {}),
    }
    model = _component("model", target, sections.get("model"), origins, "the target", TrainModule)
    if model is None and earlier is not None:
        raise UsageError(earlier.without_model)
    if model is None:
        where = (
            f"{resolved.file} has no section model:"
            if resolved.file
            else "there is no ./fit.yaml with a section model:"
        )
        raise UsageError(f"no TrainModule is named: give it as the target, as in my.module:Net or net.py ({where})")
    if not (isinstance(model.target, type) and issubclass(model.target, TrainModule)):
        raise UsageError(
            f"{model.origin('')}: {model.path!r} is {_kind(model.target)}, not a TrainModule: subclass engine.TrainModule"
        )
    found = Components(
        resolved,
        model,
        _data(data, sections.get("data"), origins),
        _callback_components(callbacks, sections.get("callbacks"), origins),
    )
    for text in overrides:
        _override(found, *text.split("=", 1))
    return found


def _origins_of_file(file: Path | None) -> dict[str, str]:
    """The line of each key of the file, by its dotted name; entries of lists by their number."""
    if file is None:
        return {}
    origin, found = f"file {file}", {}
    root = yaml_text.compose(yaml_text.read_file(file), origin, lines=True)
    for name, node, where in yaml_text.items_with_lines(root, origin, lines=True):
        found[name] = where
        inner = enumerate(node.value) if node.id == "sequence" else [(None, node)]
        for index, each in inner:
            prefix = name if index is None else f"{name}.{index}"
            found[prefix] = where if index is None else f"{origin}:{each.start_mark.line + 1}"
            found.update(
                {f"{prefix}.{key}": where for key, where in yaml_text.origins_of_keys(each, origin, lines=True).items()}
            )
    return found


def _component(
    name: str, given: str | None, section: Any, origins: Mapping[str, str], role: str, base: type
) -> Component | None:
    """The object that the command line (``given``) or a section of the file describes; ``None``: neither does."""
    origin = origins.get(name, COMMAND_LINE)
    path, init_args = _described(name, section, origin)
    if given is None and path is None:
        if init_args:
            raise UsageError(f"{origin}: {name} has no class_path: give one, as in 'class_path: my.module:Name'")
        return None
    package = CALLBACKS if base is Callback else None
    chosen = path if given is None else given
    target = load(str(chosen), role if given is not None else f"{origin}: {name}", base, package)
    if not callable(target):
        raise UsageError(
            f"{origin if given is None else role}: {chosen!r} is {_kind(target)}: name a class or a function"
        )
    if (
        given is not None
        and path is not None
        and init_args
        and load(path, f"{origin}: {name}", base, package) is not target
    ):
        logger.warning(
            "%s: the parameters of %s are not used, because %s was given on the command line", origin, path, given
        )
        init_args = {}
    prefix = f"{name}." if section is None or not set(_KEYS) & set(section) else f"{name}.init_args."
    own = {key.removeprefix(prefix): where for key, where in origins.items() if key.startswith(prefix)}
    return Component(name, str(chosen), target, init_args, {**own, "": origin if given is None else COMMAND_LINE})


def _described(name: str, section: Any, origin: str) -> tuple[str | None, dict[str, Any]]:
    """The class and the parameters of a section: text, a mapping of both, or of parameters alone."""
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


def _data(given: str | None, section: Any, origins: Mapping[str, str]) -> Component | None:
    return _component("data", given, section, origins, "--data", DataModule)


def _callback_components(given: Sequence[str], section: Any, origins: Mapping[str, str]) -> list[Component]:
    listed = [] if section is None else section if isinstance(section, list) else [section]
    alone = section is not None and not isinstance(section, list)
    found = []
    for index, entry in enumerate(listed):
        name = f"callbacks.{index}"
        own = (
            {
                name + key.removeprefix("callbacks"): where
                for key, where in origins.items()
                if key.startswith("callbacks")
            }
            if alone
            else origins
        )
        component = _component(name, None, entry, own, name, Callback)
        if component is None:
            raise UsageError(f"{origins.get(name, name)}: {name} is empty: name a class")
        found.append(component)
    for text in given:
        component = _component(f"callbacks.{len(found)}", text, None, {}, "--callback", Callback)
        assert component is not None
        found.append(component)
    return found


def _check_section(text: str) -> None:
    """Refuse a dotted name whose first name is neither a setting nor a section; settings are checked where they are read."""
    name = text.partition("=")[0]
    first, dot, _ = name.partition(".")
    if dot and first not in SECTIONS and first not in KINDS:
        raise UsageError(f"{COMMAND_LINE} {text}: there is no {first!r} to set{nearest(first, (*SECTIONS, *KINDS))}")


def _override(found: Components, name: str, text: str) -> None:
    """Assign a dotted name of the command line to its object."""
    section, _, key = name.partition(".")
    if section not in SECTIONS:
        return
    origin = f"{COMMAND_LINE} {name}"
    if section == "callbacks":
        which, _, key = key.partition(".")
        component: Component | None = _find_callback(found.callbacks, which, origin)
    else:
        component = found.model if section == "model" else found.data
    if component is None:
        raise UsageError(f"{origin}: there is no data: name it with --data, or in the section data: of the file")
    key = key.removeprefix("init_args.")
    if not key:
        raise UsageError(f"{origin}: names no parameter: write {component.name}.PARAMETER=VALUE")
    component.overrides.append((key, text))


def _find_callback(callbacks: list[Component], which: str, origin: str) -> Component:
    if which.isdecimal() and int(which) < len(callbacks):
        return callbacks[int(which)]
    same = [component for component in callbacks if component.title == which]
    if len(same) == 1:
        return same[0]
    if same:
        raise UsageError(
            f"{origin}: there are {len(same)} {which}: name one by its number, {' or '.join(component.name for component in same)}"
        )
    there = [f"{component.name} ({component.title})" for component in callbacks]
    hint = nearest(which, [component.title for component in callbacks])
    raise UsageError(f"{origin}: there is no callback {which!r}{hint}; there are: {', '.join(there) or 'none'}")


def _kind(value: Any) -> str:
    """Return the words for a value in an error."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
