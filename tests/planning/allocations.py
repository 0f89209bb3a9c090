"""What a real step allocates and sends, as torch's profiler records it: no dispatch mode, no formula, nothing of the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

FOREVER = 1 << 62
BACKWARD = "autograd::engine::evaluate_function"
FORWARD = {"forward", "forward_backward", "backward"}
"""Ranges of the loop that are forward passes until the first node of the backward pass runs."""
LOOP = FORWARD | {"optimizer"}
"""All ranges of the loop."""
WHOLE = ("FSDP::pre_forward", "FSDP::pre_backward", "FSDP::backward_prefetch")
"""Where FSDP makes whole parameters, by no operation."""
FLAT = ("FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::all_reduce")
"""What FSDP calls its own work on flat buffers, as the profiler shows it."""
ON_THE_HOST = (8, torch.get_rng_state().numel())
"""Bytes of what no operation makes and is on the host whatever the device is: a Python number as an operator's argument, the state of a random
generator."""
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "recv",
    "c10d::allgather_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
}
"""Operators of process groups. The profiler sees no tensors in lists of lists, which the last three have."""


@dataclass(eq=False)
class Block:
    """Memory from its allocation to its release."""

    pointer: int
    size: int
    within: tuple[str, ...]
    """Names of the operations and ranges around the allocation, the outermost first."""
    operation: int
    """Which dispatched operation allocated it; -1: none."""
    start: int
    end: int = FOREVER
    category: str = ""
    lost: bool = False
    """Another thread has released it, at a time that nobody knows."""


@dataclass
class Sent:
    """One call of a collective."""

    time: int
    kind: str
    bytes: int
    """Of the whole: a gather's output, a scatter's input, a reduction's tensor, the larger of an exchange's two; -1: unknown."""
    pointers: tuple[int, ...]
    """Of the storages that it reads or writes."""
    within: tuple[str, ...]

    @property
    def again(self) -> bool:
        """Whether it is inside a call of the same operator, which waits for a tensor that another collective is filling and then calls itself."""
        return any(KINDS.get(name) == self.kind for name in self.within)


@dataclass
class Recording:
    """The profiler's events of one process, in the order of time."""

    blocks: list[Block] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    packed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """When FSDP copies into or out of flat buffers, and the storages of the tensors that it copies."""
    backward: list[int] = field(default_factory=list)
    """When nodes of the backward pass begin."""
    marks: dict[str, int] = field(default_factory=dict)
    """Times of ``record_function`` ranges whose names begin with ``mark:``."""

    def alive(self, time: int) -> Iterator[Block]:
        return (block for block in self.blocks if block.start <= time < block.end)

    def assign(self, time: int, held: dict[int, str]) -> None:
        """Give the blocks at these addresses a category, if they have none."""
        for block in self.alive(time):
            if block.pointer in held:
                block.category = block.category or held[block.pointer]

    def by_context(self, block: Block) -> str:
        """The category of what no object holds and no collective reads or writes."""
        within = block.within[-1] if block.within else ""
        if any(name.startswith(FLAT) for name in block.within) or (block.operation < 0 and within.startswith(WHOLE)):
            return "communication"
        if any(name.startswith(BACKWARD) for name in block.within) or not FORWARD & set(block.within):
            return "temporaries"
        passes = (time for time in self.backward if time > block.start)
        return "activations" if block.end > next(passes, FOREVER) else "temporaries"

    def levels(self, start: int, end: int) -> list[Counter[str]]:
        """Bytes by category at ``start`` and after each change until ``end``."""
        now: Counter[str] = Counter()
        for block in self.alive(start):
            now[block.category] += block.size
        changes = [(b.start, b.size, b.category) for b in self.blocks if start < b.start < end]
        changes += [(b.end, -b.size, b.category) for b in self.blocks if start < b.end < end]
        found = [Counter(now)]
        for _, size, category in sorted(changes):
            now[category] += size
            found.append(Counter(now))
        return found


@cache
def _composite() -> frozenset[str]:
    """Operators that dispatch to others: their inner calls are operations of their own."""
    key = "CompositeImplicitAutograd"
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(n.partition(".")[0] for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, key))


def _is_operation(name: str) -> bool:
    space = name.partition("::")[0]
    return space in ("aten", "c10d", "fsdp", "_c10d_functional") and name not in _composite()


def read(tree: Iterable[Any]) -> Recording:
    """The recording of a profiler's event tree (``profile_memory=True, record_shapes=True``)."""
    found, numbers = Recording(), 0
    changes: list[tuple[int, Any, tuple[str, ...], int]] = []
    stack: list[tuple[Any, tuple[str, ...], int]] = [(event, (), -1) for event in reversed(list(tree))]
    while stack:
        event, within, operation = stack.pop()
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields, within, operation))
            continue
        name = event.name
        if name.startswith(BACKWARD):
            found.backward.append(event.start_time_ns)
        if name.startswith("mark:"):
            found.marks[name.removeprefix("mark:")] = event.start_time_ns
        elif name in KINDS and event.tag.name == "TorchOp":
            found.sent.append(_sent(event, within))
        elif name.startswith("fsdp::"):
            pointers = tuple(tensor.storage_data_ptr for tensor in _tensors(event.extra_fields.inputs))
            found.packed.append((event.start_time_ns, pointers))
        if name == "PythonSubclass":  # what a DTensor does instead is operations of its own
            operation = -1
        elif operation < 0 and _is_operation(name):
            numbers, operation = numbers + 1, numbers
        stack += [(child, (*within, name), operation) for child in reversed(event.children)]
    found.blocks = _blocks(sorted(changes, key=lambda change: change[0]))
    found.sent.sort(key=lambda sent: sent.time)
    found.backward.sort()
    return found


def _blocks(changes: Iterable[tuple[int, Any, tuple[str, ...], int]]) -> list[Block]:
    """Without kernels' own, which no operation hands on; what the back end of a process group copies; what is on the host."""
    found: dict[Block, None] = {}
    at: dict[int, Block] = {}
    for time, change, within, operation in changes:
        pointer, size = change.ptr, change.alloc_size
        before = at.pop(pointer, None)
        if before is not None:
            before.end, before.lost = time, size > 0  # allocated again: released before
        if size > 0:
            found[block := Block(pointer, size, within, operation, time)] = None
            at[pointer] = block
        elif before is not None and -1 < operation == before.operation:
            del found[before]
    return [
        block for block in found if not _of_back_end(block) and not (block.operation < 0 and block.size in ON_THE_HOST)
    ]


def _of_back_end(block: Block) -> bool:
    return any(name.startswith(("c10d::", "gloo:")) for name in block.within)


def _sent(event: Any, within: tuple[str, ...]) -> Sent:
    given = event.extra_fields.inputs
    kind = KINDS[event.name]
    whole = _tensors(given[1 if kind == "reduce_scatter" else 0])
    total = sum(_size(tensor) for tensor in whole) if whole else -1
    if kind == "all_to_all":
        total = max(total, *map(_size, _tensors(given[1])), -1)
    pointers = tuple(tensor.storage_data_ptr for tensor in _tensors(given[:2]))
    return Sent(event.start_time_ns, kind, total, pointers, within)


def _tensors(given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return [tensor for each in given for tensor in _tensors(each)]
    return [given] if hasattr(given, "storage_data_ptr") else []


def _size(tensor: Any) -> int:
    count = 1
    for size in tensor.sizes:
        count *= size
    return count * int(tensor.dtype.itemsize)
