"""Ranks that end, and ranks that are ended. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.commands import alive
from support.ranks import PATIENCE_S

from engine.distributed import failures
from engine.launch import supervisor
from engine.launch.first_failure import first_failure
from engine.launch.output import Output
from engine.launch.supervisor import CommandRank, Supervisor


def test_a_rank_that_ignores_sigterm_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        rank = CommandRank(0, 0, process, tmp_path / "error.json")
        watched = Supervisor([rank])
        assert watched.running() == [rank]
        watched.end(signal.SIGTERM, 0.1)
        watched.close()
    assert (rank.exit_code, rank.ended_by_launcher, rank.failed) == (-signal.SIGKILL, True, False)
    deadline = time.monotonic() + PATIENCE_S
    while alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_has_failed_by_itself_stays_so(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sh", "-c", "exit 3"]) as failing,
        subprocess.Popen(["sleep", "600"]) as waiting,
    ):
        ranks = [CommandRank(rank, rank, process, tmp_path) for rank, process in enumerate((failing, waiting))]
        watched = Supervisor(ranks)
        assert watched.changed.wait(PATIENCE_S)
        assert watched.running() == ranks[1:]
        watched.end(signal.SIGTERM, PATIENCE_S)
        watched.close()
    assert [(rank.exit_code, rank.failed) for rank in ranks] == [(3, True), (-signal.SIGTERM, False)]
    assert 0 < ranks[0].ended_at <= ranks[1].ended_at


LOST = RuntimeError("[gloo/pair.cc:553] Connection closed by peer")


def test_a_rank_that_ends_with_its_error_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that it leaves alone may end before it does."""
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.0)
    with (
        subprocess.Popen(["sh", "-c", "exit 1"]) as alone,
        subprocess.Popen(["sh", "-c", "sleep 0.5; exit 1"]) as failing,
        subprocess.Popen(["sleep", "600"]) as waiting,
    ):
        ranks = [
            CommandRank(rank, rank, process, tmp_path / f"{rank}.json")
            for rank, process in enumerate((alone, failing, waiting))
        ]
        for rank, error in zip(ranks, (LOST, ValueError("the cause"), LOST), strict=True):
            failures.record(error, rank.error_file)
        watched = Supervisor(ranks)
        watched.await_other_failures()
        assert watched.running() == ranks[2:]
        failure = first_failure(ranks)
        watched.end(signal.SIGTERM, PATIENCE_S)
        watched.close()
    assert failure is not None
    assert (failure.rank, failure.is_consequence) == (ranks[1], False)
    assert failure.report.endswith("ValueError: the cause")


# -- helper threads that fail -----------------------------------------------------------------------------------------------------------------


def test_a_rank_whose_end_cannot_be_seen_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: CommandRank) -> int:
        raise ChildProcessError("planted")

    monkeypatch.setattr(CommandRank, "wait", fails)
    with subprocess.Popen(["sleep", "0"]) as process:
        rank = CommandRank(0, 0, process, tmp_path)
        watched = Supervisor([rank])
        assert watched.changed.wait(PATIENCE_S)
        watched.close()
    assert (rank.exit_code, rank.failed) == (1, True)
    assert caplog.text.count("the thread fit-rank-0 has failed with ChildProcessError: planted") == 1


def test_output_is_read_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    reads, failing = Output._read, iter([True, True])

    def fails_twice(self: Output, stream: object) -> int:
        if next(failing, False):
            raise MemoryError("planted")
        return reads(self, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(Output, "_read", fails_twice)
    output = Output(tmp_path, None)
    (streams,) = output.open([0], 1)
    for descriptor in streams:
        os.write(descriptor, b"a line\n")  # type: ignore[arg-type]
    deadline = time.monotonic() + PATIENCE_S
    while (tmp_path / "rank=0.log").read_text().count("a line") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    output.close()
    assert caplog.text.count("the thread fit-output has failed with MemoryError: planted") == 1
