"""Figures of the architecture: what a reader, a reviewer and an editor may rely on, counted in the sources or in a run::

    python tests/house/figures.py                      # a line for each figure
    python tests/house/figures.py --list layers names  # these checks, with every place

``test_architecture.py`` says how large a figure may be. The exit status is 1 when a figure that has to be 0 is not.
It needs nothing but Python, except for ``walk`` and ``annexes``, which run the library.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "callbacks")
WALK = Path(__file__).with_name("walk.py")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANNEXES = ("compat/", "interop/", "huggingface/", "planning/", "strategies/deepspeed/", "cli/")
"""Beginnings of paths below ``engine/``. A module that is not below one of them belongs to the core."""

SCATTERED = (
    *("migrate/", "config/from_", "config/lightning_names", "config/other_trainers", "config/training_arguments_names"),
    *("checkpoint/convert", "checkpoint/foreign_files", "checkpoint/optimizer_names", "checkpoint/pickled"),
    *("checkpoint/user_entries", "data/padded_", "loop/trainer_view", "loop/trainer_parts", "loop/loop_view"),
    *("prepared/hooked_checkpoints", "strategies/saved_weights", "distributed/random_states", "utils/batch_sizes"),
)
"""Modules for other trainers that stand among the core's, as long as there is no ``engine/compat``."""

DOORS_TO_ANNEXES = {
    ("engine.fit", f"engine.planning.{module}") for module in ("device_table", "forecast", "plan", "search")
}
"""The imports by which ``Fit``'s two methods that plan reach an annex, when they are called."""

LAZY_NAMES = "engine.utils.lazy_names"
"""What the packages of callbacks import to make their names from their stubs."""

TYPES_FROM_ABOVE = {
    *((f"engine.{module}", "engine.loop.run") for module in ("module", "callback", "data.datamodule")),
    ("engine.callback", "engine.module"),
    ("engine.config.combinations", "engine.config.settings"),
}
"""Imports for types only, by which users' classes name the run that they are given, and rules the settings that call them."""

ROWS_OF_ANNEXES = (
    "config/kinds.py",
    "config/strategy_names.py",
    "distributed/environments/torchrun.py",
)
"""Tables with a row of DeepSpeed's: an example of a strategy with a setting, strategies, launchers."""

TORCH_FILES = ("utils/torch_private.py", "planning/torch_private.py")
"""The modules that resolve private names of torch, for every release that is supported."""

FOREIGN = re.compile(
    r"\b(lightning(?!_utilities)|fabric|pytorch_lightning|accelerate|transformers|hugging ?face|deepspeed)\b",
    re.IGNORECASE,
)
"""Names that the core does not know."""

WEAK_WORDS = _words("of those what which as whose these such them that likewise ditto also beside besides from so in")
"""A docstring that starts with one of these words needs the line before it."""

ELSEWHERE = re.compile(
    r"(the same|as (in|of|above|before|for|if|long)|like (it|that)|its|their|them|it|they|here|this is|whether (it|they|there)|"
    r"whether (this|that) (is|was|has|may|can|only|ends|saves|shows|sets))\b",
    re.IGNORECASE,
)
"""The start of a docstring whose subject stands elsewhere. "Whether this process is rank 0" has its noun, "Whether this is rank 0" has not."""

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?((?:engine|callbacks)\.[\w.]+)`")
FILE = re.compile(r"\b((?:engine|callbacks)(?:/\w+)+\.(?:py|md))\b")

PRONOUNS = _words(
    "found each own given told there kept made known said this these those theirs ours here shown taken held wanted asked meant rest few "
    "likewise others which whose whom such same it them they one ones least most"
)
"""Parameters and variables with these names do not say what they hold."""

VAGUE = PRONOUNS | _words(
    "settled whole whole_again housed on off at of joins takes gone done begun tell say take give make put keep unlike again now mine "
    "own_kind of_the_step of_the_epoch given_out call_first with_own the_others all_of some_of explained"
)
"""Functions and classes with these names do not say what they act on."""

OWN_PARAMETERS = _words(
    "run fit engine strategy group environment writer recorder window scaler stepper settings precision registry snapshot home"
)
"""Parameters with these names take an object of the library; ``Any`` hides its class."""

USERS_CALLABLES = _words(
    "transform collate_fn worker_init_fn apply_pruning policy schedule lr_lambda metric filter score function fn target hook key "
    "condition init make on_trace_ready batch_fn tokens_fn wrap auto_wrap_policy parser main command"
)
"""Fields that hold a function of the user's, or the one function that an object exists to call."""

DOORS = ("engine.interop", "engine.huggingface", "engine.launch", "engine.cli.main", "engine.compat", "engine.losses")
"""Modules with public names beside ``engine`` and ``callbacks``."""

ANNEXES_TESTS = ("compat/", "interop/", "huggingface/", "migrate/", "planning/", "cli/", "strategies/deepspeed_zero/")
"""Folders of tests of the annexes, which may use the annexes' internals."""


@dataclass(frozen=True)
class Figure:
    """A number that a check has counted, and the places that it counted."""

    name: str
    value: int
    unit: str
    places: tuple[str, ...] = ()
    """``file:line text`` of each, for a person."""


class Tree:
    """The sources of one checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def files(self) -> dict[str, Path]:
        """The modules of both packages by dotted name."""
        return {
            _module(path, self.root): path
            for package in PACKAGES
            for path in sorted((self.root / package).rglob("*.py"))
        }

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """All nodes of each module, outer nodes first."""
        with _no_collection():
            return {name: list(ast.walk(ast.parse(path.read_text()))) for name, path in self.files.items()}

    @cached_property
    def engine(self) -> list[str]:
        """The modules of the package ``engine``."""
        return [name for name in self.files if name.partition(".")[0] == "engine"]

    @cached_property
    def core(self) -> list[str]:
        """The modules of ``engine`` outside of the annexes."""
        return [name for name in self.engine if self.is_core(name)]

    def is_core(self, name: str) -> bool:
        return not self.path(name).startswith(self.annexes)

    @cached_property
    def annexes(self) -> tuple[str, ...]:
        """Beginnings of the paths of annexes."""
        return ANNEXES if (self.root / "engine" / "compat").is_dir() else ANNEXES + SCATTERED

    def part(self, name: str) -> str:
        """The core, or the annex that a module belongs to."""
        path = self.path(name)
        parts = {"planning/": "planning", "strategies/deepspeed/": "DeepSpeed", "cli/": "cli", "": "compat"}
        return "core" if self.is_core(name) else next(part for start, part in parts.items() if path.startswith(start))

    def path(self, name: str) -> str:
        """The path of a module below ``engine/``, or of one of ``callbacks`` below the checkout."""
        path = self.files[name].relative_to(self.root).as_posix()
        return path.removeprefix("engine/")

    @cached_property
    def imports(self) -> dict[str, dict[str, int]]:
        """For each module the library's modules that it imports, with the line. Imports for type checkers count."""
        graph: dict[str, dict[str, int]] = {}
        for name in self.files:
            targets: dict[str, int] = {}
            for node in self.nodes[name]:
                for target in self.imported(node, name):
                    targets.setdefault(target, node.lineno)  # type: ignore[attr-defined]
            targets.pop(name, None)
            graph[name] = targets
        return graph

    def imported(self, node: ast.AST, name: str) -> Iterator[str]:
        """The library's modules that one statement of the module ``name`` imports."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in self.files)
        elif isinstance(node, ast.ImportFrom):
            source = self._source(node, name)
            for alias in node.names:
                below = f"{source}.{alias.name}"
                if below in self.files:
                    yield below
                elif source in self.files:
                    yield source

    def _source(self, node: ast.ImportFrom, name: str) -> str:
        """The module that an import of the module ``name`` reads from."""
        if not node.level:
            return str(node.module)
        parts = name.split(".") if self.files[name].name == "__init__.py" else name.split(".")[:-1]
        return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])

    @cached_property
    def layers(self) -> dict[str, int]:
        """The layer of each folder of ``engine``, and of each file at its top, from the table in ``engine/README.md``."""
        text = (self.root / "engine" / "README.md").read_text()
        return {place: int(layer) for layer, place in re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)}

    @cached_property
    def public(self) -> dict[str, str]:
        """The public names of ``engine`` with the module that defines each."""
        stub = self.root / "engine" / "__init__.pyi"
        lines = re.findall(r"^from \.(\S+) import (\w+) as", stub.read_text(), re.MULTILINE) if stub.exists() else []
        return {name: f"engine.{module}" for module, name in lines}

    @cached_property
    def internals_in_tests(self) -> list[tuple[str, int, str, str]]:
        """The file, the line, the module and the name of each import of an internal name in a test or a helper of tests."""
        imports = []
        for path in sorted((self.root / "tests").rglob("*.py")):
            place = path.relative_to(self.root / "tests").as_posix()
            text = path.read_text()
            if place == "support/internals.py" or place.startswith("house/") or "from engine." not in text:
                continue
            with _no_collection():
                statements = list(_statements_of(ast.parse(text)))
            for node in statements:
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("engine."):
                    for alias in node.names:
                        public = self.public.get(alias.name) == node.module or str(node.module).startswith(DOORS)
                        if not public:
                            below = f"{node.module}.{alias.name}"
                            module = below if below in self.files else str(node.module)
                            imports.append((place, node.lineno, module, alias.name))
        return imports

    def functions(self, name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in self.nodes[name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    def classes(self, name: str) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes[name] if isinstance(node, ast.ClassDef))

    def parameters(self, name: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.arg]]:
        for function in self.functions(name):
            for parameter in _parameters(function):
                yield function, parameter


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# -- imports ------------------------------------------------------------------------------------------------------------


def layers(tree: Tree) -> Figure:
    """Imports go down the table of layers, never up or sideways. Only the top layer imports the public face, ``engine``."""

    def place(name: str) -> str:
        parts = name.split(".")
        return "callbacks" if parts[0] == "callbacks" else parts[1] if len(parts) > 1 else ""

    there = {place(name) for name in tree.engine} - {""}
    places = [f"{name}: no row in the table of layers" for name in sorted(there - set(tree.layers))]
    places += [f"{name}: a row in the table of layers, and no such file or folder" for name in set(tree.layers) - there]
    top = max(tree.layers.values(), default=0)
    for name in tree.engine:
        layer = tree.layers.get(place(name), top + 1)
        hints = _lines_for_type_checkers(tree.nodes[name])
        for target, line in tree.imports[name].items():
            if line in hints and (name, target) in TYPES_FROM_ABOVE:
                continue
            above = layer < top if target == "engine" else tree.layers.get(place(target), 0) >= layer
            if place(name) and above and place(name) != place(target) and (name, target) not in DOORS_TO_ANNEXES:
                places.append(f"{tree.path(name)}:{line} imports {target}")
    return Figure("layers", len(places), "imports up or sideways", tuple(places))


def callbacks(tree: Tree) -> Figure:
    """Callbacks import public names of ``engine`` only, and each other relatively: a user may have a file ``callbacks.py``."""
    places = []
    for name in (name for name in tree.files if name not in tree.engine):
        hints = _lines_for_type_checkers(tree.nodes[name])
        for node in tree.nodes[name]:
            if isinstance(node, ast.ImportFrom) and not node.level and node.lineno not in hints:
                package, _, inner = str(node.module).partition(".")
                if package == "callbacks" or (package == "engine" and inner and node.module != LAZY_NAMES):
                    places.append(f"{tree.path(name)}:{node.lineno} imports {node.module}")
    return Figure("callbacks", len(places), "imports of callbacks that reach inside", tuple(places))


def cycles(tree: Tree) -> Figure:
    """No import cycle, imports for type checkers included (but those that name the run): groups of modules that import each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[str] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in tree.imports[node]:
            if (node, target) in TYPES_FROM_ABOVE:
                continue
            if target not in PACKAGES and target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                groups.append(" ".join(sorted(group)))

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        for node in tree.imports:
            if node not in index and node not in PACKAGES:
                visit(node)
    finally:
        sys.setrecursionlimit(limit)
    return Figure("cycles", len(groups), "import cycles", tuple(groups))


def inner_imports(tree: Tree) -> Figure:
    """A function imports no module of the library; tables of lazy names load theirs by name."""
    places = []
    for name in tree.files:
        bodies = [range(function.lineno, (function.end_lineno or 0) + 1) for function in tree.functions(name)]
        for node in tree.nodes[name]:
            for target in tree.imported(node, name):
                if (name, target) in DOORS_TO_ANNEXES:
                    continue
                line = node.lineno  # type: ignore[attr-defined]
                places += [f"{tree.path(name)}:{line} imports {target}"] if any(line in body for body in bodies) else []
    return Figure("inner_imports", len(places), "imports of the library inside functions", tuple(places))


def core_imports(tree: Tree) -> Figure:
    """The core imports nothing that stands on it."""
    places = [
        f"{tree.path(name)}:{line} imports {target}"
        for name in tree.core
        for target, line in tree.imports[name].items()
        if target not in PACKAGES and not tree.is_core(target) and (name, target) not in DOORS_TO_ANNEXES
    ]
    return Figure("core_imports", len(places), "imports of an annex from the core", tuple(places))


def core_names(tree: Tree) -> Figure:
    """The core does not name other trainers or DeepSpeed in identifiers, attributes and strings. Comments, docstrings and the rows of tables may."""
    places = []
    for name in tree.core:
        documentation = {id(node.value) for node in tree.nodes[name] if _is_text(node)}  # type: ignore[attr-defined]
        for node in tree.nodes[name]:
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                text = node.value
            elif isinstance(node, ast.Name):
                text = node.id.replace("_", " ")
            elif isinstance(node, ast.Attribute):
                text = node.attr.replace("_", " ")
            match = FOREIGN.search(text)
            if match and (match[0].lower() != "deepspeed" or tree.path(name) not in ROWS_OF_ANNEXES):
                places.append(f"{tree.path(name)}:{node.lineno} {match[0]}")  # type: ignore[attr-defined]
    return Figure("core_names", len(places), "names of other trainers in the core's code", tuple(places))


def private_torch(tree: Tree) -> Figure:
    """Private names of torch are resolved in two files, which are tried with every release that is supported."""
    places = []
    for name in tree.engine:
        if tree.path(name) in TORCH_FILES:
            continue
        for node in tree.nodes[name]:
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
                private = "._" in str(node.module)
                names = [f"{node.module}.{alias.name}" for alias in node.names if private or alias.name[0] == "_"]
            elif isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[:2] != "__":
                names = [text for text in [ast.unparse(node)] if text.startswith(("torch.", "dist.", "nn."))]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("torch.") and "._" in alias.name]
            places += [f"{tree.path(name)}:{node.lineno} {text}" for text in names]  # type: ignore[attr-defined]
    return Figure(
        "private_torch", len(places), f"private names of torch outside {' and '.join(TORCH_FILES)}", tuple(places)
    )


# -- calls that can be followed -----------------------------------------------------------------------------------------


def any_parameters(tree: Tree) -> Figure:
    """No parameter that takes an object of the library is typed ``Any``: judged by its name (``walk`` judges by what arrives)."""
    places = [
        f"{tree.path(name)}:{parameter.lineno} {function.name}({parameter.arg}: Any)"
        for name in tree.core
        for function, parameter in tree.parameters(name)
        if parameter.arg in OWN_PARAMETERS
        if parameter.annotation is not None and ast.unparse(parameter.annotation) in ("Any", "object")
    ]
    return Figure("any", len(places), "parameters `run: Any` and the like", tuple(places))


def callables(tree: Tree) -> Figure:
    """Objects are passed, not functions: "go to definition" ends at a field that holds a function of another object.

    Counted are fields and constructor parameters typed ``Callable`` (but a user's: :data:`USERS_CALLABLES`), and assignments of a bound method
    or a local function to an attribute of another object (``window.agree = self.agree``).
    """
    places = set()
    for name in tree.core:
        for cls in tree.classes(name):
            for line, field in _callable_fields(cls):
                places.add(f"{tree.path(name)}:{line} {field}")
        methods = {node.name for cls in tree.classes(name) for node in cls.body if isinstance(node, ast.FunctionDef)}
        for function in tree.functions(name):
            for node in _injections(function, methods):
                places.add(
                    f"{tree.path(name)}:{node.lineno} {ast.unparse(node.targets[0])} = {ast.unparse(node.value)[:50]}"
                )
    return Figure("callables", len(places), "injected callables in the core", tuple(sorted(places)))


def _callable_fields(cls: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(node.annotation):
            field = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
            if field.strip("_") not in USERS_CALLABLES:
                yield node.lineno, f"{cls.name}.{field}: Callable"
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for parameter in _parameters(node):
                kind = ast.unparse(parameter.annotation) if parameter.annotation else ""
                if "Callable" in kind and parameter.arg.strip("_") not in USERS_CALLABLES:
                    yield parameter.lineno, f"{cls.name}(..., {parameter.arg}: Callable)"


def _injections(function: ast.FunctionDef | ast.AsyncFunctionDef, methods: set[str]) -> Iterator[ast.Assign]:
    """Assignments of functions to attributes of other objects. Objects of torch are another matter."""
    nodes = list(ast.walk(function))
    local = {node.name for node in nodes[1:] if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        owner, attribute, value = node.targets[0].value, node.targets[0].attr, node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls", "sys"):
            continue
        if attribute in ("forward", "update") or ast.unparse(owner).startswith(("nn.", "torch.")):
            continue
        bound = isinstance(value, ast.Attribute) and getattr(value.value, "id", "") == "self" and value.attr in methods
        if bound or isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in local):
            yield node


def protocols(tree: Tree) -> Figure:
    """A Protocol with at most one implementation names it in its docstring, so that a reader finds it."""
    members: dict[str, set[str]] = {}
    declared: list[tuple[str, ast.ClassDef]] = []
    for name in tree.files:
        for cls in tree.classes(name):
            if "Protocol" in {ast.unparse(base).split("[")[0].split(".")[-1] for base in cls.bases}:
                declared.append((name, cls))
            else:
                members[f"{name}.{cls.name}"] = _members(cls)
    places = []
    for name, cls in declared:
        asked_for = _members(cls)
        classes = [other for other, has in members.items() if asked_for and asked_for <= has]
        documentation = ast.get_docstring(cls) or ""
        if len(classes) <= 1 and not any(other.split(".")[-1] in documentation for other in classes):
            places.append(
                f"{tree.path(name)}:{cls.lineno} {cls.name}: {classes[0] if classes else 'implemented elsewhere'}"
            )
    return Figure(
        "protocols",
        len(places),
        f"protocols that do not name their one implementation (of {len(declared)})",
        tuple(places),
    )


def run_assignments(tree: Tree) -> Figure:
    """The owner of a value sets it: outside ``loop/run.py`` nothing assigns to an attribute of the run (``run.stop_reason = ...``)."""
    places = []
    for name in tree.core:
        for node in tree.nodes[name] if tree.path(name) != "loop/run.py" else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ():
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "run":
                        places.append(f"{tree.path(name)}:{part.lineno} run.{part.attr}")
    attributes, files = ({text.split(by)[at] for text in places} for by, at in (("run.", -1), (":", 0)))
    unit = f"assignments to the run from other files ({len(attributes)} attributes, {len(files)} files)"
    return Figure("run_assignments", len(places), unit, tuple(places))


# -- words --------------------------------------------------------------------------------------------------------------


def docstrings(tree: Tree) -> Figure:
    """A docstring is read alone, in an editor's box: its first sentence has a subject of its own, or is an imperative."""
    places = [
        f"{place} {text.splitlines()[0][:90]}"
        for name in tree.files
        for place, text in _documentation(tree, name)
        if ELSEWHERE.match(text) or re.sub(r"^\W+", "", text).split(maxsplit=1)[:1][0].lower() in WEAK_WORDS
    ]
    return Figure("docstrings", len(places), "docstrings that need the line before", tuple(places))


def stale(tree: Tree) -> Figure:
    """What a docstring refers to is there: the file, or the module, class or function of a role such as ``:class:``."""
    places = []
    for name in tree.files:
        for place, text in _documentation(tree, name):
            places += [f"{place} {target}" for target in ROLE.findall(text) if not _defined(tree.root, target)]
            places += [f"{place} {file}" for file in FILE.findall(text) if not (tree.root / file).exists()]
    return Figure("stale", len(places), "references to what does not exist", tuple(places))


def names(tree: Tree) -> Figure:
    """Parameters, variables and functions are nouns and verbs of the field."""
    places = []
    for name in tree.files:
        for node in tree.nodes[name]:
            if isinstance(node, ast.arg) and node.arg in PRONOUNS:
                places.append(f"{tree.path(name)}:{node.lineno} parameter {node.arg}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS:
                places.append(f"{tree.path(name)}:{node.lineno} variable {node.id}")
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.strip("_") in VAGUE:
                places.append(f"{tree.path(name)}:{node.lineno} def {node.name}")
    return Figure("names", len(places), "names that are pronouns or participles", tuple(places))


def bare_names(tree: Tree) -> Figure:
    """A function that other modules of the core import by its bare name has a name that no other such function has: one word, one thing."""
    sources: dict[str, set[str]] = defaultdict(set)
    for name in tree.core:
        for node in tree.nodes[name]:
            if isinstance(node, ast.ImportFrom):
                source = tree._source(node, name)
                functions = _functions_of_module(tree, source) if source in tree.core else frozenset()
                for alias in node.names:
                    if alias.name in functions:
                        sources[alias.name].add(source)
    places = [f"{word}: {', '.join(sorted(modules))}" for word, modules in sorted(sources.items()) if len(modules) > 1]
    return Figure("bare_names", len(places), "names that two modules give to different functions", tuple(places))


def _functions_of_module(tree: Tree, name: str) -> frozenset[str]:
    """The functions that a module defines at its top level."""
    module = tree.nodes[name][0]
    assert isinstance(module, ast.Module)
    return frozenset(node.name for node in module.body if isinstance(node, ast.FunctionDef))


def _documentation(tree: Tree, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a module, of its classes and functions, and the texts under its attributes, each with its place."""
    for node in tree.nodes[name]:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield f"{tree.path(name)}:{getattr(node, 'lineno', 1)}", text
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, (ast.Assign, ast.AnnAssign)) and _is_text(after) and after.value.value.strip():  # type: ignore[attr-defined]
                    yield f"{tree.path(name)}:{after.lineno}", after.value.value.strip()  # type: ignore[attr-defined]


def _defined(root: Path, dotted: str) -> bool:
    """Whether a dotted name is a module, or stands in the module or the stub that its first parts name."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        base, rest = root.joinpath(*parts[:count]), parts[count:]
        sources = [
            path for path in (base.with_suffix(".py"), base / "__init__.py", base / "__init__.pyi") if path.exists()
        ]
        if sources:
            return not rest or any(re.search(rf"\b{re.escape(rest[0])}\b", path.read_text()) for path in sources)
    return False


# -- for information ----------------------------------------------------------------------------------------------------


def sizes(tree: Tree) -> Figure:
    """Statements of the core without docstrings. There is no limit: a file is as long as one idea needs."""
    statements: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in tree.engine:
        part = tree.part(name)
        statements[part] += _statements(tree.nodes[name])
        files[part] += 1
    unit = f"statements of the core ({files['core']} files; all: {statements.total()} in {files.total()} files)"
    lines = tuple(f"{part}: {number} in {files[part]} files" for part, number in statements.most_common())
    return Figure("sizes", statements["core"], unit, lines)


def thin_files(tree: Tree) -> Figure:
    """Files of fewer than 40 statements that one other module imports. There is no limit: a small file may hold one idea."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name in tree.engine:
        for target in tree.imports[name]:
            importers[target].add(name)
    places = [
        f"{tree.path(name)} <- {next(iter(importers[name]))}"
        for name in tree.engine
        if tree.files[name].name != "__init__.py" and len(importers[name]) == 1 and _statements(tree.nodes[name]) < 40
    ]
    return Figure("thin_files", len(places), "files below 40 statements with one importer", tuple(places))


# -- tests --------------------------------------------------------------------------------------------------------------


def planted_faults(tree: Tree) -> Figure:
    """Lines that a ``faults.py`` of the tests replaces are there, once: a commit that moves such a line moves the fault too."""
    places = []
    for path in sorted((tree.root / "tests").rglob("faults.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault":
                _, file, right = (ast.literal_eval(argument) for argument in node.args[:3])
                source = tree.root / file
                count = source.read_text().count(right) if source.exists() else 0
                if count != 1:
                    places.append(f"{path.relative_to(tree.root)}:{node.lineno} {file}: {count} times: {right.strip()}")
    return Figure("planted_faults", len(places), "planted faults whose line is gone", tuple(places))


def tests_reach(tree: Tree) -> Figure:
    """Tests of a behaviour use the public doors; tests of a unit, of an annex and of this house may use internals."""
    places = [
        f"tests/{place}:{line} {module}.{name}"
        for place, line, module, name in tree.internals_in_tests
        if not place.startswith(ANNEXES_TESTS) and not _is_named_after(place, module)
    ]
    folders = Counter(place.split("/")[1] for place in places)
    return Figure(
        "tests_reach",
        len(places),
        f"internal names in tests of other units {dict(folders.most_common(6))}",
        tuple(places),
    )


def units_by_name(tree: Tree) -> Figure:
    """A test file imports internals only of the module that it is named after: ``test_order.py`` those of ``engine/data/order.py``."""
    modules: dict[str, set[str]] = defaultdict(set)
    for place, _, module, _ in tree.internals_in_tests:
        if not _is_named_after(place, module):
            modules[place].add(module.removeprefix("engine."))
    places = tuple(f"tests/{place}: {', '.join(sorted(others))}" for place, others in modules.items())
    return Figure(
        "units_by_name", len(places), "files of tests that import internals of another module than their own", places
    )


def _is_named_after(place: str, module: str) -> bool:
    return Path(place).stem.removeprefix("test_") == module.split(".")[-1]


# -- the library, run ---------------------------------------------------------------------------------------------------


def walk(tree: Tree) -> Iterator[Figure]:
    """The way from ``Fit.run`` to the first ``training_step``, a window of four micro-batches, and the classes that arrive at ``Any``."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "walk.json"
        ran = _python(WALK, "walk", tree.root, out, path=str(tree.root))
        if not out.exists():
            raise RuntimeError(f"{WALK} walk did not end:\n{ran.stderr[-3000:]}")
        counted = json.loads(out.read_text())
    yield Figure(
        "closure", len(counted["closure"]), "own modules loaded by import engine.fit", tuple(counted["closure"])
    )
    units = {
        "files": "files to the first training_step",
        "switches": "switches between files to the first training_step",
        "calls": "calls to the first training_step",
        "frames": "own frames at training_step",
        "window": "calls of a window of four",
    }
    for name, unit in units.items():
        yield Figure(f"walk {name}", counted[name], unit)
    annotations = {
        (tree.path(name), place, parameter.arg): ast.unparse(parameter.annotation)
        for name in tree.engine
        for function, parameter in tree.parameters(name)
        for place in (function.name, function.lineno)  # methods of several classes in a file have one name
        if parameter.annotation is not None
    }
    places = set()
    for file, line, function, name, classes in counted["passed"]:
        by_name = annotations.get((file, function.split(".")[-1], name))
        kind = annotations.get((file, line, name), by_name)  # a decorated function begins above its line
        if kind in ("Any", "object") and len(classes) == 1 and classes[0].startswith("engine."):
            places.add(f"{file}:{line} {function}({name}: {kind}) takes {classes[0]}")
    unit = "parameters typed Any that took one class of the library in the walk"
    yield Figure("any by type", len(places), unit, tuple(sorted(places)))


def annexes(tree: Tree) -> Figure:
    """A copy without the annexes trains, saves and resumes."""
    with tempfile.TemporaryDirectory() as place:
        for package in PACKAGES:
            shutil.copytree(tree.root / package, Path(place) / package, ignore=shutil.ignore_patterns("__pycache__"))
        removed = [name for name in tree.engine if not tree.is_core(name)]
        for name in removed:
            (Path(place) / "engine" / tree.path(name)).unlink()
        ran = _python(WALK, "train", path=f"{place}{os.pathsep}{tree.root}")
    repairs = core_imports(tree).places
    trained = "trained" in ran.stdout
    unit = f"imports to repair until a copy without {len(removed)} files of annexes trains"
    last = tuple(ran.stderr.strip().splitlines()[-1:])
    return Figure("annexes", 0 if trained else max(1, len(repairs)), unit, () if trained else (*repairs, *last))


def _python(script: Path, *arguments: object, path: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as place:
        return subprocess.run(
            command, env=variables, cwd=place, capture_output=True, text=True, timeout=180, check=False
        )


# -- helpers ------------------------------------------------------------------------------------------------------------


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _lines_for_type_checkers(nodes: Iterable[ast.AST]) -> set[int]:
    """The lines below ``if TYPE_CHECKING``."""
    blocks = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: that would walk the nodes of all files again and again, for half of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node, at any depth, without their expressions: a third of the time of ``ast.walk``."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, part, [])
        for statement in below if isinstance(below, list) else ():
            yield statement
            yield from _statements_of(statement)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _statements(nodes: Iterable[ast.AST]) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def _members(cls: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes that a class sets on itself."""
    names = {
        node.name
        for node in cls.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "__init__"
    }
    for node in ast.walk(cls):
        if isinstance(node, (ast.AnnAssign, ast.Assign)) and node in cls.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return names


CHECKS: dict[str, Callable[[Tree], Figure | Iterator[Figure]]] = {
    "planted_faults": planted_faults,
    "layers": layers,
    "callbacks": callbacks,
    "cycles": cycles,
    "inner_imports": inner_imports,
    "core_imports": core_imports,
    "core_names": core_names,
    "private_torch": private_torch,
    "any": any_parameters,
    "callables": callables,
    "protocols": protocols,
    "run_assignments": run_assignments,
    "docstrings": docstrings,
    "stale": stale,
    "names": names,
    "bare_names": bare_names,
    "tests_reach": tests_reach,
    "units_by_name": units_by_name,
    "sizes": sizes,
    "thin_files": thin_files,
    "walk": walk,
    "annexes": annexes,
}
HAVE_TO_BE_0 = ("planted_faults", "layers", "callbacks", "cycles", "inner_imports")


def measured(tree: Tree, check: str) -> list[Figure]:
    """The figures of one check."""
    result = CHECKS[check](tree)
    return [result] if isinstance(result, Figure) else list(result)


def main() -> int:
    """Print the figures.

    Returns:
        1 when a figure that has to be 0 is not.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="of " + ", ".join(CHECKS))
    parser.add_argument("--list", action="store_true", help="print every place")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout (this one)")
    options = parser.parse_args()
    if unknown := sorted(set(options.checks) - set(CHECKS)):
        parser.error(f"unknown checks: {', '.join(unknown)}; possible: {', '.join(CHECKS)}")
    tree, failed = Tree(options.tree.resolve()), False
    for check in options.checks or CHECKS:
        begun = time.perf_counter()
        for figure in measured(tree, check):
            wrong = bool(figure.value) and figure.name in HAVE_TO_BE_0
            failed |= wrong
            seconds = time.perf_counter() - begun
            print(f"{figure.name:15} {figure.value:6}  {figure.unit}  [{seconds:.1f} s]", flush=True)
            if options.list or wrong:
                print("".join(f"      {line}\n" for line in figure.places), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
