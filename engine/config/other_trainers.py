"""Errors about other trainers' names say what the name is here.

:func:`knows_other_trainers` is the only mechanism: it wraps methods that no step calls, and other trainers' attributes raise an error that says
what to use. Steps have no extra cost.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from engine.config.other_trainers_names import ARGUMENTS, ATTRIBUTES, NAMES, OF_SETTINGS, OTHERWISE
from engine.utils.errors import nearest

P = ParamSpec("P")
T = TypeVar("T")


def hint(name: str, known: Iterable[str]) -> str:
    """The hint for the unknown setting ``name``: its name here, its replacement, or the nearest of ``known``."""
    if name in NAMES:
        return f"; here it is called {NAMES[name]!r}"
    if name in OTHERWISE:
        return f"; {OTHERWISE[name]}"
    return nearest(name, known)


UNWRAPPED = ("TrainModule",)
"""Classes whose methods a step calls: their run explains their errors."""


_UNEXPECTED = re.compile(r"(\w+\.\w+)\(\) got an unexpected keyword argument '(\w+)'")
_CALLS: dict[str, Callable[..., object]] = {}


def missing(owner: object, names: Mapping[str, str], name: str) -> AttributeError:
    """The error for an attribute that ``owner`` does not have; ``names`` says what to use instead of some."""
    said = f": {names[name]}" if name in names else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{said}", name=name, obj=owner)


def explain(error: TypeError) -> None:
    """Add a hint to Python's error about an argument that one of these calls does not have."""
    found = _UNEXPECTED.match(str(error))
    if found is None or found[1] not in _CALLS:
        return
    call, name = found.groups()
    known = [each for each in inspect.signature(_CALLS[call]).parameters if each != "self"]
    said = ARGUMENTS[call].get(name)
    if said is not None:
        said = f"; {said}"
    elif name in NAMES and NAMES[name] not in known:
        said = f"; here it is a setting: Fit({NAMES[name]}=...)"
    elif name in OF_SETTINGS:
        said = f"; here it is a setting: Fit({name}=...)"
    else:
        said = hint(name, known)
    error.args = (f"{found[0]}{said}",)


def knows_other_trainers(cls: type[T]) -> type[T]:
    """Decorator: errors about names of other trainers give the name in this class."""
    for call in ARGUMENTS:
        owner, _, method = call.partition(".")
        if owner == cls.__name__:
            _CALLS[call] = vars(cls)[method]
            if owner not in UNWRAPPED:
                setattr(cls, method, _explaining(_CALLS[call]))
    if elsewhere := ATTRIBUTES.get(cls.__name__):
        for name, said in elsewhere.items():
            setattr(cls, name, _Elsewhere(name, said))
        setattr(cls, "__dir__", lambda self: [name for name in object.__dir__(self) if name not in elsewhere])  # noqa: B010
    return cls


def _explaining(call: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(call)
    def explained(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except TypeError as error:
            explain(error)
            raise

    return explained


class _Elsewhere:
    """An attribute that does not exist. Setting it is also an error: nothing would read it."""

    def __init__(self, name: str, said: str) -> None:
        self.name, self.said = name, said

    def __get__(self, owner: object, kind: type) -> NoReturn:
        if owner is None:
            raise AttributeError(
                f"{kind.__name__!r} has no attribute {self.name!r}: {self.said}", name=self.name, obj=kind
            )
        raise missing(owner, {self.name: self.said}, self.name)

    def __set__(self, owner: object, value: object) -> NoReturn:
        raise missing(owner, {self.name: self.said}, self.name)


ANY = object()
"""Any value of an argument changes nothing here: a message, a layout."""


def translated(call: str, given: Mapping[str, Any], without: Mapping[str, Any]) -> dict[str, Any]:
    """Another trainer's arguments of ``call`` by name, except those that have no counterpart.

    ``without``: each of these, with the value that asks for nothing (:data:`ANY`), and what to do instead of another.

    Raises:
        ValueError: an argument asks for what there is not.
    """
    for name, (neutral, instead) in without.items():
        if neutral is not ANY and name in given and given[name] is not neutral and given[name] != neutral:
            raise ValueError(f"{call}({name}={given[name]!r}) has no counterpart: {instead}")
    return {name: value for name, value in given.items() if name not in without}


Init = TypeVar("Init", bound=Callable[..., None])


def with_arguments_of(of: type, without: Mapping[str, Any], **fixed: Any) -> Callable[[Init], Init]:
    """Decorator of an ``__init__`` that has another trainer's signature: before its body runs, the arguments that differ from the defaults are
    given to that of the class ``of``, with our ``fixed`` ones. ``without``: as of :func:`translated`.
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
            given = translated(call, asked | arguments.get(more, {}), without)
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
