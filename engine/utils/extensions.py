"""Extension points of the core, which entry points fill: those of this distribution's annexes, and for :func:`adapted` of any package.

Without annexes every extension point has a default: an object stays as it is, the hint for an unknown name is the nearest known one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any, TypeVar

from engine.utils.errors import nearest

T = TypeVar("T")
DISTRIBUTION = "fit-trainer"
ADAPTERS, ATTRIBUTES, CHECKS, CLASSES, HINTS = (
    f"engine.{group}" for group in ("adapters", "attributes", "checks", "classes", "hints")
)
"""The groups of entry points, one for each extension point."""


def adapted(value: Any) -> Any:
    """Convert an object of another library to one of this library's; return other values unchanged.

    Any installed package may register a function for that, as an entry point of the group ``engine.adapters`` that has the name of the other
    library's package.
    """
    packages = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    if "engine" in packages:
        return value
    for point in entry_points(group=ADAPTERS):
        if point.name in packages and (adapter := load(point)) is not None:
            return adapter(value)
    return value


def attribute(owner: object, name: str) -> Any:
    """An attribute that an annex provides for a run, the ``owner``.

    Raises:
        AttributeError: no annex provides this attribute.
    """
    for point, provide in _extensions(ATTRIBUTES):
        if point == name:
            return provide(owner)
    raise AttributeError(f"run.{name}: nothing in this installation provides it", name=name, obj=owner)


@cache
def answer(place: str, name: str) -> str:
    """A sentence that says what to use instead of ``name``, which ``place`` does not have; empty if no annex knows that. With all annexes installed
    :func:`engine.compat.hints.find` answers."""
    return next((sentence for _, find in _extensions(HINTS) if (sentence := find(place, name))), "")


def hint(place: str, name: str, names: Iterable[str] = ()) -> str:
    """The end of an error about ``name``, which ``place`` does not have: what to use instead, or else the nearest of the known ``names``."""
    sentence = answer(place, name)
    return f"; {sentence}" if sentence else nearest(name, names)


def missing(owner: object, place: str, name: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have, with the :func:`answer` for ``place``."""
    return attribute_error(owner, name, answer(place, name))


def attribute_error(owner: object, name: str, sentence: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have; ``sentence`` says what to use instead, and may be empty."""
    end = f": {sentence}" if sentence else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{end}", name=name, obj=owner)


def completed(cls: type[T]) -> type[T]:
    """Decorate a public class, so that annexes may add attributes whose error explains why they do not exist, and explain wrong calls: with all
    annexes that is :func:`engine.compat.hints.complete`.

    Methods that a step calls are not wrapped, and attributes that exist do not get slower.
    """
    for _, complete in _extensions(CLASSES):
        complete(cls)
    return cls


def checked(*owners: object) -> None:
    """Let annexes check a module and callbacks before a run, by the functions that are registered in the group ``engine.checks``: with all annexes
    that is :func:`engine.compat.lightning.checks.refuse_replaced`.

    Raises:
        TypeError: an owner defines a method that is never called; the message says what to define instead.
    """
    for _, check in _extensions(CHECKS):
        check(*owners)


@cache
def _extensions(group: str) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Names and functions that this distribution registers in ``group``. Reading only these takes 0.1 ms, all installed packages 7 ms."""
    try:
        points = [point for point in distribution(DISTRIBUTION).entry_points if point.group == group]
    except PackageNotFoundError:  # a copy that is not installed
        return ()
    functions = ((point.name, load(point)) for point in points)
    return tuple((name, function) for name, function in functions if function is not None)


def load(point: EntryPoint) -> Callable[..., Any] | None:
    """The function or class of an entry point; ``None`` if its module belongs to this library, but is not in this installation.

    Raises:
        ImportError: the object cannot be imported or called; the message names the package that registers it.
    """
    try:
        function: Callable[..., Any] = point.load()
        if not callable(function):
            raise TypeError(f"it is of type {type(function).__name__}, not a function or a class")
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and point.module.startswith("engine.") and f"{point.module}.".startswith(f"{absent}."):
            return None
        package = DISTRIBUTION if point.dist is None else point.dist.name
        raise ImportError(
            f"the installed package {package!r} registers the entry point '{point.name} = {point.value}' in the group {point.group!r}, and it "
            f"cannot be loaded ({type(error).__name__}: {error}): update or uninstall {package!r}",
            name=absent,
        ) from error
    return function
