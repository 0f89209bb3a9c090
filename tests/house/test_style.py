"""The code has the form that ruff gives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_has_nothing_to_say(arguments: tuple[str, ...]) -> None:
    ruff = [sys.executable, "-m", "ruff", *arguments, "--no-cache", str(ROOT)]
    ran = subprocess.run(ruff, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
