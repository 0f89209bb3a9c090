"""Who holds up the others, and where a thread stands. Whole jobs that hang: tests/failure/test_hang.py."""

from __future__ import annotations

import logging
import pdb
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE_S

from engine.distributed.environment import Environment
from engine.distributed.group import Group
from engine.health import stacks
from engine.health.watchdog import Note, Watchdog, laggards


def note(progress: float = 5, collectives: int = 10, waits: bool = True, device: bool = False) -> Note:
    return Note(progress, collectives, "train.py:1", waits, device)


def synced(progress: float = 5) -> Note:
    return note(progress, waits=False, device=True)


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([note(), None, note()], [1]),
        ([note(), note(4), note(6, waits=False)], [1]),  # a batch behind
        ([note(), note(waits=False), note()], [1]),  # the only one that computes
        (
            [note(), note(waits=False, collectives=9), note(waits=False, collectives=10)],
            [1],
        ),  # both compute, one is further behind
        ([note(), note(waits=False), note(waits=False)], [1, 2]),
        ([note(), note(collectives=9)], [0, 1]),  # all wait: nobody is to blame alone
        ([synced(), note(waits=False), synced()], [1]),  # in .item(), as NCCL's collectives keep ranks waiting
        ([synced(), note(waits=False, collectives=20), note()], [1]),
        ([synced(), note()], [0, 1]),  # the device may wait for the other rank
        ([synced(4), note(waits=False)], [0]),  # a batch behind
    ],
)
def test_laggards(notes: list[Note | None], expected: list[int]) -> None:
    assert laggards(dict(enumerate(notes))) == expected


def standing(target: Any, where: str) -> stacks.Position:
    """The position of a thread that runs ``target``, once its stack has a line of ``where``."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    assert thread.ident is not None
    deadline = time.monotonic() + PATIENCE_S
    while where not in "".join(traceback.format_stack(sys._current_frames()[thread.ident])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return stacks.position(thread.ident)


def test_the_users_own_line() -> None:
    def user() -> None:
        time.sleep(600)  # here

    found = standing(user, "time.sleep(600)")
    assert f"{__file__}:" in found.line
    assert found.line.endswith("in user: time.sleep(600)  # here")
    assert not found.waits
    assert not found.debugged


def test_inside_of_a_library() -> None:
    def user() -> None:
        torch.utils.data.DataLoader([1], collate_fn=lambda rows: threading.Event().wait(600)).__iter__().__next__()

    found = standing(user, "waiter.acquire")
    assert "(now in threading.py:" in found.line
    assert "test_watchdog.py" in found.line


class Event:
    """Its ``synchronize`` blocks without a Python frame of its own, as a device's does."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.synchronize = self.item = self.cpu = self.acquire = lock.acquire


def test_a_call_that_waits_for_a_device() -> None:
    event = Event()

    def items() -> None:
        print("before", event.item(), "after")

    def synchronizes() -> None:
        event.synchronize()

    def copies() -> None:
        [event for _ in range(2) if event.cpu()]

    def others() -> None:
        (event.acquire(), "it is not .item()", event.item)

    assert standing(items, "event.item()").device
    assert standing(synchronizes, "event.synchronize()").device
    assert standing(copies, "event.cpu()").device
    assert not standing(others, "event.acquire()").device


def test_a_debugger_is_seen() -> None:
    class Silent(pdb.Pdb):
        def interaction(self, *args: Any) -> None:
            threading.Event().wait()

    def user() -> None:
        Silent(nosigint=True).set_trace()
        time.sleep(600)

    assert standing(user, "waiter.acquire").debugged


def alone() -> Group:
    return Group(Environment("single"), torch.device("cpu"))


def test_alone_it_tells_once_for_each_stall_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = 0
    dog = Watchdog(alone(), lambda: progress, first_s=0.3, limit_s=60, directory=tmp_path / "hang")
    with caplog.at_level(logging.WARNING, "engine"):
        deadline = time.monotonic() + PATIENCE_S
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.9)  # longer than first_s
        assert len(caplog.records) == 1
        assert "test_watchdog.py" in caplog.text
        assert "time.sleep(0.9)" in (tmp_path / "hang" / "rank=0.txt").read_text()
        progress = 1
        time.sleep(0.6)  # less than limit_s
        assert len(caplog.records) == 1
    dog.stop()
    assert "fit-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_progress_is_no_stall(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = time.monotonic()
    dog = Watchdog(alone(), lambda: int((time.monotonic() - begun) / 0.1), first_s=0.4, limit_s=0.4, directory=tmp_path)
    with caplog.at_level(logging.WARNING, "engine"):
        time.sleep(1)
    dog.stop()
    assert not caplog.records
