"""Walks the syntax tree of a source, infers which expressions are known objects, and records each use of Lightning and Accelerate."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from engine.compat.migrate.constants import Constants
from engine.compat.migrate.counterparts import counterpart, find_in_interop, is_package
from engine.compat.migrate.imports import (
    ROOTS,
    TRANSFORMERS,
    Api,
    ClassInfo,
    Meaning,
    Names,
    first_argument,
    imported_from,
    imports_alone_that_work,
    library_name,
)
from engine.compat.migrate.known_objects import (
    CHECKPOINT,
    EVENT_ARGUMENTS,
    FOLLOWED,
    HOOK_ARGUMENTS,
    KINDS,
    PLAIN_OBJECT,
    KnownObject,
    Value,
    calls_with_trainer,
    followed,
    kind_of,
    known_objects,
    object_of_library,
    object_of_user_class,
)
from engine.compat.migrate.sources import Source
from engine.compat.migrate.verdicts import (
    OPENERS,
    Attribute,
    CheckpointEntry,
    Construction,
    Definition,
    FileName,
    Import,
    Named,
    OpenedPath,
    Question,
    SchedulerDict,
    verdicts,
)
from engine.compat.transformers.names import EVENTS


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
    """Walks one source and fills ``uses`` and ``imported``, the packages of the libraries with their first import.

    ``users``: class -> the first subclass of it that also inherits from a library class.
    """

    def __init__(self, source: Source, names: Names, users: dict[ClassInfo, ClassInfo]) -> None:
        self.source, self.names, self.users = source, names, users
        self.uses: list[Use] = []
        self.imported: dict[str, ast.stmt] = {}
        self._constants = Constants(source.tree)
        self._import_may_fail = False
        self._attribute_may_fail = False
        self._foreign: frozenset[str] = frozenset()  # names that the function at hand imports from elsewhere
        self._tested_attributes: list[str] = []
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
        self._constants.enter(node)
        outer, self._foreign = self._foreign, self._foreign | _foreign_imports(node, self.names.packages)
        for statement in node.body:
            self.visit(statement)
        self._foreign = outer
        self._constants.leave()
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
            elif self._self is not None and self._self.known_object.library == TRANSFORMERS:
                if argument.arg in EVENT_ARGUMENTS and node.name in EVENTS:
                    values[argument.arg] = Value(known_objects()[EVENT_ARGUMENTS[argument.arg]])
            elif self._self is not None and argument.arg in HOOK_ARGUMENTS:
                values[argument.arg] = Value(known_objects()[HOOK_ARGUMENTS[argument.arg]])
        method = self._class is not None and self._class.methods.get(node.name) is node
        is_callback = self._class is not None and kind_of(self._class) == "callback"
        if method and is_callback and calls_with_trainer(node.name):
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
        alternatives = [*_alternatives(annotation)]
        value = next(filter(None, map(self._of_alternative, alternatives)), None)
        unknown = (item for item in alternatives if not _is_none(item) and self._of_alternative(item) is None)
        if value is not None and any(unknown):  # an object of another class may have any attribute
            return Value(replace(value.known_object, all_names_known=False), value.cls)
        return value

    def _of_alternative(self, alternative: ast.expr) -> Value | None:
        """The value of an argument that is annotated with one class, if that is known."""
        meaning = self.names.meaning(alternative, self.source)
        if isinstance(meaning, ClassInfo):
            return Value(object_of_user_class(meaning) or PLAIN_OBJECT, meaning)
        if not isinstance(meaning, Api):
            return None
        if meaning.library == TRANSFORMERS:
            return Value(object_of_library(meaning))
        if meaning.name == "Trainer" and self._self is not None:
            return Value(known_objects()["trainer of a callback"])
        name = FOLLOWED.get(meaning.name) or KINDS.get(meaning.name)
        return None if name is None else Value(known_objects()[name])

    def _meaning(self, node: ast.expr) -> Meaning:
        """The object that a (dotted) name refers to; ``None`` if the function at hand has imported another package under this name."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        return (
            None if isinstance(root, ast.Name) and root.id in self._foreign else self.names.meaning(node, self.source)
        )

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
        outer = self._import_may_fail
        for item in node.items:
            self.visit(item)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, item.context_expr)
            context = item.context_expr
            if (
                isinstance(context, ast.Call)
                and getattr(context.func, "attr", getattr(context.func, "id", "")) == "suppress"
            ):
                caught = {name for argument in context.args for name in _caught_names(argument)}
                self._import_may_fail |= bool(caught & {"ImportError", "ModuleNotFoundError", "Exception"})
        for statement in node.body:
            self.visit(statement)
        self._import_may_fail = outer

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
            if (value := self._instance(self._meaning(node.func))) is not None:
                return value
            if isinstance(node.func, ast.Name) and node.func.id == "super" and self._self is not None:
                return Value(self._self.known_object, self._self.cls)
            return None
        if isinstance(node, ast.IfExp):
            return self._value_of(node.body) or self._value_of(node.orelse)
        if isinstance(node, ast.Attribute):
            owner = self._value_of(node.value)
            return None if owner is None else self._attribute_value(owner, node.attr)
        return None

    def _instance(self, meaning: Meaning) -> Value | None:
        """The value of a call of a class, if it is a user's class or one of a library's that are followed."""
        if isinstance(meaning, ClassInfo):
            return Value(object_of_user_class(meaning) or PLAIN_OBJECT, meaning)
        known_object = followed(meaning) if isinstance(meaning, Api) else None
        return None if known_object is None else Value(known_object)

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
                return self._instance(self.names.meaning(value.func, ancestor.source))
            if isinstance(value, ast.Name) and (method := ancestor.assigned_once.get(name, (None, None))[0]):
                return self._argument_of(method, value.id, ancestor.source)
        return None

    def _argument_of(self, method: ast.FunctionDef | ast.AsyncFunctionDef, name: str, source: Source) -> Value | None:
        """The value of a method's argument that is annotated with a class of a library that is followed."""
        for argument in (*method.args.args, *method.args.kwonlyargs):
            if argument.arg == name and argument.annotation is not None:
                meanings = (
                    self.names.meaning(alternative, source) for alternative in _alternatives(argument.annotation)
                )
                return next(filter(None, map(self._instance, meanings)), None)
        return None

    # -- uses -------------------------------------------------------------------------------------------------------------------

    def _record(self, node: ast.AST, question: Question) -> None:
        """Judge the use ``question`` at ``node``, and record a :class:`Use` for each verdict."""
        self.uses += [Use(self.source, node, self._class, question.library, *verdict) for verdict in verdicts(question)]

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self._values:
            self._record_name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(self._meaning(node), Api) and self._record_name(node):
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
        meaning = self._meaning(node.func)
        call = self._constants.with_values(node, self._owners(node))
        if isinstance(node.func, ast.Attribute) and (owner := self._value_of(node.func.value)) is not None:
            self._record_member(node.func, owner, call)
            self.visit(node.func.value)
        elif isinstance(meaning, Api):
            self._record_name(node.func, call)
        else:
            if isinstance(meaning, ClassInfo):
                self._record_instance(node, meaning, call)
            elif (function := _function_name(node, meaning)) in OPENERS and self._is_checkpoint(node, function):
                self._record(node, OpenedPath(function))
            elif meaning == "functools.partial" and node.args:
                api = self._meaning(node.args[0])
                if isinstance(api, Api):
                    self._record_name(node.args[0], ast.Call(node.args[0], call.args[1:], call.keywords))
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def _owners(self, call: ast.Call) -> dict[int, ClassInfo]:
        """The arguments of a call that are attributes of an object of a user's class -> the class."""
        owners: dict[int, ClassInfo] = {}
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if isinstance(argument, ast.Attribute) and (owner := self._value_of(argument.value)) and owner.cls:
                owners[id(argument)] = owner.cls
        return owners

    def _is_checkpoint(self, call: ast.Call, function: str) -> bool:
        """Whether a call of ``function`` opens a checkpoint that a run has written."""
        path = (
            call.args[0]
            if call.args
            else next((item.value for item in call.keywords if item.arg in ("f", "src", "file", "path")), None)
        )
        if path is None or not self.names.uses_lightning or self.names.writes_pickles:
            return False
        owner = self._value_of(path.value) if isinstance(path, ast.Attribute) else None
        path = self._constants.expression(path, None if owner is None else owner.cls)
        if isinstance(path, ast.Constant):
            return function == "torch.load" and path.value in self.names.saved_paths  # one file, but no pickle
        parts = (
            self._constants.expression(node) for node in ast.walk(path) if isinstance(node, (ast.Name, ast.Attribute))
        )
        return any(isinstance(node, ast.Attribute) and node.attr in _CHECKPOINT_PATHS for node in parts)

    # -- imports ----------------------------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._record_import(node, alias.name, "")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level:
            for alias in node.names:
                self._record_import(node, imported_from(node, self.source), alias.name)

    def _record_import(self, node: ast.stmt, package: str, name: str) -> None:
        """Record an import of a library; whether it fails is judged unless the source is prepared for that."""
        root = package.split(".")[0]
        if root not in (*ROOTS, TRANSFORMERS) or root in self.names.packages:
            return
        self.imported.setdefault(root, node)
        api = library_name(f"{package}.{name}".rstrip("."))
        if api is not None and not self._import_may_fail and api.path not in _ONLY_IN_TESTS:
            self._record(node, Import(package, name, api.library))

    def visit_Try(self, node: ast.Try) -> None:
        outer = self._import_may_fail
        caught = {name for handler in node.handlers for name in _caught_names(handler.type)}
        self._import_may_fail |= bool(caught & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
        outer_attributes = self._attribute_may_fail
        self._attribute_may_fail |= bool(caught & {"AttributeError", "Exception", "BaseException"})
        for statement in node.body:
            self.visit(statement)
        self._import_may_fail = outer or imports_alone_that_work(node, self.source)
        for handler in node.handlers:
            self.visit(handler)
        self._import_may_fail = outer
        for part in node.orelse:
            self.visit(part)
        self._attribute_may_fail = outer_attributes
        for statement in node.finalbody:
            self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        outer = self._import_may_fail
        self.visit(node.test)
        tested = self._constants.enter_branch(node.test)
        attributes = [*_tested_attributes(node.test)]
        self._tested_attributes += attributes
        self._import_may_fail |= getattr(node.test, "attr", getattr(node.test, "id", "")) == "TYPE_CHECKING"
        for statement in node.body:
            self.visit(statement)
        self._import_may_fail = outer
        values = dict(self._values.maps[0])
        for statement in node.orelse:
            self.visit(statement)
        for name in _names_with_values(node.body) & _names_with_values(node.orelse):
            if self._values.maps[0].get(name) != values.get(name):  # it depends on the condition
                self._values.maps[0].pop(name, None)
        self._constants.leave_branch(tested)
        del self._tested_attributes[len(self._tested_attributes) - len(attributes) :]

    def visit_IfExp(self, node: ast.IfExp) -> None:
        attributes = [*_tested_attributes(node.test)]
        self._tested_attributes += attributes
        self.generic_visit(node)
        del self._tested_attributes[len(self._tested_attributes) - len(attributes) :]

    def _record_name(self, node: ast.expr, call: ast.Call | None = None, is_used: bool = False) -> bool:
        """Record that ``node`` names a library's class or function, or an attribute of one; return whether it does.

        ``is_used``: an attribute of it is read.
        """
        api = self._meaning(node)
        if not isinstance(api, Api) or is_package(api) or api.path in _ONLY_IN_TESTS:
            return isinstance(api, Api)
        head, _, name = api.path.rpartition(".")
        if head and isinstance(node, ast.Attribute) and _has_unknown_attributes(Api(api.library, head)):
            return self._record_name(node.value, is_used=True)
        owner = object_of_library(Api(api.library, head)) if head else PLAIN_OBJECT
        if owner.engine_class is not None or owner.interop_class is not None or owner.advice:
            self._record_attribute(owner, name, node, call)
        else:
            self._record(node, Named(api, call, is_used or id(node) in self._bases, self._package(node, api)))
        return True

    def _package(self, node: ast.expr, api: Api) -> str:
        """The package that ``node`` reads a library's name from as an attribute; empty if the name was imported, or is read from an object."""
        head = api.path.rpartition(".")[0]
        if not isinstance(node, ast.Attribute) or api.library == TRANSFORMERS:
            return ""
        owner = find_in_interop(Api(api.library, head))[0] if head else None
        root = {"lightning": "lightning.pytorch", "fabric": "lightning.fabric"}.get(api.library, api.library)
        return "" if owner is not None and not isinstance(owner, ModuleType) else f"{root}.{head}".rstrip(".")

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
        if not any(known_object.members(name)) and (self._attribute_may_fail or name in self._tested_attributes):
            return  # the source is prepared for an object without the attribute
        is_set = isinstance(getattr(node, "ctx", None), ast.Store)
        defined_by_user = known_object.is_trainer and name in self.names.names_of_trainer_subclasses
        self._record(node, Attribute(known_object, name, call, is_set, defined_by_user))

    def _record_construction(self, node: ast.Attribute, cls: ClassInfo, call: ast.Call | None) -> None:
        """Record a call of ``super().__init__(...)`` that reaches a library's class."""
        if call is not None and not any("__init__" in base.methods for base in cls.family[1:]):
            self._record_constructor(node, cls, call)

    def _record_instance(self, node: ast.Call, cls: ClassInfo, call: ast.Call) -> None:
        """Record a call of a user's class whose arguments reach the constructor of its library base."""
        constructor = next((heir.methods["__init__"] for heir in cls.family if "__init__" in heir.methods), None)
        if kind_of(cls) not in ("other", "callback"):
            return
        if constructor is None:
            self._record_constructor(node, cls, call)
        elif constructor.args.kwarg is not None and _forwards(constructor, constructor.args.kwarg.arg):
            named = {argument.arg for argument in (*constructor.args.args, *constructor.args.kwonlyargs)}
            # `options.pop("name")` takes it out.
            named |= {
                node.value
                for node in ast.walk(constructor)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            keywords = [keyword for keyword in call.keywords if keyword.arg not in named]
            if keywords:
                self._record_constructor(node, cls, ast.Call(call.func, [], keywords))

    def _record_constructor(self, node: ast.expr, cls: ClassInfo, call: ast.Call) -> None:
        """Record a call of the constructor of the library base of ``cls``, unless an unknown base may accept the arguments."""
        known_object = object_of_user_class(cls)
        if known_object is not None and all(base is not None for heir in cls.family for base in heir.bases):
            self._record(node, Construction(known_object, cls.library_bases[0], call))


_CHECKPOINT_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")
"""Attributes that have the path of a checkpoint."""
_ONLY_IN_TESTS = ("test_utils.training.mocked_dataloaders",)
"""Names that Accelerate's examples import only for their own tests; they are not reported."""


def _foreign_imports(function: ast.FunctionDef | ast.AsyncFunctionDef, packages: set[str]) -> frozenset[str]:
    """The names under which a function imports packages that are neither the libraries' nor the sources' own ``packages``."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            is_absolute = isinstance(node, ast.Import) or not node.level
            for alias in node.names if is_absolute else ():
                dotted = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if library_name(dotted) is None and dotted.split(".")[0] not in packages:
                    names.add(alias.asname or alias.name.split(".")[0])
    return frozenset(names)


def _function_name(call: ast.Call, meaning: Meaning) -> str:
    """The dotted name of the function that is called, if it is of no source and no library; a built-in's own name."""
    return meaning if isinstance(meaning, str) else getattr(call.func, "id", "") if meaning is None else ""


def _has_unknown_attributes(api: Api) -> bool:
    """Whether the name can be judged, but not its attributes: a function, a value, such as ``rank_zero_only``, or a name that is not there."""
    if api.library == TRANSFORMERS:
        return False
    match = counterpart(api)
    value = match.engine_object or find_in_interop(api)[0]
    return not isinstance(value, (ModuleType, type)) and not is_package(api)


def _caught_names(caught: ast.expr | None) -> set[str]:
    """The names of the exceptions that ``except caught`` catches; ``None``: everything."""
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return {"BaseException"} if caught is None else {getattr(kind, "attr", getattr(kind, "id", "")) for kind in kinds}


def _tested_attributes(test: ast.expr) -> Iterator[str]:
    """Yield the literal names of ``hasattr(x, "name")`` in a condition."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr" and len(node.args) == 2:
            yield str(getattr(node.args[1], "value", ""))


def _names_with_values(branch: Sequence[ast.stmt]) -> set[str]:
    """The names to which the statements assign something else than ``None``."""
    assignments = (node for statement in branch for node in ast.walk(statement) if isinstance(node, ast.Assign))
    return {
        target.id
        for node in assignments
        if not _is_none(node.value)
        for assigned in node.targets
        for target in ast.walk(assigned)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _forwards(constructor: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Whether a constructor passes its ``**name`` on to its base's: ``super().__init__(**name)``."""
    return any(
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "__init__"
        and any(keyword.arg is None and getattr(keyword.value, "id", "") == name for keyword in node.keywords)
        for node in ast.walk(constructor)
    )


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
    elif isinstance(annotation, ast.Constant) and isinstance(annotation.value, str) and "|" in annotation.value:
        try:
            yield from _alternatives(ast.parse(annotation.value, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            yield annotation
    elif isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        yield from inner.elts if isinstance(inner, ast.Tuple) else [inner]
    else:
        yield annotation
