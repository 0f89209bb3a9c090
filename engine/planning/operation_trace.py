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
        self.times = 1
        """How often what is noted now comes in a step."""

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: str) -> None:
        """A call of an operator."""
        if operator.is_view or operator.namespace == "prim":
            return
        outputs, inputs = _found(result), _found((args, kwargs))
        if not outputs and not inputs:
            return
        formula = _FORMULAS.get(operator.name()) or torch_private.flops_of(operator.overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        moved = {id(t): t.numel() * t.element_size() for t in (*inputs, *outputs)}
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        key = (str(operator.overloadpacket), dtype, flops, sum(moved.values()), phase)
        self._counts[key] = self._counts.get(key, 0) + self.times

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


def _recurrent(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Each of [steps, samples, width] meets both matrices."""
    return 2 * prod(inputs.shape[:2]) * (weight.numel() + recurrent.numel())


def _recurrent_backward(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _recurrent(inputs, weight, recurrent)


def _grouped(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> int:
    """Each row meets the matrix of its group; the rows of two operands meet within theirs."""
    return 2 * rows.numel() * matrices.shape[-1]


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::_grouped_mm": _grouped,
}
"""Of operators that torch's table of FLOPs lacks, some of which a plan meets because it computes on the CPU."""


def _found(tree: Any) -> list[Tensor]:
    return leaves(tree)
