"""Arguments and classes of other trainers that have no counterpart: the error says what to use instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.compat.table_rows import Argument


def translated(call: str, given: Mapping[str, Any], arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """Another trainer's arguments of ``call`` by name, except those that have no counterpart.

    Raises:
        ValueError: an argument asks for what there is not.
    """
    for name, argument in arguments.items():
        if name in given and argument.refuses(given[name]):
            raise ValueError(
                f"{call}({name}={given[name]!r}) has no counterpart: {argument.drop_in or argument.instead}"
            )
    return {name: value for name, value in given.items() if name not in arguments or not arguments[name].neutral}


Init = TypeVar("Init", bound=Callable[..., None])


def with_arguments_of(of: type, rows: Mapping[str, Mapping[str, Argument]], **fixed: Any) -> Callable[[Init], Init]:
    """Decorator of an ``__init__`` that has another trainer's signature: before its body runs, the arguments that differ from the defaults are
    given to that of the class ``of``, with our ``fixed`` ones. ``rows``: by class, the arguments without a counterpart.
    """

    def decorate(init: Init) -> Init:
        signature, call = inspect.signature(init), init.__qualname__.partition(".")[0]
        more = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), "")

        @functools.wraps(init)
        def of_both(self: object, *args: Any, **kwargs: Any) -> None:
            try:
                arguments = signature.bind(self, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{call}() {error}") from None
            usual = {name: each.default for name, each in signature.parameters.items()}
            named = {name: value for name, value in arguments.items() if name not in ("self", more)}
            asked = {name: value for name, value in named.items() if not _same(value, usual[name])}
            given = translated(call, asked | arguments.get(more, {}), rows.get(call, {}))
            of.__init__(self, **given, **fixed)  # type: ignore[misc]
            init(self, *args, **kwargs)

        return of_both  # type: ignore[return-value]

    return decorate


def _same(value: object, usual: object) -> bool:
    """Whether a program that names all defaults, as parsers of command lines do, gave this one's."""
    return value is usual or (type(value) is type(usual) and value == usual)


def refusing(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that refuses these ``names``; each says what to use instead."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return refused_class(name, names[name])

    return attribute


@functools.cache
def refused_class(name: str, instead: str) -> type[Any]:
    """A class that can be imported, and not made: that is an error that says what to use ``instead``."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} has no counterpart: {instead}")

    return type(name, (), {"__init__": refuse, "refused": instead, "__doc__": f"Cannot be made: {instead}."})
