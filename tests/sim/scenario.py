"""Start scenarios: functions of ``scenarios/*.py``, each in processes of its own, because the simulated device changes its whole process."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.ranks import PATIENCE_S, run_ranks

SCENARIOS = Path(__file__).with_name("scenarios")

_SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import warnings
import {module} as scenarios
warnings.simplefilter("error")
scenarios.{function}()
"""


def scenarios(module: str) -> Any:
    """A mark that runs a test with the name of each scenario of a file; those whose names begin with ``slow_`` are marked slow."""
    tree = ast.parse((SCENARIOS / f"{module}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    marked = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("slow_")) for name in names]
    return pytest.mark.parametrize("scenario", marked)


def play(module: str, function: str, world_size: int = 1, timeout: float = PATIENCE_S) -> None:
    """Run a scenario on each of the ranks; what it asserts is an error here. Its argument is a folder that the ranks share."""
    folders = [str(SCENARIOS), str(SCENARIOS.parent), str(SCENARIOS.parents[1])]
    with tempfile.TemporaryDirectory() as shared:
        run_ranks(
            _SCRIPT.format(folders=folders, module=module, function=function), world_size, shared, timeout=timeout
        )
