"""What is read from folders of runs: records written by hand, and files that nobody would write."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import time
import tracemalloc

import numpy as np
import pytest
from support.browser import Page

from callbacks import write_report
from callbacks.report import record as record_module
from callbacks.report import runs as runs_module
from callbacks.report.callback import _step_of
from callbacks.report.record import Record
from callbacks.report.runs import give_names, logged_until, read_run, runs_in


def write(folder, *events):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "report.jsonl").write_text(text)
    return folder


def start(step=0, time=100.0, **more):
    return {"event": "start", "stage": "fit", "step": step, "time": time, "elapsed": 0.0, **more}


def values(step, time, apart=0.0, stage="fit", **logged):
    return {"event": "values", "stage": stage, "step": step, "time": time, "apart": apart, "values": logged}


def points(curve):
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def test_a_resumed_run_forgets_what_it_repeats(tmp_path):
    write(
        tmp_path,
        *(start(), values(1, 101.0, loss=1.0), values(2, 102.0, loss=2.0), values(3, 103.0, loss=99.0, gone=1.0)),
        *(start(2, 200.0, elapsed=2.0), values(4, 202.0, loss=4.0), values(4, 203.0, loss=4.5)),
    )
    run = read_run(tmp_path)
    assert points(run.metrics["loss"]) == {
        1: 1.0,
        2: 2.0,
        4: 4.5,
    }  # step 3 was not reached again; step 4 has its last value
    assert "gone" not in run.metrics
    assert run.metrics["loss"].seconds.tolist() == [
        1.0,
        2.0,
        5.0,
    ]  # of training, without the time between the two processes
    assert (run.step, run.starts) == (4, 2)


def test_speed_leaves_out_validation_and_checkpoints(tmp_path):
    write(tmp_path, start(), values(10, 110.0), values(10, 115.0, 5.0, score=1.0), values(30, 125.0, 5.0))
    # From 110 to 125, of which 5 s were validation: 20 steps in 10 s.
    assert points(read_run(tmp_path).speed["steps per second"]) == {30: 2.0}


def test_times_of_all_processes_are_added(tmp_path):
    times = {"data": 1.0, "compute": 5.0, "validation": 0.0, "checkpoint": 0.0, "other": 2.0}
    end = {"event": "end", "stage": "fit", "time": 300.0, "status": "completed", "reason": "", "step": 9, "epoch": 3}
    killed = {"event": "times", "time": 104.0, "times": {"data": 1.0, "compute": 2.0}}
    write(tmp_path, start(), killed, values(5, 110.0), start(0, 290.0), {**end, "times": times})
    run = read_run(tmp_path)
    assert run.times == {
        "data": 2.0,
        "compute": 7.0,
        "unknown": 7.0,
        "validation": 0.0,
        "checkpoint": 0.0,
        "other": 2.0,
    }
    assert (run.status, run.step, run.epochs, run.seconds) == ("completed", 9, 3, 18.0)


def test_parameter_groups_with_the_same_learning_rate_are_one_curve(tmp_path):
    rows = [
        {**values(n, 100.0 + n), "lr": {"A group 1": 0.1 * n, "A group 2": 0.1 * n, "B group 1": 1.0, "B group 2": n}}
        for n in (1, 2)
    ]
    write(tmp_path, start(), *rows)
    assert list(read_run(tmp_path).rates) == ["A, all groups", "B group 1", "B group 2"]


def test_a_long_record_is_small_and_read_in_little_memory(tmp_path):
    """20,000 rows of 14 numbers: 112 bytes of numbers each. A row by name had 560 bytes, and 1 kB in memory."""
    write(tmp_path, start())
    record, names = Record(tmp_path), [f"train/metric {number}" for number in range(10)]
    for step in range(1, 20_001):
        record.row(step, 0, dict.fromkeys(names, step / 7), {"SGD": 0.1}, {"main process": step}, 0.0, 8 * step)
    record.close()
    assert (tmp_path / "report.jsonl").stat().st_size < 230 * 20_000
    tracemalloc.start()
    try:
        write_report([tmp_path])
        assert tracemalloc.get_traced_memory()[1] < 600 * 20_000  # 60 MB for 10^5 rows
    finally:
        tracemalloc.stop()
    curves = read_run(tmp_path).metrics
    assert list(curves) == names
    assert curves[names[3]].steps.tolist() == list(range(1, 20_001))
    assert (curves[names[3]].values == np.arange(1, 20_001) / 7).all()


def test_rows_of_other_names_and_of_a_killed_process(tmp_path):
    """Two processes, each with numbers of columns of its own; the first one's last row is not whole."""
    write(tmp_path, start(time=time.time()))
    for first, names in ((1, ("a", "b")), (3, ("b", "c"))):
        record = Record(tmp_path)
        record.row(first, 0, {names[0]: 1.0}, {}, {})
        record.row(first + 1, 0, {names[1]: float("nan"), names[0]: float("inf")}, {}, {})
        record.close()
        with (tmp_path / "report.jsonl").open("rb+") as file:
            file.truncate(file.seek(0, 2) - (5 if first == 1 else 0))
    run = read_run(tmp_path)
    assert {name: list(points(curve)) for name, curve in run.metrics.items()} == {"a": [1], "b": [3, 4], "c": [4]}
    assert np.isposinf(points(run.metrics["b"])[4])
    assert run.step == 4


def test_a_csv_logger_is_enough(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,samples,lr-SGD,loss\n1,0,8,0.1,2.0\n2,0,16,0.1,\n3,0,24,0.1,nan\n4,0,32,0.1,1"
    )
    (tmp_path / "config.yaml").write_text("max_epochs: 3  # code\nstrategy: {name: ddp}\n")
    run = read_run(tmp_path)
    assert list(points(run.metrics["loss"])) == [1, 3]  # the last row may not be whole
    assert (list(run.metrics), list(run.rates)) == (["loss"], ["lr-SGD"])
    assert run.config == [("max_epochs", "3", ""), ("strategy.name", "ddp", "")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n", "it has aliases"),
        ("a: &a {k: 1}\nb: {<<: *a}\n", "it has aliases"),
        ("a: [", "while parsing"),
        ("[" * 5000, "RecursionError|recursion"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_told(tmp_path, text, reason):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.0\n")
    (tmp_path / "config.yaml").write_text(text)
    run = read_run(tmp_path)
    assert points(run.metrics["loss"]) == {1: 2.0}
    ((name, value, _),) = run.config
    assert name == "config.yaml"
    assert re.match(f"not read: .*({reason})", value, re.DOTALL)


def test_a_checkpoint_that_was_being_written_is_not_there(tmp_path):
    """A kill between the manifest and the renaming leaves a hidden folder that has everything."""
    write(tmp_path, start())
    for name, step in (("step=00000003", 3), (".step=00000006.partial", 6)):
        place = tmp_path / "checkpoints" / name
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"counters": {"step": step}}))
    assert [each["step"] for each in read_run(tmp_path).checkpoints] == [3]


def test_the_step_of_a_checkpoint_is_that_of_its_save(tmp_path):
    """A save in the background was noticed at step 12; a removed one, and one at a URL, have only the record."""
    place = tmp_path / "checkpoints" / "step=00000010"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(json.dumps({"counters": {"step": 10}}))
    saved = {"event": "checkpoint", "time": 101.0, "step": 12, "score": 0.5, "best": True, "path": str(place)}
    write(tmp_path, start(), saved)
    assert [(each["step"], each["score"], each["best"]) for each in read_run(tmp_path).checkpoints] == [(10, 0.5, True)]
    assert _step_of(place) == 10
    assert [_step_of(f"s3://bucket/run/{name}") for name in ("step=00000020", "best")] == [20, None]


def test_folders_of_runs(tmp_path):
    for name in ("a", "a/version_2", "a/version_10", "b/version_1"):
        write(tmp_path / name, start())
    assert [run.folder.name for run in runs_in(tmp_path / "a")] == ["a", "version_2", "version_10"]
    assert len(runs_in(tmp_path / "a", only=True)) == 1
    runs = runs_in(tmp_path)
    give_names(runs)
    assert [run.name for run in runs] == ["a", "a/version_2", "a/version_10", "b/version_1"]
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        runs_in(tmp_path / "nowhere")


@pytest.mark.parametrize("seed", range(5))
def test_a_hostile_record_is_read_without_an_error(tmp_path, seed):
    odd = [
        None,
        True,
        -1,
        1e300,
        float("nan"),
        float("inf"),
        "x" * 5000,
        [],
        [[]],
        {},
        {"a": {"b": []}},
        1 << 80,
        "\ud800",
    ]
    keys = "event time stage step elapsed config hyperparameters machine values apart lr memory samples path score best times status"
    kinds = ["start", "values", "checkpoint", "best", "removed", "times", "end", "close", "read", "__class__"]
    draw = random.Random(seed)
    lines = []
    for _ in range(400):
        event = {key: draw.choice(odd) for key in keys.split() if draw.random() < 0.6}
        event |= {"event": draw.choice(kinds), **({"time": draw.random()} if draw.random() < 0.9 else {})}
        event |= {"values": {"m": draw.choice(odd), "n": 1}} if draw.random() < 0.5 else {}
        lines.append(json.dumps(event) if draw.random() < 0.95 else json.dumps(event)[:7])
    (tmp_path / "report.jsonl").write_text("\n".join(["[1]", "7", "[" * 100_000, *lines]))
    run = read_run(tmp_path)
    assert all(len(curve.steps) == len(curve.values) for curve in run.metrics.values())
    write_report([tmp_path])


@pytest.fixture
def small_limits(monkeypatch):
    """A file is large from 50 kB on."""
    for module in (record_module, runs_module):
        monkeypatch.setattr(module, "WHOLE", 50_000)
        monkeypatch.setattr(module, "PLACES", 16)
    monkeypatch.setattr(record_module, "_ENDS", 2_000)
    monkeypatch.setattr(record_module, "_STRETCH", 500)


def test_of_a_large_record_some_rows_are_read_and_all_other_events(tmp_path, small_limits):
    """5,000 rows of 107 bytes; then a resume at step 4,000 with other columns, a checkpoint, and 1,000 rows more."""
    now = time.time()
    for begun, names in ((0, ["a", "b"]), (4_000, ["b", "c"])):
        record = Record(tmp_path)
        record.add("start", stage="fit", step=begun, elapsed=float(begun))
        for step in range(begun + 1, begun + 5_001):
            record.row(step, 0, dict.fromkeys(names, step / 7), {}, {})
            if step == 4_500:
                record.add("checkpoint", path="s3://x/step=00004500", step=4_500, score=0.5, best=True)
        record.close()
    run = read_run(tmp_path)
    curves = {name: points(curve) for name, curve in run.metrics.items()}
    assert {name: (min(curve), max(curve)) for name, curve in curves.items()} == {
        "a": (1, pytest.approx(4_000, abs=800)),
        "b": (1, 9_000),
        "c": (pytest.approx(4_001, abs=800), 9_000),
    }
    assert max(curves["a"]) <= 4_000 < min(curves["c"])
    assert all(value == step / 7 for curve in curves.values() for step, value in curve.items())
    assert 50 < len(curves["b"]) < 300  # of 9,000
    assert (run.starts, run.step, [each["step"] for each in run.checkpoints]) == (2, 9_000, [4_500])
    assert now - 1 < run.started < now + 300
    page = Page(write_report([tmp_path]))
    assert "at 16 evenly spaced places were read. Lowest, highest and rare values may be missing." in page.text
    assert logged_until(tmp_path, 3_333)[3_333] == {"a": 3_333 / 7, "b": 3_333 / 7}  # for a comparison every row counts


def test_of_a_large_csv_file_some_rows_are_read(tmp_path, small_limits):
    text = "step,epoch,samples,loss\n" + "".join(f"{step},0,{step * 8},{step / 7}\n" for step in range(1, 10_001))
    (tmp_path / "metrics.csv").write_text(text + "10001,0,")
    run = read_run(tmp_path)
    found = points(run.metrics["loss"])
    assert (min(found), max(found), run.step) == (1, 10_000, 10_000)
    assert all(value == step / 7 for step, value in found.items())
    assert 100 < len(found) < 800
    assert max(np.diff(list(found))) < 800  # the places are evenly spaced
    assert "metrics.csv has 0.00 GiB: of its rows" in run.note


@pytest.mark.parametrize("numbered", [True, False])
def test_of_many_runs_the_last_are_on_the_page_and_few_are_opened(tmp_path, monkeypatch, numbered):
    names = [f"version_{number}" if numbered else f"run {number:04}" for number in range(1, 501)]
    for name in names:
        write(tmp_path / name, start(), values(1, 101.0, loss=1.0))
    looked_at, known = [], runs_module._has_metrics

    def counted(folder):
        looked_at.append(folder)
        return known(folder)

    monkeypatch.setattr(runs_module, "_has_metrics", counted)
    page = Page(write_report([tmp_path], tmp_path / "page.html"))
    assert [run.rpartition("/")[2] for run in page.data["runs"]] == names[-250:]
    assert "has more runs than the last 250, which are on this page" in page.text
    assert len(looked_at) <= 252


def test_folders_that_cannot_be_read_hide_no_runs(tmp_path, monkeypatch):
    write(tmp_path / "one", start(), values(1, 101.0, loss=1.0))
    (tmp_path / "loop").symlink_to("loop")
    (run,) = runs_in(tmp_path)
    assert (run.folder, run.note) == (tmp_path / "one", "")
    (tmp_path / "lost+found").mkdir()
    monkeypatch.setattr(os, "listdir", refusing("lost+found"))  # the system refuses nothing to root
    (run,) = runs_in(tmp_path)
    assert run.note.startswith(f"Not on this page: runs in folders that may not be read ({tmp_path / 'lost+found'})")
    (tmp_path / "one" / "report.jsonl").unlink()
    with pytest.raises(PermissionError, match=re.escape("lost+found")):
        runs_in(tmp_path)


def refusing(name, listdir=os.listdir):
    def refuse(path):
        if os.path.basename(path) == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    return refuse


@pytest.mark.parametrize("name", ["report.jsonl", "metrics.csv"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_line_without_an_end_is_left_out(tmp_path, name, whole):
    head = (
        b'{"event": "start", "time": 1.0, "stage": "fit"}\n'
        if name == "report.jsonl"
        else b"step,epoch,loss\n1,0,0.5\n"
    )
    with (tmp_path / name).open("wb") as file:
        file.write(head)
        file.truncate(200 << 30)  # nearly all of it a hole, which takes no space
    began = time.process_time()
    run = read_run(tmp_path, whole=whole)
    assert time.process_time() - began < 20
    assert run.starts == 1 if name == "report.jsonl" else list(run.metrics) == ["loss"]
