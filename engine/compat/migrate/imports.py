"""Resolves the names in a source, through aliases and re-exports, to the sources' own classes or to names of Lightning and Accelerate."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from engine.compat.migrate import peers
from engine.compat.migrate.sources import Source
from engine.compat.transformers.names import HEIRS, SUFFIXES, sentence_for

ROOTS = {
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
"""Packages whose use is reported -> their library. Longer names come first, because the first match counts."""
TRANSFORMERS = "transformers"
"""The package, and the library, of ``transformers.Trainer``; only what belongs to the ``Trainer`` is reported."""
_REEXPORT_LIMIT = 20
"""The maximum number of re-exports to follow from one name: more than any package has, so that circular imports end."""
_FAMILY_LIMIT = 50
"""The maximum number of classes in a family: more than anybody writes, so that a long chain of classes does not take quadratic time."""


@dataclass(frozen=True)
class Api:
    """A name that a library defines: ``Api("lightning", "callbacks.ModelCheckpoint")``; an empty path is the package itself."""

    library: str
    path: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(eq=False)
class ClassInfo:
    """A class that a source defines; ``name`` is its qualified name within the module."""

    name: str
    source: Source
    node: ast.ClassDef
    bases: list[Api | ClassInfo | None] = field(default_factory=list)
    """One entry per base class; ``None`` for a base that is neither in the sources nor in one of the libraries."""
    distant_library_bases: list[Api] = field(default_factory=list)
    """The library bases of the nearest ancestor that has any, at any distance (``family`` is limited to the nearest classes)."""

    @cached_property
    def family(self) -> list[ClassInfo]:
        """This class and its direct and indirect bases in the sources, nearest first, at most :data:`_FAMILY_LIMIT`."""
        classes, visited = [self], {self}
        for cls in classes:  # grows while it is walked
            bases = [base for base in cls.bases if isinstance(base, ClassInfo) and base not in visited]
            classes += dict.fromkeys(bases)
            visited.update(bases)
            if len(classes) >= _FAMILY_LIMIT:
                break
        return classes[:_FAMILY_LIMIT]

    @cached_property
    def library_bases(self) -> list[Api]:
        """The library classes that this class inherits from, directly or indirectly."""
        library_bases = dict.fromkeys(base for cls in self.family for base in cls.bases if isinstance(base, Api))
        return list(library_bases) or self.distant_library_bases

    @cached_property
    def methods(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        """The methods in the class's own body, by name."""
        return {
            statement.name: statement for statement in statements(self.node.body) if isinstance(statement, _FUNCTIONS)
        }

    @cached_property
    def class_attributes(self) -> set[str]:
        """The names that the class's own body assigns."""
        return {name for statement in statements(self.node.body) for name in _targets(statement)}

    @cached_property
    def set_on_self(self) -> dict[str, ast.expr | None]:
        """Attributes that the class's methods set on ``self`` -> the assigned expression; ``None`` if there is no single one."""
        values: dict[str, ast.expr | None] = {}
        for method in self.methods.values():
            first = first_argument(method)
            declared = {
                id(annotation.target)
                for annotation in ast.walk(method)
                if isinstance(annotation, ast.AnnAssign) and not annotation.value
            }
            for node in ast.walk(method):
                if id(node) in declared:
                    continue
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_named(node.value, first):
                    values.setdefault(node.attr, None)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and is_named(target.value, first):
                            values[target.attr] = node.value
        return values

    @cached_property
    def assigned_once(self) -> dict[str, tuple[ast.FunctionDef | ast.AsyncFunctionDef | None, ast.expr]]:
        """Attributes that the class sets once, in its body or in a method -> the method (``None``: the body), and the value."""
        values: dict[str, list[tuple[ast.FunctionDef | ast.AsyncFunctionDef | None, ast.expr]]] = {}
        for statement in statements(self.node.body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                for name in _targets(statement):
                    values.setdefault(name, []).append((None, statement.value))
        for method in self.methods.values():
            first = first_argument(method)
            for node in ast.walk(method):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                value = getattr(node, "value", None)
                for target in targets:
                    if (
                        isinstance(target, ast.Attribute)
                        and is_named(target.value, first)
                        and isinstance(value, ast.expr)
                    ):
                        values.setdefault(target.attr, []).append((method, value))
        return {name: assigned[0] for name, assigned in values.items() if len(assigned) == 1}

    @cached_property
    def own_names(self) -> set[str]:
        """All names that this class or one of its bases in the sources defines."""
        return {name for cls in self.family for name in (*cls.methods, *cls.class_attributes, *cls.set_on_self)}


Meaning: TypeAlias = "Api | ClassInfo | str | None"
"""The object that a name refers to; a ``str`` is the dotted name of a module of the sources, or one that belongs to no source and no library."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Names:
    """Resolves names across all sources."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.modules = {source.module: source for source in sources}
        self._namespaced = {
            ".".join([*source.above[start:], source.module]): source.module
            for source in sources
            for start in range(len(source.above))
        }
        self._tables: dict[str, dict[str, ast.expr | str | ClassInfo]] = {}
        self._stars: dict[str, list[str]] = {}
        self.classes: list[ClassInfo] = []
        self.uses_lightning = False
        """Whether a source imports Lightning."""
        self.writes_pickles = False
        """Whether a source sets ``ModelCheckpoint.pickles``, so that checkpoints are files for ``torch.load``, too."""
        self.saved_paths: set[str] = set()
        """The literal paths that the sources give to ``save_checkpoint``."""
        self._nested: dict[tuple[str, str], list[ClassInfo]] = {}
        self._looked_up: dict[tuple[str, str], Meaning] = {}
        for source in sources:
            self._tables[source.module], self._stars[source.module] = self._table(source)
        for cls in self.classes:
            cls.bases = [base for expression in cls.node.bases for base in self._bases(expression, cls.source)]
        self._find_distant()

    @cached_property
    def of_node(self) -> dict[int, ClassInfo]:
        """The ``id`` of a class's node -> the class."""
        return {id(cls.node): cls for cls in self.classes}

    @cached_property
    def names_of_trainer_subclasses(self) -> set[str]:
        """The names that user-defined subclasses of ``Trainer`` define."""
        trainers = (
            cls
            for cls in self.classes
            if any(base == Api("lightning", base.path) and base.name == "Trainer" for base in cls.library_bases)
        )
        return {name for cls in trainers for name in cls.own_names}

    def _find_distant(self) -> None:
        """Fill ``distant_library_bases`` of all classes, breadth first from the classes with library bases."""
        derived: dict[ClassInfo, list[ClassInfo]] = {}
        for cls in self.classes:
            cls.distant_library_bases = [base for base in cls.bases if isinstance(base, Api)]
            for base in cls.bases:
                if isinstance(base, ClassInfo):
                    derived.setdefault(base, []).append(cls)
        reached = [cls for cls in self.classes if cls.distant_library_bases]
        for cls in reached:  # grows while it is walked
            for inner in derived.get(cls, ()):
                if not inner.distant_library_bases:
                    inner.distant_library_bases = cls.distant_library_bases
                    reached.append(inner)

    def meaning(self, expression: ast.expr, source: Source, depth: int = 0) -> Meaning:
        """Find what a (dotted) name, a subscript or a quoted annotation in ``source`` refers to; ``depth``: the re-exports followed so far."""
        if depth > _REEXPORT_LIMIT:
            return None
        if isinstance(expression, ast.Name):
            return self._resolve(expression.id, source.module, depth + 1)
        if isinstance(expression, ast.Attribute):
            owner = self.meaning(expression.value, source, depth + 1)
            if isinstance(owner, Api):
                return _api(owner, expression.attr)
            if isinstance(owner, ClassInfo):
                inner = self._nested.get((owner.source.module, expression.attr), ())
                return next((cls for cls in inner if cls.name == f"{owner.name}.{expression.attr}"), None)
            return None if owner is None else self._dotted(f"{owner}.{expression.attr}", depth + 1)
        if isinstance(expression, ast.Subscript):  # Base[T]
            return self.meaning(expression.value, source, depth + 1)
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):  # an annotation in quotes
            try:
                return self.meaning(ast.parse(expression.value, mode="eval").body, source, depth + 1)
            except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last: nested too deeply for the parser
                return None
        if isinstance(expression, ast.Call):
            return self._imported_by_call(expression, source, depth)
        return None

    def _imported_by_call(self, call: ast.Call, source: Source, depth: int) -> Meaning:
        """The object that ``import_module("name")``, ``__import__("name")`` or ``getattr(module, "name")`` returns, if the name is a literal."""
        texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if not texts or not isinstance(text := texts[0], str):
            return None
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if function in ("import_module", "__import__") and call.args[0] is not None and len(texts) == len(call.args):
            return self._dotted(text if function == "import_module" else text.split(".")[0], depth + 1)
        if function == "getattr" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            return self.meaning(ast.Attribute(call.args[0], text), source, depth + 1)
        return None

    def _bases(self, expression: ast.expr, source: Source) -> Iterator[Api | ClassInfo | None]:
        """Yield what a base expression refers to; each alternative of `Base if installed else object` and `(Base or object)`."""
        choices = [expression]
        if isinstance(expression, ast.IfExp):
            choices = [expression.body, expression.orelse]
        elif isinstance(expression, ast.BoolOp):
            choices = expression.values
        for choice in choices:
            base = self.meaning(choice, source)
            yield base if isinstance(base, (Api, ClassInfo)) else None

    def _table(self, source: Source) -> tuple[dict[str, ast.expr | str | ClassInfo], list[str]]:
        """The module-level names of ``source`` with their imports, aliases or classes, and the modules of its star imports."""
        table: dict[str, ast.expr | str | ClassInfo] = _imports_that_work(source)
        stars: list[str] = []
        for node in ast.walk(source.tree):  # imports in functions too: a name has one meaning in nearly every file
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.uses_lightning |= _is_lightning(alias.name)
                    name = alias.name if alias.asname else alias.name.split(".")[0]
                    table.setdefault(alias.asname or name, name)
            elif isinstance(node, ast.ImportFrom):
                origin = imported_from(node, source)
                self.uses_lightning |= _is_lightning(origin)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(origin)
                    else:
                        table.setdefault(alias.asname or alias.name, f"{origin}.{alias.name}")
            elif isinstance(node, ast.Attribute):
                self.writes_pickles |= node.attr == "pickles" and isinstance(node.ctx, ast.Store)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "save_checkpoint":
                self.saved_paths |= {str(path.value) for path in node.args[:1] if isinstance(path, ast.Constant)}
        for statement in statements(source.tree.body):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
                if isinstance(target, ast.Name) and isinstance(statement.value, (ast.Name, ast.Attribute, ast.Call)):
                    table.setdefault(target.id, statement.value)
        self._add_classes(source.tree.body, source, "", table)
        return table, stars

    def _add_classes(
        self, body: Iterable[ast.stmt], source: Source, prefix: str, table: dict[str, ast.expr | str | ClassInfo]
    ) -> None:
        """Record the classes in ``body``, nested ones too, in ``classes`` and ``table``; ``prefix``: the qualified name of the enclosing scope."""
        for statement in statements(body):
            if isinstance(statement, ast.ClassDef):
                cls = ClassInfo(prefix + statement.name, source, statement)
                self.classes.append(cls)
                self._nested.setdefault((source.module, statement.name), []).append(cls)
                # A fallback class, for when an import fails, does not hide the import.
                if not isinstance(table.get(statement.name), str) or prefix:
                    table[statement.name if not prefix else cls.name] = cls
                self._add_classes(statement.body, source, f"{cls.name}.", table)
            elif isinstance(statement, _FUNCTIONS):
                self._add_classes(statement.body, source, f"{prefix}{statement.name}.", table)

    def _resolve(self, name: str, module: str, depth: int) -> Meaning:
        key = module, name
        if key not in self._looked_up:
            self._looked_up[key] = self._look_up(name, module, depth)
        return self._looked_up[key]

    def _look_up(self, name: str, module: str, depth: int) -> Meaning:
        """Find what ``name`` refers to in ``module``: its own entry, a submodule, a star import, or a class nested in a function."""
        if depth > _REEXPORT_LIMIT or module not in self._tables:
            return None
        entry = self._tables[module].get(name)
        if isinstance(entry, ClassInfo):
            return entry
        if isinstance(entry, str):
            # A script's neighbours may be imported without their folder's name.
            folder = module if self.modules[module].is_package else module.rpartition(".")[0]
            neighbour = f"{folder}.{entry}"
            is_neighbour = neighbour in self.modules or ("." in entry and neighbour.rpartition(".")[0] in self.modules)
            if is_neighbour and entry.split(".")[0] not in self.packages and library_name(entry) is None:
                return self._dotted(neighbour, depth + 1)
            return self._dotted(entry, depth + 1)
        if entry is not None:
            return self.meaning(entry, self.modules[module], depth + 1)
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}"
        for star in self._stars[module]:
            if star in self.modules:
                if meaning := self._resolve(name, star, depth + 1):
                    return meaning
            elif (api := library_name(f"{star}.{name}")) is not None and name[0].isupper():
                return api
        nested = self._nested.get((module, name), ())
        return nested[0] if len(nested) == 1 else None  # defined in a function, and used there

    @cached_property
    def packages(self) -> set[str]:
        """The top-level names of the sources' modules."""
        return {name.split(".")[0] for name in self.modules}

    def _dotted(self, dotted: str, depth: int) -> Meaning:
        """Find what an absolute dotted name refers to: a name in the longest module of the sources that it starts with, else a library's name."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            module = self._namespaced.get(module, module)
            if module in self.modules:
                if length == len(parts):
                    return module
                meaning = self._resolve(parts[length], module, depth + 1)
                for name in parts[length + 1 :]:
                    meaning = _api(meaning, name) if isinstance(meaning, Api) else None
                return meaning
        return library_name(dotted) or dotted


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, including those in its ``if``, ``try``, ``with`` and loop blocks."""
    pending = [*body][::-1]
    while pending:  # not by recursion: each `elif` is one level deeper
        statement = pending.pop()
        yield statement
        if not isinstance(statement, (ast.ClassDef, *_FUNCTIONS)):
            parts = (getattr(statement, part, ()) for part in ("body", "orelse", "finalbody"))
            handlers = (handler.body for handler in getattr(statement, "handlers", ()))
            pending += [inner for part in (*parts, *handlers) for inner in part][::-1]


def is_named(node: ast.expr, name: str | None) -> bool:
    """Whether the expression is the bare name ``name``."""
    return isinstance(node, ast.Name) and node.id == name


def first_argument(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The name of a method's first argument, usually ``self``; ``None`` for a static method."""
    if any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in function.decorator_list):
        return None
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else None


def _targets(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id


def imported_from(node: ast.ImportFrom, source: Source) -> str:
    """The absolute name of the module that a ``from ... import`` reads, which may be relative."""
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*parts, *filter(None, [node.module])])


def _imports_that_work(source: Source) -> dict[str, ast.expr | str | ClassInfo]:
    """The names of ``from ... import`` in the handlers of a ``try`` whose own import of the name fails, as for a name of another release."""
    working: dict[str, ast.expr | str | ClassInfo] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Try):
            tried = _imported_names(node.body, source)
            for name, (module, last) in _imported_names(
                (statement for handler in node.handlers for statement in handler.body), source
            ).items():
                if name in tried and _fails(*tried[name]) and not _fails(module, last):
                    working[name] = f"{module}.{last}"
    return working


def imports_alone_that_work(node: ast.Try, source: Source) -> bool:
    """Whether a ``try`` only imports names of the libraries, and all these imports work, so that its handlers do not run."""
    return all(isinstance(statement, ast.ImportFrom) for statement in node.body) and all(
        peers.door_of(module) and not _fails(module, name)
        for module, name in _imported_names(node.body, source).values()
    )


def _imported_names(body: Iterable[ast.stmt], source: Source) -> dict[str, tuple[str, str]]:
    """By local name: the module and the name that ``from ... import`` statements in ``body`` read."""
    return {
        alias.asname or alias.name: (imported_from(statement, source), alias.name)
        for statement in body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def _fails(module: str, name: str) -> bool:
    door = peers.door_of(module)
    return bool(door) and not peers.is_importable(door, name)


def _is_lightning(dotted: str) -> bool:
    api = library_name(dotted)
    return api is not None and api.library == "lightning"


def library_name(dotted: str) -> Api | None:
    """The name of a library that an absolute dotted name stands for; ``None`` if it belongs to none of them."""
    for root, library in ROOTS.items():
        if dotted == root or dotted.startswith(f"{root}."):
            return Api(library, dotted[len(root) + 1 :])
    root, _, path = dotted.partition(".")
    name = path.rpartition(".")[2]
    if (root == TRANSFORMERS and sentence_for(name)) or (root in HEIRS and name.endswith(tuple(SUFFIXES))):
        return Api(TRANSFORMERS, path)
    return None


def _api(owner: Api, name: str) -> Api:
    # `lightning.pytorch` is the library that `lightning` re-exports
    if owner == Api("lightning", "") and name in ("pytorch", "fabric"):
        return Api("fabric" if name == "fabric" else "lightning", "")
    return Api(owner.library, f"{owner.path}.{name}" if owner.path else name)
