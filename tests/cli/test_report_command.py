"""``fit report``: what it prints and writes, and its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.browser import Page

from engine.cli.main import main


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root_dir with two runs."""
    for name, loss in (("", 1.0), ("version_1", 2.0)):
        (tmp_path / "root" / name).mkdir(parents=True, exist_ok=True)
        events = (
            {"event": "start", "stage": "fit", "time": 1.0, "step": 0},
            {"event": "values", "stage": "fit", "time": 2.0, "step": 1, "values": {"loss": loss}},
        )
        (tmp_path / "root" / name / "report.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return tmp_path / "root"


def test_one_run_and_several(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "version_1")]) == 0
    assert capsys.readouterr().out == f"{runs / 'version_1' / 'report.html'}\n"
    assert main(["report", str(runs), "--out", str(tmp_path / "new" / "all.html")]) == 0
    assert Page(tmp_path / "new" / "all.html").data["runs"] == ["root", "root/version_1"]
    assert main(["report", str(runs)]) == 0
    assert (runs / "comparison.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["root", "--out", "page.pdf"], "--out page.pdf: the page needs a name that ends in .html"),
        (["root", "--max-points", "3"], "at least 100 points"),
    ],
)
def test_wrong_arguments(
    runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--out", str(runs / "report.jsonl" / "x.html")]) == 1
    assert "report.jsonl" in capsys.readouterr().err
