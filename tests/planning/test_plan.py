"""A plan from hand-made traces: what it says, as values, text, JSON and a page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hand_made import DEVICE, GIB, OPERATIONS, collective, job, rank_trace
from support import browser as chromium

from engine.planning.job import Shape
from engine.planning.plan import Plan
from engine.planning.plan_page import page
from engine.planning.rank_trace import Memory, Moment
from engine.planning.step_time import START_S, Compute

GPU = replace(DEVICE, caching=True, reserved=GIB // 2)


def test_what_fits() -> None:
    plan = Plan((rank_trace(),), job(), DEVICE)
    assert (plan.peak_bytes, plan.memory_bytes, plan.fits, plan.verdict) == (7 * GIB, 8 * GIB, True, "yes")
    tight = Plan((rank_trace(collectives=(collective(),)),), job(), replace(GPU, memory=15 * GIB // 2))
    # 7 GiB + 1 % + 0.5 GiB + 256 MiB
    assert tight.peak_bytes == 7 * GIB + int(7 * GIB * 0.01) + GIB // 2 + GIB // 4
    assert (tight.fits, tight.verdict) == (False, "only without the margins")
    assert Plan((rank_trace(),), job(), replace(GPU, memory=7 * GIB)).verdict == "no"


def test_the_worst_rank_and_the_slowest_one() -> None:
    big = rank_trace(rank=1, role="pipeline stage 2 of 2", peak=Moment("forward", "head", Memory(activations=9 * GIB)))
    slow = rank_trace(operations=OPERATIONS * 2)
    plan = Plan((slow, big), job(), DEVICE)
    assert plan.worst is big
    assert plan.slowest.compute.seconds == pytest.approx(8.0)
    assert plan.step_seconds == pytest.approx(8.0)
    assert not plan.fits


def test_time_throughput_and_money() -> None:
    facts = job(
        samples_per_epoch=160,
        steps_per_epoch=10,
        total_steps=900,
        shape=Shape(layers=1, hidden=1, heads=1, vocabulary=1, sequence=50),
    )
    plan = Plan((rank_trace(),), facts, DEVICE, price=2.0, storage=1e9)
    assert plan.step_seconds == pytest.approx(4.0)
    assert plan.samples_per_step == 16  # 8 on each of two ranks
    assert plan.samples_per_second == pytest.approx(4.0)
    assert plan.tokens_per_second == pytest.approx(200.0)
    assert plan.mfu == pytest.approx(0.75)  # 3e12 FLOPs in 4 s at 1e12 a second
    assert plan.mfu_bound == pytest.approx(0.75)
    assert plan.total_seconds == pytest.approx(3600.0)
    assert plan.cost == pytest.approx(4.0)  # two devices for an hour
    found = plan.as_json()
    assert found["data"] == {
        "samples_per_rank_and_step": 8,
        "samples_per_step": 16,
        "samples_per_epoch": 160,
        "steps_per_epoch": 10,
        "epochs": 90.0,
        "steps": 900,
        "seconds": pytest.approx(3600.0),
    }
    assert found["cost"] == {
        "price_per_device_hour": 2.0,
        "per_1000_steps": pytest.approx(40 / 9),
        "total": pytest.approx(4.0),
    }


def test_a_checkpoint() -> None:
    # The optimizer's state has half of the parameters' bytes on the rank, and so in the whole checkpoint.
    plan = Plan((rank_trace(),), job(), DEVICE, storage=1e9)
    assert plan.checkpoint_bytes == 6 * GIB
    # Each of two ranks writes 2 GiB of parameters, in 8 files at most, and 1 GiB of state in files of 128 MiB.
    # Beside them: both ranks' states, of two files each, the manifest, and the trees of model, optimizer and what is the same on all ranks.
    assert plan.checkpoint_files == 2 * (8 + 8) + 2 * 2 + 4
    assert plan.as_json()["checkpoint"]["copy_bytes"] == 3 * GIB
    assert plan.as_json()["checkpoint"]["seconds"] == pytest.approx(6 * GIB / 1e9)
    assert Plan((rank_trace(),), job(optimizer_bytes=GIB), DEVICE).checkpoint_bytes == 5 * GIB


def test_a_pipeline_waits() -> None:
    facts = job(axes={"pp": 4}, world_size=4, schedule="1f1b", parts=9, data_ranks=1)
    plan = Plan((rank_trace(),), facts, DEVICE)
    assert plan.bubble == pytest.approx(3 / 12)
    assert plan.step_seconds == pytest.approx(5.0)
    assert any("1f1b" in line for line in plan.assumptions)


def test_formulas_are_named_where_they_differ() -> None:
    shape = Shape(layers=2, hidden=1000, heads=10, vocabulary=1000, sequence=100)  # 25 million parameters
    near = Plan((rank_trace(),), job(shape=shape, parameters=25_500_000), DEVICE)
    assert {each.what: each.differs for each in near.checks} == {
        "parameters": False,
        "FLOPs of a step": True,
        "activations": True,
    }
    text = str(near)
    assert "Published formulas agree within 20 % on: parameters." in text
    assert "Korthikanti" in text
    assert "No cross-check" in str(Plan((rank_trace(),), job(), DEVICE))


def test_the_formula_of_activations_is_that_of_the_run() -> None:
    shape = Shape(layers=2, hidden=1000, heads=10, vocabulary=1000, sequence=100)
    each = 100 * 4 * 1000 * 2  # tokens, samples of a micro-batch, width, layers

    def formula(kind: str = "all_reduce", **facts: object) -> tuple[float, str]:
        trace = rank_trace(collectives=(collective(kind, axis="tp"),))
        (found,) = (
            check
            for check in Plan((trace,), job(shape=shape, axes={"tp": 2}, **facts), DEVICE).checks
            if check.what == "activations"
        )
        return found.formula, found.source.partition(",")[0]

    assert formula() == (each * 22 * 2, "s b h l (10 + 24/t)")
    assert formula("reduce_scatter") == (each * 17 * 2, "s b h l 34/t")
    assert formula(precision="bf16-mixed")[0] == each * 22
    assert formula(precision="64-true")[0] == each * 22 * 4
    assert formula(checkpointing="full", precision="bf16-mixed") == (each * 2, "2 s b h l")


def whole_plan() -> Plan:
    gathers = collective("all_gather", axis="dp_shard", phase="forward", count=4)
    trace = rank_trace(
        collectives=(gathers, collective("reduce_scatter", axis="dp_shard")),
        missing=("<b>layers.9</b> branches on its data",),
        computed=("optimizer state: ZeRO",),
    )
    device = replace(GPU, memory=15 * GIB // 2)
    return Plan((trace,), job(axes={"dp_shard": 2}, strategy="FSDP"), device, price=1.0)


def test_the_text_has_everything() -> None:
    text = str(whole_plan())
    for words in (
        "FSDP (dp_shard=2) in 32-true on 2 x round, 1 node of 2",
        "It fits only without the margins: with them it needs 7.82 GiB of 7.50 GiB on rank 0.",
        "partial: <b>layers.9</b> branches on its data",
        "computed: optimizer state: ZeRO",
        "The peak of rank 0 is in: backward in layers.1.",
        "margin: communicators' buffers",
        "all_gather",
        "for 1000 steps",
        "made up",
    ):
        assert words in text, words
    for line in whole_plan().assumptions:
        assert line.split()[0] in text
    assert max(map(len, text.splitlines())) <= 140


def test_the_json_is_documented_and_plain() -> None:
    plan = whole_plan()
    found = json.loads(json.dumps(plan.as_json(), allow_nan=False))
    assert found["version"] == 2
    assert (found["fits"], found["verdict"]) == (False, "only without the margins")
    assert found["memory"]["need_bytes"] == plan.peak_bytes
    (rank,) = found["ranks"]
    assert rank["peak"]["memory"]["total"] == 7 * GIB
    assert [each["phase"] for each in rank["timeline"]] == ["start", "forward", "backward", "end"]
    gathers = rank["collectives"][0]
    assert gathers["seconds"] == pytest.approx(4 * (START_S + 1e-6) + 0.5)
    assert (gathers["group_size"], gathers["overlaps"]) == (2, True)
    page = (Path(__file__).parents[2] / "engine/planning/README.md").read_text()
    for key in (*found, *found["time"], *found["data"], *found["memory"], *rank, *rank["compute"], *gathers):
        assert f"`{key}`" in page, f"{key} is not documented"


def test_a_long_timeline_keeps_its_peaks() -> None:
    moments = [Moment("forward", str(i), Memory(activations=i % 977)) for i in range(10_001)]
    found = Plan((rank_trace(timeline=tuple(moments)),), job(), DEVICE).as_json()["ranks"][0]["timeline"]
    assert len(found) <= 2000
    assert max(each["memory"]["total"] for each in found) == 976


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.seen = "", []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file(tmp_path: Path) -> None:
    path = whole_plan().write_page(tmp_path / "new" / "plan.html")
    found = Tags(path.read_text())
    names = [tag for tag, _ in found.seen]
    assert "script" not in names
    assert "b" not in names  # the module's name is text
    assert "<b>layers.9</b> branches on its data" in found.text
    assert not any("src" in attrs or "href" in attrs for _, attrs in found.seen)
    polygons = [attrs for tag, attrs in found.seen if tag == "polygon"]
    assert len(polygons) == 3  # parameters, optimizer state, activations
    bottom = max(float(point.split(",")[1]) for each in polygons for point in str(each["points"]).split())
    top = min(float(point.split(",")[1]) for each in polygons for point in str(each["points"]).split())
    limit = next(float(str(attrs["y1"])) for tag, attrs in found.seen if tag == "line" and attrs["class"] == "limit")
    assert (bottom - top) / (bottom - limit) == pytest.approx(7 / 7.5, abs=0.01)  # 7 GiB of 7.5
    assert "Memory of rank 0 over one step: peak of 7.00 GiB, backward in layers.1" in found.text


@pytest.mark.skipif(chromium.program() is None, reason="no Chromium")
@pytest.mark.parametrize("view", [{"width": 1280}, {"width": 390}, {"width": 1280, "dark": True}])
def test_the_page_in_a_browser(tmp_path: Path, view: dict[str, int]) -> None:
    path = whole_plan().write_page(tmp_path / "plan.html")
    with chromium.chromium() as browser:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=view["width"],
            height=900,
            deviceScaleFactor=1,
            mobile=view["width"] < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.get("dark") else "light"}
        browser.call("Emulation.setEmulatedMedia", features=[scheme])
        browser.call("Page.navigate", url=path.as_uri())
        ready = f"location.href === {json.dumps(path.as_uri())} && document.readyState === 'complete'"
        while not browser.evaluate(ready):
            pass
        assert browser.complaints() == []
        assert browser.requests() == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert browser.evaluate("document.querySelectorAll('svg polygon').length") == 3
        assert browser.evaluate("document.querySelector('svg').getBoundingClientRect().height > 100")
        colours = "[...new Set([...document.querySelectorAll('svg polygon')].map(each => getComputedStyle(each).fill))].length"
        assert browser.evaluate(colours) == 3
        light = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
        assert light is not view.get("dark", False)
        browser.screenshot(tmp_path / "plan.png")


def hostile(value: Any, kind: str) -> Any:
    """A plan all of whose texts are hostile."""
    if isinstance(value, dict):
        return {name: hostile(each, kind) for name, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, kind) for each in value]
    return chromium.HOSTILE[kind] + value if isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.skipif(chromium.program() is None, reason="no Chromium")
def test_no_name_in_the_page_runs_a_script(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    plain = whole_plan().as_json()
    with chromium.chromium() as browser:
        for kind, text in chromium.HOSTILE.items():
            plan = hostile(plain, kind) | {"verdict": plain["verdict"]}
            path.write_text(page(plan), encoding="utf-8")
            browser.open(path, policy=False, drawn=False)
            assert browser.unharmed(), kind
            assert browser.complaints() == []
            assert browser.requests() == [path.as_uri()]
            assert browser.evaluate("document.scripts.length") == 0
            lines = browser.evaluate("[...document.querySelectorAll('li')].map(each => each.textContent)")
            assert any(line.startswith(text) for line in lines), kind


def test_an_empty_plan() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Plan((), job(), DEVICE)
    assert asdict(Compute())["seconds"] == 0.0
