"""What each tracker has of a run, read with the tracker's own reader."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.ranks import clean_environment

Entry = tuple[str, int, float]
"""Name, step, value."""


def read_csv(folder: Path, server: str) -> list[Entry]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            (name, int(row["step"]), float(value))
            for row in csv.DictReader(file)
            for name, value in row.items()
            if value
        ]


def read_jsonl(folder: Path, server: str) -> list[Entry]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (name, line["step"], float(value))
        for line in lines
        if "values" in line
        for name, value in {"epoch": line["epoch"], **line["values"]}.items()
    ]


def read_tensorboard(folder: Path, server: str) -> list[Entry]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0})
    found.Reload()
    return [(name, each.step, each.value) for name in found.Tags()["scalars"] for each in found.Scalars(name)]


def read_mlflow(folder: Path, server: str) -> list[Entry]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(server)
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert found.info.status == "FINISHED"
    return [
        (name, each.step, each.value)
        for name in found.data.metrics
        for each in client.get_metric_history(found.info.run_id, name)
    ]


def read_wandb(folder: Path, server: str) -> list[Entry]:
    """The records of the offline folders: blocks of 32768 bytes, in them pieces with a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[Entry] = []
    rows: list[int] = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        data, at, piece = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            piece, at = piece + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, piece = Record.FromString(piece), b""
                row = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
                }
                if row:
                    rows.append(row["_step"])
                found += [(name, row["step"], value) for name, value in row.items() if isinstance(value, (int, float))]
    assert rows == list(range(len(rows)))
    return found


def read_trackio(folder: Path, server: str) -> list[Entry]:
    script = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_run_records("fit")
print(json.dumps(SQLiteStorage.get_logs("fit", run_id=run["id"]), default=str))
"""
    environment = clean_environment(TRACKIO_DIR=str(folder / "trackio"))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    rows = json.loads(done.stdout)
    return [
        (name, row["step"], value) for row in rows for name, value in row.items() if isinstance(value, (int, float))
    ]


def read_aim(folder: Path, server: str) -> list[Entry]:
    script = """
import json, sys
import aim
from aim.sdk.index_manager import RepoIndexManager
repo = aim.Repo(sys.argv[1])
RepoIndexManager.get_index_manager(repo).index(repo.list_all_runs()[0])  # as "aim up" does
repo = aim.Repo(sys.argv[1])
(name,) = repo.list_all_runs()
run = aim.Run(name, repo=repo, read_only=True)
found = []
for metric in run.metrics():
    steps, (values, epochs, times) = metric.data.numpy()
    found += [[metric.name, int(step), float(value)] for step, value in zip(steps, values)]
    found += [["epoch", int(step), float(epoch)] for step, epoch in zip(steps, epochs)]
print(json.dumps(found))
"""
    command = [sys.executable, "-c", script, str(folder / "aim")]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return [(name, step, value) for name, step, value in json.loads(done.stdout.splitlines()[-1])]


READERS: dict[str, Callable[[Path, str], list[Entry]]] = {
    "CSVLogger": read_csv,
    "JSONLLogger": read_jsonl,
    "TensorBoardLogger": read_tensorboard,
    "MLflowLogger": read_mlflow,
    "WandbLogger": read_wandb,
    "TrackioLogger": read_trackio,
    "AimLogger": read_aim,
}
PACKAGES = {
    "TensorBoardLogger": "tensorboard",
    "MLflowLogger": "mlflow",
    "WandbLogger": "wandb",
    "TrackioLogger": "trackio",
    "AimLogger": "aim",
}
