"""A short kill campaign under every launcher, and whether it finds a fault that was put in. ``python -m tests.failure.campaign`` kills more often."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from campaign.campaign import Campaign
from campaign.faults import FAULTS, find
from campaign.setups import SETUPS, TREE, runnable


@pytest.mark.slow
def test_kills_lose_nothing() -> None:
    with tempfile.TemporaryDirectory(
        prefix="kills-"
    ) as place:  # sockets lie in it, whose paths may have 107 characters
        setups = [SETUPS[name] for name in runnable()]
        rows = Campaign(setups, Path(place), TREE, 0, print).run(len(setups), at_once=3)
    assert [text for row in rows for text in row.found.texts] == []
    assert all(row.kills.total() >= 1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["older", "lock"])
def test_finds_a_fault(name: str) -> None:
    row = find(FAULTS[name], 2)
    assert row.found.texts, f"{FAULTS[name].what}: not found by {row.kills.total()} kills"
