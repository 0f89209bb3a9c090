"""Private names of torch that the library needs. Each has one function that knows all versions; ``tests/utils/test_torch_private.py`` calls all.

Planning has others in ``planning/torch_private.py``. If torch renames a name or makes it public, only this file changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "BatchNorm", "DispatchMode", "TensorBase", "conjugate_view", "flatten", "is_wrapper", "map_only", "multiply", "negative_view", "norms",
    "register_dataclass", "unscale", "update_scale", "without_dynamo",
]  # fmt: skip

try:  # these are torch's own functions, so that a step calls them without a function of ours in between
    multiply = torch._foreach_mul_
    """``(tensors, factor)``: multiply tensors of one device and dtype in place, in one pass. No public name takes a list."""
    norms = torch._foreach_norm
    """``(tensors)``: the norm of each tensor, in one pass."""
    register_dataclass = _pytree.register_dataclass
    """``(cls)``: let torch find the tensors in objects of this dataclass. ``torch.export.register_dataclass`` would import the exporter."""
    TensorBase: Any = torch._C.TensorBase
    """The class of torch's that has the attributes of ``torch.Tensor``."""
    conjugate_view = torch._conj
    """``(tensor)``: the conjugate, without a copy."""
    negative_view = torch._neg_view
    """``(tensor)``: the negative, without a copy."""
    flatten = _pytree.tree_flatten
    """``(tree)``: the leaves of a tree of arguments, and its form."""
    map_only = _pytree.tree_map_only
    """``(kinds, function, tree)``: a copy of a tree of arguments with ``function`` applied to leaves of these types."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    """``(gradients, found, inverse)``: multiply gradients by ``inverse`` in place; set ``found`` to 1 if one of them is not finite."""
    update_scale = torch._amp_update_scale_
    """``(scale, tracker, found, growth, backoff, interval)``: do what ``GradScaler.update`` does, on the device."""
    without_dynamo = torch._disable_dynamo
    """Decorator that excludes a function from ``torch.compile``. ``torch.compiler.disable`` would import ``torch._dynamo`` at once (1.9 s)."""
except AttributeError as error:
    raise ImportError(
        f"engine needs parts of torch that torch {torch.__version__} does not have ({error}): use torch 2.11 to 2.15"
    ) from error


# -- process groups -------------------------------------------------------------------------------------------------------------------


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process is in, including those of other libraries."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of later collectives. ``ProcessGroup.set_timeout`` would raise at a back end without one, as some third-party ones are."""
    for device in group._device_types:
        # In debug mode torch wraps each back end in another.
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)


def collectives_started(group: dist.ProcessGroup) -> int:
    """The number of collectives that this rank has started in the group.

    Raises:
        RuntimeError: the group's back end does not count them.
    """
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def can_split(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's back end for this device can split its connections among smaller groups."""
    return bool(group._get_backend(device).supports_splitting)


def member(new_group: object) -> dist.ProcessGroup | None:
    """``new_group``, or ``None`` on ranks outside it, where torch returns ``NON_GROUP_MEMBER`` (from ``dist.split_group``, too, since 2.14)."""
    return new_group if isinstance(new_group, dist.ProcessGroup) else None


def nccl_record() -> bytes | str | None:
    """The last collectives in NCCL's flight recorder (JSON); ``None`` if torch is built without one.

    Raises:
        RuntimeError: the recorder cannot be read now.
    """
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)
    record: bytes | str | None = None if dump is None else dump()
    return record


class _CallBetweenHooks:
    """The call of a compiled module between two hooks, which stay outside of what is compiled."""

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._module, self._before, self._after = weakref.ref(module), before, after
        self._compiled: Any = module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        self._before(module, args)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._after(module, args, None)

    def remove(self) -> None:
        """Let the module be called as before."""
        if (module := self._module()) is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled


def around_calls(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` around each call of a module, also if it fails. The handles remove them.

    A compiled module gets them around the compiled call: ``torch.compile`` would take hooks into what it compiles, and use the result for other
    modules of the class, because its guards do not look at hooks.
    """
    if module._compiled_call_impl is None:
        return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
    call = _CallBetweenHooks(module, before, after)
    module._compiled_call_impl = call
    return [call]


# -- wrapped and sharded models -------------------------------------------------------------------------------------------------------


def check_reduced(wrapper: DistributedDataParallel) -> None:
    """Check that the latest backward pass has reduced all gradients.

    Raises:
        RuntimeError: it has not; torch's text has the indices of the parameters.
    """
    wrapper._check_reducer_finalized()


def forget_reached(wrapper: DistributedDataParallel) -> None:
    """Make a wrapper that searches for unused parameters forget which ones backward passes have reached since the one that it has reduced: it would
    take them for used in the next window."""
    wrapper.reducer._reset_state()


def static_graph_is_known(wrapper: DistributedDataParallel) -> bool:
    """Whether a wrapper with ``static_graph=True`` has recorded its graph in a backward pass."""
    return bool(wrapper._static_graph_delay_allreduce_enqueued)


def unreduced_gradients(models: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The full gradients, from micro-batches that are not reduced yet, of parameters that FSDP2 shards, by the parameter's ``id``. Nothing public has
    them."""
    return {
        id(record.sharded_param): gradients[0]
        for group in _fsdp_groups(models)
        for record in group.fsdp_params
        if (gradients := _unreduced(record))
    }


def whole_gradients(models: Iterable[nn.Module]) -> list[Tensor]:
    """All full gradients that FSDP2 keeps at the moment."""
    return [g for group in _fsdp_groups(models) for record in group.fsdp_params for g in _unreduced(record)]


def drop_unreduced_gradients(models: Iterable[nn.Module]) -> None:
    """Discard gradients that FSDP2 keeps from micro-batches that are not reduced yet, or are reduced over a part of the ranks."""
    for group in _fsdp_groups(models):
        group._partial_reduce_output = None
        for record in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(record):
                record.unsharded_accumulated_grad = None
            if hasattr(record, "_unsharded_param"):
                record._unsharded_param.grad = None


class FSDPBlock:
    """A module whose parameters FSDP2 gathers, frees and reduces together, in four steps: ``begin`` and ``end`` of its forward and backward pass.

    ``end`` of the forward pass may free the full parameters. ``end`` of the backward pass reduces the gradients, if they are to be reduced now.
    The steps are FSDP2's own methods; :meth:`replace` puts others in their place.
    """

    def __init__(self, module: nn.Module, steps: Any) -> None:
        self.module, self._group = module, steps
        self._pre_forward, self._post_forward = steps.pre_forward, steps.post_forward
        self._pre_backward, self._post_backward = steps.pre_backward, steps.post_backward

    def replace(self, steps: FSDPSteps, number: int) -> None:
        """Let ``steps`` follow this block, which it knows by its ``number``."""
        group: Any = self._group

        def pre_forward(*args: Any) -> Any:
            # A block of several modules, which run one after another, calls this before each of them.
            if len(group.modules) == 1 or group._training_state.name != "FORWARD":
                steps.begin_forward(number)
            return self._pre_forward(*args)

        def post_forward(*args: Any) -> Any:
            steps.end_forward(number)
            return self._post_forward(*args)

        def pre_backward(*args: Any) -> Any:
            if group._training_state.name != "PRE_BACKWARD":  # otherwise another output of the block has begun it
                steps.begin_backward(number)
            return self._pre_backward(*args)

        def post_backward(*_: Any) -> None:
            steps.end_backward(number)

        group.pre_forward, group.post_forward = pre_forward, post_forward
        group.pre_backward, group.post_backward = without_dynamo(pre_backward), without_dynamo(post_backward)

    @property
    def is_trained(self) -> bool:
        """Whether a parameter of the block requires a gradient."""
        return any(record.sharded_param.requires_grad for record in self._group.fsdp_params)

    @property
    def reduces(self) -> bool:
        """Whether the next ``end`` of a backward pass reduces gradients."""
        return bool(self._group.reduce_grads)

    @property
    def reduces_fully(self) -> bool:
        """Whether the next ``end`` of a backward pass reduces gradients over all ranks, and not only over those that share one copy of the model."""
        return bool(self._group.reduce_grads and self._group.all_reduce_grads)

    @property
    def parameters(self) -> list[Tensor]:
        """The sharded parameters."""
        return [record.sharded_param for record in self._group.fsdp_params]

    def begin_forward(self) -> None:
        """Gather the parameters, as if the block ran."""
        self._pre_forward(self.module, (), {})

    def end_forward(self) -> None:
        """End what :meth:`begin_forward` began."""
        self._post_forward(self.module, (), None)

    def begin_backward(self) -> None:
        """Gather the parameters for a backward pass, as if it reached the block."""
        self._pre_backward(True)

    def end_backward(self) -> None:
        """Reduce the block's gradients, and free its parameters."""
        self._post_backward()

    def zero_missing(self) -> list[Tensor]:
        """Give a zero to each trained parameter without a gradient to reduce, and return these sharded parameters."""
        if self._group._orig_dtype is None and self.is_trained:  # it was frozen as a whole when it ran first
            self._group._init_mp_dtypes()
        records = [record for record in self._group.fsdp_params if hasattr(record, "_unsharded_param")]
        if any(vars(record).get("unsharded_accumulated_grad") is not None for record in records):
            for record in records:  # all gradients of one reduction have one dtype
                if vars(record).get("unsharded_accumulated_grad") is None:
                    record.to_accumulated_grad_if_needed()
        missing = [record for record in records if record.sharded_param.requires_grad and not _unreduced(record)]
        dtypes = {gradients[0].dtype for record in records if (gradients := _unreduced(record))}
        for record in missing:
            whole = record._unsharded_param
            # Under tensor parallelism it is a DTensor, and with fp8 a tensor that computes in fp8, whose gradient is an ordinary one.
            zero = (
                torch.zeros_like(whole, requires_grad=False)
                if hasattr(whole, "placements")
                else torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
            )
            if dtypes and zero.dtype not in dtypes:
                record.unsharded_accumulated_grad = zero.to(next(iter(dtypes)))
            else:
                whole.grad = zero
        return [record.sharded_param for record in missing]

    def has_unreduced(self) -> bool:
        """Whether the block has gradients that are not reduced yet."""
        return any(_unreduced(record) for record in self._group.fsdp_params)


class FSDPSteps:
    """Follows the steps of blocks, by their numbers; see :class:`FSDPBlock`."""

    def begin_forward(self, number: int) -> None:
        """Called before a block gathers its parameters for a forward pass."""

    def end_forward(self, number: int) -> None:
        """Called before a block frees its parameters after its forward pass."""

    def begin_backward(self, number: int) -> None:
        """Called before a block gathers its parameters for a backward pass."""

    def end_backward(self, number: int) -> None:
        """Called in place of the end of a block's backward pass, :meth:`FSDPBlock.end_backward`."""

    def end_pass(self, finish: Callable[[], None]) -> None:
        """Called at the end of a backward pass over all blocks, in place of FSDP2's ``finish``."""
        finish()


def fsdp_blocks(root: nn.Module) -> list[FSDPBlock]:
    """The blocks of a model that FSDP2 shards, in the order of its modules."""
    return [FSDPBlock(group.modules[0], group) for group in _fsdp_groups([root])]


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules to which ``fully_shard`` was applied; to import its class of them takes long."""
    return [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]


def fsdp_mesh(modules: Iterable[nn.Module]) -> DeviceMesh | None:
    """The mesh of the ranks over which FSDP2 shards these modules; ``None`` if they have no parameters of their own."""
    return next((group.mesh_info.mesh for group in _fsdp_groups(modules)), None)


def begin_fsdp_again(model: nn.Module) -> None:
    """Let FSDP2 find the parameters that have replaced those it has sharded, and take the next forward pass, of a model around this one perhaps, for
    the first one, in which it finds out what the whole model is."""
    for module in fsdp_modules(model):
        sharded: Any = module
        sharded.reshard()
        sharded._get_fsdp_state()._is_root = None
    for group in _fsdp_groups([model]):
        for record in group.fsdp_params:
            record.reset_sharded_param()


def follow_fsdp(root: nn.Module, blocks: Iterable[FSDPBlock], steps: FSDPSteps) -> None:
    """Let ``steps`` follow all forward and backward passes of ``root``."""
    for number, block in enumerate(blocks):
        block.replace(steps, number)
    for module in root.modules():
        if hasattr(type(module), "_get_fsdp_state"):
            state: Any = module._get_fsdp_state()  # type: ignore[operator]
            state._root_post_backward_final_callback = partial(steps.end_pass, state._root_post_backward_final_callback)


def _fsdp_groups(models: Iterable[nn.Module]) -> Iterator[Any]:
    """FSDP2's groups of parameters, each once: torch 2.11 has at most one for each module, later versions a list; several modules may share one."""
    for model in models:
        states = dict.fromkeys(module._get_fsdp_state() for module in fsdp_modules(model))  # type: ignore[operator]
        for state in states:
            groups = vars(state).get("_fsdp_param_groups")
            yield from filter(None, [state._fsdp_param_group] if groups is None else groups)


def _unreduced(record: Any) -> list[Tensor]:
    """A parameter's unreduced gradients: in the reduction's dtype (until torch 2.14), and the full parameter's own (after a forward pass)."""
    whole = getattr(record, "_unsharded_param", None)
    gradients = [vars(record).get("unsharded_accumulated_grad"), None if whole is None else whole.grad]
    return [gradient for gradient in gradients if gradient is not None]


def fate_of_gradient(parameter: Tensor) -> Literal["added", "returned", "none"]:
    """Within a backward pass: what happens to the parameter's gradient. It is ``"added"`` to its ``grad``, ``"returned"`` by ``torch.autograd.grad``,
    or not computed."""
    try:
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return "added" if torch._C._will_engine_execute_node(node) else "none"
    except RuntimeError:  # torch does not answer for gradients that are returned
        return "returned"


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward pass that runs now."""
    autograd: Any = torch.autograd.Variable
    autograd._execution_engine.queue_callback(function)


def is_strided_shard(placement: Any) -> bool:
    """Whether a dimension is sharded along an inner axis of the mesh first, as ``fully_shard`` does after tensor parallelism."""
    # By the class's name, because importing DTensor takes longer than this whole package; in some versions it is a subclass of Shard.
    return any(base.__name__ == "_StridedShard" for base in type(placement).__mro__)


# -- optimizers and devices -------------------------------------------------------------------------------------------------------------


def takes_amp_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer claims that its step reads ``found_inf`` and ``grad_scale``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def forget_amp_scaling(optimizer: Optimizer) -> None:
    """Record that the optimizer is no longer fused, so that its step does not divide gradients."""
    vars(optimizer).pop("_step_supports_amp_scaling", None)


def is_after_fork(backend: Any) -> bool:
    """Whether this process is a fork of one that has used the device whose module (``torch.cuda``, ``torch.xpu``, ...) is ``backend``."""
    return bool(getattr(backend, "_is_in_bad_fork", bool)())


def fp8_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return ``a @ b * scale**2`` in bf16, by the device's own product of fp8 matrices."""
    product: Tensor = torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    return product


# -- what only pipelines need; its imports take longer than all others here -------------------------------------------------------------


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors have shapes but no values, and can be used together with real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Hide operations inside the block from all active modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def is_simulated() -> bool:
    """Whether new tensors have shapes but no values, because a mode such as that of :func:`fake_mode` is active."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def dispatch_modes() -> list[Any]:
    """The active modes that see operations, the outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def is_in_flight(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a functional collective that may still run."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(tensor, AsyncCollectiveTensor)


def assert_later(condition: Tensor, text: str) -> None:
    """Let the device check a condition, shape ``()``. On CUDA nothing waits for it, and it ends the process's work there, as an index out of range
    does. In a compiled function it becomes a part of the graph."""
    torch._assert_async(condition, text)
