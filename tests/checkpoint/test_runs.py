"""``run.json``: its bytes, and reading it without trust."""

from __future__ import annotations

import json
import os

import pytest

from engine.checkpoint.runs import NO_RECORD, RunRecord

TEXT = (
    b'{"id": "5f", "stage": "fit", "job": ["slurm 3", "torchelastic a"], "host": "n1", "pid": 41, "process": "99", '
    b'"since": "2026-01-02 03:04:05 +0000", "status": "running"}'
)
RECORD = RunRecord("5f", "fit", ("slurm 3", "torchelastic a"), "n1", 41, "99", "2026-01-02 03:04:05 +0000", "running")


def test_the_text_is_that_of_earlier_versions() -> None:
    assert RECORD.text() == TEXT.replace(b", ", b",\n ")
    assert RunRecord.parse(TEXT) == RECORD


def test_where_a_run_began_and_ended_is_kept_by_those_that_continue_it() -> None:
    earlier = RunRecord("5f", "fit", began_with="runs/checkpoints/step=00000006", ended_at=(9, 31))
    assert RunRecord.parse(earlier.text()) == earlier
    for stage in ("fit", "test"):
        record = RunRecord.of_this_process("new", stage, []).continuing(earlier)
        assert (record.began_with, record.ended_at) == (earlier.began_with, earlier.ended_at)


@pytest.mark.parametrize(
    "name", ["id", "stage", "job", "host", "pid", "process", "since", "status", "began_with", "ended_at"]
)
@pytest.mark.parametrize("value", [None, True, 1.5, {}, [[]]])
def test_a_field_of_another_type_counts_as_missing(name: str, value: object) -> None:
    record = RunRecord.parse(json.dumps({**json.loads(TEXT), name: value}).encode())
    assert vars(record) == {**vars(RECORD), name: vars(NO_RECORD)[name]}


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"[]", b"{}", b'{"id": 7}', b"\xff"])
def test_what_is_no_record_is_an_empty_one(text: bytes) -> None:
    assert not RunRecord.parse(text)


def test_who_continues_a_run_keeps_its_id_and_who_evaluates_it_also_its_job() -> None:
    now = RunRecord.of_this_process("new", "fit", ["slurm 8"])
    assert vars(now.continuing(RECORD)) == {**vars(now), "id": "5f"}
    assert now.continuing(NO_RECORD) == now
    test = RunRecord.of_this_process("new", "test", ["slurm 8"])
    assert vars(test.continuing(RECORD)) == {**vars(test), "id": "5f", "stage": "fit", "job": RECORD.job}
    assert test.continuing(RunRecord("5f", "fit")).job == ()


def test_a_process_runs_here_while_its_number_start_and_host_are_those_of_the_record() -> None:
    record = RunRecord.of_this_process("a", "fit", [])
    assert record.runs_here
    assert record.owner.startswith(f"process {os.getpid()} on ")
    for name, value in (("host", "elsewhere"), ("process", "1"), ("status", "ended"), ("pid", 1 << 40)):
        assert not RunRecord(**{**vars(record), name: value}).runs_here
    assert NO_RECORD.owner == "process unknown on unknown (since unknown)"
