"""Whether our functions take what a source gives them, and whether a source's methods take what ours give them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature

from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP
from engine.compat.migrate.imports import first_argument
from engine.compat.migrate.members import rejected
from engine.compat.migrate.stand_ins import stand_in as class_of
from engine.compat.names import ARGUMENTS, NAMES, OTHERWISE
from engine.loop.hook_arguments import BESIDES_EVENTS, fitted
from engine.loop.step_arguments import taken


@dataclass(frozen=True)
class Side:
    """One of the two functions that may take a call: that of ``engine``, or that of ``engine.interop``.

    ``there``: whether it exists. ``call``: its parameters, ``None`` if Python does not tell. ``name``: for errors, ``"TrainModule.log"``.
    """

    there: bool
    call: Signature | None = None
    name: str = ""

    def refused(self, call: ast.Call) -> list[str]:
        """The arguments of a call that it does not take."""
        if self.call is None:
            return []
        keywords = [each.arg for each in call.keywords if each.arg is not None]
        refused, too_many = rejected(self.call, sum(not isinstance(each, ast.Starred) for each in call.args), keywords)
        return [*refused, *([""] if too_many else [])]


def decided(call: ast.Call, sides: Sequence[Side]) -> tuple[str, list[tuple[str, str]]]:
    """The verdict about a call, and for one that neither side takes its arguments with what to do about each."""
    least: list[tuple[str, str]] = []
    for verdict, side in zip((AS_IS, INTEROP), sides, strict=True):
        if side.there:
            refused = side.refused(call)
            if not refused:
                return verdict, []
            least = [(name, _about(name, sides)) for name in refused]
    return CHANGE, least


def _about(name: str, sides: Sequence[Side]) -> str:
    """What to do about an argument that a call does not take."""
    for side in sides:
        if name in ARGUMENTS.get(side.name, {}):
            return ARGUMENTS[side.name][name]
    if name in NAMES:
        return f"here it is called {NAMES[name]!r}"
    return OTHERWISE.get(name, "it takes fewer arguments by position" if not name else "there is no such argument here")


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_BASES = ("TrainModule", "DataModule", "Callback")


def misfit(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, cls: type, call: Signature) -> str:
    """Why a method of the class ``owner`` cannot be called in place of ours, which has the parameters ``call`` in ``cls``.

    A run's own checks answer, where it has them. Empty: it can be called.
    """
    base = next((each for each in _BASES if issubclass(cls, class_of(f"engine.{each}"))), None)
    name = node.name
    is_event = name.startswith("on_") or name in ("setup", "teardown", *BESIDES_EVENTS)
    try:
        if base == "TrainModule" and name in STEPS:
            taken(stand_in(node), f"{owner}.{name}", indexed=name != "training_step")
        elif base is not None and is_event and name in vars(class_of(f"engine.{base}")):
            fitted(stand_in(node), type(owner, (), {})(), name, class_of(f"engine.{base}"))
        elif not takes(node, call):
            return f"{owner}.{name} is called with ({', '.join(call.parameters)})"
    except TypeError as error:
        return str(error)
    return ""


def takes(node: ast.FunctionDef | ast.AsyncFunctionDef, call: Signature) -> bool:
    """Whether a method can be called with what ours of the same name is called with."""
    own = [*node.args.posonlyargs, *node.args.args]
    most = len(own) - (0 if first_argument(node) is None else 1)
    least = most - len(node.args.defaults)
    ours = [each for each in call.parameters.values() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    required = sum(each.default is Parameter.empty for each in ours)
    return least <= len(ours) and (node.args.vararg is not None or most >= required)


def stand_in(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = True) -> Callable[..., None]:
    """A function with the parameters of a method, which ``inspect.signature`` reads; ``bound``: without its object."""

    def function(*args: object, **kwargs: object) -> None: ...

    arguments = node.args
    places = [*arguments.posonlyargs, *arguments.args]
    without = len(places) - len(arguments.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(
        arguments.args
    )
    found = [
        Parameter(each.arg, kind, default=Parameter.empty if index < without else None)
        for index, (each, kind) in enumerate(zip(places, kinds, strict=True))
    ][1 if bound and first_argument(node) is not None else 0 :]
    if arguments.vararg is not None:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None))
    if arguments.kwarg is not None:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    function.__signature__ = Signature(found)  # type: ignore[attr-defined]
    return function
