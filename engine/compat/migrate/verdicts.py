"""Verdicts about uses of Lightning and Accelerate: works as is, works through interop, or needs a change (and which)."""

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
    constructor,
    follows_validation,
    log_options,
    trainer_arguments,
)
from engine.compat.migrate.counterparts import (
    AS_IS,
    CHANGE,
    INTEROP,
    Counterpart,
    counterpart,
    failed_import,
    find_in_engine,
)
from engine.compat.migrate.imports import TRANSFORMERS, Api, ClassInfo
from engine.compat.migrate.known_objects import KnownObject
from engine.compat.migrate.signatures import Member, misfit, rejected, signature, with_parameters_of
from engine.compat.names import ARGUMENTS, NAMES, OTHERWISE
from engine.compat.transformers.names import TRAINER_ARGUMENTS, training_argument


class Verdict(NamedTuple):
    """The verdict about one use. ``name``: the use as the report prints it; ``sentence``: what to change, or where the counterpart is."""

    name: str
    verdict: str
    sentence: str = ""


@dataclass(frozen=True)
class Named:
    """A use of a library's class or function: its name alone, a call (``call``), or as a base class or an object with attributes (``is_used``).

    ``package``: the package, for a name that is read from it as an attribute: ``"lightning.pytorch.callbacks"``.
    """

    api: Api
    call: ast.Call | None = None
    is_used: bool = False
    package: str = ""

    @property
    def library(self) -> str:
        """The library that defines the name."""
        return self.api.library


@dataclass(frozen=True)
class Attribute:
    """A use of an attribute of a library's object: it is read, set (``is_set``), or called (``call``).

    ``defined_by_user``: the object may be an instance of a user's subclass that defines the attribute.
    """

    known_object: KnownObject
    name: str
    call: ast.Call | None = None
    is_set: bool = False
    defined_by_user: bool = False

    @property
    def library(self) -> str:
        """The library that the object belongs to."""
        return self.known_object.library


@dataclass(frozen=True)
class Import:
    """The statement ``from package import name``, or ``import package`` without a ``name``."""

    package: str
    name: str
    library: str


@dataclass(frozen=True)
class OpenedPath:
    """A call of ``function``, which needs a file, with the path of a checkpoint that a run has written."""

    function: str
    library = "lightning"


@dataclass(frozen=True)
class CheckpointEntry:
    """A hook reads ``checkpoint[key]`` of Lightning's checkpoint dict."""

    key: str
    library = "lightning"


@dataclass(frozen=True)
class FileName:
    """A string literal whose last path component is ``name``."""

    name: str
    library = "lightning"


@dataclass(frozen=True)
class Construction:
    """A call that reaches the constructor of ``base``, from a user's subclass or by a call of it. ``known_object``: what an instance has."""

    known_object: KnownObject
    base: Api
    call: ast.Call

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.known_object.library


@dataclass(frozen=True)
class Definition:
    """The user's class named ``owner``, whose base class is ``known_object``, defines a method."""

    known_object: KnownObject
    owner: str
    method: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.known_object.library


@dataclass(frozen=True)
class SchedulerDict:
    """The user's class ``cls``, whose base class is ``known_object``, contains a dict literal that may configure a scheduler."""

    known_object: KnownObject
    cls: ClassInfo
    config: ast.Dict

    @property
    def library(self) -> str:
        """The library that the base belongs to."""
        return self.known_object.library


Question: TypeAlias = (
    Named | Import | OpenedPath | Attribute | CheckpointEntry | FileName | Construction | Definition | SchedulerDict
)
_FOLDER = "a checkpoint is a folder, not a file"
_FILES = "engine.interop.lightning.callbacks.ModelCheckpoint.pickles = True before the training writes files, too"
OPENERS = {
    "torch.load": "a checkpoint is no pickle, which torch.load needs: load_from_checkpoint(path) and ckpt_path=path take it; or set "
    "engine.interop.lightning.callbacks.ModelCheckpoint.pickles = True before the training, or give save_checkpoint(path, pickle=True): these "
    "write files for torch.load",
    **dict.fromkeys(
        ("shutil.copy", "shutil.copy2", "shutil.copyfile"),
        f"{_FOLDER}: use shutil.copytree or 'fit checkpoint pack'; {_FILES}",
    ),
    **dict.fromkeys(
        ("os.remove", "os.unlink"), f"{_FOLDER}: use trainer.strategy.remove_checkpoint(path) or shutil.rmtree"
    ),
    "open": f"{_FOLDER}; {_FILES}",
}
"""Functions that open a file -> what to do where a script gives them the path of a checkpoint."""
PLATEAU = (
    "it steps before the validation that is due at its step, where Lightning's steps after it: the first step needs 'strict': False, "
    "and each one follows the validation before; 'interval': 'epoch' follows the epoch's own validation"
)
"""How a ``ReduceLROnPlateau`` with ``interval: "step"`` that monitors a validation metric differs from Lightning's."""


def verdicts(question: Question) -> Iterator[Verdict]:
    """Yield the verdicts about a use: none if the name is the user's own or harmless, one per argument if arguments of a call are rejected."""
    match question:
        case Named():
            return _judge_name(question)
        case Attribute():
            return _judge_attribute(question)
        case Import(package, name):
            reason = failed_import(package, name)
            return iter([Verdict(f"import {package}.{name}".rstrip("."), CHANGE, reason)] if reason else ())
        case OpenedPath(function):
            return iter([Verdict(f"{function}()", CHANGE, OPENERS[function])])
        case Construction():
            return _judge_construction(question)
        case CheckpointEntry(key):
            return iter([Verdict(f"checkpoint[{key!r}]", CHANGE, CHECKPOINT[key])] if key in CHECKPOINT else ())
        case FileName(name):
            return iter([Verdict(repr(name), CHANGE, FILES[name])] if name in FILES else ())
        case Definition():
            return _judge_definition(question)
        case SchedulerDict(known_object, cls, config):
            is_different = known_object.has_as_module("training") and follows_validation(config, cls)
            return iter([Verdict("ReduceLROnPlateau", CHANGE, PLATEAU)] if is_different else ())


def _judge_construction(question: Construction) -> Iterator[Verdict]:
    """Judge the arguments of a call that reaches the constructor of a library's class: their values, then their names."""
    known_object, call = question.known_object, question.call
    label = f"{known_object.label}.__init__"
    callees = [_callee(known_object.engine_class), _callee(known_object.interop_class)]
    if question.base.library == TRANSFORMERS:
        yield from _arguments_of_transformers(question.base.name, call)
    elif reason := _refused_values(question.base, call, counterpart(question.base)):
        yield Verdict(f"{label}()", CHANGE, reason)
    elif any(callee.exists for callee in callees):
        yield from _judge_call(label, call, callees)


def _arguments_of_transformers(name: str, call: ast.Call) -> Iterator[Verdict]:
    """Yield where the arguments of a ``Trainer`` or of ``TrainingArguments`` of transformers go; those without an effect here are left out."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            is_trainer = name.endswith("Trainer")
            sentence = TRAINER_ARGUMENTS.get(keyword.arg) if is_trainer else training_argument(keyword.arg)
            if sentence:
                yield Verdict(f"{name}({keyword.arg}=)", CHANGE, sentence)


def _judge_name(question: Named) -> Iterator[Verdict]:
    """Judge a use of a library's class or function: first classes that cannot be instantiated here, then bad argument values, then the arguments."""
    api, call = question.api, question.call
    match = counterpart(api)
    if question.package and (reason := failed_import(question.package, api.name)) and match.verdict != CHANGE:
        yield Verdict(f"{question.package}.{api.name}", CHANGE, reason)
    elif api.library == TRANSFORMERS:
        yield Verdict(api.name, CHANGE, match.sentence)
        if call is not None and api.name.endswith(("Trainer", "TrainingArguments")):
            yield from _arguments_of_transformers(api.name, call)
    elif match.refused and (call is not None or question.is_used):
        yield Verdict(api.name, CHANGE, match.refused)
    elif call is None or match.verdict == CHANGE:
        yield Verdict(api.name, match.verdict, match.sentence)
    elif reason := _refused_values(api, call, match):
        yield Verdict(f"{api.name}()", CHANGE, reason)
    else:
        yield from _judge_call(
            api.name, call, [_callee(match.engine_object), _callee(match.interop_object)], match.sentence
        )


def _refused_values(api: Api, call: ast.Call, match: Counterpart) -> str:
    """Why the literal argument values of a call would be rejected; empty if they are accepted."""
    if api.name == "Trainer" and (parameters := signature(match.interop_object)) is not None:
        return trainer_arguments(call, parameters)
    if api.path.startswith("callbacks."):
        return constructor(call, [cls for cls in (match.interop_object, find_in_engine(api)[0]) if cls])
    return ""


def _judge_attribute(question: Attribute) -> Iterator[Verdict]:
    """Judge a use of an attribute. ``members``: the attribute of the class of ``engine``, and that of the class of ``engine.interop``.

    A name that neither class has is reported only if their attributes are all that the object can have, or if there is advice for the name.
    """
    known_object, name, call = question.known_object, question.name, question.call
    if known_object.has_as_module(name) or hasattr(object, name):
        return
    label = f"{known_object.label}.{name}"
    members = known_object.members(name)
    engine_member = members[0]
    if question.is_set:
        if any(members) or (known_object.all_names_known and name in known_object.advice):
            verdict = _best_verdict(*(member is not None and member.settable for member in members))
            advice = known_object.advice.get(name)
            refusal = f"it cannot be set: {advice}" if advice else "it cannot be set"
            yield Verdict(f"{label} =", verdict, refusal if verdict == CHANGE else "")
    elif not any(members):
        if not question.defined_by_user and (known_object.all_names_known or name in known_object.advice):
            yield Verdict(label, CHANGE, known_object.advice_for(name))
    elif call is None:
        yield Verdict(label, AS_IS if engine_member else INTEROP)
    elif (
        known_object.logs(name)
        and engine_member
        and engine_member.call
        and (reason := log_options(call, engine_member.call))
    ):
        yield Verdict(f"{label}()", CHANGE, reason)
    else:
        method_name = "" if known_object.engine_class is None else f"{known_object.engine_class.__name__}.{name}"
        yield from _judge_call(
            label,
            call,
            [Callee(member is not None, None if member is None else member.call, method_name) for member in members],
        )


def _judge_definition(question: Definition) -> Iterator[Verdict]:
    """Judge a method that the user's class defines: is it a hook that is called here, and with arguments that it accepts?"""
    known_object, method = question.known_object, question.method
    name, label = method.name, f"def {method.name}"
    if name.startswith("__") or known_object.has_as_module(name):
        return
    if name in known_object.uncalled:
        if name not in REPLACED or refused_hook(name, with_parameters_of(method, bound=False)):
            yield Verdict(label, CHANGE, known_object.uncalled[name])
        return
    members = known_object.members(name)
    if not any(members):
        return
    # A run calls hooks; the methods of a trainer are called by the user.
    reason = "" if known_object.is_trainer else _why_not_callable(question, members)
    verdict = CHANGE if reason else _best_verdict(*(member is not None for member in members))
    if verdict == AS_IS and name == "on_train_batch_end" and _reads_keys(method, "outputs"):
        verdict, reason = INTEROP, "with engine alone, outputs is what training_step returned"
    yield Verdict(label, verdict, reason)


def _why_not_callable(question: Definition, members: Sequence[Member | None]) -> str:
    """Why the user's method cannot be called in place of our method of that name; empty if it can."""
    known_object, method = question.known_object, question.method
    classes_and_members = zip((known_object.engine_class, known_object.interop_class), members, strict=True)
    cls, member = next((cls, member) for cls, member in classes_and_members if cls is not None and member is not None)
    is_property = any(isinstance(node, ast.Name) and node.id == "property" for node in method.decorator_list)
    if member.call is None or is_property:
        return ""
    return misfit(method, question.owner.rpartition(".")[2], cls, member.call)


def _reads_keys(method: ast.FunctionDef | ast.AsyncFunctionDef, argument: str) -> bool:
    """Whether a method reads entries of its dict argument ``argument``: ``outputs["loss"]``, ``outputs.get("loss")``."""
    return any(
        isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.value, ast.Name)
        and node.value.id == argument
        and (isinstance(node, ast.Subscript) or node.attr in ("get", "items", "keys", "values"))
        for node in ast.walk(method)
    )


def _best_verdict(in_engine: bool, in_interop: bool) -> str:
    return AS_IS if in_engine else INTEROP if in_interop else CHANGE


# -- calls ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Callee:
    """The function that a call would reach here, in ``engine`` or in ``engine.interop``.

    ``exists``: whether there is such a function. ``call``: its signature, ``None`` if Python cannot tell. ``name``: its name in
    :data:`engine.compat.names.ARGUMENTS`, such as ``"TrainModule.log"``.
    """

    exists: bool
    call: Signature | None = None
    name: str = ""

    def refused(self, call: ast.Call) -> list[str]:
        """The keywords of a call that this function does not accept; an empty string stands for too many positional arguments."""
        if self.call is None:
            return []
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        positional = sum(not isinstance(argument, ast.Starred) for argument in call.args)
        refused, too_many = rejected(self.call, positional, keywords)
        return [*refused, *([""] if too_many else [])]


@functools.cache
def _callee(counterpart: object) -> Callee:
    """Describe a class or a function of this library as the target of a call; ``None``: there is no such function."""
    name = getattr(counterpart, "__name__", "")
    parameters = signature(counterpart)
    return Callee(counterpart is not None, parameters, f"{name}.__init__" if isinstance(counterpart, type) else name)


def _judge_call(name: str, call: ast.Call, callees: Sequence[Callee], location: str = "") -> Iterator[Verdict]:
    """Judge a call: as is if ``engine``'s function accepts the arguments, interop if ``engine.interop``'s does; else a verdict per argument."""
    verdict, refused = call_verdict(call, callees)
    for argument, sentence in refused:
        yield Verdict(f"{name}({argument}=)" if argument else f"{name}()", verdict, sentence)
    if not refused:
        yield Verdict(name, verdict, location)


def call_verdict(call: ast.Call, callees: Sequence[Callee]) -> tuple[str, list[tuple[str, str]]]:
    """The verdict about a call and, if no callee accepts its arguments, pairs of each rejected argument and what to do about it."""
    refused: list[tuple[str, str]] = []
    for verdict, callee in zip((AS_IS, INTEROP), callees, strict=True):
        if callee.exists:
            names = callee.refused(call)
            if not names:
                return verdict, []
            refused = [(name, _argument_advice(name, callees)) for name in names]
    return CHANGE, refused


def _argument_advice(name: str, callees: Sequence[Callee]) -> str:
    """Say what to do about an argument that no callee accepts; ``name`` is empty for too many positional arguments."""
    for callee in callees:
        if name in ARGUMENTS.get(callee.name, {}):
            return ARGUMENTS[callee.name][name]
    if name in NAMES:
        return f"here it is called {NAMES[name]!r}"
    return OTHERWISE.get(name, "it takes fewer arguments by position" if not name else "there is no such argument here")
