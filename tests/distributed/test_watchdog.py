"""Who holds up the others, and where a thread stands. Whole jobs that hang: tests/failure/test_hang.py."""

from __future__ import annotations

import gc
import logging
import pdb
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.internals import group_of_one
from support.ranks import PATIENCE_S, run_script
from torch import nn

from engine.distributed import stacks
from engine.distributed.watchdog import HangNote, Watchdog, laggards


def note(progress: float = 5, collectives: int = 10, waits: bool = True, device: bool = False) -> HangNote:
    return HangNote(progress, collectives, "train.py:1", waits, device)


def synced(progress: float = 5) -> HangNote:
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
def test_laggards(notes: list[HangNote | None], expected: list[int]) -> None:
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


def test_alone_it_tells_once_for_each_stall_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = 0
    dog = Watchdog(group_of_one(), lambda: progress, first_s=0.3, limit_s=60, directory=tmp_path / "hang")
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
    deadline = time.monotonic() + PATIENCE_S
    while "fit-watchdog" in {thread.name for thread in threading.enumerate()}:  # it ends at its next look
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_short_run_uses_the_thread_of_the_one_before_and_is_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def watchdog(limit_s: float) -> Watchdog:
        return Watchdog(group_of_one(), lambda: 0, first_s=0.3, limit_s=limit_s, directory=tmp_path / "hang")

    def watchers() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name == "fit-watchdog"}

    before = watchers()
    first = watchdog(60)
    thread = watchers() - before
    first.stop()
    second, other = watchdog(60), watchdog(6)
    assert thread < watchers()
    assert len(watchers() - before) == 2  # one that looks more often has its own
    other.stop()
    with caplog.at_level(logging.WARNING, "engine"):
        deadline = time.monotonic() + PATIENCE_S
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.1)
    second.stop()
    assert "no batch was finished" in caplog.text


def test_a_watchdog_that_has_looked_keeps_nothing_of_its_run(tmp_path: Path) -> None:
    """Or memory of a run would be held until the thread's next look."""
    looked = threading.Event()

    def progress() -> int:
        if threading.current_thread() is not threading.main_thread():
            looked.set()
        return 0

    kept = weakref.ref(progress)
    dog = Watchdog(group_of_one(), progress, first_s=60, limit_s=60, directory=tmp_path)
    del progress
    assert looked.wait(PATIENCE_S)
    dog.stop()
    del dog
    gc.collect()
    assert kept() is None


FORKED = """
import os, sys
from engine.distributed.environments import Environment
from engine.distributed.group import Group
from engine.distributed.watchdog import Watchdog
import threading, torch

def watchdog():
    return Watchdog(Group(Environment("single"), torch.device("cpu")), lambda: 0, first_s=60, limit_s=60, directory=None)

watchdog().stop()
child = os.fork()
dog = watchdog()  # in the child the thread of the first is gone
names = [thread.name for thread in threading.enumerate() if thread.is_alive()]
dog.stop()
if not child:
    os._exit("fit-watchdog" not in names)
report(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_its_own_thread() -> None:
    assert run_script(FORKED).value == 0


def test_progress_is_no_stall(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun = time.monotonic()
    dog = Watchdog(
        group_of_one(), lambda: int((time.monotonic() - begun) / 0.1), first_s=0.4, limit_s=0.4, directory=tmp_path
    )
    with caplog.at_level(logging.WARNING, "engine"):
        time.sleep(1)
    dog.stop()
    assert not caplog.records


@pytest.mark.parametrize("kind", [AttributeError, SystemExit])
def test_a_look_that_raises_is_logged_once_and_does_not_end_the_watch(
    kind: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def progress() -> int:
        nonlocal looks
        if threading.current_thread() is not threading.main_thread():
            looks += 1
            if looks in (1, 2):
                raise kind("'int' object has no attribute 'f_globals'")
        return 0

    with caplog.at_level(logging.WARNING, "engine"):
        dog = Watchdog(group_of_one(), progress, first_s=0.3, limit_s=0.7, directory=tmp_path / "hang")
        deadline = time.monotonic() + PATIENCE_S
        while "no batch was finished" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    dog.stop()
    assert "no batch was finished" in caplog.text
    assert caplog.text.count("the watchdog could not look at the training") == 1
    assert "f_globals" in caplog.text


def test_the_report_comes_although_stacks_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError("planted")

    monkeypatch.setattr(stacks, "_lines_of_threads", fails)
    with caplog.at_level(logging.WARNING, "engine"):
        dog = Watchdog(group_of_one(), lambda: 0, first_s=0.3, limit_s=0.7, directory=tmp_path / "hang")
        deadline = time.monotonic() + PATIENCE_S
        while "no batch was finished" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.05)
    dog.stop()
    assert "the training is at (unknown, OSError: planted)" in caplog.text
    assert "could not look" not in caplog.text
    assert (tmp_path / "hang" / "rank=0.txt").read_text() == "the stacks cannot be read: OSError: planted\n"


def test_a_report_makes_no_frames_of_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Any:
        raise AssertionError("frames are walked")

    def named_一() -> None:
        threading.Event().wait()

    monkeypatch.setattr(stacks, "_frames", refused)
    assert "named_一" in standing(named_一, "waiter.acquire").line
    assert "in named_一" in stacks.all_threads()
    assert "threading.Event().wait()" in stacks.all_threads()


BESIDE_COLLECTIONS = """
import gc, sys, threading, time
from engine.distributed import stacks

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        if threading.get_ident() != thread and not ended.is_set():
            time.sleep(0.0001)  # lets the other thread run, whose frames the reader is reading

def small(depth):
    return small(depth - 1) if depth else 0

def large(depth):
    a = b = c = d = e = f = g = h = depth
    return large(depth - 1) + a + b + c + d + e + f + g + h if depth else 0

def read():
    while not ended.is_set():
        stacks.late_workers(thread)

gc.collect()
gc.freeze()
gc.set_threshold(20)
sys.setswitchinterval(1e-5)
thread, ended = threading.get_ident(), threading.Event()
reader = threading.Thread(target=read)
reader.start()
end = time.monotonic() + 2
while time.monotonic() < end and reader.is_alive():
    Cycle()
    small(50)
    large(50)
alive = reader.is_alive()
ended.set()
reader.join()
report(alive)
"""


def test_frames_are_read_while_their_thread_runs_and_finalizers_too() -> None:
    assert run_script(BESIDE_COLLECTIONS, forked=True).value


READS = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
from engine.distributed.environments import Environment
from engine.distributed.group import Group
from engine.distributed.watchdog import Watchdog

reads = []
sys.addaudithook(lambda event, _: reads.append(event) if event == "sys._current_frames" else None)
looks = 0

def progress():
    global looks
    looks += 1
    return 0

def look(during):
    before = looks
    while looks < before + 10:
        during()
    return len(reads)

group = Group(Environment("single"), torch.device("cpu"))
dog = Watchdog(group, progress, first_s=300, limit_s=0.2, directory=Path(sys.argv[1]))
computing = look(lambda: sum(range(1000)))
asleep = look(lambda: time.sleep(1))
dog.stop()
report([computing, asleep])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's processor time is known on Linux alone")
def test_the_frames_of_a_thread_that_computes_are_not_read(tmp_path: Path) -> None:
    computing, asleep = run_script(READS, tmp_path, forked=True).value
    assert computing == 0
    assert asleep > 0


LATE_WORKER = """
import logging, multiprocessing, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from engine import Fit, TrainModule
from engine.distributed import watchdog

os.register_at_fork(after_in_child=lambda: hangs and time.sleep(600))  # where CPython before 3.11.10 hangs
hangs = False
watchdog.WORKER_S = 1.0

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Hanging(DataLoader):
    def __iter__(self):
        global hangs
        hangs = True
        try:
            return super().__iter__()
        finally:
            hangs = False

told = []

class Listener(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
        if f"of the {sys.argv[3]} loader" in told[-1]:  # on a busy machine the other's worker is late, too
            for worker in multiprocessing.active_children():
                worker.kill()

logging.getLogger("engine").addHandler(Listener())
data = TensorDataset(torch.ones(4, 2))
loaders = [DataLoader(data, 2, num_workers=1) for _ in range(2)]
loaders[int(sys.argv[1])] = Hanging(data, 2, num_workers=1)
fit = Fit(accelerator="cpu", max_epochs=1, callbacks=[], root_dir=sys.argv[2], num_sanity_val_steps=0)
try:
    fit.run(Net(), *loaders)
except RuntimeError as error:
    assert "exited unexpectedly" in str(error)
report(told)
"""


@pytest.mark.parametrize(("late", "name"), [(0, "training"), (1, "evaluation")])
def test_a_worker_that_does_not_start_is_named(late: int, name: str, tmp_path: Path) -> None:
    told = run_script(LATE_WORKER, late, tmp_path, name, forked=True).value
    assert any(f"worker 0 of the {name} loader has not started after 1" in text for text in told)


FETCH = """
def fetch_sub_module(current_submodule, wait):
    wait()
def _reduce(params_to_reduce, wait):
    wait()
def step(self, wait):  # DeepSpeed's optimizer, which has the whole model
    wait()
"""


@pytest.mark.parametrize(
    ("function", "block", "expected"),
    [
        ("fetch_sub_module", lambda model: model[1], ["1"]),
        ("_reduce", lambda model: [model[1].weight, model[0].bias], ["0.bias", "1.weight"]),
        ("step", lambda model: model, []),
    ],
)
def test_the_block_of_a_waiting_thread(function: str, block: Any, expected: list[str]) -> None:
    """A block is a local of the code that gathers it."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    stacks.know_sharding("deepspeed.runtime.zero.", Path("deepspeed", "utils", "nvtx.py"))
    sharding: dict[str, Any] = {"__name__": "deepspeed.runtime.zero.partitioned_param_coordinator"}
    exec(FETCH, sharding)
    waits, ends = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        ends.wait(PATIENCE_S)

    local = SimpleNamespace(module=model) if function == "step" else block(model)
    thread = threading.Thread(target=sharding[function], args=(local, wait))
    thread.start()
    assert waits.wait(PATIENCE_S)
    assert thread.ident is not None
    found = stacks.blocks(thread.ident)
    ends.set()
    thread.join()
    named = {id(part): name for name, part in [*model.named_modules(), *model.named_parameters()]}
    assert sorted(named[id(part)] for part in found) == expected
