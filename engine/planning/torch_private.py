"""The private parts of torch that planning uses. No other file of planning touches them."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.optim import optimizer

try:
    from torch._C import _distributed_c10d
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        unset_fake_temporarily,
    )
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        is_traceable_wrapper_subclass_type,
    )
    from torch.utils.flop_counter import flop_registry

    _c10d: Any = _distributed_c10d
    WAIT = torch.ops._c10d_functional.wait_tensor.default
    """The operation that waits for a functional collective."""
    _propagated = ShardingPropagator._propagate_tensor_meta_non_cached
    _create_work_from_future, _resolve_process_group = _c10d._create_work_from_future, _c10d._resolve_process_group
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"planning needs parts of torch that torch {torch.__version__} does not have ({error}): use torch 2.11 to 2.15"
    ) from error

MOST_HOST_NUMBERS = 1 << 20
"""The largest tensor of integers, in elements, that keeps its values in a plan."""
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_prim = torch.ops.prim
_NO_NUMBER = 2**64 - 1
"""The number that autograd returns for a node that the forward pass does not create."""
_ORDINARY_TENSOR = torch.empty(0)
UNSUPPORTED = UnsupportedOperatorException
"""An operation that needs values throughout, such as a reduction of sparse gradients."""
UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations whose result, or its shape, depends on values that a tensor does not have."""


class Mode(TorchDispatchMode):
    """Base class of modes that see each operation below autograd. One on a tensor that only wraps others, such as a ``DTensor``, is seen again on the
    local tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a plan compiles nothing, and the guard costs as much as the rest


def is_fake(tensor: Tensor) -> bool:
    """Check whether the tensor has no values."""
    return isinstance(tensor, FakeTensor)


def has_host_numbers(tensor: Tensor) -> bool:
    """Check whether a tensor of integers is so small that it keeps its values in a plan."""
    return tensor.dtype in INTEGERS and tensor.numel() <= MOST_HOST_NUMBERS and not tensor.is_sparse


def wraps(types: Any) -> bool:
    """Check whether one of ``types``, classes of tensors, only wraps other tensors."""
    # A set comprehension or `any` would cost as much as the rest of an observer.
    for kind in types:  # noqa: SIM110
        if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
            return True
    return False


def asks_device(operator: Any) -> bool:
    """Check whether ``operator`` only reads a fake tensor's device, which torch does several times per operation."""
    return operator is _prim.device.default


def in_backward() -> bool:
    """Check whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def node_number() -> int:
    """The number of the autograd node that runs, or ran last, in this thread's backward pass; -1 outside of backward passes."""
    node = torch._C._current_autograd_node() if in_backward() else None
    return -1 if node is None else node._sequence_nr()


def next_node() -> int:
    """The number of the autograd node that the forward pass will create next in this thread."""
    return torch.autograd._get_sequence_nr()


def running_node() -> tuple[int, Tensor | None]:
    """The number of the running node of the backward pass (-1: none), and the parameter whose gradient it accumulates; such a node has no number."""
    node: Any = torch._C._current_autograd_node() if in_backward() else None
    if node is None:
        return -1, None
    number = node._sequence_nr()
    return (number, None) if number < _NO_NUMBER else (-1, getattr(node, "variable", None))


def persistent_buffers(model: Any) -> list[Tensor]:
    """The buffers that a module's state, and so a checkpoint, contains."""
    return [
        buffer
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def group_of(name: Any) -> dist.ProcessGroup:
    """The process group with this name, or the one in this script object."""
    group = _resolve_process_group(name) if isinstance(name, str) else name
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


@functools.cache
def flops_of(name: str) -> Callable[..., int] | None:
    """The formula for the FLOPs of an operator (``"aten::mm"``; a multiplication and an addition are two); ``None``: torch has none."""
    namespace, _, operator = name.partition("::")
    formula: Any = flop_registry.get(getattr(getattr(torch.ops, namespace), operator, None))
    return formula


def work_with(tensors: list[Any]) -> Any:
    """The handle of a finished collective, with a future that holds ``tensors``."""
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


@contextmanager
def simulated_processes(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block torch's default group has ``world_size`` ranks, of which this process is ``rank`` and the others do not exist: no socket is
    opened."""
    _clear_sharding_prop_cache()
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's own would mark each line of an error with this rank
        _clear_sharding_prop_cache()  # it would take an equal mesh of the next job for this one's, and use its groups


def simulated_group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a group of ``ranks``, some of the simulated ones."""
    group = dist.new_group(ranks, backend="fake")
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def with_values() -> Iterator[None]:
    """Inside the block, within a :class:`engine.planning.fake_tensors.Simulation`, tensors have values."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Inside the block, code that the user has compiled runs uncompiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def optimizers_as_on_accelerators() -> Iterator[None]:
    """Inside the block optimizers update many fake parameters on the CPU in one operation (``foreach``) unless told otherwise, as they do on CUDA and
    XPU: faster there, but with intermediate results as large as the parameters."""
    devices = optimizer._get_foreach_kernels_supported_devices
    kinds: list[Any] = optimizer._foreach_supported_types  # the list that DTensor adds itself to
    kinds.append(FakeTensor)
    try:
        with patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"]):
            yield
    finally:
        kinds.remove(FakeTensor)


@contextmanager
def allowed_on_fake_tensors(fake: FakeTensorMode, answered: Callable[[str, Any], Any]) -> Iterator[None]:
    """Inside the block fake tensors support some operations for which torch raises an error.

    ``Module.to`` can swap the contents of fake parameters, which torch refuses while its table of conversions has weak references to them. A
    tensor can be formatted as a number or copied to numpy, with the values that a :class:`engine.planning.fake_tensors.Simulation` assumes.
    """
    swap = torch.utils.swap_tensors

    def swap_without_memo(first: Tensor, second: Tensor) -> None:
        if first.untyped_storage()._cdata == second.untyped_storage()._cdata:
            return  # the tensor keeps its storage, so nothing changes; a weak reference to it may exist
        fake.fake_tensor_converter.tensor_memo.clear()
        swap(first, second)

    def as_formatted(self: Tensor, form: str) -> str:
        return format(self.item(), form) if not self.dim() else object.__format__(self, form)

    def numbers(self: Tensor, *_: Any, **__: Any) -> Any:
        answered("copies a tensor to numpy", "ones")
        with with_values():
            return torch.ones(self.shape, dtype=self.dtype).numpy()

    def as_list(self: Tensor) -> Any:
        return numbers(self).tolist()

    with (
        patch.object(torch.utils, "swap_tensors", swap_without_memo),
        patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),  # the error says the same
        patch.object(FakeTensor, "__format__", as_formatted, create=True),
        patch.object(FakeTensor, "numpy", numbers, create=True),
        patch.object(FakeTensor, "__array__", numbers, create=True),
        patch.object(FakeTensor, "tolist", as_list, create=True),
    ):
        yield


@contextmanager
def aligned_for(package: str) -> Iterator[None]:
    """Inside the block code in files whose paths contain ``package`` reads 0 as the address of a tensor without values, which counts as aligned."""

    def pointer(self: Tensor) -> int:
        return 0 if package in sys._getframe(1).f_code.co_filename else Tensor.data_ptr(self)

    with patch.object(FakeTensor, "data_ptr", pointer, create=True):
        yield


@contextmanager
def outside_of_propagation(watch: Callable[[bool], None]) -> Iterator[None]:
    """Call ``watch(False)`` before, and ``watch(True)`` after each time that ``DTensor`` computes the shape of a result inside the block: it does so
    with tensors of the global size, which no rank of a real job holds or computes."""

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        watch(False)
        try:
            return _propagated(*args, **kwargs)
        finally:
            watch(True)

    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unwatched):
        yield


@contextmanager
def agreeing_stages() -> Iterator[None]:
    """Inside the block a pipeline's stage assumes that the other stages know as much as it does about the shapes between them; real stages ask each
    other (from torch 2.13 on)."""

    def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Tensor:
        stage._alone = int(not InferenceMode.needs_dynamic(stage._user_meta, has_backward))
        return torch.tensor([stage._alone], dtype=torch.int32)

    def result(stage: Any, received_result: Any = None) -> Tensor:
        return torch.tensor([stage._alone], dtype=torch.int32)

    if not hasattr(PipelineStage, "_warmup_forward_vote"):
        yield
        return
    from torch.distributed.pipelining._utils import InferenceMode

    with (
        patch.object(PipelineStage, "_warmup_forward_vote", vote),
        patch.object(PipelineStage, "_warmup_backward_result", result),
    ):
        yield


@contextmanager
def released_outputs() -> Iterator[None]:
    """Inside the block a pipeline's stage releases a fake output once it is sent; torch (from 2.15 on) releases ordinary tensors only."""
    name = "_output_slot_is_releasable"
    is_releasable = getattr(PipelineStage, name, None)
    if is_releasable is None:
        yield
        return

    def is_releasable_if_ordinary(stage: Any, output: Any) -> Any:
        return is_releasable(stage, _ORDINARY_TENSOR if is_fake(output) else output)

    with patch.object(PipelineStage, name, is_releasable_if_ordinary):
        yield
