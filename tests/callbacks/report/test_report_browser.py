"""The page in a real browser: curves as they are drawn, no request, nothing on the console, no barrier that axe-core finds."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import browser as chromium

from callbacks import CSVLogger, ModelCheckpoint, Report, write_report
from engine import Fit, TrainModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.program() is None, reason="Chromium is not installed (Debian's package chromium)"),
]
HOSTILE = "</script><img src=x onerror=alert(1)>"
VIEWS: dict[str, dict[str, Any]] = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}

CURVES = """
[...document.querySelectorAll("figure")].map(figure => ({
  title: figure.querySelector("h4").textContent,
  x: [...figure.querySelectorAll("text.x")].map(t => [+t.dataset.value, t.textContent, +t.getAttribute("x")]),
  y: [...figure.querySelectorAll("text.y")].map(t => [+t.dataset.value, t.textContent, +t.getAttribute("y") - 4]),
  paths: [...figure.querySelectorAll("path[data-name]")].map(p => [p.dataset.name, p.getAttribute("d")]),
}))
"""
"""What is drawn: of each chart the labels of its axes (value, text, place), and its curves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of digits: one that ended, and one whose end is not recorded."""
    pytest.importorskip("sklearn")
    from examples.digits import Digits, DigitsData

    root = tmp_path_factory.mktemp("runs") / "digits"
    for lr, clip in ((4e-3, 1.0), (1e-3, 0.5)):
        torch.manual_seed(0)
        callbacks = [Report(), CSVLogger(), ModelCheckpoint(every="1 epochs", monitor="val/accuracy", mode="max")]
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "log_every_n_steps": 2}
        fit = Fit(**options, gradient_clip_val=clip, root_dir=root, callbacks=callbacks)
        fit.run(Digits(lr, 2), datamodule=DigitsData(128))
    record = root / "version_1" / "report.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    write_report([root])
    return root


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.chromium() as found:
        yield found


def axis(labels: list[list[Any]]) -> Any:
    """Pixels to values, from the first and the last label."""
    (first, _, start), (last, _, end) = labels[0], labels[-1]
    return lambda pixel: first + (pixel - start) * (last - first) / (end - start)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_the_curves_are_those_of_the_metrics_file(folder: Path, browser: chromium.Browser) -> None:
    browser.open(folder / "report.html")
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = set(rows[0]) - {"step", "epoch", "samples"}
    assert names == {"train/loss", "val/loss", "val/accuracy"}
    drawn = {}
    for chart in browser.evaluate(CURVES):
        step, value = axis(chart["x"]), axis(chart["y"])
        height = abs(chart["y"][0][0] - chart["y"][-1][0])
        for name, path in chart["paths"]:
            drawn[name] = [(step(x), value(y), height) for x, y in points(path)]
    for name in names:
        expected = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        assert len(drawn[name]) == len(expected) > 1
        for (x, y, height), (step_, value_) in zip(drawn[name], expected, strict=True):
            assert abs(x - step_) < 0.2
            assert abs(y - value_) < 0.01 * height
    assert {"AdamW", "steps per second", "main process"} <= drawn.keys()


@pytest.mark.parametrize("page", ["report.html", "comparison.html"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_request_nothing_on_the_console_and_nothing_wider_than_the_window(
    folder: Path, browser: chromium.Browser, page: str, view: str
) -> None:
    browser.open(folder / page, **VIEWS[view])
    assert [each for each in browser.requests() if not each.startswith("file:")] == []
    assert len(browser.requests()) == 1
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert light == (view != "dark")


@pytest.mark.parametrize("page", ["report.html", "comparison.html"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_no_violation(folder: Path, browser: chromium.Browser, page: str, view: str) -> None:
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core is not installed: pip install --no-deps axe-playwright-python")
    browser.open(folder / page, **VIEWS[view])
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.evaluate(Path(package.origin).with_name("axe.min.js").read_text() + "; 0")
    found = browser.evaluate(
        "axe.run().then(r => ({bad: r.violations.map(v => [v.id, v.nodes[0].html]), good: r.passes.length}))"
    )
    assert found["bad"] == []
    assert found["good"] > 20


def test_a_chart_is_read_with_the_keyboard(folder: Path, browser: chromium.Browser) -> None:
    browser.open(folder / "report.html")
    text = "document.activeElement.getAttribute('aria-valuetext')"
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("Home")
    assert browser.evaluate(text).startswith("step 1, train/loss: 2.")
    browser.press("ArrowRight")
    assert browser.evaluate(text).startswith("step 2, train/loss: ")
    browser.press("End")
    assert browser.evaluate(text).startswith("step 20, train/loss: ")
    browser.press("+")
    assert browser.evaluate("!document.querySelector('#controls button').hidden")
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#controls button').hidden")
    table = "document.querySelector('figure details table')"
    browser.evaluate("document.querySelector('figure summary').click()")
    browser.evaluate("new Promise(resolve => setTimeout(resolve))")
    assert browser.evaluate(f"{table}.tBodies[0].rows.length") == 11  # steps 1, 2, 4, ..., 20


def test_runs_are_hidden_and_scales_changed(folder: Path, browser: chromium.Browser) -> None:
    browser.open(folder / "comparison.html")
    count = "document.querySelectorAll('path[data-run=\"1\"]').length"
    assert browser.evaluate(count) >= 6
    browser.evaluate("[...document.querySelectorAll('#controls input[type=checkbox]')].at(-1).click()")
    assert browser.evaluate(count) == 0
    for control in ("#controls input[type=checkbox]", "#controls input[type=radio]:not(:checked)"):
        browser.evaluate(f"document.querySelector('{control}').click()")
    smooth = "const s = document.querySelector('input[type=range]'); s.value = 0.6; s.dispatchEvent(new Event('input'))"
    browser.evaluate(f"{{ {smooth} }}")
    assert browser.evaluate("document.querySelectorAll('path.raw').length > 2")
    (loss,) = [chart for chart in browser.evaluate(CURVES) if chart["title"] == "loss"]
    (low, _, bottom), *_, (high, _, top) = loss["y"]
    middle = next((pixel for value, _, pixel in loss["y"][1:-1]), None)
    assert low > 0
    assert top < bottom
    assert middle is None or abs(middle - (top + bottom) / 2) > 0  # logarithmic
    assert any(" s" in text for _, text, _ in loss["x"])
    assert high > low
    assert browser.complaints() == []


STAGES = """
[...document.querySelectorAll("figure")].map(figure => ({
  x: [...figure.querySelectorAll("text.x")].map(t => [+t.dataset.value, t.textContent, +t.getAttribute("x")]),
  lines: [...figure.querySelectorAll("line.stage")].map(line => +line.getAttribute("x1")),
  labels: [...figure.querySelectorAll("text.stage")].map(text => [text.textContent,
    ...["x", "y", "width", "height"].map(side => text.getBBox()[side])]),
  width: figure.querySelector(".plot > svg").viewBox.baseVal.width,
}))
"""
"""Of each chart the labels of its axis, the places of the lines of stages, and text and box of their labels."""


@pytest.mark.parametrize("width", [1300, 420])
def test_charts_mark_stages(tmp_path: Path, browser: chromium.Browser, width: int) -> None:
    """Five stages, of which three begin close to each other; a long text is shortened. The lines stand where the axis has their steps."""
    folder = write_record(tmp_path / "run", **{"train/loss": [float(step % 7) for step in range(100)]})
    mixture = "mixture web 40 %, code 40 %, mathematics 20 %"
    begun = [
        (20, "batch size", "8"),
        (50, "batch size", "16"),
        (51, "row length", "2048"),
        (52, "mixture", mixture[8:]),
    ]
    with (folder / "report.jsonl").open("a") as file:
        for step, kind, text in [*begun, (98, "batch size", "64")]:
            file.write(json.dumps({"event": "stage", "time": 200.0, "step": step, "kind": kind, "text": text}) + "\n")
    browser.open(write_report([folder]), width=width)
    drawn = browser.evaluate(STAGES)[0]
    step = axis(drawn["x"])
    assert [round(step(line)) for line in drawn["lines"]] == [20, 50, 51, 52, 98]
    labels = [text for text, *_ in drawn["labels"]]
    assert labels[:2] == ["batch size 8", "batch size 16"]
    assert labels[-1] == "batch size 64"
    assert len(labels) == 5
    assert f"{mixture[:23]}…" in labels
    boxes = [box for _, *box in drawn["labels"]]
    for number, (x, y, w, h) in enumerate(boxes):
        assert x >= 0
        assert x + w <= drawn["width"]
        assert all(x >= ox + ow or ox >= x + w or abs(y - oy) >= h * 0.8 for ox, oy, ow, _ in boxes[:number])
    browser.evaluate("document.querySelector('#controls input[type=radio]:not(:checked)').click()")
    assert len(browser.evaluate(STAGES)[0]["lines"]) == 5  # across time, too
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert mixture[8:] in browser.evaluate("document.querySelector('#stages').textContent")
    assert browser.complaints() == []


ROWS = "[...document.querySelectorAll('.sortable tbody tr')].map(row => row.cells[0].textContent)"
SORTS = "[...document.querySelectorAll('.sortable thead th')].map(head => head.getAttribute('aria-sort'))"


@pytest.mark.parametrize("width", [1300, 420])
def test_the_table_of_runs_is_sorted_by_click_and_by_key(tmp_path: Path, browser: chromium.Browser, width: int) -> None:
    runs = [
        write_record(tmp_path / name, {"lr": lr, "act": act}, **{"val/loss": [3.0, loss]})
        for name, lr, act, loss in (
            ("a", 0.1, "b10", 5.0),
            ("b", 10, "b9", float("nan")),
            ("c", 9, "B1", 0.5),
            ("d", 0.5, "c", 12.0),
        )
    ]
    browser.open(write_report(runs, tmp_path / "page.html"), width=width)
    heads = browser.evaluate("[...document.querySelectorAll('.sortable thead button')].map(each => each.textContent)")
    assert heads == ["run", "lr", "act", "last val/loss", "status", "steps", "training time", "started"]
    assert (browser.evaluate(ROWS), browser.evaluate(SORTS)) == (["a", "b", "c", "d"], [None] * 8)
    click = "document.querySelectorAll('.sortable thead button')[{}].click()"
    for column, up in ((1, "adcb"), (2, "cbad"), (3, "cadb")):  # numbers as numbers, and texts with numbers in them
        down = "".join(name for name in reversed(up) if (column, name) != (3, "b")) + "b" * (
            column == 3
        )  # nan stays below
        for order, direction in ((up, "ascending"), (down, "descending"), (up, "ascending")):
            browser.evaluate(click.format(column))
            assert "".join(browser.evaluate(ROWS)) == order
            assert browser.evaluate(SORTS) == [direction if place == column else None for place in range(8)]
    browser.evaluate("document.querySelector('.sortable thead button').focus()")
    browser.press("Enter")
    browser.press("Enter")
    assert "".join(browser.evaluate(ROWS)) == "dcba"
    assert browser.evaluate("document.activeElement.textContent") == "run"
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []


def test_few_points_have_marks_and_a_legend_names_a_run_once(tmp_path: Path, browser: chromium.Browser) -> None:
    long = [float(n % 5) for n in range(100)]
    for name in ("version_1", "version_2"):
        folder = tmp_path / "deep" / "sweep" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        few = [1.0, 2.0, float("nan"), 4.0] + [float("nan")] * 96
        write_record(
            folder, **{"train/loss_step": long, "train/loss_epoch": few[:100], "val/loss": few[:100], "few": few[:100]}
        )
    browser.open(write_report([tmp_path / "deep" / "sweep"]))
    titles = browser.evaluate("[...document.querySelectorAll('figure h4')].map(each => each.textContent)")
    assert titles[:2] == ["loss", "few"]
    legend = browser.evaluate("[...document.querySelector('figure .legend').children].map(item => item.textContent)")
    assert legend[:3] == ["train/loss_step", "train/loss_epoch", "val/loss"]
    assert [item.partition(" ")[0] for item in legend[3:]] == ["version_1", "version_2"]
    marks = "[...document.querySelectorAll('figure')[{}].querySelectorAll('path.marks')].map(path => path.getAttribute('d').split('M').length - 1)"
    assert browser.evaluate(marks.format(0)) == []  # a hundred points need none
    for key in "+++":
        browser.evaluate("document.querySelector('.plot').focus()")
        browser.press("Home")
        browser.press(key)
    assert max(browser.evaluate(marks.format(0))) > 3


def test_a_served_page_follows_a_run_and_outlives_its_server(tmp_path: Path, browser: chromium.Browser) -> None:
    record = write_record(tmp_path / "run", {"lr": 1}, loss=[1.0, 2.0]) / "report.jsonl"
    command = [sys.executable, "-m", "engine.cli.main", "report", str(tmp_path / "run"), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            browser.events.clear()
            browser.call("Page.navigate", url=url)
            until(
                browser, "document.documentElement?.dataset.drawn === 'yes' && document.getElementById('live') !== null"
            )
            browser.evaluate(
                "{ const s = document.querySelector('input[type=range]'); s.value = 0.5; s.dispatchEvent(new Event('input')); }"
            )
            browser.evaluate("document.querySelector('figure summary').click()")
            browser.evaluate("document.querySelector('.plot').focus()")
            steps = "charts.find(chart => chart.title === 'loss')?.series[0].x.length"
            assert browser.evaluate(steps) == 2
            with record.open("a") as file:
                file.write('{"event": "values", "stage": "fit", "time": 9.0, "step": 3, "values": {"loss": 0.5}}\n')
            until(browser, f"{steps} === 3")
            kept = "view.smooth, document.querySelector('input[type=range]').value, document.querySelector('figure details').open"
            kept = f"[{kept}, document.activeElement.className]"
            assert browser.evaluate(kept) == [0.5, "0.5", True, "plot"]
            assert {request.split("/")[2] for request in browser.requests()} == {url.split("/")[2]}
            assert browser.complaints() == []
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            until(browser, "document.getElementById('live').textContent.startsWith('The server has ended')")
        finally:
            process.kill()
    browser.call("Page.navigate", url="about:blank")


def until(browser: chromium.Browser, condition: str) -> None:
    """Wait until a JavaScript condition holds."""
    began = time.monotonic()
    while not browser.evaluate(condition):
        assert time.monotonic() - began < chromium.PATIENCE_S, condition
        time.sleep(0.05)


def write_record(folder: Path, hyperparameters: Any = None, **metrics: Any) -> Path:
    folder.mkdir()
    start = {"event": "start", "stage": "fit", "time": 0.0, "step": 0, "hyperparameters": hyperparameters or {}}
    with (folder / "report.jsonl").open("w") as file:
        file.write(json.dumps(start) + "\n")
        for step, row in enumerate(zip(*metrics.values(), strict=True), start=1):
            values = json.dumps(dict(zip(metrics, map(float, row), strict=True)))
            file.write(f'{{"event": "values", "stage": "fit", "time": {step}.0, "step": {step}, "values": {values}}}\n')
    return folder


def test_a_hostile_name_is_text(tmp_path: Path, browser: chromium.Browser) -> None:
    path = write_report([write_record(tmp_path / "run", **{HOSTILE: [1.0, float("nan"), 2.0, 3.0]})])
    browser.open(path)
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.querySelector('figure h4').textContent") == HOSTILE
    assert browser.evaluate("document.querySelector('figure .note').textContent") == "1 value is not finite."
    (chart,) = [each for each in browser.evaluate(CURVES) if each["title"] == HOSTILE]
    assert chart["paths"][0][1].count("M") == 2  # the line is broken at NaN
    assert browser.complaints() == []


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and an evaluation whose names are hostile wherever a user chooses them; parts of paths have no ``/``."""
    root = tmp_path_factory.mktemp("hostile") / chromium.HOSTILE["end of a script"] / chromium.HOSTILE["image"]

    class Net(TrainModule):
        def __init__(self, **values: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = torch.nn.ModuleDict({chromium.HOSTILE["entity"]: torch.nn.Linear(1, 1)})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name in chromium.HOSTILE.values():
                self.log(name, float(self.global_step))
            return self.layers[chromium.HOSTILE["entity"]](batch).mean()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            for name in chromium.HOSTILE.values():
                self.log(name, 1.0)

        def configure_optimizers(self) -> Any:
            return type(chromium.HOSTILE["image"], (torch.optim.SGD,), {})(self.parameters(), lr=0.1)

    for number in range(2):
        module = Net(**{name: f"{number}{value}" for name, value in chromium.HOSTILE.items()})
        saves = ModelCheckpoint(filename=chromium.HOSTILE["image"] + "{step}", monitor=chromium.HOSTILE["image"])
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "root_dir": root}
        fit = Fit(max_steps=3, callbacks=[Report(), CSVLogger(), saves], **options)
        fit.run(module, [torch.ones(2, 1)] * 3)
    Fit(callbacks=[Report()], **options).test(module, [torch.ones(2, 1)])
    record = root / "report.jsonl"
    with record.open("a") as file:  # what a hand may write
        file.write(
            json.dumps({"event": "start", "stage": "fit", "time": 1.0, "step": 3, "machine": chromium.HOSTILE}) + "\n"
        )
        end = {
            "event": "end",
            "stage": "fit",
            "time": 2.0,
            "status": chromium.HOSTILE["image"],
            "reason": chromium.HOSTILE["link"],
        }
        file.write(json.dumps(end) + "\n")
    write_report([root], root / "comparison.html")
    write_report([root], root / "report.html", only=True)
    (root / "report.jsonl").rename(root / "record")
    write_report([root], root / "csv.html", only=True)
    return root


@pytest.mark.parametrize("page", ["report.html", "comparison.html", "csv.html"])
@pytest.mark.parametrize("policy", [True, False])
def test_no_name_runs_a_script(hostile: Path, browser: chromium.Browser, page: str, policy: bool) -> None:
    """Also without the page's policy, which would stop one: it does not lean on it."""
    browser.open(hostile / page, policy=policy)
    assert browser.evaluate("document.documentElement.dataset.drawn") == "yes"
    assert browser.unharmed()
    assert browser.complaints() == []
    assert len(browser.requests()) == 1
    titles = set(browser.evaluate("[...document.querySelectorAll('figure h4')].map(each => each.textContent)"))
    assert titles >= set(chromium.HOSTILE.values())
    drawn = {name for chart in browser.evaluate(CURVES) for name, path in chart["paths"] if path.startswith("M")}
    assert drawn >= set(chromium.HOSTILE.values())
    assert browser.evaluate("document.scripts.length") == 2  # the data, and the page's own
    if page != "csv.html":
        cells = browser.evaluate("[...document.querySelectorAll('td code')].map(each => each.textContent)")
        assert set(cells) >= {f"0{value}" for value in chromium.HOSTILE.values()}


def test_a_million_points_open_in_two_seconds(tmp_path: Path, browser: chromium.Browser) -> None:
    generator = np.random.default_rng(0)
    metrics = {name: generator.normal(size=250_000).cumsum() for name in ("a/x", "train/loss", "val/loss", "b/y")}
    metrics["a/x"][77_777] = 1e6
    path = write_report([write_record(tmp_path / "run", **metrics)], max_points=2_000_000)
    total = 'JSON.parse(document.getElementById("data").textContent).charts.flatMap(c => c.series).reduce((sum, one) => sum + one.y[1], 0)'
    browser.call(
        "Performance.enable", timeDomain="threadTicks"
    )  # of the page's own thread, whatever else the machine does
    seconds: list[float] = []
    while len(seconds) < 3 and not any(each < 2 for each in seconds):
        browser.open(path)
        assert browser.evaluate(total) >= 1_000_000
        found = {each["name"]: each["value"] for each in browser.call("Performance.getMetrics")["metrics"]}
        seconds.append(found["TaskDuration"])
    assert min(seconds) < 2, seconds
    (chart,) = [each for each in browser.evaluate(CURVES) if each["title"] == "a/x"]
    value = axis(chart["y"])
    top = max(value(y) for _, y in points(chart["paths"][0][1]))
    assert abs(top - 1e6) < 2e4  # the peak is there
    assert browser.complaints() == []
