"""Members and signatures of our classes, asked of themselves or their stand-ins, and whether they fit what a source has."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from engine.compat.migrate.imports import first_argument
from engine.compat.migrate.stand_ins import stand_in
from engine.loop.method_arguments import BESIDES_EVENTS, accepting, argument_count

OURS = ("engine.", "callbacks.")


@dataclass(frozen=True)
class Member:
    """An attribute of a class. ``call``: its signature without the object, if it is a function. ``type``: the class of ours that its value has."""

    settable: bool
    call: inspect.Signature | None = None
    type: type | None = None


@functools.cache
def member(cls: Any, name: str) -> Member | None:
    """The attribute ``name`` of ``cls`` or of its objects; ``None``: there is none."""
    if hasattr(cls, name):  # False for the attributes that only raise an error
        attribute = inspect.getattr_static(cls, name)
        if isinstance(attribute, property):
            return Member(attribute.fset is not None, type=_returned(attribute.fget))
        if isinstance(attribute, functools.cached_property):
            return Member(True, type=_returned(attribute.func))
        function = getattr(attribute, "__func__", attribute)
        if isinstance(function, types.FunctionType):
            skipped = 0 if isinstance(attribute, staticmethod) else 1
            return Member(True, _without_first(signature(function), skipped))
        return Member(True)
    if any(name in inspect.get_annotations(base) or name in set_by(base) for base in cls.__mro__):
        return Member(True)
    wrapped = getattr(cls, "of", None)  # what engine.interop.lightning's callbacks and loggers forward to
    return member(wrapped, name) if isinstance(wrapped, type) else None


@functools.cache
def signature(function: Any) -> inspect.Signature | None:
    """The parameters of a function or a class that a caller may give; ``None`` where Python cannot tell."""
    try:
        every = inspect.signature(function)
        # `**unknown: Never` names what is refused
        allowed = [
            parameter for parameter in every.parameters.values() if parameter.annotation not in ("Never", typing.Never)
        ]
        return every.replace(parameters=allowed)
    except (TypeError, ValueError):
        return None


def rejected(call: inspect.Signature, positional: int, keywords: Sequence[str]) -> tuple[list[str], bool]:
    """The keywords of a call that ``call`` does not take, and whether it takes fewer positional arguments."""
    taken_names: set[str] = set()
    by_place, unlimited = 0, False
    for parameter in call.parameters.values():
        kind = parameter.kind
        if kind is Parameter.VAR_KEYWORD:
            taken_names.update(keywords)
        elif kind is Parameter.VAR_POSITIONAL:
            unlimited = True
        else:
            by_place += kind is not Parameter.KEYWORD_ONLY
            if kind is not Parameter.POSITIONAL_ONLY:
                taken_names.add(parameter.name)
    return [name for name in keywords if name not in taken_names], positional > by_place and not unlimited


def _without_first(parameters: inspect.Signature | None, skipped: int) -> inspect.Signature | None:
    return None if parameters is None else parameters.replace(parameters=list(parameters.parameters.values())[skipped:])


@functools.cache
def set_by(cls: type) -> frozenset[str]:
    """The attributes that the methods of one of our classes assign to ``self``."""
    if not cls.__module__.startswith(OURS) or "__stand_in__" in vars(cls):  # which has them as annotations
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # made by a call of `type`
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def _returned(function: Callable[..., Any] | None) -> type | None:
    """The class of ours that a property's annotation names."""
    try:
        annotation = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return None
    if not isinstance(annotation, type) or not annotation.__module__.startswith(OURS):
        return None
    return None if hasattr(annotation, "__getattr__") else annotation  # such as hyperparameters: the user's own names


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_BASES = ("TrainModule", "DataModule", "Callback")


def misfit(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, cls: type, call: Signature) -> str:
    """Why a method of the class ``owner`` cannot be called in place of ours, which has the parameters ``call`` in ``cls``.

    A run's own checks answer, where it has them. Empty: it can be called.
    """
    base = next((base for base in _BASES if issubclass(cls, stand_in(f"engine.{base}"))), None)
    name = node.name
    is_event = name.startswith("on_") or name in ("setup", "teardown", *BESIDES_EVENTS)
    try:
        if base == "TrainModule" and name in STEPS:
            argument_count(with_parameters_of(node), f"{owner}.{name}", indexed=name != "training_step")
        elif base is not None and is_event and name in vars(stand_in(f"engine.{base}")):
            accepting(with_parameters_of(node), type(owner, (), {})(), name, stand_in(f"engine.{base}"))
        elif not accepts_call(node, call):
            return f"{owner}.{name} is called with ({', '.join(call.parameters)})"
    except TypeError as error:
        return str(error)
    return ""


def accepts_call(node: ast.FunctionDef | ast.AsyncFunctionDef, call: Signature) -> bool:
    """Whether a user's method can be called as ``call`` says, which is how our method of its name is called."""
    places = [*node.args.posonlyargs, *node.args.args]
    place_count = len(places) - (0 if first_argument(node) is None else 1)
    required_count = place_count - len(node.args.defaults)
    expected = [
        parameter for parameter in call.parameters.values() if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    required = sum(parameter.default is Parameter.empty for parameter in expected)
    return required_count <= len(expected) and (node.args.vararg is not None or place_count >= required)


def with_parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = True) -> Callable[..., None]:
    """A function with the parameters of a method, which ``inspect.signature`` reads; ``bound``: without its object."""

    def function(*args: object, **kwargs: object) -> None: ...

    arguments = node.args
    places = [*arguments.posonlyargs, *arguments.args]
    without = len(places) - len(arguments.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(
        arguments.args
    )
    parameters = [
        Parameter(argument.arg, kind, default=Parameter.empty if index < without else None)
        for index, (argument, kind) in enumerate(zip(places, kinds, strict=True))
    ][1 if bound and first_argument(node) is not None else 0 :]
    if arguments.vararg is not None:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(
            Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        )
    if arguments.kwarg is not None:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function
