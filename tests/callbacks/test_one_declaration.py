"""A callback is declared once: its file, and a line of the stub. Python, ``dir`` and type checkers then find it under both names of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GREETING = '''
"""A greeting."""

from engine import Callback


class Greeting(Callback):
    """Greets ``whom``."""

    def __init__(self, whom: str, times: int = 1) -> None:
        self.whom, self.times = whom, times
'''
USED = """
import callbacks, engine.callbacks
from callbacks import Greeting
from engine.callbacks import Greeting as same
assert Greeting is same and Greeting("you").whom == "you"
for package in (callbacks, engine.callbacks):
    assert "Greeting" in package.__all__ and "Greeting" in dir(package), package
"""
CHECKED = """
from callbacks import Greeting
from engine.callbacks import Greeting as Same
from callbacks import Farewell

reveal_type(Greeting)
reveal_type(Same)
"""
SETTINGS = """
[mypy]
ignore_missing_imports = True
[mypy-torch.*,torchmetrics.*,numpy.*,rich.*,transformers.*,deepspeed.*]
follow_imports = skip
"""
"""What other packages define is not asked: mypy needs 3 s without it."""


def test_a_file_and_a_line_of_the_stub_declare_a_callback(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    copy = tmp_path / "copy"
    for name in ("engine", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "callbacks" / "greeting.py").write_text(GREETING)
    with (copy / "callbacks" / "__init__.pyi").open("a") as stub:
        stub.write("from .greeting import Greeting as Greeting\n")

    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    subprocess.run(
        [sys.executable, "-c", USED], check=True, timeout=300, cwd=tmp_path, env={**clean, "PYTHONPATH": str(copy)}
    )
    (tmp_path / "user.py").write_text(CHECKED)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--cache-dir",
        str(tmp_path / "cache"),
        "user.py",
    ]
    done = subprocess.run(
        command, timeout=300, cwd=tmp_path, env={**clean, "MYPYPATH": str(copy)}, capture_output=True, text=True
    )
    signature = '"def (whom: str, times: int =) -> callbacks.greeting.Greeting"'
    assert re.findall(r"^user.py:(\d+): (?:note|error): (.*)$", done.stdout, re.MULTILINE) == [
        ("4", 'Module "callbacks" has no attribute "Farewell"  [attr-defined]'),
        ("6", f"Revealed type is {signature}"),
        ("7", f"Revealed type is {signature}"),
    ], done.stdout + done.stderr
