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
class Seen:
    """Measurements of one submodule in the pass."""

    flops: int = 0
    """Floating point operations of all its calls."""
    inputs: Any = None
    """Shapes of the first call's arguments: a list of sizes, or several of them."""
    outputs: Any = None


def pass_through(run: Run, names: Iterable[str]) -> dict[str, Seen]:
    """Call ``training_step`` once with ``run.example_batch``, in ``on_fit_start``; all ranks call this together.

    It runs without gradients, uncompiled, in the run's precision. Afterwards the random numbers, buffers, parameters, modes, the attributes of
    modules (with metrics and counters) and the batch are as before; nothing is logged. Objects that are not modules are not
    restored.

    Args:
        names: the submodules to look at; ``""`` is the module itself, and is always included.

    Raises:
        NotMeasured: this run cannot be measured; the message says why.
        Exception: whatever the module raised.
    """
    if reason := _obstacle(run):
        raise NotMeasured(reason)
    batch = run.example_batch
    if batch is None:
        raise NotMeasured("a stream's batches cannot be read ahead of the training")
    counter = FlopCounterMode(display=False)
    seen = {"": Seen()}
    step = run.call if run.engine.strategy.matched_forward else run.training_step
    with ExitStack() as stack:
        stack.enter_context(_unchanged(run, batch))
        for name in names:
            if name:
                seen[name] = Seen()
                stack.enter_context(_watched(run.module.get_submodule(name), seen[name], counter))
        with counter, run.engine.autocast():
            step(batch, 0)
    seen[""].flops = counter.get_total_flops()
    seen[""].inputs = shapes(batch)
    return seen


class NotMeasured(Exception):
    """Why there are no FLOPs and shapes."""


def _obstacle(run: Run) -> str:
    strategy = run.engine.strategy
    if not run.module.automatic_optimization:
        return "training_step would train, with automatic_optimization=False"
    if strategy.pipelined or strategy.fused:
        return f"a forward pass alone is not possible under {type(strategy).__name__}"
    if any(nn.parameter.is_lazy(p) for p in [*run.module.parameters(), *run.module.buffers()]):
        return "lazy modules get their shapes in the first step"
    return ""


@contextmanager
def _watched(module: nn.Module, seen: Seen, counter: FlopCounterMode) -> Iterator[None]:
    began: list[int] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began.append(counter.get_total_flops())
        if seen.inputs is None:
            seen.inputs = shapes([*args, *kwargs.values()])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        start = began.pop()
        if not began:  # a module that calls itself is counted once
            seen.flops += counter.get_total_flops() - start
        if seen.outputs is None:
            seen.outputs = shapes(output)

    handles = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def shapes(value: Any) -> Any:
    """The sizes of a tensor as a list, or of those in a container; ``None`` if there are none. A single one stands for its container."""
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return None
    found = [shape for shape in map(shapes, value) if shape is not None]
    return found[0] if len(found) == 1 else found or None


# -- to leave no trace --------------------------------------------------------------------------------------------------------------


@contextmanager
def _unchanged(run: Run, batch: Any) -> Iterator[None]:
    module = run.module
    modules = list(module.modules())
    attributes = [(each, _attributes(each)) for each in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    known = [*module.parameters(), *tree_leaves(batch)]
    for _, kept in attributes:
        known += tree_leaves([value for value, _ in kept.values()])
    on_write = _CopyOnWrite([tensor for tensor in known if isinstance(tensor, Tensor)])
    vars(run)["log_media"] = _nothing
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
        for each, kept in attributes:
            _put_back(each, kept)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of logging."""


_LEFT_ALONE = ("_parameters", "_modules")
"""A strategy that shards exchanges parameters in a forward pass, and knows it."""


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, each with a copy of its content if it is a container."""
    return {
        name: (value, next((kind(value) for kind in (list, deque, dict, set) if isinstance(value, kind)), None))
        for name, value in vars(module).items()
        if name not in _LEFT_ALONE
    }


def _put_back(module: nn.Module, kept: Mapping[str, tuple[Any, Any]]) -> None:
    own = vars(module)
    for name in [name for name in own if name not in kept and name not in _LEFT_ALONE]:
        del own[name]
    for name, (value, content) in kept.items():
        own[name] = value
        if content is not None:  # the same object: handles of hooks know it
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(content)


class _CopyOnWrite(TorchDispatchMode):
    """Copies each of these tensors before an operation first writes to it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._known: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._known.setdefault(_place(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else kwargs.get(argument.name)
                    self._keep(tree_leaves(value))
        return func(*args, **kwargs)

    def _keep(self, written: Iterable[Any]) -> None:
        for tensor in written:
            if isinstance(tensor, Tensor):
                self.copies += [(each, each.detach().clone()) for each in self._known.pop(_place(tensor), ())]


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which views share."""
    local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    try:
        return (tensor if local is None else local()).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return id(tensor)
