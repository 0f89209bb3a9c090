"""What a class of ours has: asked of the class itself or of its stand-in, so that nothing is listed by hand."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
        found = inspect.getattr_static(cls, name)
        if isinstance(found, property):
            return Member(found.fset is not None, type=_returned(found.fget))
        if isinstance(found, functools.cached_property):
            return Member(True, type=_returned(found.func))
        function = getattr(found, "__func__", found)
        if isinstance(function, types.FunctionType):
            skipped = 0 if isinstance(found, staticmethod) else 1
            return Member(True, _without_first(signature(function), skipped))
        return Member(True)
    if any(name in inspect.get_annotations(each) or name in set_by(each) for each in cls.__mro__):
        return Member(True)
    wrapped = getattr(cls, "of", None)  # what engine.interop.lightning's callbacks and loggers forward to
    return member(wrapped, name) if isinstance(wrapped, type) else None


def signature(function: Any) -> inspect.Signature | None:
    """The parameters of a function or a class that a caller may give; ``None`` where Python cannot tell."""
    try:
        found = inspect.signature(function)
        # `**unknown: Never` names what is refused
        kept = [each for each in found.parameters.values() if each.annotation not in ("Never", typing.Never)]
        return found.replace(parameters=kept)
    except (TypeError, ValueError):
        return None


def rejected(call: inspect.Signature, positional: int, keywords: Sequence[str]) -> tuple[list[str], bool]:
    """The keywords of a call that ``call`` does not take, and whether it takes fewer positional arguments."""
    parameters = call.parameters.values()
    takes = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        takes.update(keywords)
    by_place = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    unlimited = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return [name for name in keywords if name not in takes], positional > by_place and not unlimited


def _without_first(found: inspect.Signature | None, skipped: int) -> inspect.Signature | None:
    return None if found is None else found.replace(parameters=list(found.parameters.values())[skipped:])


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
        found = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return None
    if not isinstance(found, type) or not found.__module__.startswith(OURS):
        return None
    return None if hasattr(found, "__getattr__") else found  # such as hyperparameters: the user's own names
