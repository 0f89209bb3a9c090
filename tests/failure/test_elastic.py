"""Killed in the middle of an epoch and resumed with other ranks, or under another strategy: the same global batches, the same losses."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from job import SAMPLES, read_diary
from support.ranks import run_ranks

GLOBAL, LAST = 24, 12
"""Samples of a step, and steps of 4 epochs: 24, 24 and 13 samples each."""

SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from engine import MeshParallel
from job import train

root, strategy, die_at, diary = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])
rank = int(os.environ["RANK"])
if strategy == "tp_fsdp":
    strategy = MeshParallel(tp=2, dp_shard=2)
report(train(root, diary.with_name(f"{diary.name}.{rank}"), strategy=strategy, dropout=0.0, workers=2 if rank == 0 else 0, batch_size=2,
             global_batch_size=24, die_at=die_at if rank == int(os.environ["WORLD_SIZE"]) - 1 else -1))
"""


def phase(root: Path, number: int, world_size: int, strategy: str, die_at: int) -> Any:
    """One start of the job; what it reported, if it was not killed."""
    args = (Path(__file__).parent, root, strategy, die_at, root / f"diary{number}")
    ran = run_ranks(SCRIPT, world_size, *args, timeout=300, check=die_at < 0)
    if die_at >= 0:
        assert ran[-1].returncode == -9, ran[-1].stderr[-3000:]
        assert all(rank.returncode for rank in ran)
    return ran[0].value


def steps_of(root: Path) -> dict[int, dict[str, Any]]:
    """What the diaries say of each step: the ids over all ranks, and the loss. Every time a step was done it was the same."""
    found: dict[int, dict[str, Any]] = {}
    for number in sorted({int(path.name[5:].split(".")[0]) for path in root.glob("diary*")}):
        ids: dict[int, list[int]] = defaultdict(list)
        losses: dict[int, float] = {}
        twice = set()
        for path in sorted(root.glob(f"diary{number}.*")):
            for line in read_diary(path):
                key = (line["step"], tuple(line["ids"]))
                if key not in twice:  # ranks that hold parts of one model see the same data
                    ids[line["step"]] += line["ids"]
                twice.add(key)
                losses[line["step"]] = line["loss"]
        for step, loss in losses.items():
            entry = {"ids": sorted(ids[step]), "loss": loss}
            if step in found and len(entry["ids"]) == len(found[step]["ids"]):
                assert entry["ids"] == found[step]["ids"]
                assert entry["loss"] == pytest.approx(found[step]["loss"], abs=1e-5)
            if step not in found or len(entry["ids"]) > len(found[step]["ids"]):  # a rank that died had not written yet
                found[step] = entry
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, Any]], dict[str, float]]:
    """Steps and metrics of one process that nobody disturbs."""
    root = tmp_path_factory.mktemp("alone")
    metrics = phase(root, 0, 1, "single", -1)
    return steps_of(root), metrics


def check(root: Path, last: Any, alone: tuple[dict[int, dict[str, Any]], dict[str, float]]) -> None:
    expected, metrics = alone
    found = steps_of(root)
    assert sorted(found) == sorted(expected) == list(range(1, LAST + 1))
    for step, entry in expected.items():
        assert found[step]["ids"] == entry["ids"], step
        assert found[step]["loss"] == pytest.approx(entry["loss"], abs=1e-5), step
    for first in range(1, LAST, 3):  # an epoch
        assert sorted(i for step in range(first, first + 3) for i in found[step]["ids"]) == list(range(SAMPLES))
    assert last == pytest.approx(metrics, abs=1e-5), json.dumps([last, metrics])


def test_four_two_one_three_ranks(tmp_path: Path, alone: Any) -> None:
    for number, (world_size, die_at) in enumerate([(4, 2), (2, 5), (1, 7), (3, 10)]):
        phase(tmp_path, number, world_size, "auto", die_at)
    check(tmp_path, phase(tmp_path, 4, 2, "auto", -1), alone)


@pytest.mark.slow
def test_from_strategy_to_strategy(tmp_path: Path, alone: Any) -> None:
    stages = [(2, "ddp", 2), (2, "fsdp", 4), (4, "tp_fsdp", 10), (1, "single", -1)]
    if importlib.util.find_spec("deepspeed"):
        stages[2:2] = [(2, "deepspeed_stage_2", 7), (2, "deepspeed_stage_3", 8)]
    for number, (world_size, strategy, die_at) in enumerate(stages):
        last = phase(tmp_path, number, world_size, strategy, die_at)
    check(tmp_path, last, alone)
