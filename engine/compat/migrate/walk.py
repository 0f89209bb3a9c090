"""Each use of Lightning's and Accelerate's names in a source, and what it is here."""

from __future__ import annotations

import ast
from collections import ChainMap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.compat.lightning.checks import refused_hook
from engine.compat.lightning.names import OF_CHECKPOINTS, OF_STRATEGIES, REPLACED
from engine.compat.migrate.counterparts import AS_IS, CHANGE, INTEROP, counterpart, is_package
from engine.compat.migrate.imports import Api, ClassInfo, Names, first_argument
from engine.compat.migrate.signatures import member, misfit, signature, stand_in
from engine.compat.migrate.sources import Source
from engine.compat.migrate.things import (
    KINDS,
    MADE,
    PASSED,
    PLAIN,
    Known,
    Thing,
    kind_of,
    of_nn_module,
    thing_of,
    things,
)
from engine.compat.migrate.values import constructor, log_options, trainer_arguments
from engine.compat.migrate.verdicts import Side, decided


@dataclass(frozen=True)
class Use:
    """One use: of ``name`` of ``library``, in ``line`` (of ``cell``, in a notebook), in the class ``owner`` or in none."""

    source: Source
    node: ast.AST
    owner: ClassInfo | None
    library: str
    name: str
    verdict: str
    what: str

    @property
    def place(self) -> tuple[int | None, int]:
        """The cell and the line."""
        return self.source.place(getattr(self.node, "lineno", 1))


class Finder(ast.NodeVisitor):
    """Walks one source. ``users``: for each class, the first one with a base of the libraries that inherits from it."""

    def __init__(self, source: Source, names: Names, users: dict[ClassInfo, ClassInfo]) -> None:
        self.source, self.names, self.users = source, names, users
        self.found: list[Use] = []
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
            self._check_override(node, self._self.thing)
        for each in (*node.decorator_list, *_annotations(node.args), *filter(None, [node.returns])):
            self.visit(each)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._known = self._known.new_child(self._arguments(node))
        for statement in node.body:
            self.visit(statement)
        self._known = self._known.parents

    visit_AsyncFunctionDef = visit_FunctionDef

    def _arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Known]:
        """What is known of a function's arguments."""
        found: dict[str, Known] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for each in arguments:
            if each.annotation is not None and (known := self._of_annotation(each.annotation)) is not None:
                found[each.arg] = known
            elif self._self is not None and each.arg in PASSED:
                found[each.arg] = Known(things()[PASSED[each.arg]])
        method = self._class is not None and self._class.methods.get(node.name) is node
        is_callback = self._class is not None and kind_of(self._class) == "callback"
        if method and is_callback and member(things()["callback"].plain, node.name):
            hook = [each.arg for each in node.args.args[1:3]]
            roles = ("trainer of a callback", "module")
            found.update({name: Known(things()[role]) for name, role in zip(hook, roles, strict=False)})
        if method and self._class is not None and (first := first_argument(node)) is not None:
            found[first] = self._self or Known(PLAIN, self._class)
        return found

    def _of_annotation(self, annotation: ast.expr) -> Known | None:
        for each in _alternatives(annotation):
            meaning = self.names.meaning(each, self.source)
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
            known = self._gives(value)
            if known is not None:
                self._known[target.id] = known
            else:
                self._known.maps[0].pop(target.id, None)

    def _gives(self, node: ast.expr) -> Known | None:
        """What is known of the value of an expression."""
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Call):
            made = self.names.meaning(node.func, self.source)
            if isinstance(made, Api) and made.name in MADE:
                return Known(things()[MADE[made.name]])
            if isinstance(made, ClassInfo) and (thing := thing_of(made)) is not None:
                return Known(thing, made)
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
        """What is known of an attribute of a thing."""
        label = owner.thing.label
        if owner.cls is not None and name in owner.cls.own:
            return self._kept(owner.cls, name)
        if name == "trainer" and label in ("LightningModule", "LightningDataModule"):
            return Known(things()["trainer of a module"])
        if name in ("lightning_module", "model") and label.lower() == "trainer":
            return Known(things()["module"])
        if name == "strategy" and label.lower() == "trainer":
            return Known(Thing("trainer.strategy", None, None, OF_STRATEGIES, closed=False))
        plain, translated = owner.thing.has(name)
        plain_type, translated_type = (None if each is None else each.type for each in (plain, translated))
        if plain_type is None and translated_type is None:
            return None
        return Known(Thing(f"{label}.{name}", plain_type, translated_type))

    def _kept(self, cls: ClassInfo, name: str) -> Known | None:
        """What an attribute is that a class of the sources sets itself: ``self.accelerator = Accelerator()``."""
        for each in cls.family:
            value = each.set_on_self.get(name)
            if isinstance(value, ast.Call):
                made = self.names.meaning(value.func, each.source)
                if isinstance(made, Api) and made.name in MADE:
                    return Known(things()[MADE[made.name]])
        return None

    # -- uses -------------------------------------------------------------------------------------------------------------------

    def _add(self, node: ast.AST, library: str, name: str, verdict: str, what: str = "") -> None:
        self.found.append(Use(self.source, node, self._class, library, name, verdict, what))

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

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and (owner := self._gives(node.func.value)) is not None:
            self._member(node.func, owner, node)
            self.visit(node.func.value)
        else:
            meaning = self.names.meaning(node.func, self.source)
            if isinstance(meaning, Api):
                self._name(node.func, node)
            else:
                self.visit(node.func)
        for each in (*node.args, *node.keywords):
            self.visit(each)

    def _name(self, node: ast.expr, call: ast.Call | None = None) -> bool:
        """A use of a class or a function of the libraries, and of what it is called with."""
        api = self.names.meaning(node, self.source)
        if not isinstance(api, Api) or is_package(api) or api.path in _OF_TESTS:
            return isinstance(api, Api)
        head, _, name = api.path.rpartition(".")
        owner = counterpart(Api(api.library, head)) if head else None
        if owner is not None and (isinstance(owner.plain, type) or isinstance(owner.translated, type)):
            plain, translated = (each if isinstance(each, type) else None for each in (owner.plain, owner.translated))
            self._member_of(node, Thing(head.rpartition(".")[2], plain, translated), name, call, api.library)
            return True
        found = counterpart(api)
        if found.refused and (call is not None or id(node) in self._bases):
            self._add(node, api.library, api.name, CHANGE, found.refused)
            return True
        if call is None or found.verdict == CHANGE:
            self._add(node, api.library, api.name, found.verdict, found.where)
            return True
        sides = [_side_of(each) for each in (found.plain, found.translated)]
        said = ""
        if api.name == "Trainer" and sides[1].call is not None:
            said = trainer_arguments(call, sides[1].call)
        elif api.path.startswith("callbacks."):
            said = constructor(call, [each for each in (found.translated, found.plain) if each])
        if said:
            self._add(node, api.library, f"{api.name}()", CHANGE, said)
        else:
            self._called(node, api.library, api.name, call, sides, found.where)
        return True

    def _member(self, node: ast.Attribute, owner: Known, call: ast.Call | None) -> None:
        """A use of an attribute of a thing."""
        name, thing = node.attr, owner.thing
        is_super = isinstance(node.value, ast.Call)
        if owner.cls is not None:
            defined = owner.cls.family[1:] if is_super else owner.cls.family
            if any(name in (*each.methods, *each.class_attributes) for each in defined):
                return
            if any(name in each.set_on_self for each in defined) and not isinstance(node.ctx, ast.Store):
                return
        if name == "__init__" and is_super and owner.cls is not None:
            self._check_init(node, owner.cls, call)
            return
        library = "accelerate" if thing.label.startswith("Accelerator") else "lightning"
        self._member_of(node, thing, name, call, library)

    def _member_of(self, node: ast.expr, thing: Thing, name: str, call: ast.Call | None, library: str) -> None:
        if (of_nn_module(name) and thing.label == "LightningModule") or hasattr(object, name):
            return
        members = thing.has(name)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            if any(members) or (thing.closed and name in thing.answers):
                verdict = _first(bool(each and each.settable) for each in members)
                what = "" if verdict != CHANGE else f"it cannot be set: {thing.instead(name)}"
                self._add(node, library, f"{thing.label}.{name} =", verdict, what)
            return
        if not any(members):
            if thing.label.lower() == "trainer" and name in self.names.own_of_trainers:
                return
            if thing.closed or name in thing.answers:
                self._add(node, library, f"{thing.label}.{name}", CHANGE, thing.instead(name))
            return
        if call is None:
            self._add(node, library, f"{thing.label}.{name}", AS_IS if members[0] else INTEROP)
            return
        ours = "" if thing.plain is None else f"{thing.plain.__name__}.{name}"
        sides = [Side(each is not None, None if each is None else each.call, ours) for each in members]
        logs = (
            name in ("log", "log_dict") and thing.label in ("LightningModule", "Callback") and sides[0].call is not None
        )
        if logs and (said := log_options(call, sides[0].call)):  # type: ignore[arg-type]
            self._add(node, library, f"{thing.label}.{name}()", CHANGE, said)
        else:
            self._called(node, library, f"{thing.label}.{name}", call, sides)

    def _called(
        self, node: ast.expr, library: str, name: str, call: ast.Call, sides: Sequence[Side], where: str = ""
    ) -> None:
        """A call: as is where our function takes its arguments, through interop where that one does."""
        verdict, refused = decided(call, sides)
        for argument, what in refused:
            self._add(node, library, f"{name}({argument}=)" if argument else f"{name}()", verdict, what)
        if not refused:
            self._add(node, library, name, verdict, where)

    def _check_init(self, node: ast.Attribute, cls: ClassInfo, call: ast.Call | None) -> None:
        """``super().__init__(...)`` of a class of the libraries."""
        thing = thing_of(cls)
        if call is None or thing is None or any("__init__" in each.methods for each in cls.family[1:]):
            return
        if any(base is None for each in cls.family for base in each.bases):
            return  # some other base may take the arguments
        sides = [_side_of(each) for each in (thing.plain, thing.translated)]
        if any(each.there for each in sides):
            self._called(node, "lightning", f"{thing.label}.__init__", call, sides)

    # -- methods that a class defines -------------------------------------------------------------------------------------------

    def _check_override(self, node: ast.FunctionDef | ast.AsyncFunctionDef, thing: Thing) -> None:
        name = node.name
        if name.startswith("__") or (thing.label == "LightningModule" and of_nn_module(name)):
            return
        if thing.label in ("LightningModule", "Callback") and name in REPLACED:
            if instead := refused_hook(name, stand_in(node, bound=False)):
                self._add(node, "lightning", f"def {name}", CHANGE, f"it is never called: define {instead}")
            return
        if thing.label == "ModelCheckpoint" and name in OF_CHECKPOINTS:
            self._add(node, "lightning", f"def {name}", CHANGE, f"it is never called: {OF_CHECKPOINTS[name]}")
            return
        members = thing.has(name)
        if not any(members):
            return
        sides = zip((thing.plain, thing.translated), members, strict=True)
        cls, found = next((cls, each) for cls, each in sides if cls is not None and each is not None)
        is_function = found.call is not None and not any(_decorator(each) == "property" for each in node.decorator_list)
        what = misfit(node, self._class.name.rpartition(".")[2], cls, found.call) if is_function and self._class else ""  # type: ignore[arg-type]
        verdict = CHANGE if what else _first([each is not None for each in members])
        if verdict == AS_IS and name == "on_train_batch_end" and _reads_keys(node, "outputs"):
            verdict, what = INTEROP, "with engine alone, outputs is what training_step returned"
        self._add(node, "lightning", f"def {name}", verdict, what)


_OF_TESTS = ("test_utils.training.mocked_dataloaders",)
"""Names that Accelerate's own examples import where they test themselves."""


def _reads_keys(method: ast.FunctionDef | ast.AsyncFunctionDef, argument: str) -> bool:
    """Whether a method takes entries of an argument by name: ``outputs["loss"]``, ``outputs.get("loss")``."""
    return any(
        isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.value, ast.Name)
        and node.value.id == argument
        and (isinstance(node, ast.Subscript) or node.attr in ("get", "items", "keys", "values"))
        for node in ast.walk(method)
    )


def _decorator(node: ast.expr) -> str:
    """The name of a decorator."""
    return node.id if isinstance(node, ast.Name) else ""


def _first(sides: Iterator[bool] | Sequence[bool]) -> str:
    plain, translated = sides
    return AS_IS if plain else INTEROP if translated else CHANGE


def _side_of(found: Any) -> Side:
    """A class or a function as what may take a call."""
    name = getattr(found, "__name__", "")
    return Side(found is not None, signature(found), f"{name}.__init__" if isinstance(found, type) else name)


def _annotations(arguments: ast.arguments) -> Iterator[ast.expr]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (each.annotation for each in every if each is not None and each.annotation is not None)


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
