"""A plan against the same training on 2 and 4 real ranks: memory by category, the peak, and each kind of collective, to the byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jobs import JOBS, Job, parity
from measured import measure
from support.ranks import ranks_of_file

from engine import Fit
from engine.planning.plan import RankTrace

FAST = (
    *("ddp, sgd, window", "fsdp, momentum, window", "fsdp, selective checkpointing", "tp, bf16, clipped"),
    *("pp of 4 parts, clipped", "fsdp, muon"),
)
"""The others are slow: they cost as much as everything else here."""
MEASURING_S = 1200.0
"""How long all jobs of one number of ranks may take (s): on a loaded machine the profiler alone needs minutes."""


def two_jobs() -> dict[str, Any]:
    return _measured(2)


def four_jobs() -> dict[str, Any]:
    return _measured(4)


def _measured(world_size: int) -> dict[str, Any]:
    root, wanted = Path(os.environ["PLANNING_ROOT"]), json.loads(os.environ["PLANNING_JOBS"])
    return {name: measure(JOBS[name], root) for name in wanted if JOBS[name].world_size == world_size}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What was measured on each rank, by the job's name."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    env = {
        "PLANNING_ROOT": str(tmp_path_factory.mktemp("runs")),
        "PLANNING_JOBS": json.dumps(chosen),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])]),
    }
    found: dict[str, list[Any]] = {}
    for prefix, world_size in (("two_", 2), ("four_", 4)):
        if any(JOBS[name].world_size == world_size for name in chosen):
            ranks = ranks_of_file(__file__, world_size, prefix, MEASURING_S, **env)["jobs"]
            found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


def marked(names: Iterable[str]) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


def planned(job: Job, root: Path) -> tuple[RankTrace, ...]:
    settings = {"accelerator": "cpu", "log_every_n_steps": 0, "num_sanity_val_steps": 0, "seed": 1, "check": False}
    fit = Fit(root_dir=root, **settings, **job.settings())
    return fit.plan(job.module(), job.loader(), world_size=job.world_size, device="cpu").traces


def held(moment: Any) -> dict[str, int]:
    return {category: size for category, size in asdict(moment.memory).items() if size}


@pytest.mark.parametrize("name", marked(JOBS))
def test_a_plan_is_what_real_ranks_hold_and_send(real: dict[str, list[Any]], tmp_path: Path, name: str) -> None:
    traces = planned(JOBS[name], tmp_path)
    assert not any(trace.missing or trace.computed for trace in traces)
    for trace in traces:
        measured = real[name][trace.rank]
        assert held(trace.timeline[0]) == measured["start"]
        assert held(trace.peak) == measured["peak"]
        sent: dict[str, list[int]] = {}
        for collective in trace.collectives:
            count, size = sent.get(collective.kind, (0, 0))
            sent[collective.kind] = [count + collective.count, size + collective.bytes]
        assert sent == measured["collectives"]
        groups: dict[tuple[int, ...], int] = {}
        for collective in trace.collectives:
            groups[collective.ranks] = groups.get(collective.ranks, 0) + collective.count
        assert groups == {tuple(ranks): count for ranks, count in measured["groups"] if count}


def without_a_plan(rows: Iterable[str]) -> list[str]:
    """The strategies among ``rows`` whose plan is not compared with real ranks here."""
    return [name for name in rows if name not in JOBS]


def test_each_strategy_of_the_parity_table_has_a_plan() -> None:
    assert without_a_plan(parity().NAMES) == []
    assert without_a_plan([*parity().NAMES, "new"]) == ["new"]


def test_the_stages_of_a_pipeline_say_which_they_are(tmp_path: Path) -> None:
    assert [trace.role for trace in planned(JOBS["pp"], tmp_path)] == ["pipeline stage 1 of 2", "pipeline stage 2 of 2"]
    assert [t.role for t in planned(JOBS["interleaved"], tmp_path)] == [
        f"pipeline stages {n} of 4" for n in ("1 and 3", "2 and 4")
    ]
