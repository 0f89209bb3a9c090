"""The layer table of the package, and the limits that keep it readable. Imports for type checking count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each place is a module or a package (a package's modules share its layer unless they have a line of their own).
LAYERS: dict[str, int] = {
    "engine.utils.errors": 0,
    "engine.utils.log": 0,
    "engine.utils.tree": 0,
    "engine.utils.seed": 0,
    "engine.health.garbage": 0,
    "engine.config": 0,
    "engine.utils.accelerator": 1,
    "engine.loop.torch_flags": 1,
    "engine.distributed": 1,
    "engine.config.hyperparameters": 2,
    "engine.step.precision": 2,
    "engine.step.gradients": 2,
    "engine.step.gradient_status": 2,
    "engine.step.window": 2,
    "engine.metrics.recorder": 2,
    "engine.metrics.torchmetrics_states": 2,
    "engine.metrics.torchmetrics_values": 2,
    "engine.metrics.reductions": 2,
    "engine.transforms": 2,
    "engine.data": 2,
    "engine.checkpoint": 2,
    "engine.strategies": 3,
    "engine.step.stepper": 3,
    "engine.step.wrappers": 3,
    "engine.checkpoint.writer": 3,
    "engine.checkpoint.resume": 3,
    "engine.checkpoint.run_folder": 3,
    "engine.checkpoint.recorded_arguments": 3,
    "engine.loop.compatibility": 4,
    "engine.processes": 4,
    "engine.preparing": 4,
    "engine.states": 4,
    "engine.engine": 4,
    "engine.interop.lightning_names": 3,
    "engine.module": 5,
    "engine.loop.module_hooks": 4,
    "engine.data.datamodule": 4,
    "engine.step.optimizers": 4,
    "engine.loop.hook_calls": 5,
    "engine.loop.callback_states": 5,
    "engine.loop.result": 5,
    "engine.loop.own_loop_counters": 5,
    "engine.loop.run_checkpoints": 5,
    "engine.loop.run": 5,
    "engine.callback": 5,
    "engine.loop.automatic_step": 6,
    "engine.loop.closure_step": 6,
    "engine.loop.batch_transfer": 6,
    "engine.loop.manual_optimization": 6,
    "engine.loop.setup": 6,
    "engine.launch.local_ranks": 6,
    "engine.loop.train": 6,
    "engine.loop.watching": 6,
    "engine.loop.whole_weights": 6,
    "engine.health.rank_checks": 6,
    "engine.loop.lifecycle": 6,
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
