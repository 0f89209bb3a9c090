"""Seconds of collectives, operations and steps, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hand_made import DEVICE, OPERATIONS, collective, rank_trace
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from engine.planning.device_table import Link
from engine.planning.rank_trace import WRAPPED, Operation
from engine.planning.step_time import (
    BUBBLE_FORMULAS,
    START_S,
    bubble_fraction,
    collective_seconds,
    compute_time,
    layout,
    model_flops,
    overlaps,
    step_time,
)
from engine.strategies.pipeline import SCHEDULES


def ranks(*numbers: int) -> tuple[int, ...]:
    return numbers


def test_rings_within_a_node() -> None:
    four = ranks(0, 1, 2, 3)
    # 1e9 bytes over links of 1e9 bytes a second, steps of 1 us.
    gathered = collective_seconds(collective("all_gather", ranks=four), DEVICE, 4)
    assert gathered == pytest.approx(START_S + 3e-6 + 0.75)
    assert collective_seconds(collective("reduce_scatter", ranks=four), DEVICE, 4) == pytest.approx(gathered)
    exchanged = collective_seconds(collective("all_to_all", ranks=four), DEVICE, 4)  # a rank may keep nothing of it
    assert exchanged == pytest.approx(START_S + 3e-6 + 1.0)
    assert collective_seconds(collective("all_reduce", ranks=four), DEVICE, 4) == pytest.approx(START_S + 6e-6 + 1.5)
    assert collective_seconds(collective("broadcast", ranks=four), DEVICE, 4) == pytest.approx(START_S + 3e-6 + 1.0)
    ten = collective_seconds(collective("all_gather", ranks=four, count=10), DEVICE, 4)
    assert ten == pytest.approx(10 * (START_S + 3e-6) + 0.75)


def test_a_group_of_one_rank_sends_nothing() -> None:
    assert collective_seconds(collective(ranks=(3,)), DEVICE, 4) == 0.0


def test_between_nodes_all_members_of_a_node_use_their_cards() -> None:
    # Two nodes of four: 4 cards of 1e8 bytes a second are slower than the links of 1e9.
    eight = tuple(range(8))
    assert layout(eight, 4).fewest == 4
    found = collective_seconds(collective("all_gather", ranks=eight), DEVICE, 4)
    assert found == pytest.approx(START_S + 6e-6 + 1e-5 + 7 / 8 * 1e9 / 4e8)
    # One rank of each node: a single card.
    apart = collective_seconds(collective("all_gather", ranks=ranks(0, 4)), DEVICE, 4)
    assert apart == pytest.approx(START_S + 1e-5 + 0.5 * 1e9 / 1e8)
    # With fast cards the links within the node set the pace.
    fast = replace(DEVICE, between=Link(1e9, 1e-5))
    assert collective_seconds(collective("all_gather", ranks=eight), fast, 4) == pytest.approx(
        START_S + 6e-6 + 1e-5 + 7 / 8
    )


def test_a_small_all_reduce_over_many_nodes_takes_a_tree() -> None:
    many = tuple(range(4 * 64))
    small = collective_seconds(collective("all_reduce", size=4, ranks=many), DEVICE, 4)
    # 3 steps within a node and log2(64) = 6 between nodes, up and down.
    assert small == pytest.approx(START_S + 2 * (3e-6 + 6e-5) + 2 * 4 / 4e8)


def test_neighbours_send_over_one_link() -> None:
    assert collective_seconds(collective("send", count=2), DEVICE, 4) == pytest.approx(2 * (START_S + 1e-6) + 1.0)
    assert collective_seconds(collective("recv", ranks=ranks(0, 4)), DEVICE, 4) == pytest.approx(START_S + 1e-5 + 10.0)


def test_roofs() -> None:
    found = compute_time(OPERATIONS, DEVICE)
    assert (found.flops, found.bytes) == (3 * 10**12, 3 * 10**6 + 10**9)
    assert (found.arithmetic_s, found.memory_s, found.dispatch_s) == pytest.approx((3.0, 1.0, 0.0))
    assert found.seconds == pytest.approx(4.0)
    assert found.intensity == pytest.approx(3e12 / (1e9 + 3e6))
    tiny = Operation("aten.relu", "float32", flops=0, bytes=8, count=1000, phase="forward")
    assert compute_time([tiny], DEVICE).dispatch_s == pytest.approx(1e-3)
    assert compute_time([tiny], DEVICE, compiled=True).seconds == pytest.approx(1000 * 8e-9)
    half = replace(OPERATIONS[0], dtype="bfloat16")
    assert compute_time([half], DEVICE).seconds == pytest.approx(0.25)


def test_a_device_waits_for_a_slower_host() -> None:
    # 100 operations on DTensors of 0.05 s each beside 4 s of work, and 100 starts of the local ones.
    device = replace(DEVICE, dtensor=0.05)
    wrapped = Operation(f"{WRAPPED}.aten.mm", "", flops=0, bytes=0, count=100, phase="forward")
    found = compute_time([*OPERATIONS, wrapped], device)
    assert found.seconds == pytest.approx(5.0 + 4e-6)
    assert found.dispatch_s == pytest.approx(1.0 + 4e-6)
    assert found.flops == compute_time(OPERATIONS, device).flops
    assert compute_time([*OPERATIONS, replace(wrapped, count=10)], device).seconds == pytest.approx(4.0)  # hidden
    assert compute_time([*OPERATIONS, wrapped], device, compiled=True).seconds == pytest.approx(4.0)


def test_a_host_computes_and_starts_one_after_another() -> None:
    device = replace(DEVICE, dtensor=0.05, dispatch=0.01, is_host=True)
    wrapped = Operation(f"{WRAPPED}.aten.mm", "", flops=0, bytes=0, count=10, phase="forward")
    assert compute_time([*OPERATIONS, wrapped], device).seconds == pytest.approx(4.0 + 4 * 0.01 + 10 * 0.05)


def test_nothing_runs_beside_a_host() -> None:
    sent = collective("all_reduce", size=10**9, count=10)
    found = step_time(rank_trace(collectives=(sent,)), replace(DEVICE, is_host=True, dispatch=0.0), 4)
    assert found.expected_s == found.best_s == found.worst_s == pytest.approx(4.0 + 10 * (START_S + 2e-6 + 0.1))
    assert not found.sent[0].overlaps


def test_a_kind_that_was_measured_has_its_own_link() -> None:
    four = ranks(0, 1, 2, 3)
    device = replace(DEVICE, within=Link(1e9, 1e-6, {"reduce_scatter": (5e8, 1e-4)}))
    found = collective_seconds(collective("reduce_scatter", ranks=four), device, 4)
    assert found == pytest.approx(START_S + 3e-4 + 1.5)
    assert collective_seconds(collective("all_gather", ranks=four), device, 4) == pytest.approx(START_S + 3e-6 + 0.75)


def test_recomputation_is_not_useful_work() -> None:
    again = replace(OPERATIONS[1], count=3)  # forward again, and the backward pass
    assert model_flops([OPERATIONS[0], again]) == 3 * 10**12
    frozen = replace(OPERATIONS[1], count=1)  # only the inputs' gradients
    assert model_flops([OPERATIONS[0], frozen]) == 2 * 10**12


def test_a_step_of_one_rank() -> None:
    found = step_time(rank_trace(), DEVICE, 4)
    assert found.expected_s == found.best_s == found.worst_s == pytest.approx(4.0)
    assert found.communication_s == found.exposed_s == 0.0


def test_communication_beside_the_backward_pass() -> None:
    # 10 reductions of 0.1 s each beside 2 s of backward pass: the last has nothing to hide behind.
    sent = collective("all_reduce", size=10**9, count=10)
    one = START_S + 2e-6 + 0.1
    found = step_time(rank_trace(collectives=(sent,)), DEVICE, 4)
    assert found.exposed_s == pytest.approx(one)
    assert found.expected_s == pytest.approx(4.0 + one)
    assert found.best_s == pytest.approx(4.0)
    assert found.worst_s == pytest.approx(4.0 + 10 * one)


def test_more_communication_than_the_pass_hides() -> None:
    sent = collective("all_reduce", size=30 * 10**9, count=30)
    whole = 30 * (START_S + 2e-6) + 30.0
    found = step_time(rank_trace(collectives=(sent,)), DEVICE, 4)
    assert found.exposed_s == pytest.approx(whole - 2.0)
    assert found.expected_s == pytest.approx(4.0 + whole - 2.0)
    assert found.best_s == pytest.approx(whole)


@pytest.mark.parametrize(
    ("kind", "axis", "phase", "beside"),
    [
        ("all_gather", "dp_shard", "forward", True),
        ("all_gather", "dp_shard", "backward", True),
        ("reduce_scatter", "dp_shard", "backward", True),
        ("all_reduce", "world", "backward", True),
        ("all_reduce", "world", "forward", False),  # synchronized batch norm
        ("all_reduce", "dp_shard", "optimizer step", False),
        ("all_reduce", "tp", "backward", False),
        ("all_gather", "tp", "forward", False),
        ("send", "pp", "forward", True),
        ("recv", "pp", "forward", False),
        ("broadcast", "world", "forward", False),
    ],
)
def test_what_runs_beside_a_pass(kind: str, axis: str, phase: str, beside: bool) -> None:
    assert overlaps(collective(kind, axis=axis, phase=phase)) is beside


def test_what_does_not_overlap_adds_up() -> None:
    both = (collective(axis="tp", phase="forward"), collective("all_reduce", size=8, phase="optimizer step"))
    one, norm = START_S + 2e-6 + 1.0, START_S + 2e-6 + 8e-9
    found = step_time(rank_trace(collectives=both), DEVICE, 4)
    assert found.expected_s == found.worst_s == pytest.approx(4.0 + one + norm)


def test_what_is_in_the_hosts_memory_crosses_the_link() -> None:
    # Gathers of 8e9 bytes over 2 ranks and a scatter of 4e9: 4e9 + 2e9 bytes cross at 1e9 a second; the optimizer moves 1e9 at 5e8.
    device = replace(DEVICE, to_host=1e9, host_memory=5e8)
    sent = (
        collective("all_gather", size=8 * 10**9, axis="dp_shard"),
        collective("reduce_scatter", size=4 * 10**9, axis="dp_shard"),
        collective("all_gather", size=10**9, axis="tp"),
    )
    trace = rank_trace(collectives=sent, on_host={"parameters": 10, "optimizer_state": 20})
    found = step_time(trace, device, 4)
    assert found.host_s == pytest.approx(4.0 + 2.0 + 2.0)
    assert found.expected_s == pytest.approx(step_time(replace(trace, on_host={}), device, 4).expected_s + 8.0)
    # Optimizer state alone: gradients go there, parameters come back once.
    assert step_time(replace(trace, on_host={"optimizer_state": 20}), device, 4).host_s == pytest.approx(4.0 + 2.0)
    assert step_time(trace, replace(device, is_host=True), 4).host_s == 0.0


def test_a_bubble_waits_in_the_passes_only() -> None:
    found = step_time(rank_trace(), DEVICE, 4, bubble=0.25)
    assert found.bubble_s == pytest.approx(1.0)  # a quarter of 3 s / 0.75
    assert found.expected_s == found.worst_s == pytest.approx(5.0)
    assert found.best_s == pytest.approx(4.0)


def simulated_bubble(order: str, p: int, m: int) -> float:
    """A schedule of one stage per rank, action by action: a forward pass takes 1, a backward pass 2."""
    plans = []
    for rank in range(p):
        warm = m if order == "gpipe" else min(m, p - rank)
        actions = [("F", i) for i in range(warm)]
        for i in range(m - warm):
            actions += [("B", i), ("F", warm + i)]
        plans.append(actions + [("B", i) for i in range(m - warm, m)])
    ended: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * p, [0] * p
    while any(position[r] < len(plans[r]) for r in range(p)):
        for r in range(p):
            while position[r] < len(plans[r]):
                kind, i = plans[r][position[r]]
                needs = ("F", r - 1, i) if kind == "F" else ("B", r + 1, i)
                if 0 <= needs[1] < p and needs not in ended:
                    break
                clock[r] = max(clock[r], ended.get(needs, 0.0)) + (1.0 if kind == "F" else 2.0)
                ended[kind, r, i] = clock[r]
                position[r] += 1
    return 1 - 3 * m / max(clock)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 4), (8, 32)])
def test_the_bubble_of_a_schedule_played_through(schedule: str, p: int, m: int) -> None:
    assert bubble_fraction(schedule, p, m) == pytest.approx(simulated_bubble(schedule, p, m))


class Placed(_PipelineStageBase):
    """A stage that a schedule can be made for, and not run."""

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = None  # type: ignore[assignment]

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.device, self.group, self.submod, self._has_backward = torch.device("cpu"), None, None, True  # type: ignore[assignment]
        self.stage_index_to_group_rank = {}


def played_bubble(schedule: str, p: int, m: int) -> float:
    """torch's own order of actions: a forward pass, the gradients of inputs and those of weights take 1 each."""
    name, _, in_a_v = SCHEDULES[schedule]
    stages = [Placed(index, 2 * p, p) for index in ((0, 2 * p - 1) if in_a_v else (0, p))]
    order = getattr(schedules, name)(stages, m, loss_fn=lambda *_: None).pipeline_order
    todo = {rank: [a for a in actions if a is not None] for rank, actions in order.items()}
    ended: dict[tuple[str, int, int], float] = {}
    clock, busy = [0.0] * p, [0.0] * p
    while any(todo.values()):
        before = len(ended), sum(map(len, todo.values()))
        for rank, actions in todo.items():
            while actions:
                needs, makes, cost = [], [], 0.0
                for each in actions[0].sub_actions or (actions[0],):
                    kind, stage, part = each.computation_type.name, each.stage_index, each.microbatch_index
                    cost += 2.0 if kind == "FULL_BACKWARD" else 1.0
                    if kind == "FORWARD":
                        needs += [("F", stage - 1, part)] if stage else []
                        makes.append(("F", stage, part))
                    elif kind != "BACKWARD_WEIGHT":
                        needs.append(("B", stage + 1, part) if stage < 2 * p - 1 else ("F", stage, part))
                        makes.append(("B", stage, part))
                if any(need not in ended and need not in makes for need in needs):
                    break
                clock[rank] = max(clock[rank], *(ended.get(need, 0.0) for need in needs), 0.0) + cost
                busy[rank] += cost
                ended |= dict.fromkeys(makes, clock[rank])
                del actions[0]
        assert (len(ended), sum(map(len, todo.values()))) != before, "the schedule waits for itself"
    return 1 - max(busy) / max(clock)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="actions without sub_actions")
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_the_bubble_of_torchs_order_played_through(schedule: str, p: int, m: int) -> None:
    assert bubble_fraction(schedule, p, m) == pytest.approx(played_bubble(schedule, p, m))


def test_bubbles_by_hand() -> None:
    assert bubble_fraction("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert bubble_fraction("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert bubble_fraction("zero_bubble", 4, 8) == pytest.approx(3 / 51)
    assert bubble_fraction("zbv", 4, 8) == pytest.approx(3 / 51)
    assert bubble_fraction("zbv", 4, 4) == pytest.approx(6 / 30)
    assert bubble_fraction("dualpipev", 4, 8) == pytest.approx(3 / 27)
    assert bubble_fraction("gpipe", 1, 8) == 0.0
    assert set(BUBBLE_FORMULAS) == set(SCHEDULES)
    for name in SCHEDULES:
        assert bubble_fraction(name, 4, 100) < bubble_fraction(name, 4, 2)
