"""A helper thread reports the error that ends it, and every file that starts threads has such a test."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import PATIENCE_S
from support.threads import Planted, fails, failure_of

from callbacks import ServableModuleValidator, servable_module
from engine.utils.helper_threads import HelperThread

ROOT = Path(__file__).parents[2]
TESTS = {
    "callbacks/loggers/sender.py": "callbacks/loggers/test_logger_base.py: test_an_error_of_the_thread_itself_is_told",
    "callbacks/servable_module.py": "utils/test_helper_threads.py: test_a_server_that_fails_is_an_error_at_once",
    "engine/checkpoint/files.py": "checkpoint/test_files.py: test_work_in_threads_raises_their_error",
    "engine/checkpoint/writer.py": "checkpoint/test_writer.py: test_an_error_of_the_thread_itself_is_told_by_wait",
    "engine/distributed/failures.py": "distributed/test_failures.py: test_an_error_in_the_watch_over_rank_0_is_reported",
    "engine/distributed/stores.py": "distributed/test_stores.py: test_an_error_in_the_thread_of_a_note_is_reported",
    "engine/distributed/watchdog.py": "distributed/test_watchdog.py: test_a_look_that_raises_is_logged_once_and_does_not_end_the_watch",
    "engine/launch/output.py": "launch/test_supervisor.py: test_output_is_read_on_after_an_error",
    "engine/launch/rendezvous.py": "launch/test_rendezvous.py: test_an_error_in_the_watch_over_machines_is_reported",
    "engine/launch/script_ranks.py": "launch/test_script_ranks.py: test_an_error_in_the_thread_that_ends_ranks_is_reported",
    "engine/launch/supervisor.py": "launch/test_supervisor.py: test_a_rank_whose_end_cannot_be_seen_counts_as_failed",
    "engine/utils/helper_threads.py": "utils/test_helper_threads.py: test_an_error_is_reported_with_what_it_means",
}
"""Where errors of the threads that a file starts are tested."""
LOG_LINES = {"engine/distributed/waiting.py"}
"""Files whose threads only log a line."""


def test_every_file_that_starts_threads_is_tested() -> None:
    """A new helper thread needs a guard, and a test of it."""
    starts = re.compile(r"(\bthreading\.Timer|\b(?<!class )(Thread|HelperThread))\(|\(threading\.Thread\)")
    starting = {
        str(path.relative_to(ROOT))
        for folder in ("engine", "callbacks")
        for path in (ROOT / folder).rglob("*.py")
        if starts.search(path.read_text())
    }
    assert starting == TESTS.keys() | LOG_LINES
    for place in TESTS.values():
        file, _, test = place.partition(": ")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_an_error_is_reported_with_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    HelperThread(fails, "fit-any", "nothing else changes").start()
    assert (
        failure_of(caplog, "fit-any") == "the thread fit-any has failed with Planted: on purpose; nothing else changes"
    )


def test_a_server_that_fails_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(run=fails, started=False)
    uvicorn = SimpleNamespace(Config=lambda *arguments, **settings: None, Server=lambda config: server)
    monkeypatch.setitem(sys.modules, "uvicorn", uvicorn)
    monkeypatch.setattr(servable_module, "_app", lambda module: None)
    module: Any = None
    validator = object.__new__(ServableModuleValidator)  # uvicorn need not be installed
    validator.host, validator.port, validator.timeout = "127.0.0.1", 1, PATIENCE_S
    with pytest.raises(RuntimeError, match="the server could not start on 127") as raised:
        validator._ask(module, {})
    assert isinstance(raised.value.__cause__, Planted)
