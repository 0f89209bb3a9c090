"""Loggers in a loop of one's own, and by the names of their trackers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from callbacks import MLflowLogger, TensorBoardLogger
from callbacks.loggers import TRACKERS, CSVLogger, LoggedLoop, logger_for


def test_a_logged_loop(tmp_path: Path) -> None:
    with LoggedLoop([CSVLogger()], tmp_path, {"lr": 0.1}) as log:
        log({"loss": 2.0})
        log({"loss": torch.tensor(1.0)}, step=5)
    (path,) = tmp_path.rglob("*.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["step"], float(row["loss"])) for row in rows] == [("1", 2.0), ("5", 1.0)]


def test_only_the_main_process_logs(tmp_path: Path) -> None:
    with LoggedLoop([CSVLogger()], tmp_path / "run", is_main_process=False) as log:
        log({"loss": 2.0})
    assert not (tmp_path / "run").exists()


def test_the_project_goes_where_the_tracker_has_such_names() -> None:
    logger = logger_for("mlflow", "digits", run_name="one")
    assert isinstance(logger, MLflowLogger)
    assert (logger.experiment_name, logger.run_name) == ("digits", "one")
    chosen = logger_for("mlflow", "digits", experiment_name="other")
    assert isinstance(chosen, MLflowLogger)
    assert chosen.experiment_name == "other"
    assert type(logger_for("tensorboard", "digits")) is TensorBoardLogger


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'comet' is unknown; possible: {', '.join(TRACKERS)}"):
        logger_for("comet")
