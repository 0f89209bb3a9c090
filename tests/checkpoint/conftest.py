from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_pickle(no_pickle_is_read: None) -> None:
    """Nothing that is tested in this folder reads one."""
