"""The benchmark that is to be run on a GPU runs: on a device in seconds, on a CPU in minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from support.ranks import PATIENCE_S, ROOT, clean_environment


@pytest.mark.slow
def test_every_row_of_gpt_is_measured(kind: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "gpt.py"), "--all", "--tiny", "--json"]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    measured = [row for row in found["rows"] if "left_out" not in row]
    assert [(row["precision"], row["compiled"]) for row in measured[:4]] == [
        ("32-true", False),
        ("32-true", True),
        ("bf16-mixed", False),
        ("bf16-mixed", True),
    ]
    assert all(row["tokens_per_s"]["fit"][0] > 0 and row["fit_over_bare"] > 0 for row in measured)
    assert all(bool(row["peak_bytes"]) == torch.cuda.is_available() for row in measured)
    assert found["saves"]["stall_s"] > 0
    assert found["saves"]["blocking_s"] > 0
