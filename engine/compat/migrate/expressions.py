"""Walks the syntax tree of a source, infers which expressions are known objects, and records each use of Lightning and Accelerate."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass

from engine.compat.migrate.counterparts import is_package
from engine.compat.migrate.imports import Api, ClassInfo, Names, first_argument
from engine.compat.migrate.known_objects import (
    CHECKPOINT,
    FOLLOWED,
    HOOK_ARGUMENTS,
    KINDS,
    PLAIN_OBJECT,
    KnownObject,
    Value,
    kind_of,
    known_objects,
    object_of_library,
    object_of_user_class,
)
from engine.compat.migrate.signatures import member
from engine.compat.migrate.sources import Source
from engine.compat.migrate.verdicts import (
    Attribute,
    CheckpointEntry,
    Construction,
    Definition,
    FileName,
    Named,
    Question,
    SchedulerDict,
    verdicts,
)


@dataclass(frozen=True)
class Use:
    """One use of ``name`` of ``library`` at ``node``, inside the class ``owner`` (``None``: outside classes), with its verdict."""

    source: Source
    node: ast.AST
    owner: ClassInfo | None
    library: str
    name: str
    verdict: str
    sentence: str

    @property
    def cell_and_line(self) -> tuple[int | None, int]:
        """The notebook cell (``None`` in a ``.py`` file) and the line."""
        return self.source.cell_and_line(getattr(self.node, "lineno", 1))


class Walker(ast.NodeVisitor):
    """Walks one source and fills ``uses``. ``users``: class -> the first subclass of it that also inherits from a library class."""

    def __init__(self, source: Source, names: Names, users: dict[ClassInfo, ClassInfo]) -> None:
        self.source, self.names, self.users = source, names, users
        self.uses: list[Use] = []
        self._class: ClassInfo | None = None
        self._self: Value | None = None
        self._values: ChainMap[str, Value] = ChainMap()
        self._bases: set[int] = set()  # the ids of the expressions that name base classes

    # -- scopes -----------------------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._class, self._self
        self._class = self.names.of_node[id(node)]
        known_object = object_of_user_class(self._class)
        if known_object is None:  # a mixin: judge it as part of the first class that combines it with a library base
            user = self.users.get(self._class)
            known_object = None if user is None else object_of_user_class(user)
        self._self = None if known_object is None else Value(known_object, self._class)
        self._bases.update(map(id, node.bases))
        self.generic_visit(node)
        self._class, self._self = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if self._self is not None and self._class is not None and self._class.methods.get(node.name) is node:
            self._record(node, Definition(self._self.known_object, self._class.name, node))
        for expression in (*node.decorator_list, *_annotations(node.args), *filter(None, [node.returns])):
            self.visit(expression)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._values = self._values.new_child(self._arguments(node))
        for statement in node.body:
            self.visit(statement)
        self._values = self._values.parents

    visit_AsyncFunctionDef = visit_FunctionDef

    def _arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Value]:
        """The arguments of a function whose objects are known, by annotation, by name, or by their place in a hook."""
        values: dict[str, Value] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if (
                argument.annotation is not None
                and (known_object := self._of_annotation(argument.annotation)) is not None
            ):
                values[argument.arg] = known_object
            elif self._self is not None and argument.arg in HOOK_ARGUMENTS:
                values[argument.arg] = Value(known_objects()[HOOK_ARGUMENTS[argument.arg]])
        method = self._class is not None and self._class.methods.get(node.name) is node
        is_callback = self._class is not None and kind_of(self._class) == "callback"
        if method and is_callback and member(known_objects()["callback"].engine_class, node.name):
            hook_arguments = [argument.arg for argument in node.args.args[1:3]]
            roles = ("trainer of a callback", "module")
            values.update(
                {name: Value(known_objects()[role]) for name, role in zip(hook_arguments, roles, strict=False)}
            )
        if method and self._self is not None and node.name in ("on_save_checkpoint", "on_load_checkpoint"):
            values.update(
                {argument.arg: Value(CHECKPOINT) for argument in node.args.args[1:][-1:]}
            )  # the last one, the dict
        if method and self._class is not None and (first := first_argument(node)) is not None:
            values[first] = self._self or Value(PLAIN_OBJECT, self._class)
        return values

    def _of_annotation(self, annotation: ast.expr) -> Value | None:
        """The value of an argument with this annotation, if one of the classes that it allows is known."""
        for alternative in _alternatives(annotation):
            meaning = self.names.meaning(alternative, self.source)
            if isinstance(meaning, ClassInfo) and (known_object := object_of_user_class(meaning)) is not None:
                return Value(known_object, meaning)
            if isinstance(meaning, Api):
                if meaning.name == "Trainer" and self._self is not None:
                    return Value(known_objects()["trainer of a callback"])
                name = FOLLOWED.get(meaning.name) or KINDS.get(meaning.name)
                if name is not None:
                    return Value(known_objects()[name])
        return None

    # -- values of expressions ---------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:  # a bare annotation assigns nothing
            self.visit(node.target)
            self.visit(node.value)
            self._assign(node.target, node.value)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Remember that the name ``target`` holds the value of ``value``, or forget what it held if that is not known."""
        if isinstance(target, ast.Name):
            result = self._value_of(value)
            if result is not None:
                self._values[target.id] = result
            else:
                self._values.maps[0].pop(target.id, None)

    def _value_of(self, node: ast.expr) -> Value | None:
        """The value of an expression, if it is known."""
        if isinstance(node, ast.Name):
            return self._values.get(node.id)
        if isinstance(node, ast.Call):
            meaning = self.names.meaning(node.func, self.source)
            if isinstance(meaning, Api) and meaning.name in FOLLOWED:
                return Value(known_objects()[FOLLOWED[meaning.name]])
            if isinstance(meaning, ClassInfo) and (known_object := object_of_user_class(meaning)) is not None:
                return Value(known_object, meaning)
            if isinstance(node.func, ast.Name) and node.func.id == "super" and self._self is not None:
                return Value(self._self.known_object, self._self.cls)
            return None
        if isinstance(node, ast.IfExp):
            return self._value_of(node.body) or self._value_of(node.orelse)
        if isinstance(node, ast.Attribute):
            owner = self._value_of(node.value)
            return None if owner is None else self._attribute_value(owner, node.attr)
        return None

    def _attribute_value(self, owner: Value, name: str) -> Value | None:
        """The value of the attribute ``name`` of ``owner``, if it is known."""
        if owner.cls is not None and name in owner.cls.own_names:
            return self._value_set_by(owner.cls, name)
        if name in owner.known_object.known_attributes:
            return Value(known_objects()[owner.known_object.known_attributes[name]])
        engine_class, interop_class = (
            None if member is None else member.type for member in owner.known_object.members(name)
        )
        if engine_class is None and interop_class is None:
            return None
        return Value(
            KnownObject(
                f"{owner.known_object.label}.{name}", engine_class, interop_class, library=owner.known_object.library
            )
        )

    def _value_set_by(self, cls: ClassInfo, name: str) -> Value | None:
        """The value of an attribute that a user's class sets itself, as in ``self.accelerator = Accelerator()``, if it is known."""
        for ancestor in cls.family:
            value = ancestor.set_on_self.get(name)
            if isinstance(value, ast.Call):
                meaning = self.names.meaning(value.func, ancestor.source)
                if isinstance(meaning, Api) and meaning.name in FOLLOWED:
                    return Value(known_objects()[FOLLOWED[meaning.name]])
        return None

    # -- uses -------------------------------------------------------------------------------------------------------------------

    def _record(self, node: ast.AST, question: Question) -> None:
        """Judge the use ``question`` at ``node``, and record a :class:`Use` for each verdict."""
        self.uses += [Use(self.source, node, self._class, question.library, *verdict) for verdict in verdicts(question)]

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self._values:
            self._record_name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(self.names.meaning(node, self.source), Api) and self._record_name(node):
            return
        owner = self._value_of(node.value)
        if owner is not None:
            self._record_member(node, owner, None)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._record(node, FileName(node.value.replace("\\", "/").rpartition("/")[2]))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        owner, key = self._value_of(node.value), node.slice
        if (
            owner is not None
            and owner.known_object is CHECKPOINT
            and isinstance(key, ast.Constant)
            and isinstance(node.ctx, ast.Load)
        ):
            self._record(node, CheckpointEntry(str(key.value)))

    def visit_Dict(self, node: ast.Dict) -> None:
        self.generic_visit(node)
        if self._self is not None and self._class is not None:
            self._record(node, SchedulerDict(self._self.known_object, self._class, node))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and (owner := self._value_of(node.func.value)) is not None:
            self._record_member(node.func, owner, node)
            self.visit(node.func.value)
        elif isinstance(self.names.meaning(node.func, self.source), Api):
            self._record_name(node.func, node)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def _record_name(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        """Record that ``node`` names a library's class or function, or an attribute of one; return whether it does."""
        api = self.names.meaning(node, self.source)
        if not isinstance(api, Api) or is_package(api) or api.path in _ONLY_IN_TESTS:
            return isinstance(api, Api)
        head, _, name = api.path.rpartition(".")
        owner = object_of_library(Api(api.library, head)) if head else PLAIN_OBJECT
        if owner.engine_class is not None or owner.interop_class is not None:
            self._record_attribute(owner, name, node, call)
        else:
            self._record(node, Named(api, call, id(node) in self._bases))
        return True

    def _record_member(self, node: ast.Attribute, owner: Value, call: ast.Call | None) -> None:
        """Record a use of an attribute of ``owner``, unless the user's own class defines it."""
        name = node.attr
        is_super = isinstance(node.value, ast.Call)
        if owner.cls is not None:
            definers = owner.cls.family[1:] if is_super else owner.cls.family
            if any(name in (*cls.methods, *cls.class_attributes) for cls in definers):
                return
            if any(name in cls.set_on_self for cls in definers) and not isinstance(node.ctx, ast.Store):
                return
        if name == "__init__" and is_super and owner.cls is not None:
            self._record_construction(node, owner.cls, call)
        else:
            self._record_attribute(owner.known_object, name, node, call)

    def _record_attribute(self, known_object: KnownObject, name: str, node: ast.expr, call: ast.Call | None) -> None:
        is_set = isinstance(getattr(node, "ctx", None), ast.Store)
        defined_by_user = known_object.is_trainer and name in self.names.names_of_trainer_subclasses
        self._record(node, Attribute(known_object, name, call, is_set, defined_by_user))

    def _record_construction(self, node: ast.Attribute, cls: ClassInfo, call: ast.Call | None) -> None:
        """Record a call of ``super().__init__(...)`` that reaches a library's class."""
        known_object = object_of_user_class(cls)
        if call is None or known_object is None or any("__init__" in base.methods for base in cls.family[1:]):
            return
        if all(
            base is not None for heir in cls.family for base in heir.bases
        ):  # an unknown base may accept the arguments
            self._record(node, Construction(known_object, call))


_ONLY_IN_TESTS = ("test_utils.training.mocked_dataloaders",)
"""Names that Accelerate's examples import only for their own tests; they are not reported."""


def _annotations(arguments: ast.arguments) -> Iterator[ast.expr]:
    all_arguments = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (
        argument.annotation for argument in all_arguments if argument is not None and argument.annotation is not None
    )


def _alternatives(annotation: ast.expr) -> Iterator[ast.expr]:
    """The alternatives of a union annotation: ``X`` and ``None`` for ``X | None``, ``X`` for ``Optional[X]``."""
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        yield from inner.elts if isinstance(inner, ast.Tuple) else [inner]
    else:
        yield annotation
