"""Helper threads that fail on purpose."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.ranks import PATIENCE_S


class Planted(BaseException):
    """An error that only the guard of a thread catches."""


def fails(*arguments: Any, **settings: Any) -> Any:
    raise Planted("on purpose")


def failure_of(caplog: pytest.LogCaptureFixture, *names: str) -> str:
    """The one message that is logged, once threads of these names have ended. A thread that another one starts comes after it."""
    for name in names:
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
    (message,) = [record.getMessage() for record in caplog.records]
    return message
