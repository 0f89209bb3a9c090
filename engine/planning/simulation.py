"""Tensors that have shapes but no values, in process groups that exist in this process alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine.planning import stand_ins
from engine.planning.torch_private import (
    INTEGERS,
    MOST_HOST_NUMBERS,
    UNREADABLE,
    FakeTensor,
    FakeTensorMode,
    Mode,
    is_fake,
    unset_fake_temporarily,
    work_with,
    wraps,
)

_HOST = torch.device("cpu")
_aten, _prim = torch.ops.aten, torch.ops.prim


class Simulation(Mode):
    """Inside the block tensors have shapes but no values, except those that the host has: small ones made from Python values, small integers made
    from nothing, and what is computed from them alone. Process groups are those of :func:`engine.planning.torch_private.simulated_processes`.

    Where the code reads a value that is not there, it gets an answer: see :mod:`engine.planning.stand_ins`.

    Args:
        answered: called with what was asked and what the answer would be; returns the answer.
    """

    def __init__(self, answered: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._answered = answered

    def __enter__(self) -> Simulation:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is _prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if wraps(types):
            return NotImplemented
        if operator is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # the fake one would be a copy
        kwargs = kwargs or {}
        if operator.overloadpacket is _aten._grouped_mm:
            with self.fake:
                return stand_ins.grouped_product(*args, **kwargs)
        if FakeTensor not in types and _of_host(operator, args, kwargs):
            with unset_fake_temporarily():
                result = operator(*args, **kwargs)
        else:
            try:
                result = operator(*self._indices(operator, args), **kwargs)
            except UNREADABLE:
                result = self._answer(operator, args, kwargs)
            if type(result) is FakeTensor and result.dtype is torch.bool:
                result._truth = stand_ins.truth(operator, args)  # type: ignore[attr-defined]
        return _finished(result, args) if operator.namespace == "c10d" else result

    def _answer(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if operator is _aten._local_scalar_dense.default:
            kind = args[0].dtype
            found: Any = (
                bool(getattr(args[0], "_truth", None)) if kind is torch.bool else 1 if kind in INTEGERS else 1.0
            )
            return self._answered("reads a value on the host", found)
        if operator in (_aten.equal.default, _aten.allclose.default):
            self._answered("compares values on the host", True)
            return True
        with self.fake:
            result = stand_ins.shaped(operator, args, kwargs, _ON_HOST)
        if result is None:
            raise
        first = result[0] if isinstance(result, tuple) else result
        if not stand_ins.certain(operator, args, kwargs, _ON_HOST):
            self._answered(
                f"has a result ({operator.overloadpacket}) whose shape depends on values", f"shape {list(first.shape)}"
            )
        return result

    def _indices(self, operator: Any, args: Any) -> Any:
        """The arguments of an operation, where masks that choose elements are numbers of elements."""
        if operator.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_) or len(args) < 2:
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype is not torch.bool:
                indices.append(index)
            elif is_fake(index):
                self._answered("chooses elements by a mask", "all of them")
                with self.fake:
                    indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            else:
                with unset_fake_temporarily():
                    indices += index.nonzero().unbind(1)
        return (args[0], indices, *args[2:])


def _numbers(tensor: Tensor) -> list[int] | None:
    if is_fake(tensor):
        return None
    with unset_fake_temporarily():
        found: list[int] = tensor.tolist()
        return found


def _tensor(values: list[int]) -> Tensor:
    with unset_fake_temporarily():
        return torch.tensor(values)


_ON_HOST = stand_ins.Host(_numbers, _tensor)


def _of_host(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation has nothing but values that the host has."""
    tensors = _tensors(args, _tensors(kwargs.values(), []))
    if tensors:
        return all(t.device == _HOST and t.numel() <= MOST_HOST_NUMBERS for t in tensors)
    if kwargs.get("device", _HOST) not in (None, _HOST, "cpu") or not args:
        return False
    if operator.overloadpacket is _aten.arange:
        return all(isinstance(each, int) for each in args) and kwargs.get("dtype") in (None, *INTEGERS)
    sizes = args[0] if isinstance(args[0], (list, tuple)) else args
    return kwargs.get("dtype") in INTEGERS and prod(s for s in sizes if isinstance(s, int)) <= MOST_HOST_NUMBERS


def _tensors(values: Any, found: list[Tensor]) -> list[Tensor]:
    """The tensors among arguments of an operator are added to ``found``."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)
    return found


def _finished(result: Any, args: Any) -> Any:
    """The result of a collective, with a future that holds its tensors: that of torch's fake work is empty, and DDP's reducer reads it."""
    several = isinstance(result, (list, tuple))
    parts = list(result) if several else [result]
    for index, part in enumerate(parts):
        if isinstance(part, torch.ScriptObject) and "Work" in str(part._type()):
            parts[index] = work_with(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
    return type(result)(parts) if several else parts[0]
