"""How many calls a step makes: the goals of ``tests/benchmarks/calls.py``, which every machine counts alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from processes import PATIENCE_S, clean_environment

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "calls.py"


def test_a_step_makes_no_more_calls_than_promised() -> None:
    cases = [f"--case={name}" for name in ("plain", "one log", "twenty logs", "DataLoader")]
    ran = subprocess.run(
        [sys.executable, BENCHMARK, "--no-peers", "--check", "--steps=100", *cases],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "twenty logs" in ran.stdout
