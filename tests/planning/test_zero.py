"""DeepSpeed's plans beside numbers computed by hand from ZeRO's rules: parts are equal, so what does not divide evenly is padded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import CLASSES, HIDDEN, WIDTH, Job, adamw, net
from torch import nn
from torch.nn import functional

from engine import DeepSpeed, Fit
from engine.planning.devices import hardware
from engine.planning.plan import Plan
from engine.planning.step_time import step_time

pytest.importorskip("deepspeed")

BLOCK = [WIDTH, WIDTH, HIDDEN * WIDTH, HIDDEN, WIDTH * HIDDEN, WIDTH]
SIZES = [*BLOCK * 3, CLASSES * WIDTH, CLASSES]
"""Elements of each parameter of the jobs' model: 7816 together, which 3 does not divide."""
WHOLE = sum(SIZES)
STEP = 4
"""Bytes of AdamW's count of steps, one for each group of parameters."""


def planned(root: Path, strategy: Any, world_size: int = 3, device: str = "cpu", **more: Any) -> Plan:
    job = Job(world_size, lambda: strategy, {"precision": "bf16-mixed", **more})
    accelerator = "cpu" if device == "cpu" else "auto"
    fit = Fit(
        root_dir=root,
        accelerator=accelerator,
        log_every_n_steps=0,
        num_sanity_val_steps=0,
        check=False,
        **job.settings(),
    )
    return fit.plan(job.module(), job.loader(), world_size=world_size, device=device)


def padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    linear = functional.linear
    yield
    assert functional.linear is linear
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [1, 2])
def test_flat_parts_are_padded_to_two_elements_of_each_rank(tmp_path: Path, stage: int) -> None:
    flat = padded(WHOLE, 2 * 3)
    assert flat == WHOLE + 2
    plan = planned(tmp_path, DeepSpeed(stage=stage))
    (trace,) = plan.traces
    start = trace.timeline[0].memory
    assert start.parameters == 2 * flat
    assert start.optimizer_state == 12 * flat // 3 + STEP  # master copy and two moments in fp32
    assert start.gradients == (4 * flat if stage == 1 else 0)  # stage 1 sums them in a buffer of its own in bf16
    (gathered,) = (each for each in trace.collectives if each.kind == "all_gather")
    assert (gathered.count, gathered.bytes, gathered.phase) == (1, 2 * flat, "optimizer step")
    assert plan.missing == plan.computed == ()


def test_each_parameter_is_padded_by_itself_at_stage_3(tmp_path: Path) -> None:
    part = sum(-(-size // 3) for size in SIZES)
    assert part == 2607
    (trace,) = planned(tmp_path, DeepSpeed(stage=3, param_persistence_threshold=0)).traces
    start = trace.timeline[0].memory
    assert start.parameters == 2 * part
    assert start.optimizer_state == 12 * part + STEP
    assert start.gradients == 4 * part
    gathered = sum(
        each.bytes for each in trace.collectives if each.kind == "all_gather" and each.phase != "optimizer step"
    )
    assert gathered >= 2 * 3 * part  # the whole model at least once
    (scattered,) = (each for each in trace.collectives if each.kind == "reduce_scatter")
    assert scattered.bytes == 2 * 3 * part


def test_what_is_offloaded_is_not_on_the_device(tmp_path: Path) -> None:
    here, there = (
        planned(tmp_path, DeepSpeed(stage=2, offload_optimizer=is_there), device="h100") for is_there in (False, True)
    )
    before, after = here.worst.timeline[0].memory, there.worst.timeline[0].memory
    assert before.optimizer_state
    assert after.optimizer_state == 0
    assert after.parameters == before.parameters
    assert there.worst.peak.memory.total < here.worst.peak.memory.total
    assert there.worst.on_host["optimizer_state"]
    assert any("in the host's memory" in each and "optimizer_state" in each for each in there.assumptions)
    steps = [any("addcdiv" in each.name for each in plan.worst.operations) for plan in (here, there)]
    assert steps == [True, False]


def test_fp16_is_planned_for_a_gpu_and_refused_on_a_cpu(tmp_path: Path) -> None:
    start = planned(tmp_path, DeepSpeed(stage=2), device="v100", precision="16-mixed").worst.timeline[0].memory
    assert start.parameters == 2 * padded(WHOLE, 6)
    with pytest.raises(ValueError, match="its fp16 needs CUDA"):
        planned(tmp_path, DeepSpeed(stage=2), precision="16-mixed")


@pytest.mark.parametrize(
    ("stage", "asked", "beside"), [(2, None, False), (2, True, True), (3, None, True), (3, False, False)]
)
def test_what_overlaps(tmp_path: Path, stage: int, asked: bool | None, beside: bool) -> None:
    trace = planned(tmp_path, DeepSpeed(stage=stage, overlap_comm=asked), 2, "h100").worst
    time = step_time(trace, hardware("h100"), 2)
    assert {each.overlaps for each in time.sent if each.collective.phase == "backward"} == {beside}


def test_one_rank_has_all(tmp_path: Path) -> None:
    start = planned(tmp_path, DeepSpeed(stage=2), 1).worst.timeline[0].memory
    assert start.optimizer_state == 12 * WHOLE + STEP


def test_the_papers_formula_stands_beside_the_trace(tmp_path: Path) -> None:
    plan = planned(tmp_path, DeepSpeed(stage=2))
    (check,) = plan.checks
    assert check.formula == WHOLE * (2 + 12 / 3)
    assert check.traced == 2 * padded(WHOLE, 6) + 4 * padded(WHOLE, 6) + STEP
    assert not check.differs


def test_a_model_made_under_zero_init(tmp_path: Path) -> None:
    class Late(type(net(adamw))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(adamw)
            del self.head

        def configure_model(self) -> None:
            if not hasattr(self, "head"):
                self.head = nn.Linear(WIDTH, CLASSES)

    fit = Fit(root_dir=tmp_path, accelerator="cpu", strategy=DeepSpeed(stage=3), check=False, precision="bf16-mixed")
    plan = fit.plan(Late(), Job(2, lambda: None).loader(), world_size=2, device="cpu")
    assert plan.job.parameters == WHOLE
    assert plan.missing == ()
    assert torch.is_grad_enabled()
