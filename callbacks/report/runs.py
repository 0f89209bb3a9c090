"""What a run left in its folder. Nothing in these files is trusted."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .curves import Curve, Points
from .record import NAME, events

CSV, CONFIG = "metrics.csv", "config.yaml"
PHASES = {
    "compute": "training steps",
    "data": "waiting for data",
    "validation": "validation",
    "checkpoint": "checkpoints",
    "other": "setup and the rest",
    "unknown": "not measured (the run was killed, or is running)",
}
LARGEST_STEP = 1 << 53


@dataclass
class RunData:
    """One run."""

    folder: Path
    name: str = ""
    status: str = "not recorded"
    reason: str = ""
    step: int = 0
    epochs: int | None = None
    seconds: float = 0.0
    """Of all its processes, one after the other."""
    started: float | None = None
    starts: int = 0
    """How often the training was started or resumed."""
    machine: dict[str, str] = field(default_factory=dict)
    config: list[tuple[str, str, str]] = field(default_factory=list)
    """Setting, value, origin."""
    metrics: dict[str, Curve] = field(default_factory=dict)
    rates: dict[str, Curve] = field(default_factory=dict)
    """Learning rates, by optimizer."""
    speed: dict[str, Curve] = field(default_factory=dict)
    memory: dict[str, Curve] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """``path``, ``step``, ``score``, ``best``, ``time``, oldest first."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds by name of :data:`PHASES`."""


def runs_in(folder: Path, only: bool = False) -> list[RunData]:
    """The runs in ``folder``: its own, and those of its numbered folders unless ``only`` its own is wanted; else those of the folders in it.

    Raises:
        FileNotFoundError: ``folder`` has no run.
    """
    found = (
        [folder] if only else _places(folder) or [run for each in sorted(folder.glob("*/")) for run in _places(each)]
    )
    if not found:
        what = "does not exist" if not folder.exists() else f"has no run with a {NAME} (Report) or {CSV} (CSVLogger)"
        raise FileNotFoundError(f"{folder} {what}: give folders of runs that had one of these callbacks")
    return [read_run(each) for each in found]


def _places(root: Path) -> list[Path]:
    """The folders of runs of one ``root_dir``: the first one is the root itself."""
    numbered = {int(path.name[8:]): path for path in root.glob("version_*") if path.name[8:].isdecimal()}
    places = [root, *(numbered[number] for number in sorted(numbered))]
    return [place for place in places if (place / NAME).is_file() or (place / CSV).is_file()]


def read_run(folder: Path) -> RunData:
    """The run in ``folder``: from its record, or from the files of ``CSVLogger`` if it has no record."""
    run = RunData(folder)
    if (folder / NAME).is_file():
        _Reader(run).read(events(folder / NAME))
    else:
        _read_csv(run)
    return run


class _Reader:
    """Builds a run from its events."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.metrics: dict[str, Points] = {}
        self.rates: dict[str, Points] = {}
        self.memory: dict[str, Points] = {}
        self.speed: dict[str, Points] = {}
        self.kept: dict[str, dict[str, Any]] = {}  # checkpoints by path
        self.elapsed = self.began = self.last = (
            0.0  # of training before this start; clock at the start; clock of the last event
        )
        self.times: dict[str, float] = {}
        self.training = self.ended = False
        # Of the last step: itself, the clock without validation and checkpoints, samples.
        self.before: tuple[int, float, float | None] | None = None

    def read(self, found: Iterable[Mapping[str, Any]]) -> None:
        """All events, in order."""
        for event in found:
            handle = getattr(self, f"_on_{event.get('event')}", None)
            now = _number(event.get("time"))
            if handle is not None and now is not None:
                handle(event, now)
                self.last = now
        self._close()
        run = self.run
        run.metrics, run.memory = _curves(self.metrics), _curves(self.memory)
        run.rates = _merged(_curves(self.rates))
        run.speed = _curves(self.speed)
        run.checkpoints = _checkpoints(run.folder, self.kept)

    def _on_start(self, event: Mapping[str, Any], now: float) -> None:
        self._close()
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
        for group in (self.metrics, self.rates, self.memory, self.speed):
            for points in group.values():
                points.cut(step)

    def _on_values(self, event: Mapping[str, Any], now: float) -> None:
        step = _step(event.get("step"))
        if step is None:
            return
        seconds = self.elapsed + max(0.0, now - self.began) if self.training else math.nan
        if self.training:
            self.run.step = max(self.run.step, step)
            self._add(self.rates, event.get("lr"), step, seconds)
            self._add(self.memory, event.get("memory"), step, seconds)
            self._measure(step, now, seconds, event)
        self._add(self.metrics, event.get("values"), step, seconds)

    def _measure(self, step: int, now: float, seconds: float, event: Mapping[str, Any]) -> None:
        """The speed since the last values of an earlier step, without validation and checkpoints."""
        samples = _number(event.get("samples"))
        worked = now - (_number(event.get("apart")) or 0.0)
        if self.before is not None and step > self.before[0]:
            earlier, then, seen = self.before
            if (took := worked - then) > 0:
                done = {"steps per second": (step - earlier) / took}
                if samples is not None and seen is not None and samples > seen:
                    done["samples per second"] = (samples - seen) / took
                self._add(self.speed, done, step, seconds)
        if self.before is None or step > self.before[0]:
            self.before = step, worked, samples

    def _on_checkpoint(self, event: Mapping[str, Any], now: float) -> None:
        path = str(event.get("path"))
        best = event.get("best") is True
        if best:
            for each in self.kept.values():
                each["best"] = False
        found = {"path": path, "step": _step(event.get("step")), "score": _number(event.get("score")), "best": best}
        self.kept[_name(path)] = {**found, "time": now}

    def _on_removed(self, event: Mapping[str, Any], now: float) -> None:
        self.kept.pop(_name(str(event.get("path"))), None)

    def _on_times(self, event: Mapping[str, Any], now: float) -> None:
        self.times = {
            name: value
            for name, given in _mapping(event.get("times")).items()
            if name in PHASES and (value := _number(given)) is not None
        }

    def _on_end(self, event: Mapping[str, Any], now: float) -> None:
        if event.get("stage") != "fit":
            return
        run = self.run
        run.status, run.reason = str(event.get("status")), str(event.get("reason") or "")
        run.step = _step(event.get("step")) or run.step
        run.epochs = _step(event.get("epoch"))
        self.ended = True
        self._on_times(event, now)

    def _close(self) -> None:
        """A start's events are all read: add its times."""
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

    def _add(self, group: dict[str, Points], values: Any, step: int, seconds: float) -> None:
        for name, given in _mapping(values).items():
            if (value := _number(given, finite=False)) is not None:
                group.setdefault(str(name), Points()).add(step, seconds, value)


def _curves(group: Mapping[str, Points]) -> dict[str, Curve]:
    return {name: points.curve() for name, points in group.items() if points.steps}


def _merged(rates: dict[str, Curve]) -> dict[str, Curve]:
    """Parameter groups that always have the same learning rate are one curve."""
    families: dict[str, dict[str, Curve]] = {}
    for name, curve in rates.items():
        families.setdefault(name.partition(" group ")[0], {})[name] = curve
    found: dict[str, Curve] = {}
    for optimizer, group in families.items():
        first = next(iter(group.values()))
        alike = len(group) > 1 and all(curve == first for curve in group.values())
        found |= {f"{optimizer}, all groups": first} if alike else group
    return found


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _checkpoints(folder: Path, recorded: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are there, oldest first: a kill may have come between a checkpoint and its entry in the record."""
    found: dict[str, dict[str, Any]] = {}
    for name, known in recorded.items():
        places = Path(known["path"]), folder / "checkpoints" / name
        if "://" in known["path"] or any(map(_exists, places)):
            found[name] = known
    for path in (folder / "checkpoints").glob("[!.]*/manifest.json"):
        try:
            manifest = _mapping(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError):
            continue
        step, score = _mapping(manifest.get("counters")).get("step"), _mapping(manifest.get("score")).get("value")
        known = {"path": str(path.parent), "step": _step(step), "score": _number(score), "best": False}
        found.setdefault(path.parent.name, {**known, "time": _number(manifest.get("saved_at")) or 0.0})
    return sorted(found.values(), key=lambda each: (each["step"] or 0, each["time"]))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_csv(run: RunData) -> None:
    """A run that only ``CSVLogger`` has recorded: no times and no speed."""
    points: dict[str, Points] = {}
    for row in _rows(run.folder / CSV):
        step = _step(_parsed(row.get("step")))
        if step is None:
            continue
        run.step = max(run.step, step)
        for name, text in row.items():
            if name not in ("step", "epoch", "samples") and (value := _parsed(text)) is not None:
                points.setdefault(str(name), Points()).add(step, math.nan, value)
    curves = _curves(points)
    run.rates = {name: curve for name, curve in curves.items() if name.startswith("lr-")}
    run.metrics = {name: curve for name, curve in curves.items() if name not in run.rates}
    run.checkpoints = _checkpoints(run.folder, {})
    try:
        settings = yaml.safe_load((run.folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return
    run.config = [(name, text, "") for name, text in _flat(_mapping(settings))]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a CSV file; a last row that a kill left unfinished is left out."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        text = file.read()
    yield from csv.DictReader(text[: text.rfind("\n") + 1].splitlines(keepends=True))


def _settings(event: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of setting, value and origin; hyperparameters first."""
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
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) or not finite else None


def _parsed(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _step(value: Any) -> int | None:
    found = _number(value)
    return int(found) if found is not None and 0 <= found < LARGEST_STEP else None


def named(runs: Sequence[RunData]) -> None:
    """Give each run the shortest end of its path, of at least one part, that no other run has."""
    paths = [run.folder.resolve().parts for run in runs]
    for run, own in zip(runs, paths, strict=True):
        length = 2 if own[-1].startswith("version_") else 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in paths) > 1:
            length += 1
        run.name = "/".join(own[-length:])
