"""The operations of a step: how many of which kind, with how many floating point operations and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from torch import Tensor

from engine.planning import torch_private
from engine.planning.rank_trace import WRAPPED, Operation
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
        formula = _ATTENTION_ON_CPU.get(operator.name()) or torch_private.flops_of(operator.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        moved = {id(t): t.numel() * t.element_size() for t in (*inputs, *outputs)}
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        key = (str(operator.overloadpacket), dtype, flops, sum(moved.values()), phase)
        self._counts[key] = self._counts.get(key, 0) + 1

    def wrapped(self, operator: Any, phase: str) -> None:
        """A call on a tensor that wraps others, such as a ``DTensor``: the host finds out what it means for those, and calls it again."""
        key = (f"{WRAPPED}.{operator.overloadpacket}", "", 0, 0, phase)
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


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products for each query and key: [batch, heads, queries, width], keys and values likewise."""
    *batch, queries, width = query.shape
    return 2 * prod(batch) * queries * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Five products: the scores are computed again."""
    return _attention(query, key, value) * 5 // 2


_ATTENTION_ON_CPU: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""A plan computes on the CPU's operators, of which torch's table of FLOPs lacks these."""


def _found(tree: Any) -> list[Tensor]:
    return leaves(tree)
