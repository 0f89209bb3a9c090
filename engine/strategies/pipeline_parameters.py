"""A pipelined model's parameters on this rank, which are those of its own stages: in the model, in optimizers and in checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from engine.distributed.group import Group
from engine.step.gradients import Loss
from engine.strategies import dtensors
from engine.strategies.parameter_replacements import ParameterReplacements
from engine.strategies.pipeline import Pipeline, Step
from engine.utils.tree import on_host


class StageParameters:
    """The parameters of one pipelined model on this rank."""

    def __init__(self, pipeline: Pipeline, replacements: ParameterReplacements) -> None:
        self.pipeline, self.replacements = pipeline, replacements
        self.tied: list[tuple[Tensor, Any, int]] = []
        """Parameters of this rank that stages on several ranks share, each with the process group of those ranks, and their number."""
        self.counts: list[int] = []
        """How many parameters each rank of the pipeline has; one that several share counts for each."""
        self._summed: dict[int, tuple[Any, int]] = {}
        """By index in ``tied``: the gradient that is already summed over the ranks, and its version."""
        self._groups: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """The parameter groups that each optimizer had before other ranks' parameters were removed from them."""
        self._elsewhere: list[nn.Module] = []
        """The modules of other ranks' stages."""

    def keep_own_stages(self, model: nn.Module, parts: list[list[nn.Module]], group: Group) -> None:
        """Keep this rank's stages of ``parts``; move other ranks' parameters to the meta device, one module after another.

        Raises:
            ValueError: a trained parameter is in no stage.
        """
        pipeline = self.pipeline
        owners: dict[nn.Parameter, set[int]] = {}
        for index, stage in enumerate(parts):
            for part in stage:
                for parameter in part.parameters():
                    owners.setdefault(parameter, set()).add(pipeline.owner(index))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in owners:
                raise ValueError(
                    f"pipeline parallel: {name!r} is in no stage, and would not be trained: add its module, or freeze it"
                )
        self.counts = [sum(rank in ranks for ranks in owners.values()) for rank in range(pipeline.size)]
        for parameter, ranks in owners.items():
            if len(ranks) > 1:
                tied_group = _column(group, pipeline.size, sorted(ranks))
                if tied_group is not None and parameter.requires_grad:
                    self.tied.append((parameter, tied_group, len(ranks)))
        self._elsewhere = [
            part for index, stage in enumerate(parts) if pipeline.owner(index) != pipeline.rank for part in stage
        ]
        pipeline.build(parts)
        for stage in parts:
            for part in stage:
                self.replacements.materialise(part)
                elsewhere = {self.replacements.current(p) for p, ranks in owners.items() if pipeline.rank not in ranks}
                for module in part.modules():
                    for key, parameter_of_part in module._parameters.items():
                        if parameter_of_part is not None and parameter_of_part in elsewhere:
                            module._parameters[key] = self.replacements.send_away(parameter_of_part)
        self.replacements.materialise(model)

    def follow_replacements(self, model: nn.Module) -> None:
        """Use the parameters that have replaced this rank's parameters since, in all modules that share one."""
        self.tied = [(self.replacements.current(p), group, count) for p, group, count in self.tied]
        self.replacements.update(model)

    def train(self, step: Step, root: Callable[[Any, float], Tensor], batch: Any, last: bool) -> Any:
        """Run forward and backward of one micro-batch. ``last``: whether it is the last of its window.

        Returns:
            The loss of the whole micro-batch, without a graph, on every rank: a scalar or a :class:`Loss`.

        Raises:
            TypeError: the loss is of another kind than before.
        """
        set_aside = [self._set_aside(index, parameter) for index, (parameter, _, _) in enumerate(self.tied)]
        totals = self.pipeline.train(step, root, batch)
        if self.pipeline.weighted is None:
            self.pipeline.weighted = bool(totals[0])
        for stage in self.pipeline.modules.values():
            for stage_parameter in stage.parameters():
                if last and dtensors.is_dtensor(stage_parameter):
                    # Schedules that split backward do not call the hook that does this.
                    dtensors.to_parameter_layout(stage_parameter)
        for index, (parameter, group, _) in enumerate(self.tied):
            if last and parameter.grad is not None:
                dist.all_reduce(dtensors.local([parameter.grad])[0], group=group)
            earlier_grad = set_aside[index]
            if earlier_grad is not None:
                parameter.grad = earlier_grad if parameter.grad is None else earlier_grad + parameter.grad
            if last and parameter.grad is not None:
                self._summed[index] = (weakref.ref(parameter.grad), parameter.grad._version)
        return Loss(totals[1], totals[2]) if self.pipeline.weighted else totals[1].float()

    def _set_aside(self, index: int, parameter: Tensor) -> Tensor | None:
        """Remove and return a tied parameter's gradient that is already summed over the stages, so that it is not summed again.
        Return ``None`` if there is no such gradient."""
        grad, summed = parameter.grad, self._summed.get(index)
        if grad is None or summed is None or summed[0]() is not grad or summed[1] != grad._version:
            return None
        parameter.grad = None
        return grad

    def keep_own(self, optimizer: Optimizer) -> None:
        """Remove parameters that only other ranks have from an optimizer."""
        if optimizer in self._groups:
            return
        self._groups[optimizer] = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not self.replacements.is_elsewhere(p)]

    # -- checkpoints ------------------------------------------------------------------------------------------------------------

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of the model's state that this rank saves: all except tensors that only other ranks' stages have."""
        own_ids = {id(t) for stage in self.pipeline.modules.values() for t in (*stage.parameters(), *stage.buffers())}
        other_ids = {id(t) for part in self._elsewhere for t in (*part.parameters(), *part.buffers())} - own_ids
        return {name: value for name, value in state.items() if id(value) not in other_ids}

    def joined_model(self, group: Group, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """The parameters and buffers of all stages, in the model's order, on rank 0; ``{}`` on other ranks."""
        own_ids = {id(t) for stage in self.pipeline.modules.values() for t in (*stage.parameters(), *stage.buffers())}
        tensors = module.state_dict(keep_vars=True)
        rows = self._gathered(group, {name: value for name, value in state.items() if id(tensors[name]) in own_ids})
        merged = {name: value for row in rows for name, value in row.items()}
        return {name: merged.get(name, state.get(name)) for name in tensors} if group.is_main else {}

    def with_all_names(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state whose groups name the parameters of all stages."""
        groups = [
            {**g, "params": names}
            for g, names in zip(state["param_groups"], self._names_by_group(optimizer, module), strict=True)
        ]
        return {**state, "param_groups": groups}

    def own_part(self, optimizer: Optimizer, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimizer's full state; ``ValueError`` if that is for other parameters."""
        names = self._names_by_group(optimizer, module)
        saved = [group["params"] for group in state["param_groups"]]
        if [set(n) for n in names] != [set(n) for n in saved]:
            in_optimizer, in_checkpoint = {n for g in names for n in g}, {n for g in saved for n in g}
            raise ValueError(
                f"the saved state of {type(optimizer).__name__} is for other parameters: only in the checkpoint: "
                f"{sorted(map(str, in_checkpoint - in_optimizer))[:5]}, only in the optimizer: {sorted(map(str, in_optimizer - in_checkpoint))[:5]}"
            )
        names_by_group = [
            [n for p, n in zip(g, ns, strict=True) if not self.replacements.is_elsewhere(p)]
            for g, ns in zip(self._groups[optimizer], names, strict=True)
        ]
        groups = [{**g, "params": n} for g, n in zip(state["param_groups"], names_by_group, strict=True)]
        own_names = {n for ns in names_by_group for n in ns}
        return {
            **state,
            "state": {n: entry for n, entry in state["state"].items() if n in own_names},
            "param_groups": groups,
        }

    def _names_by_group(self, optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
        """The names of all stages' parameters in each of the optimizer's groups."""
        names = {id(p): name for name, p in module.named_parameters()}
        return [[names[id(p)] for p in group] for group in self._groups[optimizer]]

    def _gathered(self, group: Group, values: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather ``values`` from each stage's first rank on rank 0. They are sent as pickles, since the ranks of one job trust each other.

        Tensors are sent from the host: a pickled device tensor would open a context on the sender's device in rank 0's process.
        """
        ranks_per_stage = group.world_size // self.pipeline.size
        rows = [values]
        for leader in range(ranks_per_stage, group.world_size, ranks_per_stage):
            if group.rank == leader:
                dist.send_object_list([on_host(values)], 0, group=group.cpu)
            elif group.is_main:
                row: list[Any] = [None]
                dist.recv_object_list(row, leader, group=group.cpu)
                rows.append(row[0])
        return rows


def _column(group: Group, stages: int, ranks: list[int]) -> Any:
    """The process group of ``ranks`` of the pipeline axis that have this rank's other coordinates; ``None`` on other ranks. A collective."""
    return group.part_for_device(torch.arange(group.world_size).reshape(stages, -1)[ranks].t().tolist())
