import atexit
import contextlib
import json
import os
import sys
import threading

import pytest
import torch.distributed as dist
from support.internals import new_folder
from support.ranks import run_ranks
from support.threads import fails, failure_of

from engine.distributed import failures
from engine.distributed.environments import Environment
from engine.utils.errors import RankError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RankError("rank 1 failed"), True),
        (dist.DistNetworkError("reset"), True),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_blames_peer(error, expected):
    assert failures.blames_peer(error) is expected


def test_a_record_is_read_back_and_the_first_stays(tmp_path):
    path = tmp_path / "error.json"
    try:
        raise KeyError("first")
    except KeyError as error:
        failures.record(error, path)
    failures.record(ValueError("second"), path)
    text, moment, blames = failures.read(path)
    assert "raise KeyError" in text
    assert text.rstrip().endswith("KeyError: 'first'")
    assert abs(moment - os.stat(path).st_mtime) < 5
    assert blames is False


def test_the_record_has_torch_elastics_form(tmp_path):
    path = tmp_path / "error.json"
    failures.record(RankError("gone"), path)
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "RankError: gone"
    assert int(message["extraInfo"]["timestamp"]) > 1e9
    assert failures.read(path)[2] is True


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '"x"', '{"message": {}}', '{"message": {"extraInfo": 1}}', "\x00"]
)
def test_damaged_records_are_as_good_as_none(tmp_path, content):
    path = tmp_path / "error.json"
    if content is not None:
        path.write_text(content)
    assert failures.read(path) == ("", None, False)


def test_a_record_that_cannot_be_written_hides_nothing(tmp_path):
    failures.record(KeyError("x"), tmp_path / "no such directory" / "error.json")


def test_variables_inherited_by_a_process_that_is_no_rank():
    # This process's parent is not itself, but it is alive: what a program started from within a rank would see.
    with pytest.raises(RuntimeError, match="inherited the variables of rank 1"):
        failures.attach(Environment("relaunch", 1, 2, 1, 2, 1, "127.0.0.1", 1, parent_pid=os.getpid()))


SCRIPT = """
import os, sys
from engine.distributed import failures
from engine.distributed.environments import detect
failures.attach(detect(os.environ))
failures.attach(detect(os.environ))
raise {"error": ValueError, "exit": SystemExit}[sys.argv[1]]("went wrong")
"""


def test_an_uncaught_exception_is_recorded_and_still_shown(tmp_path):
    path = tmp_path / "error.json"
    [ran] = run_ranks(SCRIPT, 1, "error", check=False, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert ran.returncode == 1
    assert ran.stderr.count("ValueError: went wrong") == 1
    assert "ValueError: went wrong" in failures.read(path)[0]


def test_an_exit_is_no_exception(tmp_path):
    path = tmp_path / "error.json"
    [ran] = run_ranks(SCRIPT, 1, "exit", check=False, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert ran.returncode == 1
    assert not path.exists()


class Struck(Exception):
    pass


def beside(call) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def count(number: int) -> int:
    return sum(1 for _ in range(number))


def test_an_interrupt_strikes_once() -> None:
    interrupt = failures.Interrupt(Struck)
    struck: list[bool] = []
    strikes = 0
    for number in (1, 2):
        go = threading.Event()
        thread = beside(lambda go=go: go.wait() and struck.append(interrupt.interrupt()))
        try:
            go.set()  # outside of Thread.start, which a strike would leave half done
            while len(struck) < number:
                count(1000)
            count(1000)
        except Struck:
            strikes += 1
        thread.join()
    interrupt.forbid()
    assert (strikes, struck) == (1, [True, False])


def test_nothing_strikes_after_withdrawal() -> None:
    interrupt = failures.Interrupt(Struck)
    interrupt.forbid()
    struck: list[bool] = []
    beside(lambda: struck.append(interrupt.interrupt())).join()
    assert count(1000) == 1000
    assert struck == [False]
    assert interrupt.forbidden.is_set()


def test_what_was_on_its_way_ends_in_withdraw() -> None:
    """Both come to the lock at once, many times; a strike that came later would fail the test."""
    for _ in range(300):
        interrupt, start = failures.Interrupt(Struck), threading.Barrier(2)

        def strike(interrupt=interrupt, start=start) -> None:
            start.wait()
            interrupt.interrupt()

        thread = beside(strike)
        with contextlib.suppress(Struck):
            start.wait()
            interrupt.forbid()
        interrupt.forbid()
        thread.join()
        assert count(100) == 100


def test_an_interrupt_is_armed_again_by_another_thread() -> None:
    interrupt = failures.Interrupt(Struck)
    interrupt.forbid()
    ready, ended, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        interrupt.allow()
        ready.set()
        try:
            while not ended.is_set():
                pass
        except Struck:
            seen.append(threading.get_ident())
        interrupt.forbid()

    thread = beside(work)
    ready.wait()
    assert interrupt.interrupt()
    thread.join(60)
    ended.set()
    assert seen == [thread.ident]


CLOSED = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a remote worker "
    "crashing. Check the logs of the remote worker before reporting an error. GLHF!"
)


def test_a_lost_rank_is_told_in_one_sentence(tmp_path, capsys, caplog):
    gone = "lost another rank: its process, its machine or the network to it is gone"
    environment = Environment("torchrun", 0, 2, 0, 2)
    failures.Uncaught(environment, sys.__excepthook__)(RuntimeError, CLOSED, None)
    assert capsys.readouterr().err == f"[rank0]: {gone}\n"
    folder = new_folder(tmp_path)
    folder.max_failures = 2
    folder.ended("step=1", CLOSED)
    assert f"checkpoint step=1 was not written: {gone}; training" in caplog.text
    mismatch = RuntimeError("gloo: op.preamble.length <= op.nbytes. 16 vs 4")  # is not a closed connection
    failures.Uncaught(environment, sys.__excepthook__)(RuntimeError, mismatch, None)
    assert "16 vs 4" in capsys.readouterr().err


def test_an_error_in_the_watch_over_rank_0_is_reported(monkeypatch, caplog):
    answers = iter([parent := os.getppid()])
    monkeypatch.setattr(os, "getppid", lambda: next(answers, None) or fails())
    monkeypatch.setattr(atexit, "register", lambda stop: None)
    failures._end_with_parent(parent, 1)
    told = failure_of(caplog, "fit-parent-watch")
    assert told.endswith("has failed with Planted: on purpose; this rank does not end by itself if rank 0 is gone")
