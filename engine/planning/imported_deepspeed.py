"""Prepares DeepSpeed, if it has been imported, for a simulated job: its own code sets up ZeRO and runs the step, on tensors without values and
in groups of the simulated job. Does not import DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.nn import functional

from engine.distributed.group import Group
from engine.planning import torch_private
from engine.planning.missing_values import DEEPSPEED


@contextmanager
def without_earlier_groups() -> Iterator[None]:
    """Inside the block DeepSpeed knows no process group from before, and after it none from the block, although its modules keep groups. Functions of
    torch that DeepSpeed replaces are torch's own at the start of the block, and as before after it."""
    linear = functional.linear
    _forget_groups()
    driven_model = sys.modules.get("engine.strategies.deepspeed.driven_model")
    if driven_model is not None:
        driven_model.restore_linear()
    try:
        yield
    finally:
        functional.linear = linear
        _forget_groups()


def _forget_groups() -> None:
    comm, groups = sys.modules.get("deepspeed.comm.comm"), sys.modules.get("deepspeed.utils.groups")
    if comm is not None and groups is not None:
        vars(comm)["cdb"] = None
        groups._release_process_group_references()


@contextmanager
def accepting_plans(group: Group) -> Iterator[None]:
    """Inside the block DeepSpeed, if it is imported, accepts what is special about a plan: tensors without addresses, the number formats of the
    planned device, and a single rank without a launcher."""
    cpu = sys.modules.get("deepspeed.accelerator.cpu_accelerator") or sys.modules.get("accelerator.cpu_accelerator")
    with ExitStack() as stack:
        if cpu is not None:
            stack.enter_context(torch_private.aligned_for(DEEPSPEED))
            if group.kind.is_accelerator:
                stack.enter_context(patch.object(cpu.CPU_Accelerator, "is_fp16_supported", lambda self: True))
            if not dist.is_initialized():
                stack.enter_context(torch_private.simulated_processes(0, 1))
        yield
