"""Calls that only one kind of device has stand in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from engine.utils import cuda

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("cuda", "mps", "xpu", "npu", "hpu", "mtia")
ONE_FILE = "engine/utils/cuda.py"
OWN_NAMES = {f"torch.{kind}" for kind in KINDS} | {
    *("torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mps", "torch.version.cuda", "torch.version.hip"),
}
ASKED_BY_NAME = {
    "engine/utils/seed.py": "checkpoints of earlier versions have CUDA's generator under this key",
    "engine/planning/measurement.py": "only these devices compute float32 products in TF32 when they are asked to",
    "engine/launch/ray.py": "what Ray calls a GPU is CUDA's",
    "engine/compat/accelerate/utils/imports.py": "Accelerate has a function for each kind",
    "engine/compat/lightning/utilities.py": "Lightning has a class for each kind",
}
"""Files that compare with the name of one kind of device, and why."""


def of_one_kind(text: str) -> list[tuple[int, str]]:
    """Lines with a call of one kind of device, or a comparison with its name."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in OWN_NAMES:
            found.append((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.Compare):
            found += [
                (node.lineno, f"comparison with {inner.value!r}")
                for inner in ast.walk(node)
                if isinstance(inner, ast.Constant) and inner.value in KINDS
            ]
    return found


FILES = sorted(path for package in ("engine", "callbacks") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_one_file_knows_cuda(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = of_one_kind(path.read_text())
    if name == ONE_FILE:
        assert found
        return
    if name in ASKED_BY_NAME:
        found = [each for each in found if not each[1].startswith("comparison")]
    assert not found, f"{name} {found}: ask engine.utils.accelerator, or add it to {ONE_FILE} with its reason"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x = torch.backends.cudnn.benchmark",
        "device.type == 'cuda'",
        "kind in ('cuda', 'xpu')",
        "found = 1 if torch.mps.is_available() else 0",
    ],
)
def test_such_a_line_is_found(line: str) -> None:
    assert of_one_kind(line)


def test_every_function_of_the_one_file_has_its_reason() -> None:
    functions = [node for node in ast.parse((ROOT / ONE_FILE).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(ast.get_docstring(function) for function in functions)


def test_the_search_for_the_fastest_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    cuda.set_convolution_search(True)
    assert torch.backends.cudnn.benchmark
    assert cuda.convolution_search()
