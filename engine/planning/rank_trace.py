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
    """Results that one operation hands to the next."""
    communication: int = 0
    """Buffers of collectives: gathered parameters, gradients on their way, buckets."""
    inputs: int = 0
    """The micro-batch."""

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        return sum(getattr(self, entry.name) for entry in fields(self))


Phase = Literal["set-up", "start", "forward", "backward", "optimizer step", "end"]
"""The phases of a training as a trace knows them; those of a step are the last five."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory at one point of the step."""

    phase: str
    """``"start"``, ``"forward"``, ``"backward"``, ``"optimizer step"`` or ``"end"``."""
    module: str
    """The module that runs, by its dotted name in the user's module; ``""`` outside of all."""
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
    """Summed over the calls, each with the whole tensor's size: the output of a gather, the input of a scatter, the tensor of a reduction."""
    phase: str
    """The phase of the step, see :attr:`Moment.phase`."""


WRAPPED = "DTensor"
"""Start of the names of operations that take the host's time alone: operations on tensors that wrap local ones. The local operations follow by
themselves."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Equal operations of a step."""

    name: str
    """The dispatcher's name of the operation: ``"aten.mm"``; after :data:`WRAPPED` and a point, what the host does for a ``DTensor``."""
    dtype: str
    """Dtype of the arithmetic: ``"bfloat16"``; ``""`` for work of the host."""
    flops: int
    """FLOPs of one call; a multiplication and an addition are two."""
    bytes: int
    """Bytes that one call reads and writes."""
    count: int
    phase: str


@dataclass(frozen=True, slots=True)
class Allocations:
    """How a rank's storages change their sizes, in order: the number of a storage and its new size in bytes (0: it is freed), by turns."""

    first: Sequence[int] = ()
    """Changes until the end of the first step."""
    again: Sequence[int] = ()
    """Changes in each further step."""
    streams: Sequence[int] = ()
    """The stream that creates each storage, by the storage's number. A stream does not get the memory that another one has freed."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One full step, the second, of one rank: the first one has made the optimizer's state."""

    rank: int
    role: str
    """Part of the rank, such as ``"pipeline stage 1 of 4"``; ``""`` where all ranks do the same."""
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
    """Allocations of the first step and of later ones, for an allocator that rounds and keeps what it has reserved."""
    on_host: dict[str, int] = field(default_factory=dict)
    """Bytes between steps by category (fields of :class:`Memory`) of what is in the host's memory, and in none of the numbers above."""
    overlaps: bool = True
    """Whether the strategy sends beside a pass what can be sent beside it."""
    missing: tuple[str, ...] = ()
    """Sentences on what could not be traced; the numbers do not include it."""
    computed: tuple[str, ...] = ()
    """Sentences on numbers that come from formulas rather than from the trace, each with the source."""
    stands_for: int = 1
    """The number of ranks of a pipeline that do what this rank does and hold at most as much, this one included."""

    @property
    def flops(self) -> int:
        """FLOPs of this rank in the step, recomputation included."""
        return sum(operation.flops * operation.count for operation in self.operations)
