"""Members and signatures of our classes, read from the classes or their stand-ins, and whether a source's calls and methods fit them."""

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
    """An attribute of a class. ``call``: a method's signature without ``self``. ``type``: the attribute's class, if it is one of ours."""

    settable: bool
    call: inspect.Signature | None = None
    type: type | None = None


@functools.cache
def member(cls: Any, name: str) -> Member | None:
    """Describe the attribute ``name`` of ``cls`` or of its instances; ``None`` if there is no such attribute."""
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
    wrapped = getattr(cls, "of", None)  # the class that engine.interop.lightning's callbacks and loggers wrap
    return member(wrapped, name) if isinstance(wrapped, type) else None


@functools.cache
def signature(function: Any) -> inspect.Signature | None:
    """The signature with the parameters that a caller may pass to a function or class; ``None`` if Python cannot tell."""
    try:
        full = inspect.signature(function)
        # `**unknown: Never` takes unknown arguments only to refuse them
        allowed = [
            parameter for parameter in full.parameters.values() if parameter.annotation not in ("Never", typing.Never)
        ]
        return full.replace(parameters=allowed)
    except (TypeError, ValueError):
        return None


def rejected(call: inspect.Signature, positional: int, keywords: Sequence[str]) -> tuple[list[str], bool]:
    """The names in ``keywords`` that the signature ``call`` does not accept, and whether ``positional`` positional arguments are too many."""
    accepted_names: set[str] = set()
    positional_limit, unlimited = 0, False
    for parameter in call.parameters.values():
        kind = parameter.kind
        if kind is Parameter.VAR_KEYWORD:
            accepted_names.update(keywords)
        elif kind is Parameter.VAR_POSITIONAL:
            unlimited = True
        else:
            positional_limit += kind is not Parameter.KEYWORD_ONLY
            if kind is not Parameter.POSITIONAL_ONLY:
                accepted_names.add(parameter.name)
    return [name for name in keywords if name not in accepted_names], positional > positional_limit and not unlimited


def _without_first(parameters: inspect.Signature | None, skipped: int) -> inspect.Signature | None:
    return None if parameters is None else parameters.replace(parameters=list(parameters.parameters.values())[skipped:])


@functools.cache
def set_by(cls: type) -> frozenset[str]:
    """The attributes that the methods of one of our classes set on ``self``; a stand-in has them as annotations instead."""
    if not cls.__module__.startswith(OURS) or "__stand_in__" in vars(cls):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # the class was made by calling `type`
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def _returned(function: Callable[..., Any] | None) -> type | None:
    """The class in a property's return annotation, if it is one of ours."""
    try:
        annotation = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # the class is imported for type checkers only
        return None
    if not isinstance(annotation, type) or not annotation.__module__.startswith(OURS):
        return None
    return (
        None if hasattr(annotation, "__getattr__") else annotation
    )  # with __getattr__, any name may exist: hyperparameters, for example


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_BASES = ("TrainModule", "DataModule", "Callback")


def misfit(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, cls: type, call: Signature) -> str:
    """The reason why a method of the user's class ``owner`` cannot be called as our class ``cls`` calls its own, with the parameters ``call``.

    An empty string if it can. Where a run checks the method itself, the answer is the run's error.
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
    """Whether a user's method accepts a call with the positional parameters of ``call``, our method of the same name."""
    positional = [*node.args.posonlyargs, *node.args.args]
    positional_count = len(positional) - (0 if first_argument(node) is None else 1)
    required_count = positional_count - len(node.args.defaults)
    expected = [
        parameter for parameter in call.parameters.values() if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
    ]
    required = sum(parameter.default is Parameter.empty for parameter in expected)
    return required_count <= len(expected) and (node.args.vararg is not None or positional_count >= required)


def with_parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = True) -> Callable[..., None]:
    """An empty function with the signature of the method ``node``, for ``inspect.signature``; ``bound``: leave out ``self``."""

    def function(*args: object, **kwargs: object) -> None: ...

    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required_count = len(positional) - len(arguments.defaults)
    kinds = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(
        arguments.args
    )
    parameters = [
        Parameter(argument.arg, kind, default=Parameter.empty if index < required_count else None)
        for index, (argument, kind) in enumerate(zip(positional, kinds, strict=True))
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
