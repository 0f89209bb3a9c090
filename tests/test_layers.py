"""The layer table of the package, and the limits that keep it readable. Imports for type checking count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each place is a module or a package (a package's modules share its layer unless they have a line of their own).
LAYERS: dict[str, int] = {
    "engine.errors": 0,
    "engine.log": 0,
    "engine.tree": 0,
    "engine.seed": 0,
    "engine.garbage": 0,
    "engine.config": 0,
    "engine.accelerator": 1,
    "engine.switches": 1,
    "engine.distributed": 1,
    "engine.hparams": 2,
    "engine.precision": 2,
    "engine.gradients": 2,
    "engine.gathered": 2,
    "engine.window": 2,
    "engine.metrics": 2,
    "engine.metric_states": 2,
    "engine.logged_metrics": 2,
    "engine.reductions": 2,
    "engine.transforms": 2,
    "engine.data": 2,
    "engine.checkpoint": 2,
    "engine.strategies": 3,
    "engine.stepper": 3,
    "engine.prepared": 3,
    "engine.saving": 3,
    "engine.loading": 3,
    "engine.run_folder": 3,
    "engine.recorded": 3,
    "engine.possible": 4,
    "engine.processes": 4,
    "engine.preparing": 4,
    "engine.states": 4,
    "engine.engine": 4,
    "engine.migration": 3,
    "engine.module": 5,
    "engine.module_hooks": 4,
    "engine.datamodule": 4,
    "engine.optimizers": 4,
    "engine.hooks": 5,
    "engine.callback_states": 5,
    "engine.result": 5,
    "engine.loop_state": 5,
    "engine.checkpoints": 5,
    "engine.run": 5,
    "engine.callback": 5,
    "engine.automatic": 6,
    "engine.closure": 6,
    "engine.transfer": 6,
    "engine.manual": 6,
    "engine.prepare": 6,
    "engine.crew": 6,
    "engine.loop": 6,
    "engine.watching": 6,
    "engine.whole": 6,
    "engine.startup": 6,
    "engine.session": 6,
    "engine.fit": 7,
    "engine.launch": 8,
    "engine.cli": 9,
}
# The only places that import own modules by name.
LAZY_TABLES = ("engine", "engine.launch", "engine.strategies", "engine.cli.main", "engine.cli.checkpoint", "engine.cli.config", "callbacks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for package in ("engine", "callbacks") for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def layer(name: str) -> int:
    while name not in LAYERS:
        assert "." in name, f"{name} has no layer: add it to the table"
        name = name.rpartition(".")[0]
    return LAYERS[name]


def own_imports(name: str) -> set[str]:
    """The own modules that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            names = [f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in FILES else str(node.module) for alias in node.names]
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
    upward = {target for target in own_imports(name) if target != "engine" and layer(target) > layer(name)}
    assert not upward, f"{name} (layer {layer(name)}) imports upward: {upward}"
    assert "engine" not in own_imports(name) or name.startswith("engine.cli"), f"{name} imports the public face"
    assert not any(target.startswith("callbacks") for target in own_imports(name)), f"{name} imports callbacks"


def test_no_import_cycle() -> None:
    graph = {name: own_imports(name) - {"engine"} for name in FILES if name != "engine"}
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
                    assert str(inner.module).split(".")[0] not in ("engine", "callbacks"), f"{name}:{inner.lineno}"
                elif isinstance(inner, ast.Import):
                    assert all(a.name.split(".")[0] not in ("engine", "callbacks") for a in inner.names), f"{name}:{inner.lineno}"


@pytest.mark.parametrize("name", list(FILES))
def test_sizes(name: str) -> None:
    lines = FILES[name].read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{FILES[name]} has {lines} lines"
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {length} lines"


def test_every_layer_line_is_used() -> None:
    unused = [place for place in LAYERS if not any(name == place or name.startswith(place + ".") for name in FILES)]
    assert not unused
