"""The simulated accelerator is built once, before the first of these tests; without a compiler they are skipped with the reason."""

from __future__ import annotations

import build_device
import pytest


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    if reason := build_device.missing():
        pytest.skip(reason)
    build_device.library()
