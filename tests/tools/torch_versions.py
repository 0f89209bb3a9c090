"""Run the tests that rest on torch's private names with other releases of torch, and print what passed::

    python tests/tools/torch_versions.py 2.11.0 2.15.0 --environments /tmp/torch-versions

It makes a virtual environment for each release in that folder, with all that the tests need (5 to 8 GB), and uses it again in the next run.
Where pip's settings hold torch back, start it with ``PIP_CONFIG_FILE=/dev/null``. CI tests the lowest and the
newest release with every change, and those between them once a week (``.github/workflows/weekly.yml``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("utils/test_torch_private.py", "parity", "strategies", "checkpoint", "planning")


@dataclass
class Outcome:
    """What became of the tests in one place."""

    passed: int
    failed: list[str]
    """The test and the first line of its error."""
    skipped: int

    def __str__(self) -> str:
        return f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"


def environment(version: str, folder: Path) -> Path:
    """The Python of an environment with this release of torch; it is made or completed first."""
    place = folder / version
    if not (place / "bin/python").exists():
        venv.create(place, with_pip=True)
    python = place / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", f"torch=={version}"], check=True)
    return python


def run(python: Path, tests: Path) -> Outcome:
    """Run a folder or a file of tests. Its output is shown as it comes.

    Raises:
        RuntimeError: pytest ended without a report.
    """
    environ = {**os.environ, "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run(
            [python, "-m", "pytest", tests, f"--junit-xml={report}"], cwd=ROOT, env=environ, check=False
        )
        if not report.exists():
            raise RuntimeError(f"{tests}: pytest ended with status {ended.returncode} and no report")
        return read(report)


def read(report: Path) -> Outcome:
    """The outcome in pytest's XML report."""
    outcome = Outcome(0, [], 0)
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        if problem is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            outcome.failed.append(f"{name}: {problem.get('message', '').partition(chr(10))[0]}")
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    return outcome


def table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """A row for each release and a column for each place, in Markdown, and a line for each failure."""
    places = list(next(iter(outcomes.values())))
    rows = [["torch", *places], ["---"] * (len(places) + 1)]
    rows += [[version, *(str(outcome) for outcome in row.values())] for version, row in outcomes.items()]
    failures = [
        f"torch {version}: {line}" for version, row in outcomes.items() for out in row.values() for line in out.failed
    ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *failures])


def main(argv: Sequence[str]) -> int:
    """Test with each release.

    Returns:
        0, or 1 when a test has failed.
    """
    parser = argparse.ArgumentParser(
        description="Run the tests that rest on torch's private names with other releases of torch."
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="a release of torch, such as 2.15.0")
    parser.add_argument(
        "--environments", type=Path, default=Path(tempfile.gettempdir()) / "torch-versions", metavar="FOLDER"
    )
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="folders and files below tests/")
    chosen = parser.parse_args(list(argv))
    outcomes = {}
    for version in chosen.versions:
        python = environment(version, chosen.environments)
        outcomes[version] = {tests: run(python, ROOT / "tests" / tests) for tests in chosen.tests}
    print(table(outcomes))
    return int(any(out.failed for row in outcomes.values() for out in row.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
