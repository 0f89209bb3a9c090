"""Buffers and metrics of a forward pass that runs twice, as if it had run once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from engine.metrics.torchmetrics_states import unchanged

State = dict[nn.Module, dict[str, Tensor | None]]
Seen = list[tuple[nn.Module, dict[str, tuple[Tensor, int]]]]


class Buffers:
    """The buffers of one block that its forward pass changes: running statistics, power iterations, codebooks.

    The second pass starts from the same values as the first one, so that it computes the same, and its changes are discarded.
    Before a pass, the buffers of modules whose passes change them are copied, and those of modules in their first pass: a constant mask
    is copied once.
    """

    def __init__(self) -> None:
        self._changes: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
        """Whether a pass changes a module's buffers, by the module's mode (whether it trains)."""

    def __getstate__(self) -> dict[str, object]:
        return {"_": None}  # a copy of the block detects this itself

    def __setstate__(self, state: dict[str, object]) -> None:
        self._changes = WeakKeyDictionary()

    def before(self, block: nn.Module) -> Pass:
        """Called before a first pass."""
        start: State = {}
        seen: Seen = []
        modes = [(module, module.training) for module in block.modules()]
        for module, mode in modes:
            if module._buffers:
                if self._changes.get(module, {}).get(mode, True):
                    start[module] = _copies(module)
                seen.append((module, {name: (b, _version(b)) for name, b in module._buffers.items() if b is not None}))
        return Pass(block, modes, start, seen)

    def after(self, first: Pass) -> None:
        """Called after a first pass. Comparing values waits for the device, in a module's first pass only."""
        for module, before in first.seen:
            verdicts, mode = self._changes.setdefault(module, {}), module.training
            now = {name: b for name, b in module._buffers.items() if b is not None}
            if now.keys() != before.keys() or any(now[n] is not b or _version(b) != v for n, (b, v) in before.items()):
                verdicts[mode] = True
                first.start.setdefault(module, _copies(module))
            elif mode not in verdicts:
                verdicts[mode] = _differ(first.start[module], now)
            if not verdicts[mode]:
                first.start.pop(module, None)
        first.seen = []


class Pass:
    """A first pass: the starting values of its second one. A context for the second one, entered several times if the graph is retained."""

    def __init__(self, block: nn.Module, modes: list[tuple[nn.Module, bool]], start: State, seen: Seen) -> None:
        self.block, self.modes, self.start, self.seen = block, modes, start, seen
        self.inner: AbstractContextManager[Any] = nullcontext()
        """Further contexts of the second pass."""
        self._open = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._as_before())
            stack.enter_context(unchanged(self.block))
            stack.enter_context(self.inner)
            self._open = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set modes and buffers as at the start of the first pass."""
        now = {module: dict(module._buffers) for module in self.start}
        modes = [(module, module.training) for module, _ in self.modes]
        for module, mode in self.modes:
            module.training = mode
        for module, buffers in self.start.items():
            module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for module, before in now.items():
                module._buffers.clear()
                module._buffers.update(before)
            for module, mode in modes:
                module.training = mode


def _copies(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if b is None else b.detach().clone() for name, b in module._buffers.items()}


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _differ(before: dict[str, Tensor | None], now: dict[str, Tensor]) -> bool:
    # Some operations change buffers without counting it: batch_norm writes its running statistics so.
    return any(b is not None and not torch.equal(b, now[name]) for name, b in before.items())
