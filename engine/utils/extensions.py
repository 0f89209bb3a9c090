"""The questions that the core asks about other libraries. The functions that answer are named in one table, ``ANSWERS`` of :data:`TABLE`.

Without that annex every question has a default: an object stays as it is, the hint for an unknown name is the nearest known one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar

from engine.utils.errors import nearest

T = TypeVar("T")
TABLE = "engine.compat.answers"
"""The annex's module that has the table, :class:`Answers`. The core works without it."""
ADAPTERS = "engine.adapters"
"""The entry-point group in which other packages register functions for :func:`adapt`, each under the name of a library's package."""


@dataclass(frozen=True)
class Answers:
    """The functions that answer the core's questions, each as ``"module:function"``, which is imported when the question is first asked."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """Package of another library -> function that converts an object of it: :func:`adapt`."""
    run_attributes: Mapping[str, str] = field(default_factory=dict)
    """Attribute of a run -> function that makes it from the run: :func:`run_attribute`."""
    advice: str = ""
    """Function of a place and a name that says what to use instead: :func:`advice`."""
    add_advice: str = ""
    """Function that adds advice to the errors of a class: :func:`with_advice`."""
    explain_call: str = ""
    """Function that adds advice to an error about an argument: :func:`explain_call`."""
    refuse_uncalled: str = ""
    """Function that checks a run's module and callbacks: :func:`refuse_uncalled`."""
    guards: Mapping[str, str] = field(default_factory=dict)
    """Module of another library -> function that lets models of it refuse wrong calls: :func:`guard_model`."""


def adapt(value: Any) -> Any:
    """Convert an object of another library to one of this library's; return other values unchanged.

    Any installed package may register a function for that, as an entry point of the group ``engine.adapters`` that has the name of the other
    library's package. It comes before the functions of the table.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    if "engine" in packages:
        return value
    for point in entry_points(group=ADAPTERS):
        if point.name in packages:
            return load(point)(value)
    for package, path in _answers().adapters.items():
        if package in packages:
            return resolve_name(path)(value)
    return value


def guard_model(model: Any) -> None:
    """Let models of other libraries in ``model`` refuse calls that would train them wrongly without a word."""
    for module, path in _answers().guards.items():
        if module in sys.modules:
            resolve_name(path)(model)


def run_attribute(owner: object, name: str) -> Any:
    """An attribute that an annex provides for a run, the ``owner``.

    Raises:
        AttributeError: no annex provides this attribute.
    """
    path = _answers().run_attributes.get(name)
    if path is None:
        raise AttributeError(f"run.{name}: nothing in this installation provides it", name=name, obj=owner)
    return resolve_name(path)(owner)


@cache
def advice(place: str, name: str) -> str:
    """A sentence that says what to use instead of ``name``, which ``place`` does not have; empty if no annex knows that."""
    path = _answers().advice
    sentence: str = resolve_name(path)(place, name) if path else ""
    return sentence


def hint(place: str, name: str, names: Iterable[str] = ()) -> str:
    """The end of an error about ``name``, which ``place`` does not have: what to use instead, or else the nearest of the known ``names``."""
    sentence = advice(place, name)
    return f"; {sentence}" if sentence else nearest(name, names)


def missing(owner: object, place: str, name: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have, with the :func:`advice` for ``place``."""
    return attribute_error(owner, name, advice(place, name))


def attribute_error(owner: object, name: str, sentence: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have; ``sentence`` says what to use instead, and may be empty."""
    end = f": {sentence}" if sentence else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{end}", name=name, obj=owner)


def with_advice(cls: type[T]) -> type[T]:
    """Decorate a public class, so that errors about attributes and arguments that it lacks say what to use instead.

    The folder ``engine/compat`` adds that for names that other trainers have; without the folder the class stays as it is. Methods that a step
    calls are not wrapped, and attributes that exist do not get slower.
    """
    if path := _answers().add_advice:
        resolve_name(path)(cls)
    return cls


def explain_call(error: TypeError) -> None:
    """Let an annex add advice to Python's error about an unexpected argument of a public method."""
    if path := _answers().explain_call:
        resolve_name(path)(error)


def call_error(method: Callable[..., object], unknown: Iterable[str]) -> TypeError:
    """The error of a call without the first argument of ``method``, or with arguments that it does not have (``unknown``): Python's, with advice."""
    parameters = list(inspect.signature(method).parameters)[1:]
    for name in unknown:
        end = hint(method.__qualname__, name, parameters)
        return TypeError(f"{method.__qualname__}() got an unexpected keyword argument {name!r}{end}")
    return TypeError(f"{method.__qualname__}() missing 1 required positional argument: {parameters[0]!r}")


def refuse_uncalled(stage: str, *owners: object) -> None:
    """Let an annex check a module and callbacks before a run of this :attr:`engine.Run.stage`.

    Raises:
        TypeError: an owner defines a method that is never called; the message says what to define instead.
    """
    if path := _answers().refuse_uncalled:
        resolve_name(path)(stage, *owners)


@cache
def _answers() -> Answers:
    """The annex's table; in a copy without the annex, an empty one."""
    try:
        answers: Answers = import_module(TABLE).ANSWERS
    except ModuleNotFoundError as error:
        if not f"{TABLE}.".startswith(f"{error.name}."):
            raise
        return Answers()
    return answers


def load(point: EntryPoint) -> Callable[..., Any]:
    """The function or class of another package's entry point.

    Raises:
        ImportError: the object cannot be imported or called; the message names the package that registers it.
    """
    try:
        function: Callable[..., Any] = point.load()
        if not callable(function):
            raise TypeError(f"it is of type {type(function).__name__}, not a function or a class")
    except (Exception, SystemExit) as error:
        package = point.module if point.dist is None else point.dist.name
        raise ImportError(
            f"the installed package {package!r} registers the entry point '{point.name} = {point.value}' in the group {point.group!r}, and it "
            f"cannot be loaded ({type(error).__name__}: {error}): update or uninstall {package!r}",
            name=error.name if isinstance(error, ModuleNotFoundError) else None,
        ) from error
    return function
