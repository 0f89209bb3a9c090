"""A forward pass on an example batch that leaves no trace: FLOPs and shapes of each submodule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from engine import Run, isolated


@dataclass(slots=True)
class SubmodulePass:
    """FLOPs and shapes of one submodule in the example pass."""

    flops: int = 0
    """FLOPs of all calls of the submodule."""
    inputs: Any = None
    """Shapes of the first call's arguments: a list of sizes, or a list of such lists."""
    outputs: Any = None
    """Shapes of the first call's outputs."""


def pass_through(run: Run, names: Iterable[str]) -> dict[str, SubmodulePass]:
    """Call ``training_step`` once with ``run.example_batch``, in ``on_fit_start``; all ranks call this together.

    The call runs without gradients, uncompiled, in the run's precision, and nothing is logged. Afterwards random numbers, buffers, parameters,
    modes, the modules' attributes (metrics and counters included) and the batch are as before. Objects that are not modules are not
    restored.

    Args:
        names: the submodules to measure; ``""`` is the module itself, and is always included.

    Raises:
        NotMeasured: this run cannot be measured; the message says why.
        Exception: whatever the module raised.
    """
    if reason := _why_not_measured(run):
        raise NotMeasured(reason)
    batch = run.example_batch
    if batch is None:
        raise NotMeasured("a stream's batches cannot be read ahead of the training")
    counter = FlopCounterMode(display=False)
    seen = {"": SubmodulePass()}
    step = run.call if run.engine.strategy.matched_forward else run.training_step
    with ExitStack() as stack:
        stack.enter_context(_restored_afterwards(run, batch))
        for name in names:
            if name:
                seen[name] = SubmodulePass()
                stack.enter_context(_measuring(run.module.get_submodule(name), seen[name], counter))
        with counter, run.engine.autocast():
            step(batch, 0)
    seen[""].flops = counter.get_total_flops()
    seen[""].inputs = shapes(batch)
    return seen


class NotMeasured(Exception):
    """FLOPs and shapes cannot be measured; the message says why."""


def _why_not_measured(run: Run) -> str:
    strategy = run.engine.strategy
    if not run.module.automatic_optimization:
        return "training_step would train, with automatic_optimization=False"
    if strategy.pipelined or strategy.fused:
        return f"a forward pass alone is not possible under {type(strategy).__name__}"
    if any(nn.parameter.is_lazy(p) for p in [*run.module.parameters(), *run.module.buffers()]):
        return "lazy modules get their shapes in the first step"
    return ""


@contextmanager
def _measuring(module: nn.Module, measured: SubmodulePass, counter: FlopCounterMode) -> Iterator[None]:
    flops_before: list[int] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flops_before.append(counter.get_total_flops())
        if measured.inputs is None:
            measured.inputs = shapes([*args, *kwargs.values()])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        start = flops_before.pop()
        if not flops_before:  # a module that calls itself is counted once
            measured.flops += counter.get_total_flops() - start
        if measured.outputs is None:
            measured.outputs = shapes(output)

    handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def shapes(value: Any) -> Any:
    """Return the sizes of a tensor as a list, and of a container as a list of its items' sizes.

    ``None`` if there is no tensor. A container of a single item has that item's sizes.
    """
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return None
    sizes = [shape for shape in map(shapes, value) if shape is not None]
    return sizes[0] if len(sizes) == 1 else sizes or None


# -- restoring the module -------------------------------------------------------------------------------------------------------------


@contextmanager
def _restored_afterwards(run: Run, batch: Any) -> Iterator[None]:
    module = run.module
    modules = list(module.modules())
    attributes = [(submodule, _attributes(submodule)) for submodule in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    values = [*module.parameters(), *tree_leaves(batch)]
    for _, saved in attributes:
        values += tree_leaves([value for value, _ in saved.values()])
    on_write = _CopyOnWrite([tensor for tensor in values if isinstance(tensor, Tensor)])
    vars(run)["log_media"] = _log_nothing
    try:
        with (
            run.logbook.silenced(),
            isolated(),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            on_write,
        ):
            yield
    finally:
        del vars(run)["log_media"]
        with torch.no_grad():
            for tensor, value in [*buffers, *on_write.copies]:
                tensor.copy_(value)
        for submodule, saved in attributes:
            _restore_attributes(submodule, saved)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces ``log_media`` during the pass, which logs nothing."""


_NOT_RESTORED = ("_parameters", "_modules")
"""Attributes that the pass leaves alone: a sharding strategy exchanges parameters in a forward pass, and puts them back itself."""


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, each with a copy of its content if it is a container."""
    return {
        name: (value, next((kind(value) for kind in (list, deque, dict, set) if isinstance(value, kind)), None))
        for name, value in vars(module).items()
        if name not in _NOT_RESTORED
    }


def _restore_attributes(module: nn.Module, saved: Mapping[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in saved and name not in _NOT_RESTORED]:
        del attributes[name]
    for name, (value, content) in saved.items():
        attributes[name] = value
        if content is not None:  # keep the object: handles of hooks refer to it
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(content)


class _CopyOnWrite(TorchDispatchMode):
    """Copies each of the given tensors before an operation first writes to it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._by_address: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._by_address.setdefault(_storage_address(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else kwargs.get(argument.name)
                    self._copy_before_write(tree_leaves(value))
        return func(*args, **kwargs)

    def _copy_before_write(self, written: Iterable[Any]) -> None:
        for tensor in written:
            if isinstance(tensor, Tensor):
                self.copies += [
                    (alias, alias.detach().clone()) for alias in self._by_address.pop(_storage_address(tensor), ())
                ]


def _storage_address(tensor: Tensor) -> int:
    """Address of the tensor's storage, which all of its views share."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    try:
        return (tensor if local is None else local()).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return id(tensor)
