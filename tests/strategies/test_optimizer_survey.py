"""The table of optimizers in the chapter on strategies is that of the record, and the record is what real packages do."""

from __future__ import annotations

import configparser
import json
import os
from typing import Any

import pytest
from strategies import optimizer_survey
from strategies.optimizer_survey import CHAPTER, RECORD, ROOT, STRATEGIES, SURVEY, differs, is_installed, updated

RECORDED: dict[str, Any] = json.loads(RECORD.read_text())


def test_the_chapter_has_the_table_of_the_record() -> None:
    assert CHAPTER.read_text() == updated(RECORDED), "python tests/strategies/optimizer_survey.py --write"


def test_the_record_has_all_optimizers_and_no_crash() -> None:
    assert list(RECORDED) == [surveyed.name for surveyed in SURVEY]
    for name, row in RECORDED.items():
        assert list(row) == list(STRATEGIES), name
        for strategy, outcome in row.items():
            assert "not resumed" not in outcome, (name, strategy)
            assert outcome.get("resumed", 0.0) == 0.0, (name, strategy)
            assert outcome.keys() in ({"refused"}, {"resumed", "from one process"}), (name, strategy)


def test_the_packages_are_those_of_the_extra() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    names = {line.split(">")[0].replace("-", "_") for line in (extras["optimizers"] + extras["fp8"]).split()}
    assert names == {surveyed.module.partition(".")[0] for surveyed in SURVEY} - {"torch"}
    assert "%(optimizers)s" in extras.get("test", raw=True).split()


def test_a_measurement_contradicts_the_record_by_its_kind_and_its_differences() -> None:
    record = {"resumed": 0.0, "from one process": 1e-3}
    assert differs({"resumed": 0.0, "from one process": 9e-3}, record) == ""
    assert "differs by 2.0e-02" in differs({"resumed": 0.0, "from one process": 2e-2}, record)
    assert "resumed with a difference of 1e-09" in differs({"resumed": 1e-9, "from one process": 0.0}, record)
    assert "recorded" in differs({"refused": "why"}, record)
    same = {"resumed": 0.0, "from one process": optimizer_survey.SAME}
    assert "differs by 2.0e-06" in differs({"resumed": 0.0, "from one process": 2e-6}, same)


@pytest.mark.slow
def test_real_packages_do_what_the_record_says() -> None:
    missing = sorted({surveyed.module for surveyed in SURVEY if not is_installed(surveyed)})
    assert not missing or "OPTIMIZERS_REQUIRED" not in os.environ, f"not installed: {missing}"
    measured = optimizer_survey.survey()
    problems = {
        f"{name}, {strategy}": problem
        for name, row in measured.items()
        for strategy in STRATEGIES
        if (problem := differs(row[strategy], RECORDED[name][strategy]))
    }
    assert problems == {}
    assert len(measured) + len([surveyed for surveyed in SURVEY if not is_installed(surveyed)]) == len(SURVEY)
