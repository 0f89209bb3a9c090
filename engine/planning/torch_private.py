"""What planning needs of torch beyond its public names, and the only place that touches it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.optim import optimizer

try:
    from torch._C import _distributed_c10d
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
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
    _propagated = ShardingPropagator._propagate_tensor_meta_non_cached
    _create_work_from_future, _resolve_process_group = _c10d._create_work_from_future, _c10d._resolve_process_group
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"planning needs parts of torch that torch {torch.__version__} does not have ({error}): use torch 2.11 to 2.13"
    ) from error

MOST_HOST_NUMBERS = 1 << 20
"""Larger tensors have no values, even if they hold integers."""
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HOST = torch.device("cpu")
_aten, _prim = torch.ops.aten, torch.ops.prim
UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations whose result, or its shape, depends on values that a tensor does not have."""


class Mode(TorchDispatchMode):
    """Sees each operation below autograd. An operation on a tensor that only wraps others, such as a ``DTensor``, comes again with those."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a plan compiles nothing, and the guard costs as much as the rest


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has no values."""
    return isinstance(tensor, FakeTensor)


def wraps(types: Any) -> bool:
    """Whether one of these classes of tensors only wraps others."""
    # A set comprehension or `any` would cost as much as the rest of an observer.
    for kind in types:  # noqa: SIM110
        if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
            return True
    return False


def asks_device(operator: Any) -> bool:
    """Whether this only reads a fake tensor's device, which torch does several times an operation."""
    return operator is _prim.device.default


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def node_number() -> int:
    """Which node of the backward pass runs in this thread, or has run last in it; -1 outside of backward passes."""
    node = torch._C._current_autograd_node() if in_backward() else None
    return -1 if node is None else node._sequence_nr()


def unsharded_gradients(model: Any) -> list[Tensor]:
    """The whole gradients that FSDP's blocks keep now."""
    found = []
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for parameter in getattr(getattr(state, "_fsdp_param_group", None), "fsdp_params", ()):
            whole = getattr(parameter, "_unsharded_param", None)
            found += [parameter.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]


def persistent_buffers(model: Any) -> list[Tensor]:
    """The buffers that the state of a module, and so a checkpoint, has."""
    return [
        buffer
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def group_of(name: Any) -> dist.ProcessGroup:
    """The process group of this name, or behind this script object."""
    found = _resolve_process_group(name) if isinstance(name, str) else name
    return found if isinstance(found, dist.ProcessGroup) else dist.ProcessGroup.unbox(found)


def flops_of(packet: Any) -> Callable[..., int] | None:
    """The formula for the floating point operations of an operator (a multiplication and an addition are two)."""
    found: Any = flop_registry.get(packet)
    return found


class Simulation(Mode):
    """Inside the block tensors have shapes but no values, except those that the host has: small ones made from Python values, small integers made
    from nothing, and what is computed from them alone. Process groups are those of :func:`simulated_processes`.

    Where the code reads a value that is not there, it gets an answer: 1 for a number, False for a condition, and the largest possible result
    where its shape depends on values.

    Args:
        answered: called with what was asked and what is answered; returns whether the training's own code has asked. The library gets 0.
    """

    def __init__(self, answered: Callable[[str, Any], bool]) -> None:
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
        if FakeTensor not in types and _of_host(operator, args, kwargs):
            with unset_fake_temporarily():
                result = operator(*args, **kwargs)
        else:
            try:
                result = operator(*self._indices(operator, args), **kwargs)
            except UNREADABLE:
                result = self._answer(operator, args)
        return _finished(result, args) if operator.namespace == "c10d" else result

    def _answer(self, operator: Any, args: Any) -> Any:
        if operator is _aten._local_scalar_dense.default:
            kind = args[0].dtype
            found: Any = False if kind is torch.bool else 1 if kind in INTEGERS else 1.0
            return found if self._answered("reads a value on the host", found) else type(found)(0)
        if operator is _aten.equal.default:
            return self._answered("compares values on the host", True) or True
        sizes: dict[Any, Any] = {
            _aten.nonzero.default: lambda t: torch.empty((t.numel(), t.ndim), dtype=torch.int64),
            _aten.masked_select.default: lambda t, mask: t.new_empty(
                torch.broadcast_shapes(t.shape, mask.shape).numel()
            ),
            _aten.bincount.default: lambda t, weights=None, least=0: t.new_empty(max(least, 1), dtype=torch.int64),
            _aten._unique2.default: lambda t, *_: tuple(t.new_empty(t.numel()) for _ in range(3)),
        }
        largest = sizes.get(operator)
        if largest is None:
            raise
        self._answered(
            f"has a result ({operator.overloadpacket}) whose shape depends on values", "the largest possible one"
        )
        with self.fake:
            return largest(*args)

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
            future: Any = torch.futures.Future()
            future.set_result(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
            parts[index] = _create_work_from_future(future).boxed()
    return type(result)(parts) if several else parts[0]


@contextmanager
def simulated_processes(rank: int, world_size: int) -> Iterator[None]:
    """torch's default group is one of ``world_size`` ranks that exist in this process alone, of which it is ``rank``: no socket, no other process."""
    _clear_sharding_prop_cache()
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch's own would mark each line of an error with this rank
        _clear_sharding_prop_cache()  # it takes equal meshes of two jobs for one, and finds the groups of the first


@contextmanager
def job_set_aside() -> Iterator[None]:
    """Inside the block this process is in no job, so that one can be simulated; afterwards it is in the same one again. No other rank takes part."""
    module: Any = dist.distributed_c10d
    world = module._world
    names = dict(world.pg_names)
    module._unregister_all_process_groups()
    tables = (
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "tags_to_pg",
        "pg_to_tag",
        "pg_coalesce_state",
    )
    module._world = SimpleNamespace(default_pg=None, group_count=0, comms=[], **{name: {} for name in tables})
    try:
        yield
    finally:
        module._world = world
        for group, name in names.items():
            module._register_process_group(name, group)


def simulated_group(ranks: list[int]) -> dist.ProcessGroup:
    """A new group of some of these ranks."""
    made = dist.new_group(ranks, backend="fake")
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def real() -> Iterator[None]:
    """Inside the block, within a :class:`Simulation`, tensors have values."""
    with unset_fake_temporarily(), _disable_current_modes():
        yield


@contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Inside the block optimizers change fake parameters on the CPU many at once (``foreach``) unless told otherwise, as they do on CUDA and XPU:
    faster there, with intermediate results as large as the parameters."""
    devices = optimizer._get_foreach_kernels_supported_devices
    kinds: list[Any] = optimizer._foreach_supported_types  # the list that DTensor adds itself to
    kinds.append(FakeTensor)
    try:
        with patch.object(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"]):
            yield
    finally:
        kinds.remove(FakeTensor)


@contextmanager
def usable(simulation: Simulation, answered: Callable[[str, Any], bool]) -> Iterator[None]:
    """Inside the block fake tensors allow what torch refuses them.

    ``Module.to`` swaps the contents of fake parameters, which torch refuses while its table of conversions has weak references to them. Code
    formats a tensor as a number, or copies it to numpy; it gets the same answers as from a :class:`Simulation`.
    """
    swap = torch.utils.swap_tensors

    def forgetting(one: Tensor, other: Tensor) -> None:
        if one.untyped_storage()._cdata == other.untyped_storage()._cdata:
            return  # converted to what it is: somebody may hold a weak reference to it
        simulation.fake.fake_tensor_converter.tensor_memo.clear()
        swap(one, other)

    def formatted(self: Tensor, form: str) -> str:
        return format(self.item(), form) if not self.dim() else object.__format__(self, form)

    def numbers(self: Tensor, *_: Any, **__: Any) -> Any:
        answered("copies a tensor to numpy", "ones")
        with real():
            return torch.ones(self.shape, dtype=self.dtype).numpy()

    def listed(self: Tensor) -> Any:
        return numbers(self).tolist()

    with (
        patch.object(torch.utils, "swap_tensors", forgetting),
        patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),  # the error itself says it
        patch.object(FakeTensor, "__format__", formatted, create=True),
        patch.object(FakeTensor, "numpy", numbers, create=True),
        patch.object(FakeTensor, "__array__", numbers, create=True),
        patch.object(FakeTensor, "tolist", listed, create=True),
    ):
        yield


@contextmanager
def aligned_for(package: str) -> Iterator[None]:
    """Inside the block code of files whose paths contain ``package`` finds tensors without values aligned in memory."""

    def pointer(self: Tensor) -> int:
        return 0 if package in sys._getframe(1).f_code.co_filename else Tensor.data_ptr(self)

    with patch.object(FakeTensor, "data_ptr", pointer, create=True):
        yield


@contextmanager
def outside_of_propagation(watch: Callable[[bool], None]) -> Iterator[None]:
    """Inside the block ``watch(False)`` is called before, and ``watch(True)`` after ``DTensor`` computes the shape of a result, with tensors as
    large as the whole: they are nobody's memory, and their operations nobody's work."""

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
    """Inside the block a pipeline's stage takes the others to know as much about the shapes between them as it does; real ones ask each other (from
    torch 2.13 on)."""

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
