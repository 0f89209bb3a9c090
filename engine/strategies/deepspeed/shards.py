"""Gathers full tensors by parameter name from DeepSpeed's shards, and loads them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.checkpoint.reader import Report, Source, empty_tensor
from engine.strategies.base import numbered_state


class Shards:
    """One of DeepSpeed's optimizers, at any stage: where each parameter's master copy and optimizer state are.

    Args:
        wrapper: DeepSpeed's optimizer of stage 1, 2 or 3.
        optimizer: the wrapped one, from the user or the configuration.
        groups: the parameters of each of its groups, before DeepSpeed replaced them by flat shards.
        share: this rank and the number of ranks that share the full tensors.
    """

    def __init__(
        self, wrapper: Any, optimizer: Any, groups: Sequence[Sequence[Tensor]], share: tuple[int, int]
    ) -> None:
        self.wrapper, self.optimizer, self.groups, self.share = wrapper, optimizer, groups, share
        self.managed = {id(p) for group in groups for p in group if p.requires_grad}

    def flat(self, group: int, parameter: Any) -> Tensor:
        """The flat shard of this rank's optimizer that contains ``parameter``."""
        shard: Tensor
        if hasattr(parameter, "ds_id"):
            shard = self.wrapper.fp32_partitioned_groups_flat[
                self.wrapper.grad_position[self.wrapper.get_param_id(parameter)][0]
            ]
        elif hasattr(self.wrapper, "single_partition_of_fp32_groups"):
            shard = self.wrapper.single_partition_of_fp32_groups[group]
        else:  # bf16 at stage 1
            shard = self.wrapper.fp32_groups_flat_partition[group]
        return shard

    def numbered(self) -> Iterator[tuple[int, int, Any]]:
        """Number (as in torch's ``state_dict``), group and parameter of all trained parameters."""
        number = 0
        for index, group in enumerate(self.groups):
            for parameter in group:
                if id(parameter) in self.managed:
                    yield number, index, parameter
                number += 1

    def read(self, parameter: Any, key: str | None = None) -> Tensor:
        """The full master copy of a parameter, or its full state ``key``, in fp32; a collective."""
        if hasattr(parameter, "ds_id"):
            value: Tensor = self.wrapper.get_full_hp_param(parameter, key)
        else:
            value = parameter.get_full_hp_param(key)
        return value.detach()

    def write(self, parameter: Any, value: Tensor, key: str | None = None) -> None:
        """Set this rank's shard of a parameter's master copy, or of its state ``key``."""
        value = value.detach().to(torch.float32)
        if hasattr(parameter, "ds_id"):
            # DeepSpeed's own setter fails if the last rank's shard is padded.
            size, rank = parameter.ds_tensor.numel(), self.wrapper._get_param_partition_rank(parameter)
            part = value.flatten()[rank * size : (rank + 1) * size]
            self.wrapper.set_local_hp_param(F.pad(part, (0, size - part.numel())), parameter, key)
        else:
            parameter.set_full_hp_param(value, key)

    def _link(self) -> None:
        """Link parameters to their states. DeepSpeed does so after its first group has stepped, when the others have no state yet."""
        if hasattr(self.wrapper, "_lazy_init_hp_params_optimizer_state"):
            self.wrapper._hp_optimizer_states_linked = False
            self.wrapper._lazy_init_hp_params_optimizer_state()

    # -- in the form of torch: parameters by number -----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the parameters that they had before."""
        return [
            {**group, "params": list(parameters)}
            for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Full tensors of every ``share``-th parameter; a collective."""
        self._link()
        entries: dict[int, dict[str, Any]] = {}
        for number, group, parameter in self.numbered():
            flat = self.flat(group, parameter)
            state, mine = self.optimizer.state.get(flat, {}), number % self.share[1] == self.share[0]
            entry: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value = (
                        self.read(parameter, key) if value.shape == flat.shape else value
                    )  # all ranks read, one keeps it
                entry[key] = value.cpu().clone() if mine and isinstance(value, Tensor) else value
            if entry and mine:
                entries[number] = entry
        return {"state": entries, "param_groups": self.numbered_groups()}

    def numbered_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, parameters by numbers."""
        first, groups = 0, []
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            groups.append({**group, "params": list(range(first, first + len(parameters)))})
            first += len(parameters)
        return groups

    def load_state_dict(self, state: Mapping[str, Any], read: Callable[[Any], Any]) -> None:
        """Load the merged :meth:`state_dict` of all ranks, or that of a plain optimizer.

        Args:
            read: returns an entry's value with its full tensor in memory; called for one at a time.
        """
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        parameters = [(group, p, state["state"][i]) for i, group, p in self.numbered() if i in state["state"]]
        for index, parameter, entry in parameters:
            flat = self.flat(index, parameter)
            for key, value in entry.items():
                if not _like(value, parameter):
                    self.optimizer.state[flat][key] = read(value)
                elif key not in self.optimizer.state[flat]:
                    self.optimizer.state[flat][key] = torch.zeros_like(flat, requires_grad=False)
        self._link()
        for _, parameter, entry in parameters:
            for key, value in entry.items():
                if _like(value, parameter):
                    self.write(parameter, read(value), key)


def _like(value: Any, parameter: Any) -> bool:
    """Whether a state entry has one number for each of the parameter's."""
    shape = getattr(value, "shape", ())
    return len(shape) > 0 and shape == getattr(parameter, "ds_shape", parameter.shape)


def load_optimizer(shards: Shards, module: nn.Module, state: dict[str, Any], read: Callable[[Any], Any]) -> None:
    """Load a state by names or by numbers of parameters; ``read``: see :meth:`Shards.load_state_dict`."""
    shards.load_state_dict(numbered_state(_Numbers(shards), module, state), read)


class _Numbers:
    """The optimizer interface that ``numbered_state`` needs, without gathering anything."""

    def __init__(self, shards: Shards) -> None:
        self.param_groups, self._groups = shards.param_groups, shards.numbered_groups()

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self._groups}


def model_state(module: nn.Module, shards: Shards | None, mine: Callable[[int], bool]) -> dict[str, Any]:
    """Full parameters and buffers on the CPU; a collective. For parameters in half precision these are the fp32 master copies.

    Args:
        mine: whether this rank keeps the tensor of this number; the others have only one full tensor at a time.
    """
    tensors: dict[str, Any] = {}
    full_tensors: dict[int, Tensor | None] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # from get_extra_state
            tensors[name] = tensor
            continue
        if id(tensor) not in full_tensors:
            full = shards.read(tensor) if shards is not None and id(tensor) in shards.managed else _gathered(tensor)
            full_tensors[id(tensor)] = full.cpu() if mine(len(full_tensors)) else None
        full_tensor = full_tensors[id(tensor)]
        if full_tensor is not None:
            tensors[name] = full_tensor
    return tensors


def load_model(module: nn.Module, shards: Shards | None, source: Source, strict: bool) -> Report:
    """Read full tensors, one after another, into parameters, master copies and buffers.

    Raises:
        ValueError: missing or unexpected names.
    """
    state = module.state_dict(keep_vars=True)
    shapes = {
        name: torch.empty(t.ds_shape, device="meta") if hasattr(t, "ds_shape") else t for name, t in state.items()
    }
    report = source.check(module, shapes, strict)
    wrong = {text.split(" ")[0] for text in report.other_shapes}
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in state.items():
            if id(tensor) in done or not isinstance(tensor, Tensor) or name not in source or name in wrong:
                continue
            done.add(id(tensor))
            full = empty_tensor(source.stored(name))
            source.read_model({name: full})
            if hasattr(tensor, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                    if torch.distributed.get_rank() == 0:
                        tensor.copy_(full)
            else:
                tensor.copy_(full)
            if shards is not None and id(tensor) in shards.managed:
                shards.write(tensor, full.to(tensor.device))
    if source.extra:
        module.load_state_dict({name: value for name, value in source.extra.items() if name in state}, strict=False)
    return report


def mark_sharded(module: nn.Module) -> None:
    """Mark each parameter that stage 3 has sharded, for code that does not know DeepSpeed, also after the run."""
    parameter: Any
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.sharded_by = "DeepSpeed"


def flat_range(parameter: Any) -> tuple[int, int]:
    """The elements of a flattened parameter that this rank has at stage 3: the first, and the one after the last."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
    return min(rank * size, parameter.ds_numel), min((rank + 1) * size, parameter.ds_numel)


def _gathered(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, "ds_id"):
        return tensor.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()
