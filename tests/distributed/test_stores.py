"""Notes between ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.internals import group_of_one
from support.threads import fails, failure_of

from engine.distributed.stores import Notes


def test_an_error_in_the_thread_of_a_note_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes(group_of_one(), "topic")
    store: Any = SimpleNamespace(set=fails)
    notes._store = store
    notes.write("name", 1)
    assert not notes.answers
    told = failure_of(caplog, "fit-notes")
    assert told == "the thread fit-notes has failed with Planted: on purpose; this rank's notes do not reach the others"
