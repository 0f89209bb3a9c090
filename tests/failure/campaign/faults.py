"""``python -m tests.failure.campaign.faults``: does the campaign find what it is for? One fault each in copies of the library."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .campaign import Campaign, Row
from .setups import SETUPS, TREE


class Fault(NamedTuple):
    """A line of the library, made wrong."""

    what: str
    file: str
    right: str
    wrong: str
    setup: str = "single"


FAULTS = {
    "older": Fault(
        "a job goes on from the checkpoint before the newest", "engine/checkpoint/resume.py",
        "else storage.newest_first()\n", "else storage.newest_first()[1:] or storage.newest_first()\n",
    ),
    "early": Fault(
        "a checkpoint has its name before it has its manifest", "engine/checkpoint/local_storage.py",
        "        record = write_json(partial / MANIFEST, manifest)\n        folders = () if TREES in manifest else (*FOLDERS, WEIGHTS)\n"
        "        for folder in (*folders, \".\"):\n            if folder != WEIGHTS or (partial / folder).is_dir():\n"
        "                sync(f\"{partial}/{folder}\")\n",
        "        partial.rename(path)\n        sync(path)\n        return write_json(path / MANIFEST, manifest)\n",
    ),
    "lock": Fault(
        "who is said to hold a folder holds it, dead or alive", "engine/checkpoint/runs.py",
        "        free = _lock(descriptor, fcntl.LOCK_EX, before) and", "        free = before.status != RUNNING and",
    ),
    "random": Fault(
        "random numbers start again", "engine/engine_snapshot.py",
        "            loaded.load_into(\"random generators\", restore, own_state[\"rng\"])\n", "            pass\n",
    ),
    "position": Fault(
        "an epoch starts again at its first sample", "engine/loop/train.py",
        "loader.resume(state.epoch, state.position, loaders.take_stream())", "loader.resume(state.epoch, 0, loaders.take_stream())",
    ),
    "validation": Fault(
        "a validation that ended in an error counts", "engine/loop/evaluate.py",
        "            run.state.validated_step = previous_validated_step\n", "            pass\n",
    ),
    "score": Fault(
        "that a checkpoint waits for its score is forgotten", "callbacks/model_checkpoint.py",
        "        self._waits_for_score = state.get(\"waits_for_score\") is True\n", "        pass\n",
    ),
    "stop": Fault(
        "that a stop waits is forgotten", "engine/loop/run_resume.py",
        "    snapshot.restore_stops(loaded, own_state, [] if ends and _starts_again(run, loaded, how) else ends)\n", "",
    ),
    "removal": Fault(
        "what was still to be removed is forgotten", "engine/loop/run.py",
        "content.shared[\"postponed\"] = [*folder.to_remove, *remove]", "content.shared[\"postponed\"] = [*folder.to_remove]",
    ),
    "orphan": Fault(
        "ranks do not end with the process that has started them", "engine/launch/child.py",
        "        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)", "        ctypes.CDLL(None)", "fit launch",
    ),
}  # fmt: skip
"""One for each kind of loss."""


def copied(fault: Fault, place: Path) -> Path:
    """A copy of the library with the fault.

    Raises:
        ValueError: the line is not in the library any more.
    """
    for name in ("engine", "callbacks"):
        shutil.copytree(TREE / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = place / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.right)} times what the fault replaces:\n{fault.right}")
    path.write_text(text.replace(fault.right, fault.wrong))
    return place


def find(fault: Fault, most: int, report: Callable[[str], None] = lambda line: None) -> Row:
    """What a campaign of at most so many kills finds: it ends at the first loss."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        campaign = Campaign([SETUPS[fault.setup]], place / "jobs", copied(fault, place / "tree"), 0, report)
        return campaign.run(most)[0]


def main() -> int:
    """The exit status: 1 when a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.failure.campaign.faults", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)}; all by default")
    parser.add_argument("--kills", type=int, default=28, help="give a fault up after so many")
    given = parser.parse_args()
    missed = 0
    for name in given.names:
        began = time.monotonic()
        row = find(FAULTS[name], given.kills)
        missed += not row.found.texts
        outcome = (
            f"found after {row.kills.total()} kills" if row.found.texts else f"NOT found by {row.kills.total()} kills"
        )
        print(f"{name}: {FAULTS[name].what}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
        print("".join(f"    {text[:300]}\n" for text in row.found.texts[:2]), end="", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
