"""What each tracker has of a run, read with the tracker's own reader."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

Entry = tuple[str, int, float]
"""Name, step, value."""


def read_csv(folder: Path) -> list[Entry]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            (name, int(row["step"]), float(value))
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value
        ]


def read_jsonl(folder: Path) -> list[Entry]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (name, line["step"], float(value))
        for line in lines
        if "values" in line
        for name, value in {"epoch": line["epoch"], **line["values"]}.items()
    ]


def read_tensorboard(folder: Path) -> list[Entry]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    found.Reload()
    return [(name, each.step, each.value) for name in found.Tags()["scalars"] for each in found.Scalars(name)]


READERS: dict[str, Callable[[Path], list[Entry]]] = {
    "CSVLogger": read_csv,
    "JSONLLogger": read_jsonl,
    "TensorBoardLogger": read_tensorboard,
}
