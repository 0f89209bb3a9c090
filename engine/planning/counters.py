"""Counters of a step's operations and collectives: the number of each kind, with its floating point operations and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from engine.planning import torch_private
from engine.planning.plan import Collective
from engine.planning.rank_trace import WRAPPED, Operation
from engine.utils.tree import leaves


class OperationCounter:
    """Counts operations that compute or move something; views are free."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int, int, str], int] = {}
        self.weight = 1
        """How many calls of the step each call that is noted now represents."""

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: str) -> None:
        """Count a call of an operator."""
        if operator.is_view or operator.namespace == "prim":
            return
        outputs, inputs = leaves(result), leaves((args, kwargs))
        if not outputs and not inputs:
            return
        name = operator._schema.name.removesuffix("_")  # a product in place (aten::addmm_) has the formula of the other
        formula = _FORMULAS.get(name) or torch_private.flops_of(name)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
        moved = {id(t): t.numel() * t.element_size() for t in (*inputs, *outputs)}
        dtype = str((inputs or outputs)[0].dtype).removeprefix("torch.")
        key = (str(operator.overloadpacket), dtype, flops, sum(moved.values()), phase)
        self._counts[key] = self._counts.get(key, 0) + self.weight

    def wrapped(self, operator: Any, phase: str) -> None:
        """Count a call on a tensor that only wraps others, such as a ``DTensor``: the host derives the call on the local tensors, which is noted when
        it comes."""
        key = (f"{WRAPPED}.{operator.overloadpacket}", "", 0, 0, phase)
        self._counts[key] = self._counts.get(key, 0) + 1

    def operations(self) -> tuple[Operation, ...]:
        """The operators called since :meth:`clear`, each kind with its number of calls."""
        return tuple(
            Operation(name, dtype, flops, moved, count, phase)
            for (name, dtype, flops, moved, phase), count in self._counts.items()
        )

    def clear(self) -> None:
        """Count from zero."""
        self._counts.clear()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention: two products for each pair of a query and a key. Shapes: [batch, heads, queries, width], and likewise for keys and
    values."""
    *batch, queries, width = query.shape
    return 2 * prod(batch) * queries * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention's backward pass: five products, because the scores are computed again."""
    return _attention(query, key, value) * 5 // 2


def _recurrent(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a recurrent layer: both matrices multiply each row of the inputs [steps, samples, width]."""
    return 2 * prod(inputs.shape[:2]) * (weight.numel() + recurrent.numel())


def _recurrent_backward(inputs: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _recurrent(inputs, weight, recurrent)


def _grouped(rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a product by groups: each row is multiplied by the matrix of its group."""
    return 2 * rows.numel() * matrices.shape[-1]


def _batched(matrices: Tensor, factors: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the products of matrices [batch, n, m] and [batch, m, p]."""
    return 2 * matrices.numel() * factors.shape[-1]


def _vector(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the product of a matrix and a vector."""
    return 2 * matrix.numel()


def _added(product: Callable[..., int]) -> Callable[..., int]:
    """The formula of an operator that adds the ``product`` to its first argument."""
    return lambda summand, *args, **kwargs: product(*args, **kwargs)


_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten::_grouped_mm": _grouped,
    "aten::mv": _vector,
    "aten::addmv": _added(_vector),
    "aten::addbmm": _added(_batched),
}
"""FLOPs of operators that torch's table lacks. A plan meets some of them because it computes on the CPU."""


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
"""Part of an operator's name -> kind of collective; the first part that is found counts."""
_GROUP_ARGUMENTS = ("process_group", "group_name")


class CollectiveCounter:
    """Counts collectives.

    Args:
        axes: the ranks of this rank's group on each mesh axis.
    """

    def __init__(self, axes: Mapping[str, tuple[int, ...]]) -> None:
        self._names = {ranks: name for name, ranks in axes.items()}
        self.weight = 1
        """How many calls of the step each call that is noted now represents."""
        self._calls: dict[tuple[str, tuple[int, ...], str], list[int]] = {}  # by kind, ranks and phase

    def note(
        self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: str
    ) -> list[Tensor]:
        """Count a call of a collective's operator, and return the tensors that it reads or writes."""
        name = operator._schema.name.partition("::")[2]
        kind = next((kind for start, kind in _KINDS if start in name), None)
        if kind is None:
            return []
        values, group = [], None
        for argument, value in zip(operator._schema.arguments, args, strict=False):
            if argument.name in _GROUP_ARGUMENTS:
                group = value
            else:
                values.append(_tensors(value))
        values += [_tensors(value) for value in kwargs.values()]
        if operator.namespace != "c10d":
            values.append(_tensors(result))
        if group is None:
            group = next(kwargs[name] for name in _GROUP_ARGUMENTS if name in kwargs)
        ranks = tuple(dist.get_process_group_ranks(torch_private.group_of(group)))
        size = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in values)
        self._calls.setdefault((kind, ranks, phase), []).extend([size] * self.weight)
        return [tensor for tensors in values for tensor in tensors]

    def collectives(self) -> tuple[Collective, ...]:
        """Collectives counted since :meth:`clear`."""
        return tuple(
            Collective(kind, self._axis(ranks), ranks, len(sizes), sum(sizes), phase)
            for (kind, ranks, phase), sizes in self._calls.items()
        )

    def clear(self) -> None:
        """Count from zero."""
        self._calls.clear()

    def _axis(self, ranks: tuple[int, ...]) -> str:
        """The name of the mesh axis whose group is ``ranks``; without one, ``"world"`` or the number of ranks."""
        if ranks in self._names:
            return self._names[ranks]
        return "world" if len(ranks) == dist.get_world_size() else f"{len(ranks)} ranks"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
