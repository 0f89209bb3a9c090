"""The program that tests with other releases of torch: what it counts, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.torch_versions import Outcome, run, table

FILE = """
import pytest

def test_right(): pass

def test_wrong():
    assert 1 + 1 == 3, "sums"

@pytest.fixture
def broken(): raise OSError("no disk")

def test_error(broken): pass

@pytest.mark.skip(reason="")
def test_left_out(): pass
"""


def test_a_folder_is_run_and_counted(tmp_path: Path) -> None:
    (tmp_path / "test_sums.py").write_text(FILE)
    outcome = run(Path(sys.executable), tmp_path)
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert [line.partition("test_sums::")[2] for line in outcome.failed] == [
        "test_wrong: AssertionError: sums",
        'test_error: failed on setup with "OSError: no disk"',
    ]


def test_the_table_has_a_row_for_each_release_and_a_line_for_each_failure() -> None:
    outcomes = {"2.11.0": {"parity": Outcome(3, [], 1)}, "2.15.0": {"parity": Outcome(2, ["test_a::test_b: off"], 1)}}
    assert table(outcomes).splitlines() == [
        "| torch | parity |",
        "| --- | --- |",
        "| 2.11.0 | 3 passed, 0 failed, 1 skipped |",
        "| 2.15.0 | 2 passed, 1 failed, 1 skipped |",
        "torch 2.15.0: test_a::test_b: off",
    ]
