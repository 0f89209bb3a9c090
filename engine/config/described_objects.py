"""Checks what a ``class_path`` names before it is called: a configuration says ``os.system`` as easily as the name of a class."""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ObjectKind:
    """The objects that a description may stand for.

    Attributes:
        classes: the object is an instance of one of these.
        name: the name of such an object with its article, for messages.
        annotated: refuse a function that does not say what it returns even if it is one of the project's.
    """

    classes: tuple[type, ...]
    name: str
    annotated: bool = False

    def has(self, cls: type) -> bool:
        """Whether an object of the class is one of this kind; text is iterable, but no loader."""
        return issubclass(cls, self.classes) and (object in self.classes or not issubclass(cls, (str, bytes)))


ANYTHING = ObjectKind((object,), "an object")


def check_described(
    values: Any, place: str, kinds: Mapping[str, ObjectKind] | None = None, kind: ObjectKind = ANYTHING
) -> None:
    """Check the parsed values of a command line or file: each function that a ``class_path`` names must say which objects it returns.

    jsonargparse has compared classes with the types of their parameters. It does not do so for ``Any`` and ``Callable``.

    Args:
        values: the namespace that jsonargparse has parsed. Descriptions of objects in it are namespaces, too; mappings are data where any
            object may be given.
        place: the name of ``values``, for messages.
        kinds: the objects that are expected, by the names of their parameters.
        kind: the object that is expected, if ``values`` describe one.

    Raises:
        TypeError: a ``class_path`` names something else.
    """
    if isinstance(values, (list, tuple)):
        for value in values:
            check_described(value, place, kind=kind)
    is_namespace = isinstance(values, argparse.Namespace)
    entries = vars(values) if is_namespace else values
    if isinstance(entries, Mapping):
        path = entries.get("class_path")
        if isinstance(path, str) and (is_namespace or kind is not ANYTHING):
            with suppress(
                ImportError, AttributeError, ValueError
            ):  # jsonargparse reports it, or takes the description as data
                check_target(pkgutil.resolve_name(path), path, place, kind)
        for name, value in entries.items():
            inner = place if name == "init_args" else f"{place}.{name}".removeprefix(".")
            check_described(value, inner, kind=(kinds or {}).get(str(name), ANYTHING))


def check_target(target: Any, path: str, place: str, kind: ObjectKind) -> None:
    """Check the class or function ``target`` that ``path`` names.

    Raises:
        TypeError: ``target`` is another class, a function that is annotated to return something else, or one that does not say what it returns. A
            function of the project itself may leave that out.
    """
    if isinstance(target, type):
        if not kind.has(target):
            raise TypeError(f"{place}: {path!r} is the class {target.__name__}, not {kind.name}")
        return
    function = _function(target)
    if function is None:
        raise TypeError(
            f"{place}: {path!r} is a {type(target).__name__}, not a class or a function that returns {kind.name}"
        )
    returned = _returned(function)
    if returned is None:
        if kind.annotated or not _is_of_project(function):
            raise TypeError(
                f"{place}: {path!r} is a function that does not say what it returns, and it is not called to find out: annotate it to return "
                f"{kind.name}, or name a class"
            )
    elif not any(map(kind.has, returned)):
        raise TypeError(f"{place}: {path!r} is a function that is annotated to return something else than {kind.name}")


def _function(target: Any) -> FunctionType | None:
    """The Python function behind a decorated function, a method, a partial or an object with ``__call__``; ``None``: there is none."""
    while isinstance(target, partial):
        target = target.func
    target = inspect.unwrap(getattr(target, "__func__", target)) if callable(target) else target
    if not isinstance(target, FunctionType) and not inspect.isroutine(target):
        target = getattr(type(target), "__call__", None)  # noqa: B004
    return target if isinstance(target, FunctionType) else None


def _returned(function: FunctionType) -> list[type] | None:
    """The classes that a function is annotated to return; ``None``: it does not say."""
    try:
        hint = get_type_hints(function).get("return", Any)
    except Exception:  # a name in an annotation that exists for type checkers only
        return None
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if Any in hints or object in hints:
        return None
    classes = [get_origin(part) or part for part in hints if part is not NoneType]
    return classes if all(isinstance(cls, type) for cls in classes) else None


def _is_of_project(function: FunctionType) -> bool:
    """Whether a function is neither Python's own nor one of an installed package."""
    file = Path(function.__code__.co_filename).resolve()
    is_installed = {"site-packages", "dist-packages"} & {*file.parts} or file.is_relative_to(
        sysconfig.get_path("stdlib")
    )
    return file.is_file() and not is_installed
