"""Helper threads that fail on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.ranks import PATIENCE_S


class Planted(BaseException):
    """An error that only the guard of a thread catches."""


def fails(*arguments: Any, **settings: Any) -> Any:
    raise Planted("on purpose")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failure_of(caplog: pytest.LogCaptureFixture, *names: str) -> str:
    """The one message that is logged, once threads of these names have ended."""
    wait_for(lambda: not any(thread.name in names for thread in threading.enumerate()))
    (message,) = [record.getMessage() for record in caplog.records]
    return message
