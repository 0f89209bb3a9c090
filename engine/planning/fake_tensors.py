"""Tensors, modules and batches that have shapes but no values, and operations on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.planning import missing_values, torch_private
from engine.planning.torch_private import (
    INTEGERS,
    MOST_HOST_NUMBERS,
    UNREADABLE,
    WAIT,
    FakeTensor,
    FakeTensorMode,
    Mode,
    is_fake,
    unset_fake_temporarily,
    work_with,
    wraps,
)
from engine.utils.tree import map_tensors

_HOST = torch.device("cpu")
_aten, _prim = torch.ops.aten, torch.ops.prim


class Simulation(Mode):
    """Inside the block, tensors have shapes but no values. Only small tensors on the host have values: those created from Python values, small new
    tensors of integers, and results that are computed from such tensors alone. Process groups are simulated, by
    :func:`engine.planning.torch_private.simulated_processes`.

    Code that reads a value of a tensor without values gets an assumed one: see :mod:`engine.planning.missing_values`.

    Args:
        assume: called with what the code does and the assumed value; returns the value that the code gets.
    """

    def __init__(self, assume: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._assume = assume

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
        if operator is WAIT:
            return args[0]  # the operation on a fake tensor would return a copy
        kwargs = kwargs or {}
        if operator.overloadpacket is _aten._grouped_mm:
            with self.fake:
                return missing_values.grouped_product(*args, **kwargs)
        if FakeTensor not in types and _computes_on_host(operator, args, kwargs):
            with unset_fake_temporarily():
                result = operator(*args, **kwargs)
        else:
            try:
                result = operator(*self._indices(operator, args), **kwargs)
            except UNREADABLE:
                result = self._assumed_result(operator, args, kwargs)
            if type(result) is FakeTensor and result.dtype is torch.bool:
                result._truth = missing_values.known_truth(operator, args)  # type: ignore[attr-defined]
        return _with_tensors_in_future(result, args) if operator.namespace == "c10d" else result

    def _assumed_result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that depends on values which are not there. Called while the operation's error is handled, which is raised again
        if the operation is not known."""
        if operator is _aten._local_scalar_dense.default:
            kind = args[0].dtype
            answer: Any = (
                bool(getattr(args[0], "_truth", None)) if kind is torch.bool else 1 if kind in INTEGERS else 1.0
            )
            return self._assume("reads a value on the host", answer)
        if operator in (_aten.equal.default, _aten.allclose.default):
            self._assume("compares values on the host", True)
            return True
        with self.fake:
            result = missing_values.assumed_shape(operator, args, kwargs, _HOST_VALUES)
        if result is None:
            raise
        first = result[0] if isinstance(result, tuple) else result
        if not missing_values.shape_is_certain(operator, args, kwargs, _HOST_VALUES):
            self._assume(
                f"has a result ({operator.overloadpacket}) whose shape depends on values", f"shape {list(first.shape)}"
            )
        return result

    def _indices(self, operator: Any, args: Any) -> Any:
        """The arguments of an operation, with boolean masks that index a tensor replaced by indices."""
        if operator.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_) or len(args) < 2:
            return args
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype is not torch.bool:
                indices.append(index)
            elif is_fake(index):
                self._assume("chooses elements by a mask", "all of them")
                with self.fake:
                    indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            else:
                with unset_fake_temporarily():
                    indices += index.nonzero().unbind(1)
        return (args[0], indices, *args[2:])


def _numbers(tensor: Tensor) -> list[int] | None:
    """The values of a tensor of integers; ``None``: it has none."""
    if is_fake(tensor):
        return None
    with unset_fake_temporarily():
        numbers: list[int] = tensor.tolist()
        return numbers


def _tensor(values: list[int]) -> Tensor:
    """A tensor with values."""
    with unset_fake_temporarily():
        return torch.tensor(values)


_HOST_VALUES = missing_values.HostValues(_numbers, _tensor)


def _computes_on_host(operator: Any, args: Any, kwargs: Any) -> bool:
    """Check whether an operation computes values: its tensors are small and on the host, or it creates a small tensor of integers there."""
    tensors = _tensors(args, _tensors(kwargs.values(), []))
    if tensors:
        return all(t.device == _HOST and t.numel() <= MOST_HOST_NUMBERS for t in tensors)
    if kwargs.get("device", _HOST) not in (None, _HOST, "cpu") or not args:
        return False
    if operator.overloadpacket is _aten.arange:
        return all(isinstance(size, int) for size in args) and kwargs.get("dtype") in (None, *INTEGERS)
    sizes = args[0] if isinstance(args[0], (list, tuple)) else args
    return kwargs.get("dtype") in INTEGERS and prod(s for s in sizes if isinstance(s, int)) <= MOST_HOST_NUMBERS


def _tensors(values: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Append the tensors among an operator's arguments ``values`` to ``tensors``, and return ``tensors``."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, tensors)
    return tensors


def _with_tensors_in_future(result: Any, args: Any) -> Any:
    """The result of a collective, whose handle gets a future that holds the tensors: the future of torch's fake handle is empty, and DDP's reducer
    reads it."""
    several = isinstance(result, (list, tuple))
    parts = list(result) if several else [result]
    for index, part in enumerate(parts):
        if isinstance(part, torch.ScriptObject) and "Work" in str(part._type()):
            parts[index] = work_with(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
    return type(result)(parts) if several else parts[0]


Module = TypeVar("Module", bound=nn.Module)


def fake_module(module: Module) -> Module:
    """Return a deep copy of ``module`` with fake tensors on the CPU. Tensors on the meta device stay there; shared tensors stay shared.

    To be called within a :class:`engine.planning.fake_tensors.Simulation`.
    """
    memo: dict[int, Any] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise ValueError(
                f"{type(module).__name__}.{name} is a ScriptModule ({inner.original_name}), whose operations a plan cannot see: plan with the module "
                "that it was made from, before torch.jit.script or torch.jit.trace"
            )
        for tensor in (*inner._parameters.values(), *inner._buffers.values(), *vars(inner).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = fake_tensor(tensor)
    first_keys = list(memo)
    while True:
        try:
            return copy.deepcopy(module, memo)
        except Exception:
            shared = _uncopyable_attributes(module, memo)
            if not shared:
                raise
            memo = {key: memo[key] for key in first_keys}
            memo.update({id(value): value for value in shared})
            first_keys = list(memo)


def fake_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without values that has the shape, the layout and the class of ``tensor``. A fake tensor is returned unchanged, and a tensor on
    the meta device stays there. Small integers keep their values: they may be indices of positions, or pointers into a queue."""
    if tensor.is_meta:
        with torch_private.with_values():
            meta = torch.empty_like(tensor)
            return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    if torch_private.is_fake(tensor):
        return tensor
    if is_lazy(tensor):  # it has no shape yet
        return copy.deepcopy(tensor)
    if not isinstance(tensor, nn.Parameter) and torch_private.has_host_numbers(tensor):
        with torch_private.with_values():
            return tensor.detach().to("cpu", copy=True)
    fake = (
        torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if tensor.layout is torch.strided
        else torch.empty(tensor.size(), dtype=tensor.dtype)
    )
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(fake, tensor.requires_grad)
        parameter.__dict__.update(
            {name: value for name, value in vars(tensor).items() if not isinstance(value, Tensor)}
        )
        return parameter
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake


def make_fake(module: nn.Module) -> None:
    """Replace, in place, the tensors with values that hooks of ``module`` have created."""
    fakes: dict[int, Tensor] = {}
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta and not torch_private.is_fake(tensor):
                    tensors[key] = fakes.setdefault(id(tensor), fake_tensor(tensor))  # type: ignore[assignment]


def fake_batch(batch: Any) -> Any:
    """A batch with fake tensors; small ones of integers (tokens, lengths, masks) keep their values, so that code may read them."""
    return map_tensors(_fake_input, batch)


def _fake_input(tensor: Tensor) -> Tensor:
    return fake_tensor(tensor.detach() if torch_private.has_host_numbers(tensor) else tensor)


def _uncopyable_attributes(module: nn.Module, memo: dict[int, Any]) -> list[Any]:
    """Attributes of a module's submodules that cannot be copied, such as locks and open files: the copy will share them."""
    attributes = []
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name in ("_parameters", "_buffers", "_modules") or id(value) in memo or isinstance(value, nn.Module):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                attributes.append(value)
    return attributes
