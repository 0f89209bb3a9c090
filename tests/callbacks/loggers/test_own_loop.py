"""Loggers in a loop of one's own."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from callbacks.loggers import CSVLogger, LoggedLoop


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
