"""Each helper thread of the library reports an error once, with what it means."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import PATIENCE_S

from callbacks import ServableModuleValidator, servable_module
from engine.checkpoint.files import SMALL, in_parallel
from engine.distributed import failures
from engine.distributed.stores import Notes
from engine.launch import rendezvous
from engine.launch.rendezvous import Machines, bounded
from engine.launch.script_ranks import ScriptRanks
from engine.launch.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
HERE = (
    "callbacks/servable_module.py",
    "engine/checkpoint/files.py",
    "engine/distributed/failures.py",
    "engine/distributed/stores.py",
    "engine/launch/rendezvous.py",
    "engine/launch/script_ranks.py",
    "engine/utils/helper_threads.py",
)
"""Files that start threads whose errors are tested below."""
ELSEWHERE = {
    "engine/distributed/watchdog.py": "distributed/test_watchdog.py: test_a_look_that_raises_is_logged_once_and_does_not_end_the_watch",
    "engine/checkpoint/writer.py": "checkpoint/test_writer.py: test_an_error_of_the_thread_itself_is_told_by_wait",
    "engine/launch/output.py": "launch/test_supervisor.py: test_output_is_read_on_after_an_error",
    "engine/launch/supervisor.py": "launch/test_supervisor.py: test_a_rank_whose_end_cannot_be_seen_counts_as_failed",
    "callbacks/loggers/sender.py": "callbacks/loggers/test_logger_base.py: test_an_error_of_the_thread_itself_is_told",
}
"""Where the errors of the other files' threads are tested."""
LOG_LINES = ("engine/strategies/ddp_replica.py", "engine/strategies/block_order.py")
"""Files whose threads only log a line."""


class Planted(BaseException):
    """An error that only the guard of a thread catches."""


def fails(*arguments: Any, **settings: Any) -> Any:
    raise Planted("on purpose")


# -- each starts one thread, which fails -----------------------------------------------------------------------------------------------------


def parent_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    answers = iter([parent])
    monkeypatch.setattr(os, "getppid", lambda: next(answers, None) or fails())
    monkeypatch.setattr(atexit, "register", lambda stop: None)
    failures._end_with_parent(parent, 1)


def notes(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = SimpleNamespace(rank=0, world_size=2, store=None)
    board = Notes(group, "topic")
    board._store = SimpleNamespace(set=fails)
    board.write("name", 1)
    assert not board.answers


def watched_meeting(monkeypatch: pytest.MonkeyPatch, waiting: Callable[[], int]) -> Machines:
    """Begin a round of machines whose rendezvous says that ``waiting()`` machines wait."""
    monkeypatch.setattr(rendezvous, "WATCH_S", 0.001)
    monkeypatch.setattr(Machines, "_join", lambda *arguments: None)
    handler: Any = SimpleNamespace(get_run_id=lambda: "run", num_nodes_waiting=waiting)
    machines = Machines(handler, 1.0, "localhost", None)
    store: Any = SimpleNamespace(check=lambda keys: False)
    machines._store = store
    machines.next_round(1, 0)
    return machines


def machines_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    watched_meeting(monkeypatch, fails)


def end_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def note_failure(ranks: ScriptRanks) -> None:
        ranks._failed.set()
        ranks._interrupt.forbid()  # as if rank 0 had reacted already

    monkeypatch.setattr(ScriptRanks, "_await_failure", note_failure)
    monkeypatch.setattr(Supervisor, "end", fails)
    job: Any = None
    ScriptRanks(job, [], Path())


@pytest.mark.parametrize(
    ("start", "names", "consequence"),
    [
        (parent_watch, ["fit-parent-watch"], "this rank does not end by itself if rank 0 is gone"),
        (notes, ["fit-notes"], "this rank's notes do not reach the others"),
        (machines_watch, ["fit-waiting"], "machines that join or fail are noticed only when this one ends"),
        (end_of_ranks, ["fit-terminate", "fit-ranks"], "the other ranks may have to be ended by hand"),
    ],
)
def test_an_error_of_a_helper_thread_is_reported_once(
    start: Callable[[pytest.MonkeyPatch], None],
    names: list[str],
    consequence: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start(monkeypatch)
    wait_for(lambda: not any(thread.name in names for thread in threading.enumerate()))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"the thread {names[0]} has failed with Planted: on purpose; {consequence}"


def test_the_watch_over_machines_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [TypeError("planted"), TypeError("planted"), 3]

    def waiting() -> int:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    machines = watched_meeting(monkeypatch, waiting)
    wait_for(lambda: machines.machines_waiting == 3)
    machines._stop_watching()
    wait_for(lambda: not any(thread.name == "fit-waiting" for thread in threading.enumerate()))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the thread fit-waiting has failed with TypeError: planted; it goes on")


def test_work_in_threads_raises_their_errors() -> None:
    with pytest.raises(Planted):
        in_parallel(fails, range(20), size=SMALL + 1)
    with pytest.raises(Planted):
        bounded(fails, PATIENCE_S, "a call")


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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- no other thread is started ---------------------------------------------------------------------------------------------------------------


def test_every_file_that_starts_threads_is_tested() -> None:
    """A new helper thread needs a guard, and a test like those above."""
    starts = re.compile(r"\b(Thread|Timer|HelperThread)\(|\(threading\.Thread\)")
    starting = {
        str(path.relative_to(ROOT))
        for folder in ("engine", "callbacks")
        for path in (ROOT / folder).rglob("*.py")
        if starts.search(path.read_text())
    }
    assert starting == {*ELSEWHERE, *HERE, *LOG_LINES}
    for place in ELSEWHERE.values():
        file, _, test = place.partition(": ")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
