"""The search over plans: what it goes through, what it rules out without a trace, and the order of what fits. Plans are made by hand here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from engine import MeshParallel
from engine.planning.candidates import Candidate, Layout, layouts, micro_batches, precisions
from engine.planning.devices import DEVICES, hardware
from engine.planning.job import Job
from engine.planning.plan import Memory, Moment, Operation, Plan, RankTrace
from engine.planning.search import PlanSearch, Space, search

MIB = 2**20
PARAMETERS = 100 * MIB
"""Bytes of the model; gradients have as many, the optimizer twice as many."""
KEPT = {None: 16 * MIB, "selective": 8 * MIB, "full": 2 * MIB}
"""Bytes of activations of one sample."""
WORK = {None: 1.0, "selective": 1.05, "full": 1.3}
DDP, FSDP = Layout("ddp", 4, 1), Layout("fsdp", 4, 4)


def planned(candidate: Candidate, memory: int) -> Plan:
    """By hand: shared or whole model state, activations in proportion to the samples; time in proportion to the work, with a cost a micro-batch."""
    shards = candidate.layout.shards
    activations = candidate.micro_batch * KEPT[candidate.activation_checkpointing]
    state = Memory(
        parameters=PARAMETERS // shards, gradients=PARAMETERS // shards, optimizer_state=2 * PARAMETERS // shards
    )
    peak = Moment("backward", "layers.3", replace(state, activations=activations))
    flops = int(
        1e9
        * candidate.window
        * (candidate.micro_batch * WORK[candidate.activation_checkpointing] + 0.5 * (shards > 1) + 0.1)
    )
    samples = candidate.micro_batch * candidate.window
    trace = RankTrace(
        0,
        "",
        samples,
        candidate.window,
        peak,
        {},
        (peak, Moment("end", "", state)),
        (),
        (Operation("aten.mm", "float32", flops, 0, 1, "forward"),),
    )
    job = Job(
        world_size=4, data_ranks=4, window=candidate.window, parameters=PARAMETERS // 4, trainable=PARAMETERS // 4
    )
    return Plan((trace,), job, replace(DEVICES["cpu"], memory=memory))


class Planner:
    """Plans by hand, and notes what it was asked for."""

    def __init__(self, memory: int, refuse: Sequence[str] = ()) -> None:
        self.memory, self.refuse = memory, refuse
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Plan:
        self.asked.append(candidate)
        if any(text in str(candidate.layout) for text in self.refuse):
            raise ValueError(f"{candidate.layout} cannot be\nbecause of this")
        return planned(candidate, self.memory)


def found(planner: Planner, given: Sequence[Layout], **space: Any) -> PlanSearch:
    options = {"precisions": ["32-true"], "global_batch": 64, "micro_batch": 16, **space}
    return search(Space(layouts=given, **options), planner, world_size=4, device="cpu", memory_bytes=planner.memory)


def test_all_that_fits_is_ordered_by_time_and_the_largest_micro_batch_is_found() -> None:
    # 400 MiB of state and 16 a sample: 656 for 16 samples.
    ran = found(Planner(700 * MIB), [FSDP, DDP])
    assert [(str(each.candidate.layout), each.candidate.micro_batch) for each in ran.fitting] == [
        ("ddp", 16),
        ("fsdp", 16),
    ]
    assert ran.best is not None
    assert ran.best.plan is not None
    assert ran.best.candidate.settings == {
        "strategy": "ddp",
        "precision": "32-true",
        "activation_checkpointing": None,
        "accumulate_grad_batches": 1,
    }


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    # Without recomputation 8 samples fit (400 + 8 * 16 = 528); recomputing all, 16 (400 + 16 * 2 = 432).
    planner = Planner(540 * MIB)
    ran = found(planner, [DDP])
    by_hand = {
        (each.candidate.activation_checkpointing, each.candidate.micro_batch, each.candidate.window)
        for each in ran.fitting
    }
    assert by_hand == {(None, 8, 2), ("selective", 16, 1)}
    assert all(each.candidate.micro_batch * each.candidate.window * 4 == 64 for each in ran.tried)
    assert len(planner.asked) == 3, (
        "16 without recomputation, then 8; 16 again with selective; full recomputation is only slower"
    )
    slower = [each for each in ran.tried if each.verdict == "slower"]
    assert {(each.candidate.activation_checkpointing, each.candidate.micro_batch) for each in slower} >= {
        (None, 4),
        ("full", 16),
    }


def test_the_reason_names_the_peak_its_phase_and_its_module() -> None:
    ran = found(Planner(400 * MIB), [DDP], recompute=[None])
    largest = max((each for each in ran.tried if each.plan), key=lambda each: each.candidate.micro_batch)
    assert largest.verdict == "too large"
    assert largest.reason == "peak 656.00 MiB of 400.00 MiB in phase 'backward', in layers.3"
    assert ran.best is None
    assert "Nothing fits." in str(ran)


def test_two_sizes_that_do_not_fit_rule_smaller_ones_out() -> None:
    # 656 and 528 MiB: one sample needs at least 528 - 128 * 7 / 8 = 416 MiB.
    planner = Planner(410 * MIB)
    ran = found(planner, [DDP], global_batch=128, recompute=[None])
    assert [each.micro_batch for each in planner.asked] == [16, 8]
    small = next(each for each in ran.tried if each.candidate.micro_batch == 1)
    assert small.reason == "at least 416.00 MiB of 410.00 MiB, as micro-batches of 8 and 16 show"


def test_model_state_alone_rules_a_strategy_out_without_a_trace() -> None:
    # FSDP needs 100 MiB of state, DDP 400.
    planner = Planner(390 * MIB)
    ran = found(planner, [FSDP, DDP])
    assert {str(each.layout) for each in planner.asked} == {"fsdp"}
    (ddp,) = (each for each in ran.tried if str(each.candidate.layout) == "ddp")
    assert ddp.verdict == "too large"
    assert ddp.reason == "parameters, gradients and optimizer state alone need 400.00 MiB of 390.00 MiB"


def test_a_refused_degree_rules_its_multiples_out() -> None:
    given = [Layout({"name": "mesh", "dp_shard": 4 // tp, "tp": tp}, 4 // tp, 4) for tp in (2, 4)]
    planner = Planner(1000 * MIB, refuse=["tp"])
    ran = found(planner, given)
    assert len(planner.asked) == 1
    assert [each.reason for each in ran.tried] == [
        "ValueError: {name: mesh, dp_shard: 2, tp: 2} cannot be",
        "as with tp=2: ValueError: {name: mesh, dp_shard: 2, tp: 2} cannot be",
    ]


def test_a_recomputation_that_is_refused_leaves_the_strategy() -> None:
    class Without(Planner):
        def __call__(self, candidate: Candidate) -> Plan:
            if candidate.activation_checkpointing:
                raise ValueError("no repeated blocks")
            return super().__call__(candidate)

    ran = found(Without(540 * MIB), [DDP])
    assert [(each.candidate.activation_checkpointing, each.candidate.micro_batch) for each in ran.fitting] == [
        (None, 8)
    ]
    assert sum(each.verdict == "refused" for each in ran.tried) == 2


def test_a_global_batch_that_does_not_divide_is_refused() -> None:
    (tried,) = found(Planner(1000 * MIB), [DDP], global_batch=6).tried
    assert tried.reason == "a step of 6 samples does not divide over the 4 ranks that see different data"


def test_a_time_limit_ends_the_search_and_says_so() -> None:
    planner = Planner(1000 * MIB)
    ran = search(
        Space(layouts=[DDP, FSDP], precisions=["32-true"], global_batch=64, micro_batch=16),
        planner,
        world_size=4,
        device="cpu",
        memory_bytes=planner.memory,
        seconds=0.0,
    )
    assert not planner.asked
    assert {each.verdict for each in ran.tried} == {"not planned"}
    assert any("time limit of 0 s" in each for each in ran.notes)


def test_the_table_and_json_say_the_same() -> None:
    ran = found(Planner(540 * MIB), [DDP, FSDP])
    told = ran.as_json()
    assert told["candidates"][0]["verdict"] == "fits"
    assert len(told["candidates"]) == len(ran.tried)
    assert told["planned"] == ran.planned == len([each for each in told["candidates"] if each["need_bytes"]])
    text = str(ran)
    assert "fit run ... --set strategy=" in text
    assert told["candidates"][0]["fit"] in text
    assert "540.00 MiB each, steps of 64 samples" in text


def test_what_somebody_has_given_is_planned_whatever_is_known() -> None:
    # With FSDP planned first, model state alone rules DDP out; a given DDP is planned all the same.
    planner = Planner(390 * MIB)
    ran = found(planner, [FSDP, replace(DDP, is_requested=True)], recompute=[None])
    assert str(planner.asked[0].layout) == "fsdp"
    assert "ddp" in {str(each.layout) for each in planner.asked}
    assert {each.verdict for each in ran.tried if each.candidate.layout.is_requested} == {"too large"}


def test_a_strategy_of_somebody_elses_is_not_ruled_out_by_its_ranks() -> None:
    planner = Planner(390 * MIB)
    found(planner, [FSDP, Layout("theirs", 4, 1, bounded=False)], recompute=[None])
    assert "theirs" in {str(each.layout) for each in planner.asked}


def test_nothing_fits_names_what_comes_closest() -> None:
    # FSDP is ruled out without a trace: its state alone needs 100 MiB. With one sample, all recomputed, it needs 102.
    ran = found(Planner(50 * MIB), [DDP, FSDP])
    assert ran.best is None
    closest = 'Fit(strategy="fsdp", precision="32-true", activation_checkpointing="full", accumulate_grad_batches=16), micro-batches of 1'
    assert f"Nothing fits. The closest needs 102.00 MiB of 50.00 MiB: {closest}" in str(ran)


def test_one_reason_is_one_line() -> None:
    ran = found(
        Planner(540 * MIB, refuse=["mesh"]), [DDP, *(Layout({"name": "mesh", "pp": pp}, 4, 4) for pp in (2, 3))]
    )
    lines = [line.split() for line in str(ran).splitlines()]
    (slower,) = (line for line in lines if "slower" in line)
    assert slower[:4] == ["ddp", "32-true", "slower", str(sum(each.verdict == "slower" for each in ran.tried))]
    assert sum("refused" in line for line in lines) == 2  # their messages differ


def test_settings_as_one_types_them() -> None:
    plain = Candidate(Layout({"name": "mesh", "dp_shard": 2, "tp": 2}, 2, 4), "bf16-mixed", "full", 8, 2)
    assert (
        plain.command(False)
        == "--set 'strategy={name: mesh, dp_shard: 2, tp: 2}' precision=bf16-mixed activation_checkpointing=full accumulate_grad_batches=2"
    )
    assert (
        plain.code(False)
        == 'Fit(strategy={"name": "mesh", "dp_shard": 2, "tp": 2}, precision="bf16-mixed", activation_checkpointing="full", '
        "accumulate_grad_batches=2)"
    )
    assert "accumulate_grad_batches" not in f"{plain.command(True)} {plain.code(True)}"  # global_batch_size is given
    given = MeshParallel(tp=2, plan={"up": "colwise"}, sequence_parallel=True)
    own = Candidate(Layout(given, 2, 4), "32-true", None, 8, 1)
    assert own.command(False) is None
    assert (
        own.code(True)
        == "Fit(strategy=MeshParallel(tp=2, plan={'up': 'colwise'}, sequence_parallel=True), precision=\"32-true\")"
    )


class Cut(nn.Module):
    """Has a plan and stages."""

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {}

    def pipeline_stages(self) -> list[nn.Module]:
        return []


def names(model: nn.Module, world_size: int, per_node: int) -> set[str]:
    return {str(each) for each in layouts(model, world_size, per_node)}


def test_degrees_divide_the_ranks_and_tensor_parallel_stays_in_a_node() -> None:
    all_of = layouts(Cut(), 16, 8)
    assert {each.degree("tp") for each in all_of} == {1, 2, 4, 8}
    assert {each.degree("pp") for each in all_of} == {1, 2, 4, 8, 16}
    for each in all_of:
        if isinstance(each.strategy, dict) and each.strategy["name"] == "mesh":
            asked = each.strategy
            sizes = [asked.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "tp")]
            product = 1
            for size in sizes:
                product *= size
            assert product == 16, asked
            assert each.data_ranks == asked.get("dp_replicate", 1) * asked["dp_shard"]
    assert {
        "ddp",
        "fsdp",
        "{name: fsdp, dp_replicate: 2}",
        "{name: mesh, dp_shard: 8, tp: 2}",
        "{name: mesh, pp: 2, dp_shard: 4, tp: 2}",
    } <= names(Cut(), 16, 8)


def test_a_model_without_plan_or_stages_is_asked_once_for_each() -> None:
    all_of = layouts(nn.Linear(2, 2), 8, 8)
    assert {each.degree("tp") for each in all_of} == {1, 2}
    assert {each.degree("pp") for each in all_of} == {1, 2}


def test_one_process_has_one_strategy() -> None:
    assert names(Cut(), 1, 8) == {"single"}


@pytest.mark.parametrize(
    ("given", "share", "sizes"),
    [(8, 8, [1, 2, 4, 8]), (8, 32, [1, 2, 4, 8, 16, 32]), (6, 24, [1, 3, 6, 12, 24]), (3, 3, [1, 3]), (1, 1, [1])],
)
def test_micro_batches_divide_a_ranks_share(given: int, share: int, sizes: list[int]) -> None:
    assert micro_batches(given, share) == sizes


def test_precision_stays_unless_a_gpu_could_do_with_less() -> None:
    assert precisions("32-true", hardware("measured:cpu,8GiB,fp32=1e10,bf16=1e10,1e10"), ()) == ["32-true"]
    assert precisions("32-true", DEVICES["h100"], ()) == ["32-true", "bf16-mixed"]
    assert precisions("32-true", DEVICES["t4"], ()) == ["32-true", "16-mixed"]  # it has no bf16
    assert precisions("bf16-true", DEVICES["h100"], ()) == ["bf16-true"]
    assert precisions("32-true", DEVICES["h100"], ["16-mixed"]) == ["16-mixed"]
