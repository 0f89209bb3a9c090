"""What DeepSpeed keeps besides the model and the optimizer's state, so that a plan can say what its memory is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

PARAMETERS, GRADIENTS, STATE, COMMUNICATION = "parameters", "gradients", "optimizer_state", "communication"
_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Attributes of DeepSpeed's optimizers with this rank's part of the fp32 master copies, at stages 1 and 2, 1 in bf16, and 3."""
_GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "fp32_groups_gradients_flat",
    "grad_partitions_flat_buffer",
)
"""Attributes with gradients from the backward pass until the step."""
_SHARDS = ("fp16_partitioned_groups_flat", "lp_param_buffer", "param_groups_fp16_flat_cpu_memory")
"""Attributes with this rank's part of the parameters, at stage 3."""
_ON_HOST_FOR_OPTIMIZER = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
"""Buffers through which an offloaded step goes, in the host's memory."""
_NESTED = 3
"""Lists in lists and buckets in dicts: deeper, there are no tensors of its own."""

Kept = tuple[str, list[Tensor], bool]
"""What it is for (a field of :class:`engine.planning.plan.Memory`), the tensors, and whether they are in the host's memory."""


def kept(wrapper: Any, optimizer: Any, parameters: list[Any], offload_optimizer: bool, offload_parameters: bool) -> Iterator[Kept]:
    """What one of DeepSpeed's optimizers keeps now; of a tensor that comes twice, the last entry counts.

    Args:
        wrapper: DeepSpeed's optimizer.
        optimizer: the one that it wraps.
        parameters: of the model.
        offload_optimizer: whether the optimizer's state, the master copies and the gradients for them are in the host's memory.
        offload_parameters: whether the sharded parameters are.
    """
    every = vars(wrapper)
    for name, value in every.items():
        if name not in (*_MASTERS, *_GRADIENTS, *_SHARDS):
            yield COMMUNICATION, _tensors(value), offload_optimizer and name in _ON_HOST_FOR_OPTIMIZER
    masters = _tensors([every.get(name) for name in _MASTERS])
    waiting = [master.grad for master in masters if master.grad is not None]
    yield GRADIENTS, [*_tensors([every.get(name) for name in _GRADIENTS]), *waiting], offload_optimizer
    yield GRADIENTS, _tensors([[p.grad, getattr(p, "grad_accum", None)] for p in parameters]), False
    yield STATE, [*masters, *_tensors(list(optimizer.state.values()))], offload_optimizer
    yield PARAMETERS, _tensors([every.get(name) for name in _SHARDS]), offload_parameters
    yield PARAMETERS, [p.data for p in parameters], False
    shards = [[getattr(p, name, None) for name in ("ds_tensor", "ds_secondary_tensor")] for p in parameters]
    yield PARAMETERS, _tensors(shards), offload_parameters


def _tensors(value: Any, depth: int = _NESTED) -> list[Tensor]:
    """In lists, dicts and DeepSpeed's buckets."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0:
        return []
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    elif type(value).__name__.startswith("IPGBucket"):
        inner = vars(value).values()
    else:
        return []
    return [tensor for each in inner for tensor in _tensors(each, depth - 1)]
