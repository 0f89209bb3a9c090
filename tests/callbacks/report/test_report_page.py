"""The page as text: everything in it is escaped, nothing in it comes from elsewhere, and runs are compared."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import time
from configparser import ConfigParser
from pathlib import Path

import pytest
from support.browser import Page

from callbacks import write_report, write_run_table
from callbacks.report.page_text import duration, number

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</script><img src=x onerror=alert(1)>{{points}}"


def run(folder: Path, config: dict[str, object], **metrics: list[float]) -> Path:
    """A folder with a record of ``metrics`` at steps 1, 2, ..."""
    folder.mkdir(parents=True)
    entries = {name: {"value": value, "origin": "code"} for name, value in config.items()}
    lines: list[dict[str, object]] = [{"event": "start", "stage": "fit", "time": 1.0, "step": 0, "config": entries}]
    for step in range(max(map(len, metrics.values()))):
        logged = {name: values[step] for name, values in metrics.items() if step < len(values)}
        lines.append({"event": "values", "stage": "fit", "time": 2.0 + step, "step": step + 1, "values": logged})
    (folder / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_text_of_a_run_is_text_on_the_page(tmp_path: Path) -> None:
    hostile = tmp_path / "<b>&amp;"
    run(hostile, {HOSTILE: HOSTILE}, **{HOSTILE: [1.0, 2.0], "'\"": [float("nan"), float("inf")]})
    path = write_report([hostile], tmp_path / "page.html")
    page = Page(path)
    assert not {"img", "b"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.tables["Values of each metric"][1][:2] == ["'\"", "∞"]
    assert [HOSTILE, HOSTILE, "code"] in page.tables["Settings"]
    assert page.series["<b>&amp;", HOSTILE][2] == [1.0, 2.0]
    assert (
        path.read_text().count("onerror") == path.read_text().count("&lt;img src=x onerror=") + 2
    )  # in the data: title and name


def test_only_the_pages_own_style_and_script_may_run(tmp_path: Path) -> None:
    path = write_report([run(tmp_path / "run", {}, loss=[1.0])])
    text = path.read_text()
    policy = next(a["content"] for tag, a in Page(path).tags if tag == "meta" and a.get("http-equiv"))
    for tag in ("style", "script"):
        inner = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert inner is not None
        digest = base64.b64encode(hashlib.sha256(inner[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in str(policy)
    assert "default-src 'none'" in str(policy)
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_runs_are_compared(tmp_path: Path) -> None:
    first = run(tmp_path / "a", {"lr": 0.1, "seed": 1}, **{"train/loss": [3.0, 2.0], "only": [1.0]})
    second = run(tmp_path / "b", {"lr": 0.2, "seed": 1, "extra": {"name": "x", "deep": 1}}, **{"train/loss": [3.0]})
    path = write_report([first, second, tmp_path / "a"])
    assert path == first / "comparison.html"
    page = Page(path)
    assert page.data["runs"] == ["a", "b"]
    assert page.tables["Settings that differ"] == [
        ["setting", "a", "b"],
        ["lr", "0.1", "0.2"],
        ["extra.name", "not set", "x"],
        ["extra.deep", "not set", "1"],
    ]
    assert page.tables["Last value of each metric"][1:] == [["only", "1", ""], ["train/loss", "2", "3"]]
    (loss,) = [chart for chart in page.data["charts"] if chart["title"] == "loss"]
    assert [one["run"] for one in loss["series"]] == [0, 1]


def finished(folder: Path, score: float | None, seconds: float, **config: object) -> Path:
    """A run that ended, with a scored checkpoint."""
    run(folder, config, **{"val/accuracy": [0.5, 0.25]})
    times = {"compute": seconds, "data": 0.0, "validation": 0.0, "checkpoint": 0.0, "other": 0.0}
    end = {
        "event": "end",
        "stage": "fit",
        "time": 9.0,
        "status": "completed",
        "reason": "",
        "step": 1200,
        "epoch": 1,
        "times": times,
    }
    with (folder / "report.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    if score is not None:
        place = folder / "checkpoints" / "step=00000002"
        place.mkdir(parents=True)
        value = {"monitor": "val/accuracy", "mode": "max", "value": score}
        (place / "manifest.json").write_text(json.dumps({"counters": {"step": 2}, "score": value, "saved_at": 3.0}))
    return folder


def test_a_comparison_begins_with_a_table_of_runs(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / "lr=0.1", 0.5, 90.0, lr=0.1, seed=1, act="relu", name="lr=0.1"),
        finished(tmp_path / "lr=0.02", 0.75, 4.0, lr=0.02, seed=1, act="tanh", name="lr=0.02", steps=8),
        run(tmp_path / "killed", {"lr": 1, "seed": 1, "act": "=1+1"}, loss=[1.0]),
    ]
    path = write_report(runs, tmp_path / "page.html")
    head, *rows = Page(path).tables["Runs"]
    assert head == [
        "run",
        "lr",
        "act",
        "steps (setting)",
        "best val/accuracy",
        "status",
        "steps",
        "training time",
        "started",
    ]
    assert [row[:8] for row in rows] == [
        ["lr=0.1", "0.1", "relu", "", "0.5", "completed", "1,200", "1 min 30 s"],
        ["lr=0.02", "0.02", "tanh", "8", "0.75", "completed", "1,200", "4 s"],
        ["killed", "1", "=1+1", "", "", "no end recorded", "1", "1 s"],
    ]
    text = path.read_text()
    assert text.index("<caption>Runs") < text.index('id="curves"')
    table = write_run_table(runs, tmp_path / "new" / "runs.csv")
    (address,) = [a["href"] for tag, a in Page(path).tags if tag == "a" and "download" in a]
    assert address is not None
    assert base64.b64decode(address.partition("base64,")[2]) == table.read_bytes()  # the page's link
    with table.open(newline="") as file:
        first, *lines = csv.reader(file)
    assert first == [*head[:-2], "training time (s)", "started"]
    assert [line[:8] for line in lines] == [
        ["lr=0.1", "0.1", "relu", "", "0.5", "completed", "1200", "90.0"],
        ["lr=0.02", "0.02", "tanh", "8", "0.75", "completed", "1200", "4.0"],
        ["killed", "1", "'=1+1", "", "", "no end recorded", "1", "1.0"],  # no formula
    ]
    assert {line[8] for line in lines} == {"1970-01-01 00:00:01+00:00"}


def test_runs_without_scores_are_compared_by_their_last_values(tmp_path: Path) -> None:
    metrics = {"val/loss": [2.0, 1.5], "val/accuracy": [0.1, float("nan")], "train/loss": [1.0, 0.5]}
    runs = [run(tmp_path / "a", {}, **metrics), run(tmp_path / "b", {}, **{"train/loss": [1.0, 0.25]})]
    (head, a, b) = Page(write_report(runs, tmp_path / "page.html")).tables["Runs"]
    assert head[1:3] == ["last val/accuracy", "last val/loss"]
    assert [a[1:3], b[1:3]] == [["NaN", "1.5"], ["", ""]]
    one = finished(tmp_path / "c", 0.5, 1.0)
    two = finished(tmp_path / "d", 3.0, 1.0)
    manifest = two / "checkpoints" / "step=00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("val/accuracy", "val/loss").replace("max", "min"))
    head, *rows = Page(write_report([one, two], tmp_path / "page.html")).tables["Runs"]
    assert [head[1], *(row[1] for row in rows)] == ["best score", "0.5 (val/accuracy)", "3 (val/loss)"]


def test_two_hundred_runs_are_rows_in_a_second(tmp_path: Path) -> None:
    for lr in range(200):
        finished(tmp_path / "sweep" / f"lr={lr}", lr / 200, 1.0, lr=lr)
    seconds: list[float] = []
    while len(seconds) < 3 and not any(each < 1 for each in seconds):
        began = time.process_time()
        path = write_report([tmp_path / "sweep"])
        seconds.append(time.process_time() - began)
    assert min(seconds) < 1, seconds
    page = Page(path)
    assert len(page.tables["Runs"]) == 201
    assert page.tables["Last value of each metric"][:2] == [["run", "val/accuracy"], ["lr=0", "0.25"]]  # rows, too


def test_a_value_logged_twice_and_its_validation_share_a_chart(tmp_path: Path) -> None:
    names = ("train/loss_step", "train/loss_epoch", "val/loss", "warm_step", "acc_step", "acc_epoch", "val_acc")
    page = Page(write_report([run(tmp_path / "run", {}, **{name: [1.0] for name in names})]))
    charts = {chart["title"]: [one["name"] for one in chart["series"]] for chart in page.data["charts"]}
    assert charts == {"loss": [*names[:3]], "warm_step": ["warm_step"], "acc": [*names[4:]]}
    looks = [(one["color"], one["dash"]) for one in page.data["charts"][0]["series"]]
    assert len(set(looks)) == len({dash for _, dash in looks}) == 3


def test_labels_leave_out_the_folder_that_all_runs_share(tmp_path: Path) -> None:
    for name in ("", "version_1", "a"):
        run_folder = tmp_path / "root" / name
        run_folder.mkdir(parents=True, exist_ok=True)
        run(run_folder / "x", {}, loss=[1.0])
        (run_folder / "x" / "report.jsonl").rename(run_folder / "report.jsonl")
    data = Page(write_report([tmp_path / "root"])).data
    assert data["runs"] == ["root", "root/version_1", "a"]
    assert data["labels"] == ["root", "root/version_1", "a"]
    data = Page(
        write_report([tmp_path / "root" / "version_1", tmp_path / "root" / "version_0"], tmp_path / "p.html")
    ).data
    assert data["labels"] == ["version_1", "root"]


def test_training_and_validation_share_a_chart_and_what_is_not_a_result_is_apart(tmp_path: Path) -> None:
    names = (
        "train/loss",
        "val/loss",
        "val_accuracy",
        "lr-AdamW",
        "lr-AdamW-momentum",
        "grad_norm",
        "grad_norm/w",
        "cpu/rss_bytes",
        "cpu/percent",
        "tokens_per_second",
        "a/b",
    )
    page = Page(write_report([run(tmp_path / "run", {}, **{name: [1.0] for name in names})]))
    charts = {
        chart["title"]: (chart["group"], [one["name"] for one in chart["series"]]) for chart in page.data["charts"]
    }
    assert charts == {
        "loss": ("Metrics", ["train/loss", "val/loss"]),
        "accuracy": ("Metrics", ["val_accuracy"]),
        "a/b": ("Metrics", ["a/b"]),
        "learning rate": ("Learning rate", ["lr-AdamW"]),
        "lr-AdamW-momentum": ("Learning rate", ["lr-AdamW-momentum"]),
        "grad_norm": ("Gradient norm", ["grad_norm"]),
        "grad_norm/w": ("Parameters", ["grad_norm/w"]),
        "cpu/rss_bytes": ("Memory", ["cpu/rss_bytes"]),
        "cpu/percent": ("Machine", ["cpu/percent"]),
        "tokens_per_second": ("Throughput", ["tokens_per_second"]),
    }


def test_the_number_of_points_has_a_limit(tmp_path: Path) -> None:
    values = [float(n % 7) for n in range(2000)]
    values[1234] = 1000.0
    page = Page(write_report([run(tmp_path / "run", {}, loss=values)], max_points=300))
    steps, _, kept = page.series["run", "loss"]
    assert len(steps) <= 300
    assert kept[steps.index(1235.0)] == 1000.0


def test_a_page_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path / "run", {}, loss=[1.0])
    path = write_report([folder])
    before = path.read_text()
    (folder / "report.jsonl").write_bytes(b"\xff\n")
    write_report([folder])  # nothing usable, and still a page
    assert "No values were logged" in Page(path).text
    assert before != path.read_text()
    assert [each.name for each in folder.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (4.2149, "4.21 s"), (61.0, "1 min 01 s"), (3725.0, "1 h 02 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers() -> None:
    assert [number(value) for value in (0.125, 1e-9, 1234567.0, float("nan"), float("-inf"))] == [
        *("0.125", "1e-09", "1.23457e+06", "NaN", "-∞")
    ]


def test_an_installed_package_has_the_pages_files() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = [each.strip() for each in config["options.package_data"]["callbacks"].split(",")]
    found = {path for pattern in patterns for path in (ROOT / "callbacks").glob(pattern)}
    needed = {path for path in (ROOT / "callbacks" / "report").iterdir() if path.is_file() and path.suffix != ".py"}
    assert needed
    assert needed <= found


def test_a_stage_has_one_color_in_all_charts_and_the_series_of_a_chart_differ(tmp_path: Path) -> None:
    names = ["train/loss", "val/loss", "val/accuracy", "test/accuracy", "gain", "noise", "lr-a", "lr-b", "lr-c"]
    path = write_report([run(tmp_path / "run", {}, **{name: [1.0, 2.0] for name in names})])
    looks = {s["name"]: (s["color"], s["dash"]) for chart in Page(path).data["charts"] for s in chart["series"]}
    assert looks["val/loss"] == looks["val/accuracy"] == (1, 1)
    assert [looks[name][0] for name in ("train/loss", "test/accuracy")] == [0, 2]
    others = [looks[name][0] for name in ("gain", "noise", "lr-a", "lr-b", "lr-c")]
    assert len(set(others)) == 5
    assert not {0, 1, 2} & set(others)


def test_a_comparison_shows_curves_first_and_what_really_differs(tmp_path: Path) -> None:
    """One run is of an earlier version, without the setting ``new``; a third one has no settings."""
    one, two = {"lr": 0.1, "seed": 1, "root_dir": "a"}, {"lr": 0.2, "seed": 1, "root_dir": "b", "extra": 5}
    for folder, config in (("one", one), ("two", two)):
        run(tmp_path / folder, dict(config), loss=[1.0])
    record = tmp_path / "two" / "report.jsonl"
    start, *rest = record.read_text().splitlines(keepends=True)
    event = json.loads(start)
    event["config"]["new"] = {"value": None, "origin": "default"}
    record.write_text(json.dumps(event) + "\n" + "".join(rest))
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "metrics.csv").write_text("step,epoch,loss\n1,0,3.0\n")
    (tmp_path / "three" / "config.yaml").write_text("")
    path = write_report([tmp_path / name for name in ("one", "two", "three")], tmp_path / "page.html")
    assert Page(path).tables["Settings that differ"][1:] == [
        ["lr", "0.1", "0.2", "not recorded"],
        ["extra", "not set", "5", "not recorded"],
    ]
    text = path.read_text()
    assert text.index('id="curves"') < text.index('id="differences"')


def test_an_evaluation_is_not_compared(tmp_path: Path) -> None:
    run(tmp_path / "root", {"lr": 0.1}, loss=[1.0, 0.5])
    test = run(tmp_path / "root" / "version_1", {}, **{"test/loss": [0.75]})
    (test / "report.jsonl").write_text((test / "report.jsonl").read_text().replace('"fit"', '"test"'))
    path = write_report([tmp_path / "root"])
    assert path == tmp_path / "root" / "report.html"  # the page of the one training
    page = Page(path)
    assert page.data["runs"] == ["root"]
    assert page.tables["Values of each evaluation"][1][:4] == ["root/version_1", "test/loss", "0.75", "1"]
    assert "Settings that differ" not in page.tables
    assert Page(write_report([test])).data["runs"] == ["root/version_1"]  # alone
