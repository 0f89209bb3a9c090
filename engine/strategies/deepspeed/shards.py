"""Gathers full tensors from DeepSpeed's shards, by parameter name, and loads full tensors into the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.checkpoint.reader import Report, Source, empty_tensor
from engine.strategies.base import numbered_state


class Shards:
    """The master copies and optimizer states of one of DeepSpeed's sharding optimizers, by parameter.

    Args:
        wrapper: DeepSpeed's optimizer of stage 1, 2 or 3.
        optimizer: the optimizer inside the wrapper, from the user or the configuration.
        groups: the parameters of each of the optimizer's groups, before DeepSpeed replaced them by flat shards.
        share: this rank and the number of ranks among which the full tensors are divided.
    """

    def __init__(
        self, wrapper: Any, optimizer: Any, groups: Sequence[Sequence[Tensor]], share: tuple[int, int]
    ) -> None:
        self.wrapper, self.optimizer, self.groups, self.share = wrapper, optimizer, groups, share
        self.managed = {id(p) for group in groups for p in group if p.requires_grad}
        """Ids of the trained parameters."""

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
        """Yield for each trained parameter its number (as in torch's ``state_dict``), the index of its group, and the parameter."""
        number = 0
        for index, group in enumerate(self.groups):
            for parameter in group:
                if id(parameter) in self.managed:
                    yield number, index, parameter
                number += 1

    def read(self, parameter: Any, key: str | None = None) -> Tensor:
        """The full master copy of a parameter, or its full optimizer state ``key``, in fp32; a collective."""
        if hasattr(parameter, "ds_id"):
            value: Tensor = self.wrapper.get_full_hp_param(parameter, key)
        else:
            value = parameter.get_full_hp_param(key)
        return value.detach()

    def write(self, parameter: Any, value: Tensor, key: str | None = None) -> None:
        """Set this rank's shard of a parameter's master copy, or of its optimizer state ``key``, from the full ``value``."""
        value = value.detach().to(torch.float32)
        if hasattr(parameter, "ds_id"):
            # DeepSpeed's own setter fails if the last rank's shard is padded.
            size, rank = parameter.ds_tensor.numel(), self.wrapper._get_param_partition_rank(parameter)
            part = value.flatten()[rank * size : (rank + 1) * size]
            self.wrapper.set_local_hp_param(F.pad(part, (0, size - part.numel())), parameter, key)
        else:
            parameter.set_full_hp_param(value, key)

    def _link(self) -> None:
        """Link parameters to their optimizer states. DeepSpeed does that after its first group has stepped, when other groups have no state yet."""
        if hasattr(self.wrapper, "_lazy_init_hp_params_optimizer_state"):
            self.wrapper._hp_optimizer_states_linked = False
            self.wrapper._lazy_init_hp_params_optimizer_state()

    # -- as torch's optimizers have them: parameters by number --------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with the parameters that they had before DeepSpeed replaced them."""
        return [
            {**group, "params": list(parameters)}
            for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with full tensors, for this rank's ``share`` of the parameters; a collective."""
        self._link()
        entries: dict[int, dict[str, Any]] = {}
        for number, group, parameter in self.numbered():
            flat = self.flat(group, parameter)
            state, is_kept = self.optimizer.state.get(flat, {}), number % self.share[1] == self.share[0]
            entry: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # All ranks take part in gathering it, and one keeps it.
                    value = self.read(parameter, key) if value.shape == flat.shape else value
                entry[key] = value.cpu().clone() if is_kept and isinstance(value, Tensor) else value
            if entry and is_kept:
                entries[number] = entry
        return {"state": entries, "param_groups": self.numbered_groups()}

    def numbered_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the numbers of their parameters."""
        number, groups = 0, []
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            groups.append({**group, "params": list(range(number, number + len(parameters)))})
            number += len(parameters)
        return groups

    def load_state_dict(self, state: Mapping[str, Any], read: Callable[[Any], Any]) -> None:
        """Load the merged :meth:`state_dict` of all ranks, or that of a plain optimizer.

        Args:
            read: returns the full tensor of an entry's value, in memory; called for one value at a time.
        """
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        parameters = [(group, p, state["state"][i]) for i, group, p in self.numbered() if i in state["state"]]
        for index, parameter, entry in parameters:
            flat = self.flat(index, parameter)
            for key, value in entry.items():
                if not _is_elementwise(value, parameter):
                    self.optimizer.state[flat][key] = read(value)
                elif key not in self.optimizer.state[flat]:
                    self.optimizer.state[flat][key] = torch.zeros_like(flat, requires_grad=False)
        self._link()
        for _, parameter, entry in parameters:
            for key, value in entry.items():
                if _is_elementwise(value, parameter):
                    self.write(parameter, read(value), key)


def _is_elementwise(value: Any, parameter: Any) -> bool:
    """Whether a value of the optimizer's state has the parameter's full shape, unlike the step count."""
    shape = getattr(value, "shape", ())
    return len(shape) > 0 and shape == getattr(parameter, "ds_shape", parameter.shape)


def load_optimizer(shards: Shards, module: nn.Module, state: dict[str, Any], read: Callable[[Any], Any]) -> None:
    """Load an optimizer state, with parameters by name or by number; ``read``: see :meth:`Shards.load_state_dict`."""
    shards.load_state_dict(numbered_state(_Numbers(shards), module, state), read)


class _Numbers:
    """The part of an optimizer's interface that ``numbered_state`` needs, without gathering any state."""

    def __init__(self, shards: Shards) -> None:
        self.param_groups, self._groups = shards.param_groups, shards.numbered_groups()

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": self._groups}


def model_state(module: nn.Module, shards: Shards | None, is_kept: Callable[[int], bool]) -> dict[str, Any]:
    """Full parameters and buffers on the CPU; a collective. Parameters in half precision are represented by their fp32 master copies.

    Args:
        is_kept: whether this rank keeps the tensor of this number; of other tensors it has only one at a time in memory.
    """
    tensors: dict[str, Any] = {}
    full_tensors: dict[int, Tensor | None] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):  # from get_extra_state
            tensors[name] = tensor
            continue
        if id(tensor) not in full_tensors:
            full = shards.read(tensor) if shards is not None and id(tensor) in shards.managed else _gathered(tensor)
            full_tensors[id(tensor)] = full.cpu() if is_kept(len(full_tensors)) else None
        full_tensor = full_tensors[id(tensor)]
        if full_tensor is not None:
            tensors[name] = full_tensor
    return tensors


def load_model(module: nn.Module, shards: Shards | None, source: Source, strict: bool) -> Report:
    """Read a checkpoint's full tensors, one after another, into parameters, master copies and buffers.

    Raises:
        ValueError: names are missing or unexpected.
    """
    state = module.state_dict(keep_vars=True)
    shapes = {
        name: torch.empty(t.ds_shape, device="meta") if hasattr(t, "ds_shape") else t for name, t in state.items()
    }
    report = source.check(module, shapes, strict)
    mismatched = {text.split(" ")[0] for text in report.other_shapes}
    loaded_ids: set[int] = set()
    with torch.no_grad():
        for name, tensor in state.items():
            if id(tensor) in loaded_ids or not isinstance(tensor, Tensor) or name not in source or name in mismatched:
                continue
            loaded_ids.add(id(tensor))
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
    """Mark each parameter that stage 3 has sharded, so that code which does not know DeepSpeed can tell, also after the run."""
    parameter: Any
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.sharded_by = "DeepSpeed"


def flat_range(parameter: Any) -> tuple[int, int]:
    """The range of a flattened parameter's elements that this rank has at stage 3: its first index, and the index after its last."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
    return min(rank * size, parameter.ds_numel), min((rank + 1) * size, parameter.ds_numel)


def _gathered(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, "ds_id"):
        return tensor.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()
