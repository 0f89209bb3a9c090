"""Activation offload on two simulated devices, one a rank."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from offload import COMPILED, MIB, ROWS, Big, Stack, _compared, _trained

from engine import FSDP, MeshParallel


def _joined() -> None:
    """A group for both devices, as a user may bring it: the library's own is for one."""
    if not dist.is_initialized():
        torch.accelerator.set_device_index(int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,sim:simccl")


def slow_fsdp_and_ddp() -> None:
    _joined()
    plain = _trained(Stack(), strategy="ddp")
    assert _compared(Stack, strategy="ddp").peak <= 0.65 * plain.peak
    for transforms in (
        {},
        {"accumulate_grad_batches": 2},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"compile": COMPILED},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile's own
            offloaded = _compared(Stack, strategy="fsdp", **transforms)
        assert offloaded.peak <= 0.65 * plain.peak, (transforms, offloaded.peak / plain.peak)


def slow_a_sharded_module_in_a_second_run() -> None:
    _joined()
    model = Stack(3)
    for _ in range(2):
        assert _trained(model, strategy="fsdp", activation_offload=True).sent == 10 * MIB


def slow_gathered_parameters_stay() -> None:
    """Weights of a MiB each, which FSDP gathers for a block and frees after it, or keeps until the backward pass."""
    _joined()
    for reshard in (True, False):
        for more in ({}, {"compile": {"blocks": True, "backend": "aot_eager"}}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _compared(lambda: Stack(4, Big), strategy=FSDP(reshard_after_forward=reshard), **more)
            assert found.sent == 6 * MIB, (reshard, more, found.sent / MIB)
    _compared(lambda: Stack(4, Big), strategy="fsdp", precision="bf16-mixed", rows=2 * ROWS)


class _Split(Stack):
    """Its blocks are divided over the ranks, so that linear layers save tensors of another class."""

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def slow_tensor_parallel() -> None:
    _joined()
    # Of each block's five tensors all leave; three of them are halves, below a MiB at 4096 rows.
    found = _compared(lambda: _Split(4), strategy=MeshParallel(tp=2, dp_shard=1), rows=2 * ROWS)
    assert found.sent == 3 * 6 * MIB, found.sent / MIB
