"""What the launchers' tests compare with, and how they run commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.ranks import ROOT, clean_environment, run_ranks

TRAINED = Path(__file__).parent / "trained.py"
DIGITS = ROOT / "examples" / "digits.py"


def reference(folder: Path, ranks: int = 2) -> dict[str, Any]:
    """What trained.py writes as ``ranks`` ranks under torchrun's variables."""
    run_ranks(TRAINED, ranks, folder / "reference", folder / "reference.json", timeout=300)
    return dict(json.loads((folder / "reference.json").read_text()))


def run(
    *command: object, environ: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 180
) -> str:
    """The output of a command that must end well."""
    done = subprocess.run(
        list(map(str, command)),
        env=clean_environment() | dict(environ or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}: exit status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def fit(*arguments: object, **options: Any) -> str:
    """The output of the ``fit`` command."""
    return run(sys.executable, "-m", "engine.cli.main", *arguments, **options)


def accuracy(text: str) -> float:
    """The one accuracy that digits.py prints, in percent."""
    (found,) = re.findall(r"test accuracy: ([\d.]+)%", text)
    return float(found)
