"""Reads a run's folder for the report. The files may be anybody's: a wrong value is left out, never an error."""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from engine import without_secrets

from ..loggers.bounded_lines import bounded_lines
from ..loggers.csv_cells import from_cell
from .curves import Array, Curve, Points
from .record import HEAD, NAME, PLACES, WHOLE, events, packed, sampled_lines

CSV, CONFIG = "metrics.csv", "config.yaml"
_NUMBERED = re.compile(r"version_[1-9][0-9]{0,8}")
PHASES = {
    "compute": "training steps",
    "data": "waiting for data",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "other": "setup and the rest",
    "unknown": "not measured (the run was killed, or is running)",
}
LARGEST_STEP = 1 << 53
MOST_RUNS = 250
"""Largest number of runs of one ``root_dir`` on a page."""
_LARGEST = 64 << 20, 1 << 20
"""Size of the largest manifest, and of the largest file of settings, that is read, in bytes."""


@dataclass(frozen=True)
class Stage:
    """A stage of a training that has begun: ``kind`` and ``text``, such as ``"batch size"`` and ``"512"``."""

    step: int
    """The last step before the stage."""
    kind: str
    text: str
    seconds: float
    """Seconds of training before it; NaN: not known."""


@dataclass
class RunData:
    """The data of one run on the page."""

    folder: Path
    name: str = ""
    status: str = "not recorded"
    reason: str = ""
    step: int = 0
    epochs: int | None = None
    seconds: float = 0.0
    """Seconds of training, summed over the run's processes (one after each resume)."""
    started: float | None = None
    starts: int = 0
    """How often the training was started or resumed."""
    machine: dict[str, str] = field(default_factory=dict)
    config: list[tuple[str, str, str]] = field(default_factory=list)
    """Rows of setting, value and origin."""
    metrics: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, Curve] = field(default_factory=dict)
    """Learning rates, by optimizer."""
    speed: dict[str, Curve] = field(default_factory=dict)
    memory: dict[str, Curve] = field(default_factory=dict)
    trained: bool = True
    """Whether the run trained; ``False``: it only evaluated."""
    note: str = ""
    """Sentence for the page about the parts of this run that it leaves out; empty: none."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints, oldest first: ``path``, ``step``, ``score``, ``best``, ``time``, ``weights`` (that were scored; empty: not known),
    ``monitor`` and ``mode`` of the score."""
    score: float | None = None
    """Score of the best checkpoint; ``None``: there is none."""
    monitor: str = ""
    """Metric of the score, and in ``mode`` how scores are compared: ``"min"``, ``"max"``; empty: not known."""
    mode: str = ""
    times: dict[str, float] = field(default_factory=dict)
    """Phase of :data:`PHASES` -> seconds."""
    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    """Name -> columns and rows of a table that a callback has made."""
    stages: list[Stage] = field(default_factory=list)
    """Stages of the training, in the order of their steps."""

    @property
    def training_s(self) -> float:
        """Seconds of training, with its validations, checkpoints and waits for data; without the start of the processes and the set-up."""
        return sum(seconds for phase, seconds in self.times.items() if phase != "other") or self.seconds


def read_runs(folders: Sequence[str | os.PathLike[str]], only: bool = False) -> tuple[list[RunData], list[RunData]]:
    """Read the runs in ``folders``, each once, and give them names.

    Args:
        only: a folder stands for its own run alone.

    Returns:
        The runs that trained, and those that only evaluated. If none trained, the latter come first, as the runs.

    Raises:
        FileNotFoundError: a folder has no run.
    """
    runs_by_folder = {
        run.folder.resolve(): run for folder in folders for run in runs_in(Path(folder).expanduser(), only)
    }
    runs = list(runs_by_folder.values())
    give_names(runs)
    trained = [run for run in runs if run.trained]
    return (trained, [run for run in runs if not run.trained]) if trained else (runs, [])


def runs_in(folder: Path, only: bool = False) -> list[RunData]:
    """Read the runs in ``folder``: its own run and, unless ``only`` is true, the runs of its numbered folders and those with names beside them.

    If ``folder`` has no run itself, the runs of the folders in it are read. If there are more than :data:`MOST_RUNS`, only the last ones by number or
    name are read, and the note of the first says so. It also names folders that may not be read.

    Raises:
        FileNotFoundError: ``folder`` has no run.
        PermissionError: ``folder`` may not be read, or all folders in it may not be read.
    """
    unreadable: list[PermissionError] = []
    folders = [folder] if only else _run_folders(folder, MOST_RUNS + 1)
    if folders and not only:
        folders = [*folders, *_named_run_folders(folder)]
    if not folders and folder.is_dir():
        inner = (
            place
            for name in sorted(os.listdir(folder), reverse=True)
            for place in _run_folders(folder / name, MOST_RUNS + 1, unreadable)[::-1]
        )
        folders = list(islice(inner, MOST_RUNS + 1))[::-1]
    if not folders:
        if unreadable:
            raise unreadable[0]
        what = "does not exist" if not folder.exists() else f"has no run with a {NAME} (Report) or {CSV} (CSVLogger)"
        raise FileNotFoundError(
            f"{folder} {what}: give folders of runs with Report() or CSVLogger() in their callbacks"
        )
    runs = [read_run(run_folder) for run_folder in folders[-MOST_RUNS:]]
    if len(folders) > MOST_RUNS:
        runs[0].note = (
            f"{folder} has more runs than the last {MOST_RUNS}, which are on this page: give the folders of runs to choose others. "
            + runs[0].note
        )
    if unreadable:
        names = ", ".join([str(error.filename) for error in unreadable[:3]] + ["..."] * (len(unreadable) > 3))
        runs[0].note = f"Not on this page: runs in folders that may not be read ({names}). " + runs[0].note
    return runs


def _run_folders(root: Path, limit: int, unreadable: list[PermissionError] | None = None) -> list[Path]:
    """Return the folders of the newest runs of one ``root_dir``, oldest first. The first run's folder is the root itself.

    A root that may not be read is added to ``unreadable``; without ``unreadable`` it is an error.
    """
    if root.name == "version_0" and not root.exists():  # the name of the first run
        return [root.parent] if _has_metrics(str(root.parent)) else []
    try:
        names = os.listdir(root)
    except OSError as error:
        if unreadable is not None and isinstance(error, PermissionError):
            unreadable.append(error)
        elif error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return []
    numbers = sorted((int(name[8:]) for name in names if _NUMBERED.fullmatch(name)), reverse=True)
    folders = (*(f"{root}/version_{number}" for number in numbers), str(root))
    return [Path(folder) for folder in islice(filter(_has_metrics, folders), limit)][::-1]


def _named_run_folders(root: Path) -> list[Path]:
    """Return the folders of runs with names in a root that has runs without a name, too."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [root / name for name in names if not _NUMBERED.fullmatch(name) and _has_metrics(f"{root}/{name}")]


def _has_metrics(folder: str) -> bool:
    return os.path.isfile(f"{folder}/{NAME}") or os.path.isfile(f"{folder}/{CSV}")


def read_run(folder: Path, whole: bool = False) -> RunData:
    """Read the run in ``folder``: from its record, or from the files of ``CSVLogger`` if it has no record.

    Args:
        whole: read every row, however large the file is.
    """
    run = RunData(folder)
    path = folder / (NAME if (folder / NAME).is_file() else CSV)
    if path.name == NAME:
        _Reader(run).read(events(path, whole))
    else:
        _read_csv(run, whole)
    if not whole and (size := path.stat().st_size) > WHOLE:
        run.note = (
            f"{path} has {size / 2**30:.2f} GiB: of its rows, those at its start, at its end and at {PLACES:,} evenly spaced places were read. "
            "Lowest, highest and rare values may be missing."
        )
    return run


class _Reader:
    """Builds a run from the events of its record."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.metrics: dict[str, Points] = {}
        self.rates: dict[str, Points] = {}
        self.memory: dict[str, Points] = {}
        self.speed: dict[str, Points] = {}
        self.checkpoints_by_name: dict[str, dict[str, Any]] = {}
        self.best = ""
        """Name of the best checkpoint, as recorded last."""
        # Seconds of training before this start; the clock at the start; the clock of the last event.
        self.elapsed = self.began = self.last = 0.0
        self.times: dict[str, float] = {}
        self.training = self.ended = False
        self.columns: dict[int, list[Points]] = {}
        """Number of a kind of rows -> the curves of its columns."""
        self.stages: list[tuple[int, str, str]] = []
        """Step, kind and text of each stage, in the order in which they were recorded."""
        self.before: Array | None = None
        """The last step, its seconds, the clock without validation and checkpoints, and samples; shape [4, 1]."""

    def read(self, recorded: Iterable[Mapping[str, Any]]) -> None:
        """Read all events, in order."""
        for event in recorded:
            handle = getattr(self, f"_on_{event.get('event')}", None)
            now = _number(event.get("time"))
            if handle is not None and now is not None:
                handle(event, now)
                self.last = max(now, self.last) if event["event"] == "rows" else now
        self._add_times()
        run = self.run
        run.trained = run.starts > 0
        groups = self.metrics, self.rates, self.speed, self.memory
        run.metrics, rates, run.speed, run.memory = _curves(*groups)
        run.rates = _same_rates_once(rates)
        run.stages = _with_seconds(self.stages, run)
        _set_checkpoints(run, self.checkpoints_by_name, self.best)

    def _on_start(self, event: Mapping[str, Any], now: float) -> None:
        self._add_times()
        run = self.run
        self.began, self.last, self.before, self.times = now, now, None, {}
        self.training = event.get("stage") == "fit"
        run.machine = {str(k): str(v) for k, v in _mapping(event.get("machine")).items()} or run.machine
        if not self.training:
            run.status = run.status if run.starts else "evaluated"
            return
        self.ended = False
        run.started = now if run.started is None else run.started
        run.starts += 1
        run.status, run.reason = "no end recorded", "It was killed, or it is still running."
        self.elapsed = _number(event.get("elapsed")) or 0.0
        run.config = _settings(event) or run.config
        step = _step(event.get("step")) or 0
        run.step = step
        self.stages = [stage for stage in self.stages if stage[0] <= step]
        for group in (self.metrics, self.rates, self.memory, self.speed):
            for points in group.values():
                points.cut(step)

    def _on_values(self, event: Mapping[str, Any], now: float) -> None:
        """Read a row of an earlier version, which has names in it."""
        groups: dict[str, dict[str, float]] = {}
        for kind in ("values", "lr", "memory"):
            numbers = {str(name): _number(value, finite=False) for name, value in _mapping(event.get(kind)).items()}
            groups[kind] = {name: value for name, value in numbers.items() if value is not None}
        self._on_columns({"number": 0, **{kind: list(group) for kind, group in groups.items()}}, now)
        head = 0, now, _step(event.get("step")), 0, _number(event.get("apart")), _number(event.get("samples"))
        row = [*head, *(value for group in groups.values() for value in group.values())]
        self._on_rows({"rows": [packed([math.nan if number is None else number for number in row])]}, now)

    def _on_columns(self, event: Mapping[str, Any], now: float) -> None:
        number = _step(event.get("number"))
        if number is not None:
            groups = zip(("values", "lr", "memory"), (self.metrics, self.rates, self.memory), strict=True)
            self.columns[number] = [
                group.setdefault(str(name), Points())
                for kind, group in groups
                for name in (event[kind] if isinstance(event.get(kind), list) else [])
            ]

    def _on_rows(self, event: Mapping[str, Any], now: float) -> None:
        """Read rows that follow each other, of any kind."""
        rows = [row for row in event["rows"] if len(row) >= 8 * len(HEAD) and len(row) % 8 == 0]
        if not rows:
            return
        head = np.frombuffer(b"".join(row[: 8 * len(HEAD)] for row in rows), "<f8").reshape(len(rows), len(HEAD))
        numbers, times, steps, _, apart, samples = head.T
        good = np.isfinite(times) & (steps >= 0) & (steps < LARGEST_STEP)
        seconds = np.full(len(rows), math.nan)
        if self.training and good.any():
            seconds = self.elapsed + np.maximum(0.0, times - self.began)
            self.run.step = max(self.run.step, int(steps[good].max()))
            worked = times - np.where(np.isfinite(apart), apart, 0.0)
            self._measure(*(array[good] for array in (steps, seconds, worked, samples)))
            self.last = float(times[good][-1])
        for number, columns in self.columns.items():
            size = 8 * (len(HEAD) + len(columns))
            places = [place for place in np.flatnonzero(good & (numbers == number)) if len(rows[place]) == size]
            at, passed = steps[places], seconds[places]
            values = np.frombuffer(b"".join(rows[place][8 * len(HEAD) :] for place in places), "<f8")
            for points, column in zip(columns, values.reshape(len(places), len(columns)).T, strict=True):
                points.add(at, passed, column)

    def _measure(self, steps: Array, seconds: Array, worked: Array, samples: Array) -> None:
        """Add the speed between the first values of each step and of the step before, without validation and checkpoints."""
        now = np.stack((steps, seconds, worked, samples))
        now = now if self.before is None else np.concatenate((self.before, now), axis=1)
        first = np.append(True, now[0, 1:] > np.maximum.accumulate(now[0])[:-1])
        now = now[:, first]
        self.before = now[:, -1:]
        done, _, took, more = np.diff(now)
        for name, count in (("steps per second", done), ("samples per second", more)):
            measured = (took > 0) & (count > 0)
            if measured.any():
                points = self.speed.setdefault(name, Points())
                points.add(now[0, 1:][measured], now[1, 1:][measured], count[measured] / took[measured])

    def _on_checkpoint(self, event: Mapping[str, Any], now: float) -> None:
        path = str(event.get("path"))
        if event.get("best") is True:
            self.best = _last_part(path)
        entry = {"path": path, "step": _step(event.get("step")), "score": _number(event.get("score"))}
        self.checkpoints_by_name[_last_part(path)] = {**entry, "time": now}

    def _on_best(self, event: Mapping[str, Any], now: float) -> None:
        self.best = _last_part(str(event.get("path")))

    def _on_removed(self, event: Mapping[str, Any], now: float) -> None:
        self.checkpoints_by_name.pop(_last_part(str(event.get("path"))), None)

    def _on_stage(self, event: Mapping[str, Any], now: float) -> None:
        step, kind, text = _step(event.get("step")), str(event.get("kind")), str(event.get("text"))
        latest = next((stage for stage in self.stages[::-1] if stage[1] == kind), None)
        # A training that resumes within a stage records it again.
        if step is not None and (latest is None or latest[2] != text):
            self.stages.append((step, kind, text))

    def _on_table(self, event: Mapping[str, Any], now: float) -> None:
        columns, rows = event.get("columns"), event.get("rows")
        if isinstance(columns, list) and isinstance(rows, list):
            complete_rows = [row for row in rows if isinstance(row, list) and len(row) == len(columns)]
            self.run.tables[str(event.get("name"))] = [str(column) for column in columns], complete_rows

    def _on_times(self, event: Mapping[str, Any], now: float) -> None:
        self.times = {
            name: value
            for name, seconds in _mapping(event.get("times")).items()
            if name in PHASES and (value := _number(seconds)) is not None
        }

    def _on_end(self, event: Mapping[str, Any], now: float) -> None:
        if event.get("stage") != "fit":
            return
        run = self.run
        run.status, run.reason = str(event.get("status")), without_secrets(str(event.get("reason") or ""))
        run.step = _step(event.get("step")) or run.step
        run.epochs = _step(event.get("epoch"))
        self.ended = True
        self._on_times(event, now)

    def _add_times(self) -> None:
        """Add the times of a start, when all of its events are read."""
        if not self.training:
            return
        times = dict(self.times)
        whole = max(0.0, self.last - self.began)
        if not self.ended:
            times["unknown"] = max(0.0, whole - sum(times.values()))
        for name, seconds in times.items():
            self.run.times[name] = self.run.times.get(name, 0.0) + seconds
        self.run.seconds = sum(self.run.times.values())
        self.training = False


def _curves(*groups: Mapping[str, Points]) -> list[dict[str, Curve]]:
    shared: dict[tuple[int, ...], Array] = {}
    curves = [{name: points.curve(shared) for name, points in group.items()} for group in groups]
    return [{name: curve for name, curve in group.items() if len(curve)} for group in curves]


def _with_seconds(stages: Iterable[tuple[int, str, str]], run: RunData) -> list[Stage]:
    """The stages in the order of their steps, with the seconds of training that the longest curve tells."""
    curves = [*run.metrics.values(), *run.rates.values(), *run.memory.values()]
    longest = max(curves, key=len, default=None)
    timed = []
    for step, kind, text in sorted(stages):
        seconds = math.nan
        if longest is not None and longest.steps[0] <= step <= longest.steps[-1]:
            seconds = float(np.interp(step, longest.steps, longest.seconds))
        timed.append(Stage(step, kind, text, seconds))
    return timed


def _same_rates_once(rates: dict[str, Curve]) -> dict[str, Curve]:
    """Merge the curves of parameter groups whose learning rates are always equal."""
    families: dict[str, dict[str, Curve]] = {}
    for name, curve in rates.items():
        families.setdefault(name.partition(" group ")[0], {})[name] = curve
    merged: dict[str, Curve] = {}
    for optimizer, group in families.items():
        first = next(iter(group.values()))
        alike = len(group) > 1 and all(curve == first for curve in group.values())
        merged |= {f"{optimizer}, all groups": first} if alike else group
    return merged


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _set_checkpoints(run: RunData, recorded: Mapping[str, dict[str, Any]], best: str) -> None:
    """Set the checkpoints of a run that exist, and the score of the best one."""
    run.checkpoints = _checkpoints(run.folder, recorded, best)
    chosen = next((checkpoint for checkpoint in run.checkpoints if checkpoint["best"]), None)
    if chosen is not None:
        run.score, run.monitor, run.mode = chosen["score"], chosen["monitor"], chosen["mode"]


def _checkpoints(folder: Path, recorded: Mapping[str, dict[str, Any]], best: str) -> list[dict[str, Any]]:
    """Return the checkpoints that exist, oldest first: a kill may have come between a checkpoint and its entry in the record.

    ``best``: the name of the one that was recorded as the best. Scores in the checkpoints are newer.
    """
    existing: dict[str, dict[str, Any]] = {}
    for name, checkpoint in recorded.items():
        places = Path(checkpoint["path"]), folder / "checkpoints" / name
        if "://" in checkpoint["path"] or any(map(_exists, places)):
            existing[name] = checkpoint
    for path in (folder / "checkpoints").glob("[!.]*/manifest.json"):
        try:
            manifest = _mapping(json.loads(_read(path, _LARGEST[0])))
        except (OSError, ValueError, RecursionError):
            continue
        step, score = _mapping(manifest.get("counters")).get("step"), _mapping(manifest.get("score")).get("value")
        checkpoint = {"path": str(path.parent), "step": _step(step), "score": _number(score)}
        entry = existing.setdefault(path.parent.name, {**checkpoint, "time": _number(manifest.get("saved_at")) or 0.0})
        entry["step"] = checkpoint["step"]  # the record has the step at which the save was noticed
    manifests = {
        name: _manifest(Path(checkpoint["path"]), folder / "checkpoints" / _last_part(checkpoint["path"]))
        for name, checkpoint in existing.items()
    }
    best = _best_by_score(manifests) or best
    for name, checkpoint in existing.items():
        checkpoint["weights"], checkpoint["best"] = _scored_with(manifests[name]), name == best
        score = _mapping(_mapping(manifests[name]).get("score"))
        checkpoint["monitor"], checkpoint["mode"] = str(score.get("monitor", "")), str(score.get("mode", ""))
    return sorted(existing.values(), key=lambda each: (each["step"] or 0, each["time"]))


def _manifest(*places: Path) -> Mapping[str, Any] | None:
    """Return the manifest of the checkpoint that is at one of the ``places``; ``None``: it cannot be read."""
    for place in places:
        try:
            return _mapping(json.loads(_read(place / "manifest.json", _LARGEST[0])))
        except (OSError, ValueError, RecursionError):
            continue
    return None


def _best_by_score(manifests: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return the name of the checkpoint with the best score, the earliest of equal ones; empty if not all have scores that can be compared."""
    ranked: list[tuple[float, int, str]] = []
    metrics = set()
    for name, manifest in manifests.items():
        if manifest is None:
            return ""
        score, step = _mapping(manifest.get("score")), _step(_mapping(manifest.get("counters")).get("step"))
        value = _number(score.get("value"), finite=False)
        if value is not None:
            metrics.add((str(score.get("monitor")), str(score.get("mode"))))
            if not math.isnan(value):
                ranked.append((-value if score.get("mode") == "max" else value, step or 0, name))
    return min(ranked)[2] if ranked and len(metrics) == 1 else ""


def _scored_with(manifest: Mapping[str, Any] | None) -> str:
    """Return the weights that a checkpoint's score was measured with, from its manifest; empty: not known."""
    if manifest is None:
        return ""
    several = any(str(file).startswith("weights/") for file in _mapping(manifest.get("files")))
    weights = manifest.get("scored_with", "" if several else "trained")
    return weights if isinstance(weights, str) else ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_csv(run: RunData, whole: bool) -> None:
    """Read a run that only ``CSVLogger`` has recorded: it has no times and no speed."""
    points: dict[str, Points] = {}
    with suppress(csv.Error):  # a cell beyond csv's limit: the rows before it count
        for block in _blocks(run.folder / CSV, whole):
            rows, steps = _cells_with_numbers(block.get("step", ()))
            good = (steps >= 0) & (steps < LARGEST_STEP)
            step_of = np.full(max(map(len, block.values())), math.nan)
            step_of[rows[good]] = np.floor(steps[good])
            run.step = int(np.nanmax(step_of, initial=run.step))
            for name, cells in block.items():
                if name not in ("step", "run_step", "epoch", "samples"):
                    places, values = _cells_with_numbers(cells)
                    has_step = np.isfinite(step_of[places])
                    at = step_of[places[has_step]]
                    points.setdefault(name, Points()).add(at, np.full(len(at), math.nan), values[has_step])
    (curves,) = _curves(points)
    run.rates = {name: curve for name, curve in curves.items() if name.startswith("lr-")}
    run.metrics = {name: curve for name, curve in curves.items() if name not in run.rates}
    _set_checkpoints(run, {}, "")
    run.trained = (run.folder / CONFIG).exists()  # which a training writes
    try:
        run.config = [(name, text, "") for name, text in _flat(without_secrets(_settings_file(run.folder)))]
    except FileNotFoundError:
        pass
    except _UNREADABLE as error:
        run.config = [(CONFIG, f"not read: {error or type(error).__name__}", "")]


_UNREADABLE = OSError, ValueError, yaml.YAMLError, RecursionError
"""The errors of :func:`_settings_file`."""


def _settings_file(folder: Path) -> Mapping[str, Any]:
    """Return the settings that ``CSVLogger`` has written into a run's folder."""
    text = _read(folder / CONFIG, _LARGEST[1]).decode()
    # This ends early if values are nested too deeply; the parser alone would take longer and longer.
    yaml.compose(text, Loader=yaml.SafeLoader)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError(
            "it has aliases, which may stand for more values than anybody can read, and no logger writes them"
        )
    return _mapping(yaml.safe_load(text))


def config_of(folder: Path) -> dict[str, Any]:
    """Return the settings that the run in ``folder`` has recorded, in the form of ``Run.config``; empty if it has no record.

    Raises:
        ValueError: the record of ``CSVLogger`` cannot be read.
    """
    if (folder / NAME).is_file():
        starts = [
            event for event in events(folder / NAME) if event.get("event") == "start" and event.get("stage") == "fit"
        ]
        return dict(_mapping(starts[-1].get("config"))) if starts else {}
    try:
        return {str(name): {"value": value} for name, value in _settings_file(folder).items()}
    except FileNotFoundError:
        return {}
    except _UNREADABLE as error:
        path, reason = folder / CONFIG, str(error) or type(error).__name__
        raise ValueError(
            f"the settings of the run, {path}, cannot be read: {reason}. Mend the file, or remove it and give the settings"
        ) from error


def _read(path: Path, largest: int) -> bytes:
    """Read a regular file; a pipe or a device could block for ever.

    Raises:
        OSError: the file is not a regular one, has more than ``largest`` bytes, or cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(f"{path} has {os.path.getsize(path):,} bytes, and at most {largest:,} are read")
    return content


def _blocks(path: Path, whole: bool) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the columns of a CSV file, some thousand rows at a time, without a last row that a kill left unfinished."""
    whole = whole or path.stat().st_size <= WHOLE
    with path.open("rb") as file:
        some = bounded_lines(file) if whole else (line for _, line in sampled_lines(file))
        lines = _readable(csv.reader(_complete_lines(line.decode(errors="replace") for line in some)))
        names = [from_cell(cell) for cell in next(lines, [])]
        while rows := list(islice(lines, 5_000)):
            full = [row for row in rows if len(row) == len(names)]
            if full:
                yield dict(zip(names, zip(*full, strict=True), strict=True))


def _readable(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yield the rows before the first cell of more than 100 kB, which no logger writes."""
    with contextlib.suppress(csv.Error):
        yield from rows


def _complete_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, without a last line that has no end."""
    before = ""
    for line in lines:
        if before:
            yield before
        before = line
    if before.endswith("\n"):
        yield before


def _cells_with_numbers(cells: Sequence[str]) -> tuple[Array, Array]:
    """Return the indices of cells with numbers, and the numbers."""
    places = [place for place, text in enumerate(cells) if text]
    try:
        numbers = [float(cells[place]) for place in places]
    except ValueError:
        pairs = [(place, number) for place in places if (number := _parsed_float(cells[place])) is not None]
        places, numbers = [place for place, _ in pairs], [number for _, number in pairs]
    return np.array(places, dtype=np.int64), np.array(numbers, dtype=np.float64)


def _settings(event: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of setting, value and origin; hyperparameters first. An earlier version may have recorded what this one hides."""
    event = without_secrets({name: event.get(name) for name in ("hyperparameters", "config")})
    rows = [(name, text, "hyperparameter") for name, text in _flat(_mapping(event.get("hyperparameters")))]
    for name, entry in _mapping(event.get("config")).items():
        entry = _mapping(entry)
        value, origin = entry.get("value"), str(entry.get("origin", ""))
        origins = _mapping(entry.get("origins"))
        if isinstance(value, Mapping) and value:
            rows += [(f"{name}.{key}", text, str(origins.get(key, origin))) for key, text in _flat(value)]
        else:
            rows.append((str(name), _text(value), origin))
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth < 8:
            rows += _flat(value, f"{prefix}{name}.", depth + 1)
        else:
            rows.append((f"{prefix}{name}", _text(value)))
    return rows


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 2000 else f"{text[:2000]} ..."


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, finite: bool = True) -> float | None:
    if type(value) not in (int, float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) or not finite else None


def _parsed_float(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _step(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < LARGEST_STEP else None


def give_names(runs: Sequence[RunData]) -> None:
    """Name each run by the shortest end of its path, of at least one part, that no other run has."""
    paths = [run.folder.resolve().parts for run in runs]
    for run, parts in zip(runs, paths, strict=True):
        length = 2 if parts[-1].startswith("version_") else 1
        while length < len(parts) and sum(path[-length:] == parts[-length:] for path in paths) > 1:
            length += 1
        run.name = "/".join(parts[-length:])


def logged_until(folder: Path, step: int) -> dict[int, dict[str, float]]:
    """Return the values that the run in ``folder`` has recorded up to ``step``, by step and name; empty if it has no record."""
    if not any((folder / name).is_file() for name in (NAME, CSV)):
        return {}
    recorded: dict[int, dict[str, float]] = {}
    for name, curve in read_run(folder, whole=True).metrics.items():
        for number, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            if number <= step:
                recorded.setdefault(int(number), {})[name] = value
    return recorded
