"""Every program of ``tests/benchmarks`` runs: its smallest form, whose numbers mean nothing, ends well and prints a line of its table."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.ranks import PATIENCE_S, ROOT, clean_environment

BENCHMARKS = ROOT / "tests" / "benchmarks"


@dataclass
class Smallest:
    """The options of the smallest form of a program, and a pattern of what it prints when it has measured something."""

    options: str
    prints: str
    needs: str = ""
    """A peer that the program is about."""


PROGRAMS = {
    "accelerate_scripts.py": Smallest(
        "--target exact --processes 1 --only test_noop_sync --check",
        r"exact, 1 process\(es\): {'passed': 1,",
        "accelerate",
    ),
    "calls.py": Smallest("--steps 10 --case plain", r"plain +│ +\d+ │ +\+\d+"),
    "checkpoint.py": Smallest(
        "--megabytes 1 --rounds 1 --dir .", r"Fit, default: a save of a tiny model in a run \(ms\) +[\d.-]+"
    ),
    "first_step.py": Smallest("Fit", r"\[\d\S+, \d\S+\]"),
    "fixed_costs.py": Smallest("--smallest", r"a removal with 10 kept +[\d.]+ ms"),
    "losses.py": Smallest("--rounds 1 --sizes 500x100x16", r"ours +\d+ MiB"),
    "migrate_coverage.py": Smallest("--demos --check", r"lightning's demos", "lightning"),
    "mixtures.py": Smallest("--rounds 1", r"Mixture, 10\^6 samples +[\d.]+ us a sample"),
    "overhead.py": Smallest(
        "--no-peers --rounds 1 --steps 10 --case plain --case 'DDP tiny'", r"DDP tiny +│ +[\d.]+ │"
    ),
    "packing.py": Smallest("--rounds 1 --samples 100000", r"TokenFile, us a sample +[\d.]+"),
    "planning.py": Smallest("--model tiny --ranks 8", r"8 │ +[\d.]+ s │"),
    "published_modules.py": Smallest("boring_datamodule_no_len --errors", r"1 of 1 with weights equal", "lightning"),
    "startup.py": Smallest("--no-peers --rounds 1", r"\+ Fit, to its first step +│ +[\d.]+"),
    "strategies.py": Smallest("--no-peers --rounds 1 --steps 2 --case ddp", r"ddp +│ +[\d.]+ │"),
    "ten_callbacks.py": Smallest("--rounds 1 --steps 10", r"all ten +[+-][\d.]+ us a step"),
    "whole_tensors.py": Smallest("--width 64 --layers 2 --rounds 1", r"fsdp +[\d.]+ +2 +[\d.]+"),
}
ELSEWHERE = {"gpt.py": "tests/gpu/test_benchmark.py"}
"""Programs that another test file runs."""


def test_no_program_is_left_out() -> None:
    programs = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert programs == PROGRAMS.keys() | ELSEWHERE.keys()
    assert all(name in (ROOT / place).read_text() for name, place in ELSEWHERE.items())


@pytest.mark.slow
def test_the_table_of_collectives_is_what_the_benchmark_counts(tmp_path: Path) -> None:
    chapter = ROOT / "engine" / "strategies" / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(chapter.read_text().replace("| Muon | 0 | 2; ", "| Muon | 1 | 3; "))  # it is written again
    command = [sys.executable, str(BENCHMARKS / "whole_tensors.py"), "--write", str(copy)]
    subprocess.run(command, cwd=tmp_path, env=clean_environment(), check=True, timeout=2 * PATIENCE_S)
    assert copy.read_text() == chapter.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_smallest_form_of_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    smallest = PROGRAMS[name]
    if smallest.needs:
        pytest.importorskip(smallest.needs)
    command = [sys.executable, str(BENCHMARKS / name), *shlex.split(smallest.options)]
    variables = clean_environment(TMPDIR=str(tmp_path))
    ran = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert re.search(smallest.prints, ran.stdout), ran.stdout[-3000:] + ran.stderr[-3000:]
