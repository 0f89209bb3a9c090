"""The layer table of the package. Imports for type checking count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A folder, or a file at the top of the package, imports from lower layers and from itself, never sideways.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("utils",),
    ("config", "distributed"),
    ("checkpoint", "health"),
    ("metrics",),
    ("transforms",),
    ("step",),
    ("data", "strategies"),
    ("prepared", "launch", "module"),
    ("engine",),
    ("loop",),
    ("callback",),
    ("replay",),
    ("fit", "callbacks"),
    ("planning",),
    ("interop", "huggingface"),
    ("migrate",),
    ("cli",),
)
# What imports upward: the two methods of ``Fit`` that plan, when they are called, and the types in their signatures.
UPWARD = {
    ("engine.fit", "engine.planning.forecast"),
    *(("engine.fit", f"engine.planning.{name}") for name in ("device_table", "plan", "search")),
}
# A second name of the package `callbacks`, which nothing below `interop` imports: the one module there that imports it.
SECOND_NAME = "engine.callbacks"
# The only places that import own modules by name.
LAZY_TABLES = (
    *(
        "engine",
        "engine.callbacks",
        "engine.launch",
        "engine.strategies",
        "engine.cli.main",
        "engine.cli.checkpoint",
        "engine.cli.config",
    ),
    "callbacks",
    "callbacks.loggers",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path for package in ("engine", "callbacks") for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def place(name: str) -> str:
    """The folder of the package that a module is in, or its own name at the top."""
    return name.split(".")[1]


def layer(name: str) -> int:
    found = [number for number, places in enumerate(LAYERS) if place(name) in places]
    assert found, f"{name} has no layer: add it to the table"
    return found[0]


def imported_from(node: ast.ImportFrom, name: str) -> str:
    """The module that an import of the module ``name`` reads from."""
    if not node.level:
        return str(node.module)
    # The package `callbacks` also has the name `engine.callbacks`, where an absolute import would find a user's own callbacks.py.
    assert name.startswith("callbacks."), f"{name} has a relative import"
    parts = name.split(".") if FILES[name].name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])


def own_imports(name: str) -> set[str]:
    """The own modules that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = imported_from(node, name)
            names = [f"{source}.{alias.name}" if f"{source}.{alias.name}" in FILES else source for alias in node.names]
        else:
            continue
        found |= {each for each in names if each in FILES}
    return found


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph[node]):
            if found := visit(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((cycle for node in graph if (cycle := visit(node, []))), [])


ENGINE = [name for name in FILES if name.startswith("engine.")]


@pytest.mark.parametrize("name", ENGINE)
def test_imports_go_down(name: str) -> None:
    others = {target for target in own_imports(name) if target.startswith("engine.") and place(target) != place(name)}
    wrong = {target for target in others if layer(target) >= layer(name) and (name, target) not in UPWARD}
    assert not wrong, f"{name} (layer {layer(name)}) imports upward or sideways: {wrong}"
    assert "engine" not in own_imports(name) or name.startswith("engine.cli"), f"{name} imports the public face"
    outside = name == SECOND_NAME or place(name) == "interop"
    assert outside or not any(target.startswith("callbacks") for target in own_imports(name)), (
        f"{name} imports callbacks"
    )
    assert SECOND_NAME not in own_imports(name) or name == "engine" or place(name) == "interop", (
        f"{name} imports callbacks"
    )


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("callbacks")])
def test_callbacks_import_each_other_relatively(name: str) -> None:
    typing = [
        node for node in ast.walk(TREES[name]) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    hints = {id(node) for block in typing for node in ast.walk(block)}
    wrong = [
        node.lineno
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.ImportFrom) and not node.level and id(node) not in hints
        if str(node.module).partition(".")[0] == "callbacks"
    ]
    assert not wrong, f"{FILES[name]}: lines {wrong} import callbacks by a name that a user's own callbacks.py may have"


def test_no_import_cycle() -> None:
    graph = {
        name: {target for target in own_imports(name) - {"engine"} if (name, target) not in UPWARD}
        for name in FILES
        if name != "engine"
    }
    assert find_cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("callbacks")])
def test_callbacks_use_public_names_only(name: str) -> None:
    reached = {target for target in own_imports(name) if target.startswith("engine.")}
    assert not reached, f"{name} reaches into {reached}; import from engine"


@pytest.mark.parametrize("name", [name for name in FILES if name not in LAZY_TABLES])
def test_no_own_import_inside_a_function(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    upward = {(name, f"{inner.module}.{alias.name}") for alias in inner.names} <= UPWARD
                    own = str(inner.module).split(".")[0] in ("engine", "callbacks")
                    assert upward or not own, f"{name}:{inner.lineno}"
                elif isinstance(inner, ast.Import):
                    assert all(a.name.split(".")[0] not in ("engine", "callbacks") for a in inner.names), (
                        f"{name}:{inner.lineno}"
                    )


def test_the_table_has_what_is_there() -> None:
    named = [each for places in LAYERS for each in places]
    assert sorted(named) == sorted({place(name) for name in ENGINE})
