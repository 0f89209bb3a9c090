"""The walk over a source: it knows what each expression is, and finds each use of the names of Lightning and Accelerate."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass

from engine.compat.migrate.counterparts import is_package
from engine.compat.migrate.imports import Api, ClassInfo, Names, first_argument
from engine.compat.migrate.known_objects import (
    CHECKPOINT,
    KINDS,
    MADE,
    PASSED,
    PLAIN,
    Known,
    Thing,
    kind_of,
    of_class,
    thing_of,
    things,
)
from engine.compat.migrate.signatures import member
from engine.compat.migrate.sources import Source
from engine.compat.migrate.verdicts import (
    Attribute,
    Construction,
    Definition,
    Entry,
    FileName,
    Named,
    Question,
    Schedule,
    verdicts,
)


@dataclass(frozen=True)
class Use:
    """One use: of ``name`` of ``library``, in ``line`` (of ``cell``, in a notebook), in the class ``owner`` or in none."""

    source: Source
    node: ast.AST
    owner: ClassInfo | None
    library: str
    name: str
    verdict: str
    sentence: str

    @property
    def place(self) -> tuple[int | None, int]:
        """The cell and the line."""
        return self.source.place(getattr(self.node, "lineno", 1))


class Walker(ast.NodeVisitor):
    """Walks one source. ``users``: for each class, the first one with a base of the libraries that inherits from it."""

    def __init__(self, source: Source, names: Names, users: dict[ClassInfo, ClassInfo]) -> None:
        self.source, self.names, self.users = source, names, users
        self.uses: list[Use] = []
        self._class: ClassInfo | None = None
        self._self: Known | None = None
        self._known: ChainMap[str, Known] = ChainMap()
        self._bases: set[int] = set()  # the ids of the expressions that name base classes

    # -- scopes -----------------------------------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._class, self._self
        self._class = self.names.of_node[id(node)]
        thing = thing_of(self._class)
        if thing is None:  # a class without a base of theirs may be mixed into one that has
            user = self.users.get(self._class)
            thing = None if user is None else thing_of(user)
        self._self = None if thing is None else Known(thing, self._class)
        self._bases.update(map(id, node.bases))
        self.generic_visit(node)
        self._class, self._self = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if self._self is not None and self._class is not None and self._class.methods.get(node.name) is node:
            self._ask(node, Definition(self._self.thing, self._class.name, node))
        for expression in (*node.decorator_list, *_annotations(node.args), *filter(None, [node.returns])):
            self.visit(expression)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._known = self._known.new_child(self._arguments(node))
        for statement in node.body:
            self.visit(statement)
        self._known = self._known.parents

    visit_AsyncFunctionDef = visit_FunctionDef

    def _arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Known]:
        """The arguments of a function that are known."""
        values: dict[str, Known] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation is not None and (thing := self._of_annotation(argument.annotation)) is not None:
                values[argument.arg] = thing
            elif self._self is not None and argument.arg in PASSED:
                values[argument.arg] = Known(things()[PASSED[argument.arg]])
        method = self._class is not None and self._class.methods.get(node.name) is node
        is_callback = self._class is not None and kind_of(self._class) == "callback"
        if method and is_callback and member(things()["callback"].plain, node.name):
            hook = [argument.arg for argument in node.args.args[1:3]]
            roles = ("trainer of a callback", "module")
            values.update({name: Known(things()[role]) for name, role in zip(hook, roles, strict=False)})
        if method and self._self is not None and node.name in ("on_save_checkpoint", "on_load_checkpoint"):
            values.update({argument.arg: Known(CHECKPOINT) for argument in node.args.args[1:][-1:]})
        if method and self._class is not None and (first := first_argument(node)) is not None:
            values[first] = self._self or Known(PLAIN, self._class)
        return values

    def _of_annotation(self, annotation: ast.expr) -> Known | None:
        for alternative in _alternatives(annotation):
            meaning = self.names.meaning(alternative, self.source)
            if isinstance(meaning, ClassInfo) and (thing := thing_of(meaning)) is not None:
                return Known(thing, meaning)
            if isinstance(meaning, Api):
                if meaning.name == "Trainer" and self._self is not None:
                    return Known(things()["trainer of a callback"])
                name = MADE.get(meaning.name) or KINDS.get(meaning.name)
                if name is not None:
                    return Known(things()[name])
        return None

    # -- what an expression gives -----------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:  # without a value nothing is set
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
        if isinstance(target, ast.Name):
            result = self._gives(value)
            if result is not None:
                self._known[target.id] = result
            else:
                self._known.maps[0].pop(target.id, None)

    def _gives(self, node: ast.expr) -> Known | None:
        """The value of an expression, if it is known."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Call):
            meaning = self.names.meaning(node.func, self.source)
            if isinstance(meaning, Api) and meaning.name in MADE:
                return Known(things()[MADE[meaning.name]])
            if isinstance(meaning, ClassInfo) and (thing := thing_of(meaning)) is not None:
                return Known(thing, meaning)
            if isinstance(node.func, ast.Name) and node.func.id == "super" and self._self is not None:
                return Known(self._self.thing, self._self.cls)
            return None
        if isinstance(node, ast.IfExp):
            return self._gives(node.body) or self._gives(node.orelse)
        if isinstance(node, ast.Attribute):
            owner = self._gives(node.value)
            return None if owner is None else self._attribute(owner, node.attr)
        return None

    def _attribute(self, owner: Known, name: str) -> Known | None:
        """The value of an attribute of a thing, if it is known."""
        if owner.cls is not None and name in owner.cls.own_names:
            return self._set_attribute(owner.cls, name)
        if name in owner.thing.gives:
            return Known(things()[owner.thing.gives[name]])
        plain, translated = (None if member is None else member.type for member in owner.thing.members(name))
        if plain is None and translated is None:
            return None
        return Known(Thing(f"{owner.thing.label}.{name}", plain, translated, library=owner.thing.library))

    def _set_attribute(self, cls: ClassInfo, name: str) -> Known | None:
        """The value of an attribute that a class of the sources sets itself: ``self.accelerator = Accelerator()``."""
        for ancestor in cls.family:
            value = ancestor.set_on_self.get(name)
            if isinstance(value, ast.Call):
                meaning = self.names.meaning(value.func, ancestor.source)
                if isinstance(meaning, Api) and meaning.name in MADE:
                    return Known(things()[MADE[meaning.name]])
        return None

    # -- uses -------------------------------------------------------------------------------------------------------------------

    def _ask(self, node: ast.AST, question: Question) -> None:
        self.uses += [Use(self.source, node, self._class, question.library, *verdict) for verdict in verdicts(question)]

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self._known:
            self._name(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(self.names.meaning(node, self.source), Api) and self._name(node):
            return
        owner = self._gives(node.value)
        if owner is not None:
            self._member(node, owner, None)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._ask(node, FileName(node.value.replace("\\", "/").rpartition("/")[2]))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        owner, key = self._gives(node.value), node.slice
        if (
            owner is not None
            and owner.thing is CHECKPOINT
            and isinstance(key, ast.Constant)
            and isinstance(node.ctx, ast.Load)
        ):
            self._ask(node, Entry(str(key.value)))

    def visit_Dict(self, node: ast.Dict) -> None:
        self.generic_visit(node)
        if self._self is not None and self._class is not None:
            self._ask(node, Schedule(self._self.thing, self._class, node))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and (owner := self._gives(node.func.value)) is not None:
            self._member(node.func, owner, node)
            self.visit(node.func.value)
        elif isinstance(self.names.meaning(node.func, self.source), Api):
            self._name(node.func, node)
        else:
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def _name(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        """Record a use of a class or a function of the libraries, or of a class's attribute; returns whether ``node`` is one."""
        api = self.names.meaning(node, self.source)
        if not isinstance(api, Api) or is_package(api) or api.path in _OF_TESTS:
            return isinstance(api, Api)
        head, _, name = api.path.rpartition(".")
        owner = of_class(Api(api.library, head)) if head else PLAIN
        if owner.plain is not None or owner.translated is not None:
            self._attribute_of(owner, name, node, call)
        else:
            self._ask(node, Named(api, call, id(node) in self._bases))
        return True

    def _member(self, node: ast.Attribute, owner: Known, call: ast.Call | None) -> None:
        """A use of an attribute of a thing, unless the user's own class has it."""
        name = node.attr
        is_super = isinstance(node.value, ast.Call)
        if owner.cls is not None:
            definers = owner.cls.family[1:] if is_super else owner.cls.family
            if any(name in (*cls.methods, *cls.class_attributes) for cls in definers):
                return
            if any(name in cls.set_on_self for cls in definers) and not isinstance(node.ctx, ast.Store):
                return
        if name == "__init__" and is_super and owner.cls is not None:
            self._construction(node, owner.cls, call)
        else:
            self._attribute_of(owner.thing, name, node, call)

    def _attribute_of(self, thing: Thing, name: str, node: ast.expr, call: ast.Call | None) -> None:
        is_set = isinstance(getattr(node, "ctx", None), ast.Store)
        is_own = thing.is_trainer and name in self.names.own_of_trainers
        self._ask(node, Attribute(thing, name, call, is_set, is_own))

    def _construction(self, node: ast.Attribute, cls: ClassInfo, call: ast.Call | None) -> None:
        """``super().__init__(...)`` of a class of the libraries."""
        thing = thing_of(cls)
        if call is None or thing is None or any("__init__" in base.methods for base in cls.family[1:]):
            return
        if all(base is not None for heir in cls.family for base in heir.bases):  # any other base may take the arguments
            self._ask(node, Construction(thing, call))


_OF_TESTS = ("test_utils.training.mocked_dataloaders",)
"""Names that Accelerate's own examples import where they test themselves."""


def _annotations(arguments: ast.arguments) -> Iterator[ast.expr]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (argument.annotation for argument in every if argument is not None and argument.annotation is not None)


def _alternatives(annotation: ast.expr) -> Iterator[ast.expr]:
    """The classes that an annotation allows: ``Optional[X]``, ``X | None``, ``"X"``."""
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    elif isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        yield from inner.elts if isinstance(inner, ast.Tuple) else [inner]
    else:
        yield annotation
