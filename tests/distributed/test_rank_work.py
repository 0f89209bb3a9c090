"""Who logs, in which order, where a function runs, and which slice of the data each process has."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.ranks import ranks_of

from engine import Engine, get_logger, rank_zero_only
from engine.distributed.rank_work import part


def test_one_process(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("script", "info")
    assert logging.getLogger("script").level == logging.INFO
    for options in ({}, {"main_process_only": False}, {"in_order": True}):
        logger.info("a %s", 1, **options)
    logger.debug("left out")
    for _ in range(2):
        logger.warning_once("once")
    assert [each.getMessage() for each in caplog.records] == ["a 1", "a 1", "a 1", "once"]
    assert {each.filename for each in caplog.records} == {Path(__file__).name}


def test_other_ranks_are_silent_before_they_join(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    logger = get_logger("script")
    logger.warning("not here")
    logger.warning("everywhere", main_process_only=False)
    assert [each.getMessage() for each in caplog.records] == ["everywhere"]
    assert rank_zero_only(lambda: 1, default=2)() == 2
    monkeypatch.setenv("RANK", "0")
    assert rank_zero_only(lambda: 1, default=2)() == 1


def speak(path: str) -> None:
    Engine(accelerator="cpu")
    logger = get_logger("script")
    logger.logger.addHandler(logging.FileHandler(path))
    logger.warning("%s in turn", os.environ["RANK"], in_order=True)
    logger.warning("%s alone", os.environ["RANK"])


def test_ranks_take_turns(tmp_path: Path) -> None:
    ranks_of(speak, 2, tmp_path / "said")
    assert (tmp_path / "said").read_text().splitlines() == ["0 in turn", "1 in turn", "0 alone"]


def test_a_dataset_stays_a_dataset() -> None:
    datasets: Any = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"k": number} for number in range(5)])
    assert [part(data, rank, 2, False)["k"][:] for rank in range(2)] == [[0, 1, 2], [3, 4]]
    assert [part(data, rank, 2, True)["k"][:] for rank in range(2)] == [[0, 1, 2], [3, 4, 4]]
