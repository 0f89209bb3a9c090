"""What a job that was killed has lost, beside one that nobody disturbed."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]
OWN = ("elapsed_s", "last_s", "names", "postponed")
"""What a checkpoint says of the run that wrote it: its time, names of checkpoints beside one that stays, and what that run had still to remove."""
ASIDE = re.compile(r"metrics\.\d+\.csv")
"""The rows of a run that was killed before its first checkpoint: the next one starts again, and keeps them."""
AGAIN = re.compile(r"(?<=/step=\d{8})-v\d+")
"""The end of the name of a checkpoint that is saved beside one of the same step, from which the run has resumed."""
THEIRS = ("torchelastic_",)
"""Temporary directories of torchrun, which nobody removes after a kill."""
LOSSES = (
    "steps lost", "samples lost", "weights differ", "rows lost", "outcome differs", "failed resumes", "orphans", "left behind",
)  # fmt: skip


@dataclass
class Found:
    """About one job, or several."""

    losses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0))
    repeated: int = 0
    """Steps that were done a second time, because their checkpoint was not complete yet: no loss."""
    texts: list[str] = field(default_factory=list)

    def lose(self, what: str, count: int, text: str) -> None:
        """Note a loss."""
        if count:
            self.losses[what] += count
            self.texts.append(f"{what}: {text}")

    def add(self, other: Found) -> None:
        for what, count in other.losses.items():
            self.losses[what] += count
        self.repeated += other.repeated
        self.texts += other.texts


def attempts(place: Path) -> list[dict[int, list[Line]]]:
    """The diaries of each attempt that came to train, in order: the whole lines by rank."""
    found: dict[tuple[int, int], dict[int, list[Line]]] = {}
    for path in place.glob("diaries/*/*"):
        attempt, rank = map(int, path.name.split("."))
        lines = []
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                lines.append(json.loads(line))
        if lines:
            found.setdefault((int(path.parent.name), attempt), {})[rank] = lines
    return [found[key] for key in sorted(found)]


def check_steps(place: Path, reference: Path, ranks: int, steps: int, found: Found) -> None:
    """The steps on which the final weights rest are those of the undisturbed run; each attempt began at the newest complete checkpoint."""
    tracks: list[dict[int, Line]] = [{} for _ in range(ranks)]
    saved = done = 0
    for number, attempt in enumerate(attempts(place)):
        begins = {lines[0]["begin"] for lines in attempt.values()}
        newest = max(saved, *(lines[0]["newest"] for rank, lines in attempt.items() if rank == 0), 0)
        for begin in begins:
            found.lose(
                "steps lost",
                abs(newest - begin),
                f"attempt {number} began at step {begin}, the newest complete checkpoint was of {newest}",
            )
        begin = min(begins)
        found.repeated += max(0, done - begin)
        for rank, lines in attempt.items():
            kept = {step: line for step, line in tracks[rank].items() if step <= lines[0]["begin"]}
            tracks[rank] = kept | {line["step"]: line for line in lines[1:]}
            done = max([done, *(line["step"] for line in lines[1:])])
            saved = max([saved, newest, *(line["complete"] for line in lines[1:])])
    (whole,) = attempts(reference)
    for rank in range(ranks):
        expected = {line["step"]: line for line in whole[rank][1:]}
        assert sorted(expected) == list(range(1, steps + 1)), "the undisturbed run is not whole"
        missing = sorted(expected.keys() ^ tracks[rank].keys())
        found.lose("steps lost", len(missing), f"rank {rank}: steps {missing}")
        for step in sorted(expected.keys() & tracks[rank].keys()):
            wanted, got = expected[step], tracks[rank][step]
            ids = set(wanted["ids"]) ^ set(got["ids"]) or (wanted["ids"] != got["ids"] and set(wanted["ids"])) or set()
            found.lose("samples lost", len(ids), f"rank {rank}, step {step}: {got['ids']} instead of {wanted['ids']}")
            found.lose("weights differ", int(wanted["weights"] != got["weights"]), f"rank {rank} after step {step}")


def check_outcome(place: Path, reference: Path, found: Found) -> None:
    """The best checkpoint and the last one, the reason for the end, and the last metrics, if the last attempt has trained: the step that a run
    continues from is not reported again."""
    mine, others = (json.loads((each / "outcome.json").read_text()) for each in (place, reference))
    for name in ("best", "last", *(("metrics", "end") if len(attempts(place)[-1][0]) > 1 else ())):
        found.lose("outcome differs", int(mine[name] != others[name]), f"{name} {mine[name]} instead of {others[name]}")


def check_rows(place: Path, reference: Path, found: Found) -> None:
    """The rows of ``metrics.csv``, each once and in order."""
    mine, others = (
        list(csv.DictReader((each / "root" / "metrics.csv").read_text().splitlines())) for each in (place, reference)
    )
    missing = [row for row in others if row not in mine]
    more = [row for row in mine if row not in others]
    found.lose("rows lost", len(missing), f"{missing[:3]}")
    found.lose("rows lost", len(more), f"rows that nobody else has: {more[:3]}")
    if not missing and not more:
        found.lose("rows lost", int(mine != others), "rows are in another order, or come twice")


def check_files(place: Path, reference: Path, found: Found) -> None:
    """The files are those of the undisturbed run, and the checkpoints say the same."""
    mine, others = (
        {AGAIN.sub("", name): each / "root" / name for name in names}
        for each in (place, reference)
        for names in [sorted(str(path.relative_to(each / "root")) for path in (each / "root").rglob("*"))]
    )
    last = attempts(place)[-1][0]
    source = f"checkpoints/step={last[0]['begin']:08d}"  # what the last attempt continued from stays for the next one
    # Where nothing was left to train, it stays the state before the end of its epoch.
    ended = f"{source}/state" if len(last) == 1 else None
    beside = sorted(
        name for name in mine.keys() ^ others.keys() if not name.startswith(source) and not ASIDE.fullmatch(name)
    )
    found.lose("left behind", len(beside), f"in one root only: {', '.join(beside)}")
    left = {path.name for path in (place / "tmp").iterdir() if not path.name.startswith(THEIRS)}
    left -= {path.name for path in (reference / "tmp").iterdir()}
    found.lose("left behind", len(left), f"in the temporary directory: {', '.join(sorted(left))}")
    for name, other in others.items():
        path = mine.get(name, other)
        kept = name.split("/")[2:3]
        if ended is not None and name.startswith(ended):
            continue
        if kept and kept[0] in ("model", "optim", "state") and path.is_file() and not _alike(path, other):
            found.lose("weights differ", 1, f"{name} is not that of the undisturbed run")


def _alike(path: Path, other: Path) -> bool:
    """The same bytes, but for what is a run's own."""
    if path.read_bytes() == other.read_bytes():
        return True
    if path.name != "shared.json":
        return False
    values = [json.loads(each.read_bytes()) for each in (path, other)]
    return bool(_without_own(values[0]) == _without_own(values[1]))


def _without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_own(each) for key, each in value.items() if key not in OWN}
    return [_without_own(each) for each in value] if isinstance(value, list) else value
