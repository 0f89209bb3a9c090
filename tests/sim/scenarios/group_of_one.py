"""One device of an accelerator reaches every collective of its back end, as ``fit test`` tries it on a machine with one GPU."""

from __future__ import annotations

import os
import tempfile
import warnings

import simulated
import torch
import torch.distributed as dist

from engine.cli import self_check_jobs
from engine.distributed import process_groups


def collectives_ddp_and_fsdp() -> None:
    warnings.simplefilter("default")  # torch has timers of DDP for CPU and CUDA only
    os.chdir(tempfile.mkdtemp())
    seen: list[str] = []
    real = process_groups.initialise

    def initialise(*args: object, **settings: object) -> None:
        real(*args, **settings)  # type: ignore[arg-type]
        seen.append(f"{dist.get_backend_config()}, {process_groups.backend_of(torch.device('sim', 0))}")
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.bound_device_id is None

    process_groups.initialise = initialise  # type: ignore[assignment]
    ranks = self_check_jobs.Ranks()
    self_check_jobs.single("sim", ranks)
    assert self_check_jobs.one_rank("sim", ranks).startswith("weights differ by ")
    assert seen == ["cpu:gloo,sim:simccl, simccl"]
    assert not simulated.races()
