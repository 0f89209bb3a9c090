"""Activation checkpointing: the activations inside blocks are recomputed in the backward pass instead of stored.

A block's forward pass then runs twice; its buffers and metrics change as if it had run once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from engine.config.kinds import Recompute
from engine.metrics.torchmetrics_states import unchanged
from engine.transforms.blocks import blocks_of, user_module
from engine.utils.log import warn_once

State = dict[nn.Module, dict[str, Tensor | None]]
Seen = list[tuple[nn.Module, dict[str, tuple[Tensor, int]]]]

_SAVED = (
    "mm.default",
    "addmm.default",
    "bmm.default",
    "_scaled_mm.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
)
"""Operations whose results ``"selective"`` stores, because they are the most expensive to recompute."""


def recompute(model: nn.Module, setting: Recompute) -> None:
    """Let the model's repeated blocks be recomputed in the backward pass, in place: classes and names stay. ``None`` undoes this.

    Random numbers are the same as in the first pass, so dropout drops the same units. Buffers (running statistics) and torchmetrics
    objects are updated once. Other side effects of a block's forward pass, such as appending to a list, happen twice.

    Raises:
        ValueError: the model has no blocks.
    """
    for module in model.modules():
        override = vars(module).get("forward")
        if isinstance(override, partial) and override.func is _recomputed:
            del module.forward
    if setting is None:
        return
    blocks = list(reversed(blocks_of(model, [], 0)))  # reversed back into the model's order
    if not blocks:
        raise ValueError(
            f"activation_checkpointing={setting!r}: {type(user_module(model)).__name__} has no repeated blocks; define blocks(self) that returns "
            "the modules to recompute"
        )
    every = setting if isinstance(setting, int) else 1
    for block in blocks[::every]:
        block.forward = partial(_recomputed, block, setting == "selective", RecomputedBuffers())


def _recomputed(block: nn.Module, selective: bool, buffers: RecomputedBuffers, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if any(map(_is_cache, (*args, *kwargs.values()))):
        args, kwargs = _without_cache(block, args, kwargs)
    if torch.compiler.is_compiling():  # a compiled graph updates buffers only once by itself
        context: dict[str, Any] = (
            {"context_fn": partial(create_selective_checkpoint_contexts, _saved_operations())} if selective else {}
        )
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)
    first_pass = buffers.before(block)
    outputs = checkpoint(
        forward, *args, use_reentrant=False, context_fn=partial(_contexts, first_pass, selective), **kwargs
    )
    buffers.after(first_pass)
    return outputs


def _is_cache(value: Any) -> bool:
    """Whether an argument of a block is a cache of keys and values, as decoders of transformers make one unless ``use_cache=False``."""
    return type(value).__name__.endswith("Cache") and callable(getattr(value, "get_seq_length", None))


def _without_cache(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without the cache, which the second pass would fill again: its keys and values would count twice.

    Raises:
        ValueError: the cache has something from before this pass, which the block needs.
    """
    index = next((m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)), 0)
    if any(_is_cache(value) and value.get_seq_length(index) for value in (*args, *kwargs.values())):
        raise ValueError(
            f"activation_checkpointing: {type(block).__name__} got a cache that has keys and values already (past_key_values: a prefix, or a second "
            "pass of one loop), and the pass that recomputes it would count them twice. Train it without activation_checkpointing"
        )
    warn_once(
        f"activation_checkpointing: blocks such as {type(block).__name__} are trained without the cache that the model made "
        "(use_cache=True), because recomputing would fill it twice; out.past_key_values stays empty. To say so: model.config.use_cache = False"
    )
    changed = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if changed.get("use_cache"):
        changed["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), changed


def _contexts(
    first_pass: FirstPass, selective: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's first pass and of its second."""
    if not selective:
        return nullcontext(), first_pass
    recording, first_pass.inner = create_selective_checkpoint_contexts(_saved_operations())
    return _without_autocast_cache(recording), first_pass


@contextmanager
def _without_autocast_cache(recording: AbstractContextManager[Any]) -> Iterator[None]:
    """Let autocast cast weights at each use: a block that is used twice would take its cast from the cache, so that it was not recorded."""
    is_caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with recording:
            yield
    finally:
        torch.set_autocast_cache_enabled(is_caching)


def _saved_operations() -> list[Any]:
    operations = []
    for name in _SAVED:
        packet, overload = name.split(".")
        operation = getattr(torch.ops.aten, packet, None)
        if operation is not None:
            operations.append(getattr(operation, overload))
    return operations


class RecomputedBuffers:
    """Keeps the buffers that a block's forward pass changes as after one pass: running statistics, power iterations, codebooks.

    The second pass starts from the values that the first one started from, so that it computes the same, and its changes are discarded.
    Buffers are copied before a pass if the module's passes change them, or if this is its first pass: a constant mask is copied only once.
    """

    def __init__(self) -> None:
        self._changes: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
        """Whether a pass changes a module's buffers, by module and mode (whether it trains)."""

    def __getstate__(self) -> dict[str, object]:
        return {"_": None}  # a copy of the block finds out by itself

    def __setstate__(self, state: dict[str, object]) -> None:
        self._changes = WeakKeyDictionary()

    def before(self, block: nn.Module) -> FirstPass:
        """Record a block's modes and buffers before its first pass."""
        start: State = {}
        seen: Seen = []
        modes = [(module, module.training) for module in block.modules()]
        for module, mode in modes:
            if module._buffers:
                if self._changes.get(module, {}).get(mode, True):
                    start[module] = _copies(module)
                seen.append((module, {name: (b, _version(b)) for name, b in module._buffers.items() if b is not None}))
        return FirstPass(block, modes, start, seen)

    def after(self, first: FirstPass) -> None:
        """Find out which buffers a first pass has changed. In a module's very first pass this compares values, which waits for the device."""
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


class FirstPass:
    """A record of a block's state before its first pass. As a context, it restores that state for the second pass (for each, if it is repeated)."""

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
        """Set modes and buffers inside the block as they were when the first pass started."""
        current_buffers = {module: dict(module._buffers) for module in self.start}
        modes = [(module, module.training) for module, _ in self.modes]
        for module, mode in self.modes:
            module.training = mode
        for module, buffers in self.start.items():
            module._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        try:
            yield
        finally:
            for module, buffers_now in current_buffers.items():
                module._buffers.clear()
                module._buffers.update(buffers_now)
            for module, mode in modes:
                module.training = mode


def _copies(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if b is None else b.detach().clone() for name, b in module._buffers.items()}


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _differ(before: dict[str, Tensor | None], after: dict[str, Tensor]) -> bool:
    # Some operations change a buffer but not its version, as batch_norm does with its running statistics.
    return any(b is not None and not torch.equal(b, after[name]) for name, b in before.items())
