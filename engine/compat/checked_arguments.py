"""Decorators for constructors with another trainer's signature: check the arguments against their annotations, and pass them to our class."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from engine.compat.refusals import refuse_stand_ins, translated
from engine.compat.table_rows import Argument
from engine.config.typed_values import convert_arguments, hints

Init = TypeVar("Init", bound=Callable[..., None])


class Constructor:
    """Binds and checks the arguments of ``init``, an ``__init__`` with another trainer's signature.

    Arguments that ``init`` takes by ``**`` are checked against those of the class ``of``. Arguments in ``but`` are not checked.
    """

    def __init__(self, init: Callable[..., None], of: type | None = None, but: Collection[str] = ()) -> None:
        self.init, self.of, self.but = init, of, but
        self.call, parameters = init.__qualname__.partition(".")[0], inspect.signature(init).parameters
        self.signature = inspect.signature(init)
        self.keywords = next((name for name, item in parameters.items() if item.kind is item.VAR_KEYWORD), "")

    @functools.cached_property
    def types(self) -> Mapping[str, Any]:
        """The annotations by argument; resolved at the first call, because they may name classes that the module defines later."""
        return {name: hint for name, hint in typing.get_type_hints(self.init).items() if name not in self.but}

    def bound(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Bind the arguments of a call, converted to their annotated types.

        Raises:
            TypeError, ValueError: an unknown argument, or an invalid value.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.call}() {error}") from None
        bound.arguments.update(convert_arguments(self.call, self.types, self._named(bound)))
        if further_arguments := bound.arguments.get(self.keywords):
            types = dict.fromkeys(further_arguments, self.types[self.keywords]) | (
                {} if self.of is None else hints(self.of)
            )
            bound.arguments[self.keywords] = convert_arguments(self.call, types, further_arguments)
        return bound

    def differing(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """The arguments that differ from their defaults."""
        parameters = self.signature.parameters
        named = {
            name: value
            for name, value in self._named(bound).items()
            if not _is_default(value, parameters[name].default)
        }
        return named | bound.arguments.get(self.keywords, {})

    def _named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        return {name: value for name, value in bound.arguments.items() if name not in ("self", self.keywords)}


def _is_default(value: object, default: object) -> bool:
    """Whether a value equals the default, which command-line parsers pass explicitly."""
    return value is default or (type(value) is type(default) and value == default)


def checking_arguments(*, but: Collection[str] = ()) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` to convert its arguments, except those in ``but``, to their annotated types."""

    def decorate(init: Init) -> Init:
        constructor = Constructor(init, but=but)

        @functools.wraps(init)
        def checked_init(*args: Any, **kwargs: Any) -> None:
            refuse_stand_ins(constructor.call, (*args, *kwargs.values()))
            bound = constructor.bound(*args, **kwargs)
            init(*bound.args, **bound.kwargs)

        return checked_init  # type: ignore[return-value]

    return decorate


def with_arguments_of(of: type, rows: Mapping[str, Mapping[str, Argument]], **fixed: Any) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` with another trainer's signature: before its body runs, call the ``__init__`` of ``of`` with the arguments that
    differ from their defaults, and with ``fixed``. ``rows``: class name -> the arguments without a counterpart.
    """

    def decorate(init: Init) -> Init:
        constructor = Constructor(init, of)

        @functools.wraps(init)
        def of_both(self: object, *args: Any, **kwargs: Any) -> None:
            refuse_stand_ins(constructor.call, (*args, *kwargs.values()))
            bound, call = constructor.bound(self, *args, **kwargs), constructor.call
            of.__init__(self, **translated(call, constructor.differing(bound), rows.get(call, {})), **fixed)  # type: ignore[misc]
            init(*bound.args, **bound.kwargs)

        return of_both  # type: ignore[return-value]

    return decorate


def as_device(call: str, device: torch.device | str | int | None) -> torch.device | None:
    """Convert the argument ``device`` of ``call`` to a ``torch.device``.

    Raises:
        ValueError: torch does not know the device.
    """
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{call}(device={device!r}): {str(error).partition(chr(10))[0]}") from None
