"""The facts about DeepSpeed that a plan needs. Imported when one of its strategies is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from engine.planning.strategy_facts import KeptTensors, StrategyFacts, strategy_facts
from engine.strategies.deepspeed.configuration import OFFLOAD, get, is_set
from engine.strategies.deepspeed.strategy import DeepSpeed

PARAMETERS, GRADIENTS, STATE, COMMUNICATION = "parameters", "gradients", "optimizer_state", "communication"
_MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Attributes of DeepSpeed's optimizers with this rank's shard of the fp32 master copies: at stages 1 and 2, at stage 1 in bf16, and at stage 3."""
_GRADIENTS = (
    "averaged_gradients",
    "all_grad_tensors",
    "accumulated_grads_in_cpu",
    "fp32_groups_gradients_flat",
    "grad_partitions_flat_buffer",
)
"""Attributes that hold gradients from the backward pass until the step."""
_SHARDS = ("fp16_partitioned_groups_flat", "lp_param_buffer", "param_groups_fp16_flat_cpu_memory")
"""Attributes with this rank's shard of the parameters, at stage 3."""
_STEP_BUFFERS = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")
"""Attributes with the buffers through which an offloaded step copies."""
_DEPTH = 3
"""How deep tensors are nested at most: in lists of lists, or in buckets in a dict."""


@strategy_facts.register
def _facts(strategy: DeepSpeed) -> StrategyFacts:
    return StrategyFacts(
        overlaps=_overlaps(strategy.config_in_effect),
        kept_tensors=partial(_own_tensors, strategy),
        zero_stage=strategy.zero_stage,
        refusal=_refusal(strategy),
    )


def _refusal(strategy: DeepSpeed) -> str:
    """The error message if DeepSpeed keeps something on disk, which cannot be planned; empty if it does not."""
    for name, section in OFFLOAD.items():
        if get(strategy.config_in_effect, f"zero_optimization.{section}.device") == "nvme":
            return (
                f"{name}='nvme' ({strategy.where}) cannot be planned: DeepSpeed would write files. Plan it with {name}='cpu': the device holds the "
                "same"
            )
    return ""


def _overlaps(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed communicates during a pass: ``overlap_comm``, which is on by default at stage 3 only."""
    path = "zero_optimization.overlap_comm"
    return bool(get(config, path)) if is_set(config, path) else get(config, "zero_optimization.stage") == 3


def _own_tensors(strategy: DeepSpeed) -> Iterator[KeptTensors]:
    """Yield the tensors that DeepSpeed's optimizers keep now. If a tensor comes twice, its last entry counts."""
    offloaded = {
        name: get(strategy.config_in_effect, f"zero_optimization.{section}.device", "none") != "none"
        for name, section in OFFLOAD.items()
    }
    for model in strategy.models:
        if model.engine is not None and model.optimizer is not None and model.shards is not None:
            wrapper, parameters = model.engine.optimizer, list(model.parameters())
            yield from _optimizer_tensors(vars(wrapper), model.optimizer, offloaded["offload_optimizer"])
            yield GRADIENTS, _tensors([[p.grad, getattr(p, "grad_accum", None)] for p in parameters]), False
            yield from _parameter_tensors(vars(wrapper), parameters, offloaded["offload_parameters"])


def _optimizer_tensors(attributes: Mapping[str, Any], optimizer: Any, on_host: bool) -> Iterator[KeptTensors]:
    """Yield the communication buffers, reduced gradients, fp32 master copies and optimizer state. ``on_host``: the optimizer is offloaded."""
    for name, value in attributes.items():
        if name not in (*_MASTERS, *_GRADIENTS, *_SHARDS):
            yield COMMUNICATION, _tensors(value), on_host and name in _STEP_BUFFERS
    masters = _tensors([attributes.get(name) for name in _MASTERS])
    yield GRADIENTS, _tensors([attributes.get(name) for name in _GRADIENTS]), on_host
    yield GRADIENTS, _tensors([master.grad for master in masters]), on_host
    yield STATE, [*masters, *_tensors(list(optimizer.state.values()))], on_host


def _parameter_tensors(attributes: Mapping[str, Any], parameters: list[Any], on_host: bool) -> Iterator[KeptTensors]:
    """Yield the parameters, or this rank's shards of them. ``on_host``: the parameters are offloaded."""
    yield PARAMETERS, _tensors([attributes.get(name) for name in _SHARDS]), on_host
    yield PARAMETERS, [p.data for p in parameters], False
    shards = [[getattr(p, name, None) for name in ("ds_tensor", "ds_secondary_tensor")] for p in parameters]
    yield PARAMETERS, _tensors(shards), on_host


def _tensors(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """The tensors in nested lists, dicts and DeepSpeed's buckets, down to ``depth`` levels."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    elif type(value).__name__.startswith("IPGBucket"):
        inner = vars(value).values()
    else:
        return []
    return [tensor for item in inner for tensor in _tensors(item, depth - 1)] if depth else []
