"""The check of planted faults runs before all other tests: a stale fault would only be noticed in the slow part."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_planted_faults.py")
