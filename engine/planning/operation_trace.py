"""The operations of a step: how many of which kind, with how many floating point operations and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.planning import torch_private
from engine.planning.plan import Operation
from engine.utils.tree import leaves


class OperationTrace:
    """Counts operations that compute or move something; views are free."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int, int, str], int] = {}

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: str) -> None:
        """A call of an operator."""
        if operator.is_view or operator.namespace == "prim":
            return
        outputs, inputs = _found(result), _found((args, kwargs))
        if not outputs and not inputs:
            return
        formula = torch_private.flops_of(operator.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        moved = {id(t): t.numel() * t.element_size() for t in (*inputs, *outputs)}
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        key = (str(operator.overloadpacket), dtype, flops, sum(moved.values()), phase)
        self._counts[key] = self._counts.get(key, 0) + 1

    def operations(self) -> tuple[Operation, ...]:
        """What was counted since :meth:`clear`."""
        return tuple(
            Operation(name, dtype, flops, moved, count, phase)
            for (name, dtype, flops, moved, phase), count in self._counts.items()
        )

    def clear(self) -> None:
        """Count from zero."""
        self._counts.clear()


def _found(tree: Any) -> list[Tensor]:
    return leaves(tree)
