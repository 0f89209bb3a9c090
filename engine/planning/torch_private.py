"""What planning needs of torch beyond its public names, and the only place that touches it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
import torch.nn.parallel.distributed as ddp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

try:
    from torch._C._distributed_c10d import FakeWork, _create_work_from_future, _resolve_process_group
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.flop_counter import flop_registry
except ImportError as error:
    raise ImportError(
        f"planning needs parts of torch that torch {torch.__version__} does not have ({error}): use torch 2.11 to 2.13"
    ) from error

UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations whose result, or its shape, depends on values that a fake tensor does not have."""
MOST_HOST_NUMBERS = 65536
"""Larger tensors are fake even if they hold integers made from nothing."""
_SMALL_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_C10D, _HOST = "c10d", torch.device("cpu")


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has no values."""
    return isinstance(tensor, FakeTensor)


def is_wrapper(kind: type) -> bool:
    """Whether a class of tensors only wraps others, such as ``DTensor``: its operations arrive again, with the tensors inside."""
    return is_traceable_wrapper_subclass_type(kind)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def accumulates(operator: Any) -> bool:
    """Whether autograd itself adds two gradients of one tensor now, outside of any node."""
    return operator is torch.ops.aten.add.Tensor and in_backward() and torch._C._current_autograd_node() is None


def unsharded_gradients(model: Any) -> list[Tensor]:
    """The whole gradients that FSDP's blocks keep now."""
    found = []
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for parameter in getattr(getattr(state, "_fsdp_param_group", None), "fsdp_params", ()):
            whole = getattr(parameter, "_unsharded_param", None)
            found += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]


def group_of(name: Any) -> dist.ProcessGroup:
    """The process group of this name, or behind this script object."""
    return _resolve_process_group(name) if isinstance(name, str) else dist.ProcessGroup.unbox(name)


def flops_of(packet: Any) -> Callable[..., int] | None:
    """The formula for the floating point operations of an operator (a multiplication and an addition are two)."""
    return flop_registry.get(packet)


class Simulation(TorchDispatchMode):
    """Inside the block tensors have shapes but no values, except those that the host has: numbers made from Python values and small integers made
    from nothing, and what is computed from them alone. Process groups are those of :func:`simulated_processes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._depth = 0

    def __enter__(self) -> Simulation:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented
        if self._of_host(function, args, kwargs):
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        return _finished(result, args) if function.namespace == _C10D else result

    def _of_host(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation has nothing but values that the host has."""
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors:
            return all(not is_fake(t) and t.device == _HOST and t.numel() <= MOST_HOST_NUMBERS for t in tensors)
        if kwargs.get("dtype") not in _SMALL_DTYPES or not args:
            return False
        sizes = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        numbers = 1
        for size in sizes:
            numbers *= size if isinstance(size, int) else 1
        return numbers <= MOST_HOST_NUMBERS


def _finished(result: Any, args: Any) -> Any:
    """The result of a collective, with a future that holds its tensors: that of torch's fake work is empty, and DDP's reducer reads it."""
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    for index, part in enumerate(parts):
        if isinstance(part, torch.ScriptObject) and "Work" in str(part._type()):
            future: Any = torch.futures.Future()
            first = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            future.set_result(list(first))
            parts[index] = _create_work_from_future(future).boxed()
    return type(result)(parts) if isinstance(result, (list, tuple)) else parts[0]


@contextmanager
def simulated_processes(rank: int, world_size: int) -> Iterator[None]:
    """torch's default group is one of ``world_size`` ranks that exist in this process alone, of which it is ``rank``: no socket, no other process."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulated_group(ranks: list[int]) -> dist.ProcessGroup:
    """A new group of some of these ranks."""
    made = dist.new_group(ranks, backend="fake")
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def real() -> Iterator[None]:
    """Inside the block, within a :class:`Simulation`, tensors have values."""
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        yield


@contextmanager
def swappable(simulation: Simulation) -> Iterator[None]:
    """Inside the block ``Module.to`` works on fake parameters: it swaps their contents, which torch refuses while its table of conversions has weak
    references to them."""
    swap = torch.utils.swap_tensors

    def forgetting(one: Tensor, other: Tensor) -> None:
        simulation.fake.fake_tensor_converter.tensor_memo.clear()
        swap(one, other)

    with patch.object(torch.utils, "swap_tensors", forgetting):
        yield
