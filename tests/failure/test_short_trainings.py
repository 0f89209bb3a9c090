"""Data workers start beside gloo's threads, again and again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import run_ranks

TRAININGS = 60
"""On CPython 3.11.7, without the wait before a fork, the first hang came after 23 to 112."""


@pytest.mark.slow
def test_no_worker_hangs_in_its_fork() -> None:
    script = Path(__file__).with_name("short_trainings.py")
    ran = run_ranks(script, 2, "--trainings", TRAININGS, timeout=1800)
    assert [rank.value for rank in ran] == [TRAININGS, TRAININGS]
