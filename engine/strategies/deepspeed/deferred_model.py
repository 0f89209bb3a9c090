"""Gives a model that was built without memory its values, one module at a time, and lets ZeRO stage 3 shard each at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.strategies import deferred_init


def shard_deferred(model: nn.Module, group: Group, config: Mapping[str, Any], half: torch.dtype | None) -> None:
    """Shard the parameters of ``model`` that have no memory; no rank ever has more than one module's whole parameters.

    Args:
        config: DeepSpeed's configuration.
        half: the format of the parameters that floating-point values are rounded to; ``None``: their own.

    Raises:
        ValueError: initial values that ``configure_model`` gave are lost.
    """
    deferred_init.check_recorded(model)
    initialise = deferred_init.initialiser(model) if group.is_main else None
    replaced: dict[Tensor, Tensor] = {}
    if initialise is not None and deferred_init.lacks_values(model):
        replaced.update(deferred_init.record_initial_values(model, group.device, initialise))
    sharder = _Sharder(config)
    for inner in reversed(list(model.modules())):  # the parts of a module before the module
        stores: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        for store in stores:  # a tensor that another module has, too
            store.update({key: replaced[t] for key, t in store.items() if t is not None and t in replaced})
        with_memory = deferred_init.materialise(inner, group.device, initialise)
        replaced.update(with_memory)
        new = [parameter for parameter in with_memory.values() if isinstance(parameter, nn.Parameter)]
        for parameter in new:
            if half is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(half)
        sharder.shard(new)


class _Sharder:
    """Shards parameters as ``deepspeed.zero.Init`` does those of a module that it is given."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._sharded: Any = None
        """A parameter that is sharded: DeepSpeed shards others through it, with the same settings."""

    def shard(self, parameters: list[nn.Parameter]) -> None:
        """Shard ``parameters``, with rank 0's values; a collective."""
        import deepspeed

        new = [parameter for parameter in parameters if not hasattr(parameter, "ds_id")]
        if new and self._sharded is None:
            deepspeed.zero.Init(module=nn.ParameterList(new), config_dict_or_path=self._config)
            self._sharded = new[0]
        elif new:
            self._sharded.convert_to_zero_parameters(param_list=new)
