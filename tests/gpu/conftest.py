"""What is here runs on a CUDA device. Tests that take the fixture ``kind`` run on the CPU on a machine without one; the others are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

NOTICE = "ignore:Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations:UserWarning"
"""What torch says once a process when ``set_sync_debug_mode`` is called, in whichever test comes first."""


@pytest.fixture
def kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings(NOTICE))
        if not torch.cuda.is_available() and "kind" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
