"""Builds and describes the objects of a run: the parameters of their constructors are options of the file and of the command line."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from engine.cli.requested_objects import COMMAND_LINE, Component, within
from engine.cli.terminal import UsageError
from engine.config import yaml_text
from engine.config.described_objects import check_described
from engine.config.masked import plain_value, with_origins
from engine.config.resolve import Resolved
from engine.config.secret_text import HIDDEN, has_hidden
from engine.config.typed_values import TEXT_READERS, converted, is_data
from engine.config.yaml_text import flow
from engine.utils.errors import nearest

_SECTION = "fit-section"
"""The option under which a parser takes the values of the file; no parameter has this name."""

for _type, _reader in TEXT_READERS.items():
    # jsonargparse has a reader of paths already, which before 4.52 it replaces only if told not to fail.
    register_type(_type, deserializer=_reader, type_check=isinstance, fail_already_registered=False)


class ObjectBuilder:
    """A :class:`Component` whose parameters are checked against the types of its constructor.

    Raises:
        UsageError: a parameter is unknown, missing, or of the wrong type; the message names it, its origin, and the nearest one.
    """

    def __init__(self, component: Component) -> None:
        self.component = component
        self._parser = parser_of(component)
        names = parameters(self._parser)
        for key, value in _values_in_file(component, names):
            _check_name(component, key, component.line(key), names)
            _check_value(component, key, value, component.line(key), names)
            _check_not_hidden(component, key, value)
        for key, _ in component.overrides:
            _check_name(component, key.removesuffix("+"), f"{COMMAND_LINE} {component.name}.{key}", names)
        self._arguments = [
            f"--{_SECTION}",
            flow(dict(component.init_args)),
            *(f"--{key}={value}" for key, value in component.overrides),
        ]
        try:
            self._values = self._parser.parse_args(self._arguments)
        except argparse.ArgumentError as error:
            raise UsageError(_with_user_names(component, str(error), names)) from None
        except Exception as error:  # from a module that a class path names, or from jsonargparse about one
            raise _as_usage_error(component, error) from None
        try:
            check_described(self._values, component.name)
        except TypeError as error:
            raise UsageError(f"{component.origin('')}: {error}") from None
        given_names = {
            *component.fixed,
            *component.init_args,
            *(key.removesuffix("+").split(".")[0] for key, _ in component.overrides),
        }
        if missing := [name for name in _untyped(component.target) if name not in given_names]:
            raise UsageError(_needs(component, missing))

    def build(self) -> tuple[Any, dict[str, Any]]:
        """Create the object; return it with the arguments of its constructor."""
        try:
            arguments = self._parser.instantiate(self._values).as_dict()
        except Exception as error:  # from a constructor, or from jsonargparse about one
            raise _as_usage_error(self.component, error) from None
        arguments.pop(_SECTION.replace("-", "_"))
        arguments |= self.component.fixed
        return self.component.target(**arguments), arguments

    def as_values(self) -> tuple[dict[str, Any], list[str]]:
        """All parameters as in YAML, including defaults; and the names of those that are left out because their values cannot be written as text."""
        values = self._values.clone()
        values.pop(_SECTION.replace("-", "_"))
        left_out = [name for name in vars(values) if not self._reads_back(name)]
        for name in left_out:
            values.pop(name)
        fixed = {name: plain_value(value) for name, value in self.component.fixed.items()}
        return {**fixed, **self._dumped(values)}, left_out

    def _reads_back(self, name: str) -> bool:
        """Check whether the value of a parameter, written as text, is read as the same value."""
        values = self._values.clone()
        for other_name in [other_name for other_name in vars(values) if other_name != name]:
            values.pop(other_name)
        try:
            with warnings.catch_warnings():  # from the comparison
                warnings.simplefilter("ignore")
                read_back = self._parser.parse_args([*self._arguments, f"--{_SECTION}", flow(self._dumped(values))])
            return bool(read_back[name] == self._values[name])
        except (argparse.ArgumentError, TypeError, ValueError, RuntimeError):
            return False

    def _dumped(self, values: Any) -> dict[str, Any]:
        """The parameters as in YAML."""
        dumped: dict[str, Any] = json.loads(
            self._parser.dump(values, format="json_compact", skip_unset=False, skip_validation=True)
        )
        return dumped


def parser_of(component: Component) -> ArgumentParser:
    """A parser whose options are the parameters of the component's class or function."""
    parser = ArgumentParser(
        exit_on_error=False, add_help=False, allow_abbrev=False, print_config=None, prog=component.name
    )
    parser.add_argument(f"--{_SECTION}", action="config")
    try:
        if isinstance(component.target, type):
            parser.add_class_arguments(component.target, None, fail_untyped=False, skip=set(component.fixed))
        else:
            parser.add_function_arguments(component.target, None, fail_untyped=False, skip=set(component.fixed))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{component.name} {component.path}: its parameters cannot be read: {' '.join(str(error).split())}"
        ) from error
    return parser


def parameters(parser: ArgumentParser) -> dict[str, argparse.Action]:
    """The parameters that take values, by dotted name; of a dataclass its fields instead of itself."""
    actions = {
        action.dest: action
        for action in parser._actions
        if action.option_strings and action.dest != _SECTION.replace("-", "_")
    }
    help_names = {f"{name}.help" for name in actions}
    named_actions = {name: action for name, action in actions.items() if name not in help_names}
    return {
        name: action
        for name, action in named_actions.items()
        if not any(inner.startswith(f"{name}.") for inner in named_actions)
    }


def _values_in_file(component: Component, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names that the file gives, with their values; mappings are entered as far as the parser has names for their keys."""

    def walk(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) and any(inner.startswith(f"{name}.") for inner in names):
                yield from walk(value, f"{name}.")
            else:
                yield name, value

    return walk(component.init_args, "")


def _check_name(component: Component, key: str, origin: str, names: Mapping[str, Any]) -> None:
    """Raise an error if there is no parameter with the dotted name ``key``; it names the nearest one."""
    # A name inside a parameter (of an object that the parameter's type describes) is checked by its type.
    if any(within(key, name) or within(name, key) for name in names):
        return
    owner, _, last = key.rpartition(".")
    while owner and not any(name.startswith(f"{owner}.") for name in names):
        owner, _, last = owner.rpartition(".")
    siblings = sorted(
        {
            name.removeprefix(f"{owner}." if owner else "").split(".")[0]
            for name in names
            if not owner or name.startswith(f"{owner}.")
        }
    )
    place = f"{component.name}.{owner}" if owner else f"{component.name} {component.title}"
    raise UsageError(
        f"{origin}: {place} has no parameter {last!r}{nearest(last, siblings)}; it has {', '.join(siblings) or 'none'}"
    )


def _check_value(component: Component, key: str, value: Any, origin: str, names: Mapping[str, argparse.Action]) -> None:
    """Check a value in the same way as the options of a strategy, if its type is data: text and numbers, alone or in lists and mappings."""
    if key not in names or not is_data(hint := type_of(names[key])):
        return
    try:
        converted(hint, value, key)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{origin}: {component.name}.{key} does not fit: {error}") from None


def _check_not_hidden(component: Component, key: str, value: Any) -> None:
    """Raise an error for a value that a record shows in place of a secret: the object would be created with the stars."""
    names = [name.removesuffix("+") for name, _ in component.overrides]
    if any(within(key, name) for name in names):
        return
    for name in names:
        if within(name, key):
            value = _without_entry(value, name.removeprefix(f"{key}.").split("."))
    if has_hidden(value):
        raise UsageError(
            f"{component.line(key)}: {component.name}.{key} is {flow(value)}, where {HIDDEN} was written in place of a secret: give the value, "
            f"as in --set {component.name}.{key}=VALUE"
        )


def _without_entry(values: Any, path: Sequence[str]) -> Any:
    """A copy of nested mappings without the entry at ``path``, if there is one."""
    if not isinstance(values, Mapping) or path[0] not in values:
        return values
    entries = {name: value for name, value in values.items() if name != path[0]}
    return entries if len(path) == 1 else {**entries, path[0]: _without_entry(values[path[0]], path[1:])}


def type_of(action: argparse.Action) -> Any:
    """The type of a parameter."""
    return getattr(action, "_typehint", None) or action.type


def _with_user_names(component: Component, message: str, names: Mapping[str, argparse.Action]) -> str:
    """The message of an error of jsonargparse, with the parameter's name as the user wrote it, and its origin."""
    text = " ".join(message.split())
    if match := re.match(r'Parser key "([^"]+)": (.*)', text):
        key, reason = match.groups()
        with suppress(ValueError):  # the text may be no YAML
            for written in (written for override_key, written in component.overrides if override_key == key):
                value = yaml_text.construct(yaml_text.compose(written, component.origin(key)))
                _check_value(component, key, value, component.origin(key), names)
        return f"{component.origin(key)}: {component.name}.{key} does not fit: {_reason(reason)}"
    if match := re.match(r"the following arguments are required: (.*)", text):
        return _needs(component, [name.strip() for name in match[1].split(",")])
    return f"{component.origin('')}: {component.name} {component.title}: {text}"


def _needs(component: Component, missing: list[str]) -> str:
    """The error message for parameters without a value."""
    first = missing[0]
    advice = f"give --set {component.name}.{first}=VALUE, or {first} under its init_args in the file"
    return f"{component.name} {component.title} needs {', '.join(missing)}: {advice}"


def _untyped(target: Callable[..., Any]) -> list[str]:
    """The parameters with neither a type nor a default, for which jsonargparse would pass ``None``."""
    empty, kinds = inspect.Parameter.empty, (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    signature_parameters = inspect.signature(target).parameters.values()
    return [
        parameter.name
        for parameter in signature_parameters
        if parameter.kind in kinds and parameter.default is empty and parameter.annotation is empty
    ]


def _as_usage_error(component: Component, error: Exception) -> Exception:
    """Return a :class:`UsageError` with the user's names if the error is jsonargparse's own; any other error is returned unchanged."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not any(
        name in trace.tb_frame.f_code.co_filename for name in (f"{os.sep}jsonargparse{os.sep}", argparse.__file__)
    ):
        return error
    return UsageError(
        f"{component.origin('')}: {component.name} {component.title} does not fit: {_reason(' '.join(str(error).split()))}"
    )


def _reason(text: str) -> str:
    """The reason that jsonargparse gives, shortened: without the alternative ``None`` of a union."""
    if match := re.search(r"Errors: - (.*?) Given value type: .*? Given value: (.*)", text):
        reasons = [part for part in match[1].split(" - ") if part != "Expected a <class 'NoneType'>"]
        text = f"{'; or: '.join(reasons)} (given: {match[2]})"
    text = re.sub(r"NestedArg\(key='([^']*)', val='([^']*)'\)", r"\1=\2", text)
    return re.sub(
        r"Expected a dot import path string: (\S+)",
        r"\1 is not a class with its module, such as torch.optim.AdamW",
        text,
    )


# -- descriptions -------------------------------------------------------------------------------------------------------------------


def config_text(resolved: Resolved, parsers: Sequence[ObjectBuilder]) -> str:
    """The text of a file of settings that repeats the run: settings with their origins, and each object with all of its parameters.

    Defaults that cannot be written as text (an object created in the signature) are named in a comment, and apply again when the file is used.
    """
    lines = ["# settings of Fit, and where each comes from"]
    for name, entry in with_origins(resolved.settings, resolved.origins, hide=False).items():
        if name != "callbacks":
            lines.append(f"{name}: {flow(entry['value'])}  # {' '.join(entry['origin'].split())}")
    by_name = {parser.component.name: parser for parser in parsers}
    for name in ("model", "data"):
        if name in by_name:
            lines += ["", f"{name}:", *_object_lines(by_name[name], "  ")]
    callbacks = [parser for name, parser in by_name.items() if name.startswith("callbacks.")]
    if callbacks:
        lines += ["", "callbacks:"]
    for parser in callbacks:
        first, *further_lines = _object_lines(parser, "    ")
        lines += [f"  - {first.strip()}", *further_lines]
    return "\n".join(lines) + "\n"


def _object_lines(parser: ObjectBuilder, indent: str) -> list[str]:
    """The lines of the file that describe one object."""
    values, left_out = parser.as_values()
    lines = [f"class_path: {flow(parser.component.path)}"]
    if values:
        lines += ["init_args:", *(f"  {name}: {flow(value)}" for name, value in values.items())]
    lines += [f"# {name}: the default of {parser.component.title}, an object without a text form" for name in left_out]
    return [f"{indent}{line}" for line in lines]


def class_help(command: str, components: Sequence[Component]) -> str:
    """The text of ``--help`` with a target: name, type, default and documentation of each class's parameters."""
    lines = [f"usage: fit {command} TARGET --set NAME=VALUE ...", ""]
    for component in components:
        # For a class without a docstring getdoc would return the base class's.
        bare = inspect.isclass(component.target) and component.target.__doc__ is None
        about = "" if bare else (inspect.getdoc(component.target) or "").split("\n\n")[0]
        about = _one_line(about)
        lines += [f"{component.name}: {component.path}", *([f"  {about}"] if about else [])]
        rows = [
            (f"{component.name}.{name}", *_parameter_row(action))
            for name, action in parameters(parser_of(component)).items()
        ]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:2]] if rows else []
        for name, kind, details in rows:
            lines.append(f"    {name:<{widths[0]}}  {kind:<{widths[1]}}  {details}".rstrip())
        lines += [] if rows else ["    (no parameters)"]
        lines.append("")
    return "\n".join(
        [
            *lines,
            "settings of Fit: 'fit config --default' writes each with its documentation, 'fit env' prints each with its value",
        ]
    )


def _parameter_row(action: argparse.Action) -> tuple[str, str]:
    """The type of a parameter, and its default with its documentation."""
    kind = type_of(action)
    default = "required" if action.required else f"default {_default_text(action.default)}"
    return _type_text(kind), f"{default}{f'; {_one_line(action.help)}' if action.help else ''}"


def _one_line(text: str) -> str:
    """A docstring on one line, with roles replaced by their targets: ``:class:`engine.Every``` becomes engine.Every."""
    return _ROLE_OF_SPHINX.sub(r"\1", " ".join(text.split()))


_ROLE_OF_SPHINX = re.compile(r":[\w:]+:`~?([^`<]+?)(?: <[^`]*>)?`")


def _type_text(kind: Any) -> str:
    """A type as the help shows it: ``int | None``."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{kind.__name__} {{{', '.join(kind.__members__)}}}"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(text for part in get_args(kind) if (text := _type_text(part)) != "any") or "any"
    if kind is NoneType:
        return "None"
    text = kind.__name__ if isinstance(kind, type) and not getattr(kind, "__args__", None) else str(kind)
    return "any" if text in ("None", "Untyped") else text.replace("typing.", "")


def _default_text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return (
        str(value)
        if isinstance(value, (str, int, float, Path)) or value is None
        else " ".join(repr(value).split())[:80]
    )
