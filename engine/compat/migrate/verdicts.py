"""Verdicts about uses of the libraries: as is, through interop, or a change, with the sentence that says what to do."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import Signature
from typing import NamedTuple, TypeAlias

from engine.compat.lightning.checks import refused_hook
from engine.compat.lightning.names import CHECKPOINT, FILES, REPLACED
from engine.compat.migrate.argument_values import (
    after_validation,
    constructor,
    follows_validation,
    log_options,
    trainer_arguments,
)
from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP, Counterpart, counterpart, plain_counterpart
from engine.compat.migrate.imports import Api, ClassInfo
from engine.compat.migrate.known_objects import Thing
from engine.compat.migrate.signatures import Member, misfit, rejected, signature, with_parameters_of
from engine.compat.names import ARGUMENTS, NAMES, OTHERWISE


class Verdict(NamedTuple):
    """The answer about one use. ``name``: how the report calls the use; ``sentence``: what to do, or where the counterpart is."""

    name: str
    verdict: str
    sentence: str = ""


@dataclass(frozen=True)
class Named:
    """A class or a function of the libraries is named, or called with ``call``, or a class inherits from it."""

    api: Api
    call: ast.Call | None = None
    is_base: bool = False

    @property
    def library(self) -> str:
        """The library that has the name."""
        return self.api.library


@dataclass(frozen=True)
class Attribute:
    """An attribute of a thing is read, set, or called with ``call``.

    ``is_own``: a subclass in the sources defines the name, and the thing may be an object of this one.
    """

    thing: Thing
    name: str
    call: ast.Call | None = None
    is_set: bool = False
    is_own: bool = False

    @property
    def library(self) -> str:
        """The library that the thing belongs to."""
        return self.thing.library


@dataclass(frozen=True)
class Entry:
    """A hook reads an entry of Lightning's checkpoint."""

    key: str
    library = "lightning"


@dataclass(frozen=True)
class FileName:
    """A text ends with the name of a file."""

    name: str
    library = "lightning"


@dataclass(frozen=True)
class Construction:
    """A class of the sources calls the constructor of its base."""

    thing: Thing
    call: ast.Call

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.thing.library


@dataclass(frozen=True)
class Definition:
    """The class ``owner`` of the sources, whose objects are ``thing``, defines a method."""

    thing: Thing
    owner: str
    method: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.thing.library


@dataclass(frozen=True)
class Schedule:
    """The class ``cls`` of the sources, whose objects are ``thing``, has a dict that may configure a scheduler."""

    thing: Thing
    cls: ClassInfo
    config: ast.Dict

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.thing.library


Question: TypeAlias = Named | Attribute | Entry | FileName | Construction | Definition | Schedule
PLATEAU = (
    "it steps before the validation that is due at its step, where Lightning's steps after it: the first step needs 'strict': False, "
    "and each one follows the validation before; 'interval': 'epoch' follows the epoch's own validation"
)
"""The difference of a ``ReduceLROnPlateau`` with ``interval: "step"`` that follows what validation logs."""


def verdicts(question: Question) -> Iterator[Verdict]:
    """The verdict about a use: none where the name is the user's own or nobody's concern, several where several arguments of a call are refused."""
    match question:
        case Named():
            return _of_name(question)
        case Attribute():
            return _of_attribute(question)
        case Construction(thing, call):
            callees = [_callee(thing.plain), _callee(thing.translated)]
            return (
                _of_call(f"{thing.label}.__init__", call, callees)
                if any(callee.exists for callee in callees)
                else iter(())
            )
        case Entry(key):
            return iter([Verdict(f"checkpoint[{key!r}]", CHANGE, CHECKPOINT[key])] if key in CHECKPOINT else ())
        case FileName(name):
            return iter([Verdict(repr(name), CHANGE, FILES[name])] if name in FILES else ())
        case Definition():
            return _of_definition(question)
        case Schedule(thing, cls, config):
            is_different = thing.has_as_module("training") and follows_validation(config, cls)
            return iter([Verdict("ReduceLROnPlateau", CHANGE, PLATEAU)] if is_different else ())


def _of_name(question: Named) -> Iterator[Verdict]:
    api, call = question.api, question.call
    match = counterpart(api)
    if match.refused and (call is not None or question.is_base):
        yield Verdict(api.name, CHANGE, match.refused)
    elif call is None or match.verdict == CHANGE:
        yield Verdict(api.name, match.verdict, match.where)
    elif reason := _refused_values(api, call, match):
        yield Verdict(f"{api.name}()", CHANGE, reason)
    else:
        yield from _of_call(api.name, call, [_callee(match.plain), _callee(match.translated)], match.where)


def _refused_values(api: Api, call: ast.Call, match: Counterpart) -> str:
    """Why the values that a call has literally are refused; empty when they are not."""
    if api.name == "Trainer" and (parameters := signature(match.translated)) is not None:
        return trainer_arguments(call, parameters)
    if api.path.startswith("callbacks."):
        if (parameters := signature(match.translated)) and (reason := after_validation(api.name, call, parameters)):
            return reason
        return constructor(call, [cls for cls in (match.translated, plain_counterpart(api)[0]) if cls])
    return ""


def _of_attribute(question: Attribute) -> Iterator[Verdict]:
    thing, name, call = question.thing, question.name, question.call
    if thing.has_as_module(name) or hasattr(object, name):
        return
    label = f"{thing.label}.{name}"
    members = thing.members(name)
    plain = members[0]
    if question.is_set:
        if any(members) or (thing.closed and name in thing.answers):
            verdict = _best(*(member is not None and member.settable for member in members))
            yield Verdict(f"{label} =", verdict, f"it cannot be set: {thing.answer(name)}" if verdict == CHANGE else "")
    elif not any(members):
        if not question.is_own and (thing.closed or name in thing.answers):
            yield Verdict(label, CHANGE, thing.answer(name))
    elif call is None:
        yield Verdict(label, AS_IS if plain else INTEROP)
    elif thing.logs(name) and plain and plain.call and (reason := log_options(call, plain.call)):
        yield Verdict(f"{label}()", CHANGE, reason)
    else:
        method_name = "" if thing.plain is None else f"{thing.plain.__name__}.{name}"
        yield from _of_call(
            label,
            call,
            [Callee(member is not None, None if member is None else member.call, method_name) for member in members],
        )


def _of_definition(question: Definition) -> Iterator[Verdict]:
    thing, method = question.thing, question.method
    name, label = method.name, f"def {method.name}"
    if name.startswith("__") or thing.has_as_module(name):
        return
    if name in thing.uncalled:
        if name not in REPLACED or refused_hook(name, with_parameters_of(method, bound=False)):
            yield Verdict(label, CHANGE, thing.uncalled[name])
        return
    members = thing.members(name)
    if not any(members):
        return
    reason = _misfit(question, members)
    verdict = CHANGE if reason else _best(*(member is not None for member in members))
    if verdict == AS_IS and name == "on_train_batch_end" and _reads_keys(method, "outputs"):
        verdict, reason = INTEROP, "with engine alone, outputs is what training_step returned"
    yield Verdict(label, verdict, reason)


def _misfit(question: Definition, members: Sequence[Member | None]) -> str:
    """Why a method cannot be called in place of ours; empty: it can be."""
    thing, method = question.thing, question.method
    both = zip((thing.plain, thing.translated), members, strict=True)
    cls, member = next((cls, member) for cls, member in both if cls is not None and member is not None)
    is_property = any(isinstance(node, ast.Name) and node.id == "property" for node in method.decorator_list)
    if member.call is None or is_property:
        return ""
    return misfit(method, question.owner.rpartition(".")[2], cls, member.call)


def _reads_keys(method: ast.FunctionDef | ast.AsyncFunctionDef, argument: str) -> bool:
    """Tell whether a method takes entries of an argument by name: ``outputs["loss"]``, ``outputs.get("loss")``."""
    return any(
        isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.value, ast.Name)
        and node.value.id == argument
        and (isinstance(node, ast.Subscript) or node.attr in ("get", "items", "keys", "values"))
        for node in ast.walk(method)
    )


def _best(plain: bool, translated: bool) -> str:
    return AS_IS if plain else INTEROP if translated else CHANGE


# -- calls ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Callee:
    """One of the two functions that may take a call: the one of ``engine``, or the one of ``engine.interop``.

    ``exists``: whether it exists. ``call``: its parameters, ``None`` if Python does not tell. ``name``: for errors, ``"TrainModule.log"``.
    """

    exists: bool
    call: Signature | None = None
    name: str = ""

    def refused(self, call: ast.Call) -> list[str]:
        """The arguments of a call that it does not take."""
        if self.call is None:
            return []
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
        refused, too_many = rejected(self.call, positional, keywords)
        return [*refused, *([""] if too_many else [])]


@functools.cache
def _callee(counterpart: object) -> Callee:
    """A class or a function as what may take a call."""
    name = getattr(counterpart, "__name__", "")
    parameters = signature(counterpart)
    return Callee(counterpart is not None, parameters, f"{name}.__init__" if isinstance(counterpart, type) else name)


def _of_call(name: str, call: ast.Call, callees: Sequence[Callee], where: str = "") -> Iterator[Verdict]:
    """Judge a call: as is where our function takes the arguments, through interop where that one does, else what to do about each."""
    verdict, refused = call_verdict(call, callees)
    for argument, sentence in refused:
        yield Verdict(f"{name}({argument}=)" if argument else f"{name}()", verdict, sentence)
    if not refused:
        yield Verdict(name, verdict, where)


def call_verdict(call: ast.Call, callees: Sequence[Callee]) -> tuple[str, list[tuple[str, str]]]:
    """The verdict about a call, and for one that neither callee takes its arguments with what to do about each."""
    refused: list[tuple[str, str]] = []
    for verdict, callee in zip((AS_IS, INTEROP), callees, strict=True):
        if callee.exists:
            names = callee.refused(call)
            if not names:
                return verdict, []
            refused = [(name, _about(name, callees)) for name in names]
    return CHANGE, refused


def _about(name: str, callees: Sequence[Callee]) -> str:
    """The sentence about an argument that a call does not take."""
    for callee in callees:
        if name in ARGUMENTS.get(callee.name, {}):
            return ARGUMENTS[callee.name][name]
    if name in NAMES:
        return f"here it is called {NAMES[name]!r}"
    return OTHERWISE.get(name, "it takes fewer arguments by position" if not name else "there is no such argument here")
