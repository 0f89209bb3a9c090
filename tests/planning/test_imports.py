"""Who does not plan pays nothing for planning."""

from __future__ import annotations

import subprocess
import sys

from support.ranks import clean_environment

HEAVY = (
    "torch._dynamo",
    "torch.distributed.pipelining",
    "sympy",
    "rich",
    "engine.planning.plan",
    "engine.planning.tracing",
)


def test_fit_is_imported_without_what_plans() -> None:
    script = f"import sys; from engine import Fit; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
