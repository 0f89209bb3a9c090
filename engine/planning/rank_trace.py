"""The trace of a rank: what the rank holds, sends and computes in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's device at one moment, by what holds them. Storages are counted once, at their own size, before the allocator rounds."""

    parameters: int = 0
    """Parameters as the rank keeps them between steps: its shards, or all of them."""
    buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    """Results of the forward pass that the backward pass needs."""
    temporaries: int = 0
    """Intermediate results that the backward pass does not need."""
    communication: int = 0
    """Buffers of collectives: gathered parameters, gradients on their way, buckets."""
    inputs: int = 0
    """The micro-batch."""

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(getattr(self, entry.name) for entry in fields(self))


Phase = Literal["set-up", "start", "forward", "backward", "optimizer step", "end"]
"""The phases of a training in a trace; the last five are those of a step."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory at one point of the step."""

    phase: str
    """``"start"``, ``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"end"``."""
    module: str
    """The module that runs, by its dotted name in the user's module; ``""`` outside of every module."""
    memory: Memory


KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
)
"""Kinds of collectives, and of transfers between two ranks."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The collectives of one kind over one mesh axis that a rank takes part in during one phase of a step."""

    kind: str
    """One of :data:`KINDS`."""
    axis: str
    """The mesh axis (``"dp_shard"``, ``"tp"``, ``"pp"``, ...); ``"world"`` for all ranks."""
    ranks: tuple[int, ...]
    """The members of this rank's group on that axis."""
    count: int
    """Calls in the phase."""
    bytes: int
    """Summed over the calls, each with the whole tensor's size: the output of a gather, the input of a scatter, the tensor of a reduction, the larger
    of what a rank sends and receives in an all-to-all."""
    phase: str
    """The phase of the step, see :attr:`Moment.phase`."""


WRAPPED = "DTensor"
"""The prefix of the names of operations on tensors that only wrap local tensors. They cost time on the host alone; the operations on the local
tensors are counted separately."""


@dataclass(frozen=True, slots=True)
class Operation:
    """All calls with the same operator, dtype, FLOPs and bytes in one phase of a step."""

    name: str
    """The dispatcher's name of the operator, such as ``"aten.mm"``; with the prefix :data:`WRAPPED` and a point for what the host does for a
    ``DTensor``."""
    dtype: str
    """Dtype of the arithmetic, such as ``"bfloat16"``; ``""`` for work of the host."""
    flops: int
    """FLOPs of one call; a multiplication and an addition are two."""
    bytes: int
    """Bytes that one call reads and writes."""
    count: int
    phase: str


@dataclass(frozen=True, slots=True)
class Allocations:
    """The order in which a rank's storages are created, resized and freed. Each change is two numbers: the storage's number and its new size in bytes
    (0: it is freed)."""

    first: Sequence[int] = ()
    """Changes until the end of the first step."""
    again: Sequence[int] = ()
    """Changes in each further step."""
    streams: Sequence[int] = ()
    """The stream on which each storage is created, by the storage's number. Memory that was freed on one stream is not given to another."""


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Activations that a rank moves to the host's memory and back (``activation_offload``)."""

    host_bytes: int
    """Pinned memory of the host, which the allocator takes in powers of two."""
    sent_bytes: int
    """Bytes that cross the link to the host in a step, in its forward passes."""
    returned_bytes: int
    """Bytes that come back in a step, in its backward passes. The last ones to leave are often still on the device when they are needed."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one full step of one rank. It is never the first step, because that one creates the optimizer's state."""

    rank: int
    role: str
    """The difference between this rank and others, such as ``"pipeline stage 1 of 4"``; ``""`` where all ranks do the same."""
    samples: int
    """Samples of the micro-batches of this step on this rank."""
    micro_batches: int
    peak: Moment
    held_at_peak: dict[str, int]
    """Bytes of parameters, gradients and activations at the peak by module, the largest first; at most 20."""
    timeline: tuple[Moment, ...]
    collectives: tuple[Collective, ...]
    operations: tuple[Operation, ...]
    allocations: Allocations = field(default_factory=Allocations, repr=False)
    """The allocations of the first step and of a later one, from which torch's caching allocator is replayed."""
    on_host: dict[str, int] = field(default_factory=dict)
    """Bytes, between steps, of what is in the host's memory, by field of :class:`Memory`. No other number of the trace includes them."""
    offloaded: HostTraffic | None = None
    """The activations that ``activation_offload`` moves; ``None``: none."""
    overlaps: bool = True
    """Whether the strategy runs its collectives concurrently with a pass, where a pass allows it."""
    missing: tuple[str, ...] = ()
    """Sentences on what could not be traced; the numbers leave it out."""
    computed: tuple[str, ...] = ()
    """Sentences on numbers that come from formulas rather than from the trace, each with the source."""
    stands_for: int = 1
    """The number of pipeline ranks that this trace represents, its own included. The others compute the same and hold at most as much memory."""

    @property
    def flops(self) -> int:
        """FLOPs of this rank in the step, recomputation included."""
        return sum(operation.flops * operation.count for operation in self.operations)
