"""What is read from folders of runs: records written by hand, and files that nobody would write."""

from __future__ import annotations

import json
import random

import pytest

from callbacks import write_report
from callbacks.report.runs import named, read_run, runs_in


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


def test_a_csv_logger_is_enough(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,samples,lr-SGD,loss\n1,0,8,0.1,2.0\n2,0,16,0.1,\n3,0,24,0.1,nan\n4,0,32,0.1,1"
    )
    (tmp_path / "config.yaml").write_text("max_epochs: 3  # code\nstrategy: {name: ddp}\n")
    run = read_run(tmp_path)
    assert list(points(run.metrics["loss"])) == [1, 3]  # the last row may not be whole
    assert (list(run.metrics), list(run.rates)) == (["loss"], ["lr-SGD"])
    assert run.config == [("max_epochs", "3", ""), ("strategy.name", "ddp", "")]


def test_a_checkpoint_that_was_being_written_is_not_there(tmp_path):
    """A kill between the manifest and the renaming leaves a hidden folder that has everything."""
    write(tmp_path, start())
    for name, step in (("step=00000003", 3), (".step=00000006.partial", 6)):
        place = tmp_path / "checkpoints" / name
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"counters": {"step": step}}))
    assert [each["step"] for each in read_run(tmp_path).checkpoints] == [3]


def test_folders_of_runs(tmp_path):
    for name in ("a", "a/version_2", "a/version_10", "b/version_1"):
        write(tmp_path / name, start())
    assert [run.folder.name for run in runs_in(tmp_path / "a")] == ["a", "version_2", "version_10"]
    assert len(runs_in(tmp_path / "a", only=True)) == 1
    runs = runs_in(tmp_path)
    named(runs)
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
    kinds = ["start", "values", "checkpoint", "removed", "times", "end", "close", "read", "__class__"]
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
