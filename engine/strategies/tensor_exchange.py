"""Whole tensors on one rank each: which part of a tensor each rank holds, and the exchange of these parts in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.distributed.group import Group
from engine.utils.parameters import is_sharded, mesh_axes
from engine.utils.torch_private import is_simulated, is_strided_shard

_ALIGNMENT = 16
"""Segments of a buffer begin at multiples of this (bytes): every dtype can be viewed there."""
MISSING = 2
"""The status of a tensor that has a gradient on some ranks only; 1: it has one on all of them, 0: on none."""


class Part(NamedTuple):
    """The part of a whole tensor that one rank holds."""

    where: tuple[slice, ...]
    elements: int
    """The number of elements in the part."""


class Layout(NamedTuple):
    """How the ranks of a group hold one tensor. The ranks form a grid, in row-major order."""

    shape: torch.Size
    grid: tuple[int, ...]
    """The number of ranks on each axis."""
    cuts: tuple[tuple[int, int], ...] = ()
    """The axes along which the tensor is cut, each with the dim that it cuts, in the order of the cuts. Along all others ranks have copies."""

    def part(self, rank: int) -> Part:
        """The part of one rank; it may be empty."""
        begins, sizes, indices = [0] * len(self.shape), list(self.shape), self._indices(rank)
        for axis, dim in self.cuts:
            chunk = -(-sizes[dim] // self.grid[axis])
            begin = min(chunk * indices[axis], sizes[dim])
            begins[dim] += begin
            sizes[dim] = min(chunk, sizes[dim] - begin)
        where = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
        return Part(where, math.prod(sizes))

    def is_source(self, rank: int, owner: int) -> bool:
        """Whether the owner takes this rank's part: of several copies it takes those with its own index on the axes of copies."""
        cut = {axis for axis, _ in self.cuts}
        pairs = zip(self._indices(rank), self._indices(owner), strict=True)
        return all(axis in cut or index == of_owner for axis, (index, of_owner) in enumerate(pairs))

    def holders(self) -> list[int]:
        """The ranks whose part is not empty; all of them for a tensor without elements."""
        ranks = list(range(math.prod(self.grid)))
        return [rank for rank in ranks if self.part(rank).elements] or ranks

    def _indices(self, rank: int) -> list[int]:
        """The index of a rank on each axis."""
        indices: list[int] = []
        for size in reversed(self.grid):
            rank, index = divmod(rank, size)
            indices.insert(0, index)
        return indices


def layout_of(parameter: Any, axes: Mapping[str, int]) -> Layout:
    """The layout of a parameter on a grid with these axes.

    Raises:
        ValueError: the parameter is laid out in another way than by cutting its dims.
    """
    grid = tuple(axes.values())
    if not is_sharded(parameter):
        return Layout(parameter.shape, grid)
    names, placements = list(axes), parameter.placements
    pairs = list(zip(mesh_axes(parameter), placements, strict=False))
    if any(is_strided_shard(placement) for placement in placements):
        pairs.reverse()  # the inner axes have cut the tensor first
    cuts: list[tuple[int, int]] = []
    for name, placement in pairs:
        if placement.is_shard() or is_strided_shard(placement):
            if name not in axes:
                raise ValueError(
                    f"a parameter is sharded along {name!r}, which is none of the strategy's axes ({', '.join(axes)})"
                )
            cuts.append((names.index(name), placement.dim % len(parameter.shape)))
        elif not placement.is_replicate():
            raise ValueError(f"a parameter has the placement {placement}, so its parts cannot be put together")
    return Layout(parameter.shape, grid, tuple(cuts))


@torch.no_grad()
def local_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor, which shares its memory. Unlike :mod:`engine.strategies.dtensors`, this imports nothing of torch's DTensor, which
    trainings under DDP do without."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


class LentTensor(NamedTuple):
    """A parameter that is lent to its owner for each step."""

    parameter: Any
    layout: Layout
    owner: int

    def local(self) -> Tensor:
        """This rank's part of the value."""
        return local_part(self.parameter).data

    def local_gradient(self) -> Tensor:
        """This rank's part of the gradient."""
        return local_part(self.parameter.grad)


class _Segments:
    """A buffer with a segment for each rank: a flag (one byte) for each tensor, then the tensors' parts.

    Args:
        parts: by rank, the parts of its segment, each with the tensor's number in the bucket.
        copies: how many tensors are sent of each part: two for gradient and value.
    """

    def __init__(
        self, parts: Mapping[int, Sequence[tuple[int, Part]]], copies: int, world_size: int, like: Tensor
    ) -> None:
        self.sizes: list[int] = []
        """The bytes of each rank's segment."""
        self._copies, self._dtype, self._device = copies, like.dtype, like.device
        self._parts: list[tuple[int, Part, int]] = []  # number, part, and the first byte of its first copy
        numbers, positions, begin = [], [], 0
        for rank in range(world_size):
            of_rank = parts.get(rank, [])
            at = begin + _aligned(len(of_rank))
            for index, (number, part) in enumerate(of_rank):
                numbers.append(number)
                positions.append(begin + index)
                self._parts.append((number, part, at))
                at += copies * part.elements * like.element_size()
            self.sizes.append(_aligned(at) - begin)
            begin += self.sizes[-1]
        self.numbers = torch.tensor(numbers, dtype=torch.int64, device=like.device)
        """The tensor's number for each part."""
        self.flags = torch.tensor(positions, dtype=torch.int64, device=like.device)
        """Where in the buffer the flag of each part is."""

    def new_buffer(self) -> Tensor:
        """An uninitialized buffer."""
        # Not made of integers: a plan would take them for values.
        elements = torch.empty(sum(self.sizes) // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        return elements.view(torch.uint8)

    def flags_in(self, buffer: Tensor, bits: Tensor) -> Tensor:
        """The flag of each part; in a simulated job, where nobody has sent one, those of ranks with the same ``bits`` as this one."""
        return bits[self.numbers] if is_simulated() else buffer[self.flags]

    def tensors(self, buffer: Tensor) -> Iterator[tuple[int, Part, list[Tensor]]]:
        """For each part its tensor's number, the part, and views of its copies, of the part's shape."""
        for number, part, begin in self._parts:
            shape = [piece.stop - piece.start for piece in part.where]
            size = part.elements * self._dtype.itemsize
            copies = buffer[begin : begin + self._copies * size].view(self._dtype).split(part.elements)
            yield number, part, [copy.view(shape) for copy in copies]


class Transfer(NamedTuple):
    """An exchange that is under way; it keeps its buffers until its end."""

    sent: Tensor
    received: Tensor
    work: Any


class Bucket:
    """Tensors of one dtype and device that are gathered, stepped and returned together: by two collectives, or one where all ranks have copies.

    Every rank makes the same buckets. What is sent depends on the layouts alone: a rank without a gradient sends a flag instead.

    Args:
        lent: the tensors, in the same order on all ranks.
        group: the ranks that hold them.
    """

    def __init__(self, lent: Sequence[LentTensor], group: Group) -> None:
        self.lent, self._group = lent, group
        rank, ranks, like = group.rank, range(group.world_size), lent[0].local()
        self.device, self.dtype = like.device, like.dtype
        self._parts = [tensor.layout.part(rank) for tensor in lent]
        self._owned = [number for number, tensor in enumerate(lent) if tensor.owner == rank]
        self._is_gathered = any(tensor.layout.cuts for tensor in lent)
        to_owners: dict[int, list[tuple[int, Part]]] = {}
        from_owners: dict[int, list[tuple[int, Part]]] = {}
        for number, (tensor, part) in enumerate(zip(lent, self._parts, strict=True)):
            if tensor.owner != rank and part.elements:
                from_owners.setdefault(tensor.owner, []).append((number, part))
                if tensor.layout.is_source(rank, tensor.owner):
                    to_owners.setdefault(tensor.owner, []).append((number, part))
        of_others = {
            other: [(number, part) for number in self._owned if (part := lent[number].layout.part(other)).elements]
            for other in ranks
            if other != rank
        }
        of_sources = {
            other: [(number, part) for number, part in parts if lent[number].layout.is_source(other, rank)]
            for other, parts in of_others.items()
        }
        count = group.world_size
        self._gathered = _Segments(to_owners, 2, count, like), _Segments(of_sources, 2, count, like)
        self._returned = _Segments(of_others, 1, count, like), _Segments(from_owners, 1, count, like)
        self._owned_numbers = torch.tensor(self._owned, dtype=torch.int64, device=self.device)
        has_part = [part.elements > 0 for part in self._parts]
        self._has_part = torch.tensor(has_part, dtype=torch.uint8, device=self.device)
        self._bits: tuple[bytes, Tensor] | None = None

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sends in a step."""
        gathered = sum(self._gathered[0].sizes) if self._is_gathered else 0
        return gathered + sum(self._returned[0].sizes)

    def _own_bits(self) -> Tensor:
        """For each tensor 1 if this rank has its gradient, else 0; on the device. Copied to it only when they change."""
        bits = bytes(tensor.parameter.grad is not None for tensor in self.lent)
        if self._bits is None or self._bits[0] != bits:
            self._bits = bits, torch.tensor(list(bits), dtype=torch.uint8, device=self.device)
        return self._bits[1]

    def start_gathering(self) -> Transfer | None:
        """Begin to send this rank's parts of gradients and values to their owners."""
        if not self._is_gathered:
            return None
        for tensor in self.lent:
            grad = tensor.parameter.grad
            if grad is not None and is_sharded(grad) and grad.placements != tensor.parameter.placements:
                tensor.parameter.grad = grad.redistribute(placements=tensor.parameter.placements)
        outgoing, incoming = self._gathered
        sent = outgoing.new_buffer()
        sent[outgoing.flags] = self._own_bits()[outgoing.numbers]
        for number, _, (gradient, value) in outgoing.tensors(sent):
            tensor = self.lent[number]
            if tensor.parameter.grad is not None:
                gradient.copy_(tensor.local_gradient())
            value.copy_(tensor.local())
        return self._start(outgoing, incoming, sent)

    def _start(self, outgoing: _Segments, incoming: _Segments, sent: Tensor) -> Transfer:
        received = incoming.new_buffer()
        group = self._group.cpu if self.device.type == "cpu" else self._group.wide
        work = dist.all_to_all_single(received, sent, incoming.sizes, outgoing.sizes, group=group, async_op=True)
        return Transfer(sent, received, work)

    def finish_gathering(self, transfer: Transfer | None) -> Lent:
        """Wait for the parts of others, and put the whole tensors of this rank together."""
        incoming, bits = self._gathered[1], self._own_bits()
        wholes = {number: self._with_own_part(number) for number in self._owned}
        missing = torch.zeros(bits.shape, dtype=torch.int32, device=self.device)
        if transfer is not None:
            transfer.work.wait()
            received = transfer.received
            missing.index_add_(0, incoming.numbers, (incoming.flags_in(received, bits) ^ bits[incoming.numbers]).int())
            for number, part, (gradient, value) in incoming.tensors(received):
                whole = wholes[number]
                whole.data[part.where] = value
                if whole.grad is not None:
                    whole.grad[part.where] = gradient
        statuses = torch.where(missing > 0, MISSING, bits)
        if self.device.type == "cpu":
            for number, status in enumerate(statuses.tolist()):
                if status == MISSING:
                    wholes[number].grad = None  # not stepped: all ranks raise an error
        return Lent(self, wholes, statuses)

    def _with_own_part(self, number: int) -> nn.Parameter:
        """A plain parameter with the value and the gradient of an owned tensor, as far as this rank has them. If it has all, memory is shared."""
        tensor, part = self.lent[number], self._parts[number]
        has_gradient = tensor.parameter.grad is not None
        if self._is_whole(number):
            whole = nn.Parameter(tensor.local(), tensor.parameter.requires_grad)
            whole.grad = tensor.local_gradient() if has_gradient else None
        else:
            whole = nn.Parameter(torch.empty(tensor.layout.shape, dtype=self.dtype, device=self.device))
            whole.data[part.where] = tensor.local()
            if has_gradient:
                whole.grad = torch.empty_like(whole)
                whole.grad[part.where] = tensor.local_gradient()
        # Attributes that an optimizer may read, such as a name or a multiplier; not what the parameter's class has.
        attributes = getattr(tensor.parameter, "__dict__", {})
        vars(whole).update({name: value for name, value in attributes.items() if not name.startswith("_")})
        return whole

    def _is_whole(self, number: int) -> bool:
        """Whether this rank has all of a tensor, and lends its own memory."""
        return not self.lent[number].layout.cuts

    def start_returning(self, lent: Lent) -> Transfer:
        """Begin to send the new values of this rank's whole tensors to all ranks that hold a part."""
        outgoing, incoming = self._returned
        sent = outgoing.new_buffer()
        sent[outgoing.flags] = lent.statuses[outgoing.numbers]
        for number, part, (value,) in outgoing.tensors(sent):
            value.copy_(lent.wholes[number].data[part.where])
        return self._start(outgoing, incoming, sent)

    def finish_returning(self, transfer: Transfer, lent: Lent) -> Tensor:
        """Wait for the new values, and take them over.

        Returns:
            For each tensor, whether some ranks have its gradient and others do not (not 0); on the device. On the CPU such values are not taken.
        """
        incoming, bits = self._returned[1], self._own_bits()
        transfer.work.wait()
        statuses = torch.zeros_like(bits)
        statuses[self._owned_numbers] = lent.statuses[self._owned_numbers]
        statuses[incoming.numbers] = incoming.flags_in(transfer.received, bits)
        differing = (statuses ^ bits) * self._has_part
        if self.device.type == "cpu" and bool(differing.any()):
            return differing
        for number, whole in lent.wholes.items():
            if not self._is_whole(number):
                self.lent[number].local().copy_(whole.data[self._parts[number].where])
        for number, _, (value,) in incoming.tensors(transfer.received):
            self.lent[number].local().copy_(value)
        for tensor in self.lent:
            torch.autograd.graph.increment_version(tensor.parameter)
        return differing


class Lent(NamedTuple):
    """The whole tensors of a bucket on this rank, which owns them, by their number in the bucket."""

    bucket: Bucket
    wholes: dict[int, nn.Parameter]
    statuses: Tensor
    """For each tensor of the bucket 1 if it has a gradient, 0 if it has none, more if only some ranks have it; valid for owned ones."""

    def by_parameter(self) -> dict[int, nn.Parameter]:
        """The whole tensors that have a gradient, by the id of the parameter."""
        return {
            id(self.bucket.lent[number].parameter): whole
            for number, whole in self.wholes.items()
            if whole.grad is not None
        }


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
