"""The collectives of a step: how many of which kind, over which ranks, with how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine.planning import torch_private
from engine.planning.plan import Collective

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_KINDS = (
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce_", "reduce"),
    ("gather_", "gather"),
    ("scatter_", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)
_GROUP_ARGUMENTS = ("process_group", "group_name")


class CollectiveTrace:
    """Counts collectives.

    Args:
        axes: the ranks of this rank's group on each mesh axis.
    """

    def __init__(self, axes: Mapping[str, tuple[int, ...]]) -> None:
        self._names = {ranks: name for name, ranks in axes.items()}
        self.times = 1
        """How often what is noted now comes in a step."""
        self._calls: dict[tuple[str, tuple[int, ...], str], list[int]] = {}  # by kind, ranks and phase

    def note(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: str
    ) -> list[Tensor]:
        """A call of a collective's operator; its tensors."""
        name = operator._schema.name.partition("::")[2]
        kind = next((kind for start, kind in _KINDS if start in name), None)
        if kind is None:
            return []
        given, group = [], None
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.name in _GROUP_ARGUMENTS:
                group = value
            else:
                given.append(_tensors(value))
        given += [_tensors(value) for value in kwargs.values()]
        if operator.namespace != "c10d":
            given.append(_tensors(result))
        if group is None:
            group = next(kwargs[name] for name in _GROUP_ARGUMENTS if name in kwargs)
        ranks = tuple(dist.get_process_group_ranks(torch_private.group_of(group)))
        size = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in given)
        self._calls.setdefault((kind, ranks, phase), []).extend([size] * self.times)
        return [tensor for tensors in given for tensor in tensors]

    def collectives(self) -> tuple[Collective, ...]:
        """What was counted since :meth:`clear`."""
        return tuple(
            Collective(kind, self._axis(ranks), ranks, len(sizes), sum(sizes), phase)
            for (kind, ranks, phase), sizes in self._calls.items()
        )

    def clear(self) -> None:
        """Count from zero."""
        self._calls.clear()

    def _axis(self, ranks: tuple[int, ...]) -> str:
        if ranks in self._names:
            return self._names[ranks]
        return "world" if len(ranks) == dist.get_world_size() else f"{len(ranks)} ranks"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
