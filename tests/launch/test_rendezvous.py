"""The watch over a job's machines, with a rendezvous that is a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import PATIENCE_S
from support.threads import Planted, fails, failure_of

from engine.launch import rendezvous
from engine.launch.rendezvous import Machines, bounded


def watched(monkeypatch: pytest.MonkeyPatch, waiting: Callable[[], int]) -> Machines:
    """Begin a round of machines whose rendezvous says that ``waiting()`` machines wait."""
    monkeypatch.setattr(rendezvous, "WATCH_S", 0.001)
    monkeypatch.setattr(Machines, "_join", lambda *arguments: None)
    handler: Any = SimpleNamespace(get_run_id=lambda: "run", num_nodes_waiting=waiting)
    machines = Machines(handler, 1.0, "localhost", None)
    store: Any = SimpleNamespace(check=lambda keys: False)
    machines._store = store
    machines.next_round(1, 0)
    return machines


def test_an_error_in_the_watch_over_machines_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched(monkeypatch, fails)
    told = failure_of(caplog, "fit-waiting")
    assert told.startswith("the thread fit-waiting has failed with Planted: on purpose; machines that join or fail")


def test_the_watch_over_machines_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, noted = iter([TypeError("planted"), TypeError("planted"), 3]), threading.Event()

    def waiting() -> int:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:  # the 3 has been noted
            noted.set()
        return 3

    machines = watched(monkeypatch, waiting)
    assert noted.wait(PATIENCE_S)
    assert machines.machines_waiting == 3
    machines._stop_watching()
    told = failure_of(caplog, "fit-waiting")
    assert told.startswith("the thread fit-waiting has failed with TypeError: planted; it goes on")


def test_a_call_that_is_bounded_raises_its_error() -> None:
    assert bounded(lambda: 3, PATIENCE_S, "a call") == 3
    with pytest.raises(Planted):
        bounded(fails, PATIENCE_S, "a call")
