"""Collectives over nested containers of tensors, and over objects.

All ranks make the same calls in the same order, with trees of the same structure (dicts with their keys in the same order). Inputs are
never changed in place, and tensors from other ranks carry no gradient. CPU tensors use the group's gloo process group, others
torch's default group. With one process nothing is sent or copied.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from engine.distributed.group import Group
from engine.utils import accelerator
from engine.utils.errors import RankError, nearest
from engine.utils.tree import leaves, map_tensors

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

_Spec = tuple[torch.dtype, tuple[int, ...]]


def all_reduce(group: Group, tree: Any, op: str = "sum", scale: float = 1.0) -> Any:
    """Copy ``tree`` with each tensor replaced by its elementwise sum, mean, min or max over all ranks, times ``scale``.

    Shapes and dtypes are kept, with these exceptions (also on one process): the ``"mean"`` of integers and booleans is float32, the ``"sum"`` of
    booleans is int64. float16 and bfloat16 are summed in float32. Tensors of one dtype and device share one collective.

    Raises:
        ValueError: ``op`` is not sum, mean, min or max.
    """
    if op not in _OPS:
        raise ValueError(f"unknown reduction {op!r}{nearest(op, _OPS)}. Possible: {', '.join(_OPS)}")
    if scale != 1.0:
        return map_tensors(lambda tensor: tensor * scale, all_reduce(group, tree, op))
    tensors = leaves(tree)
    if group.cpu is None:
        if all(_result_dtype(tensor.dtype, op) == tensor.dtype for tensor in tensors):
            return tree
        return map_tensors(lambda tensor: tensor.to(_result_dtype(tensor.dtype, op)), tree)
    indices_by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_by_kind.setdefault((_sent_dtype(tensor.dtype, op), tensor.device), []).append(index)
    results = list(tensors)
    for (dtype, device), indices in indices_by_kind.items():
        # A copy, even of a single tensor: inputs are not changed.
        flat = torch.cat([tensors[index].detach().reshape(-1).to(dtype) for index in indices])
        dist.all_reduce(flat, _OPS[op], group=_process_group_for(group, device))
        if op == "mean":
            flat = (
                flat if dtype.is_floating_point or dtype.is_complex else flat.to(accelerator.wide(device))
            ) / group.world_size
        for index, part in zip(indices, flat.split([tensors[index].numel() for index in indices]), strict=True):
            results[index] = part.view(tensors[index].shape).to(_result_dtype(tensors[index].dtype, op))
    return _rebuild(tree, results)


def maximum_over_ranks(group: Group, values: Sequence[float]) -> list[float]:
    """The maximum of each number over all ranks. Waits for all ranks."""
    maxima: list[float] = all_reduce(group, torch.tensor(values, dtype=torch.float64), "max").tolist()
    return maxima


def gather(group: Group, tree: Any) -> Any:
    """Copy ``tree`` with each tensor replaced by all ranks' tensors, concatenated along dim 0 in the order of ranks.

    ``[n_r, ...]`` on rank r becomes ``[n_0 + n_1 + ..., ...]`` on every rank; the lengths may differ, or be 0. Scalars ``[]`` become
    ``[world_size]`` (``[1]`` on one process).

    Raises:
        ValueError: the ranks have different numbers of tensors, dtypes, numbers of dims, or sizes of dims other than 0 (on all ranks).
    """
    if group.cpu is None:
        return map_tensors(lambda tensor: tensor.detach() if tensor.ndim else tensor.detach().reshape(1), tree)
    tensors = [tensor.detach() if tensor.ndim else tensor.detach().reshape(1) for tensor in leaves(tree)]
    specs = _exchange_specs(group, leaves(tree), "gather")
    results = []
    for index, tensor in enumerate(tensors):
        shapes = [spec[index][1] for spec in specs]
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise ValueError(
                _mismatch_text("gather", index, specs, "sizes beyond dim 0 (pad_across_processes makes them equal)")
            )
        results.append(_gather_rows(group, tensor, [shape[0] if shape else 1 for shape in shapes]))
    return _rebuild(tree, results)


def stack(group: Group, tree: Any, sync_grads: bool = False) -> Any:
    """Copy ``tree`` with each tensor ``[...]`` replaced by all ranks' tensors, stacked to ``[world_size, ...]``; with one process, return ``tree``.

    Args:
        sync_grads: keep the autograd graph. In the backward pass, which all ranks run together, each rank's tensor gets the sum of all ranks'
            gradients for it.

    Raises:
        ValueError: the errors of :func:`gather`.
    """
    if group.cpu is None:
        return tree
    if sync_grads:
        return map_tensors(lambda tensor: _Stacked.apply(group, tensor), tree)
    return gather(group, map_tensors(lambda tensor: tensor.detach()[None], tree))


class _Stacked(torch.autograd.Function):
    """The stacked tensors of :func:`stack` with ``sync_grads``."""

    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Any:
        ctx.group = group
        return gather(group, tensor[None])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, all_reduce(ctx.group, gradients[0])[ctx.group.rank]


def gather_row(group: Group, row: Tensor) -> Tensor:
    """Gather a CPU tensor ``[n]`` from every rank as ``[world size, n]``, in one collective. ``n`` and dtype must be equal, which is not checked
    (:func:`gather` checks it, at three times the cost)."""
    if group.cpu is None:
        return row.unsqueeze(0)
    rows = [torch.empty_like(row) for _ in range(group.world_size)]
    dist.all_gather(rows, row, group=group.cpu)
    return torch.stack(rows)


def broadcast(group: Group, tree: Any, src: int = 0) -> Any:
    """Copy ``tree`` with each tensor replaced by rank ``src``'s.

    Raises:
        ValueError: there is no rank ``src``, or the ranks' tensors differ in number, dtype or shape (on all ranks).
    """
    _check_src(group, src)
    if group.cpu is None:
        return tree
    tensors = leaves(tree)
    specs = _exchange_specs(group, tensors, "broadcast")
    results = []
    for index, tensor in enumerate(tensors):
        if any(spec[index] != specs[0][index] for spec in specs):
            raise ValueError(_mismatch_text("broadcast", index, specs, "shapes"))
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if copy.numel():
            dist.broadcast(_bytes(copy), group_src=src, group=_process_group_for(group, copy.device))
        results.append(copy)
    return _rebuild(tree, results)


def gather_samples(group: Group, data: Any, is_counted: bool, as_objects: bool = False) -> Any:
    """:func:`gather` of samples, or :func:`gather_object` of values without tensors (a list from each rank, joined).

    Args:
        is_counted: whether this rank's samples count; ``False``: they are repeated ones.
        as_objects: pickle tensors, too.
    """
    has_tensors = False

    def counted_rows(tensor: Tensor) -> Tensor:
        nonlocal has_tensors
        has_tensors = True
        return tensor.detach() if is_counted or not tensor.ndim else tensor.detach()[:0]

    tree = map_tensors(counted_rows, data)
    if has_tensors and not as_objects:
        return gather(group, tree)
    objects = data if isinstance(data, list) else [data]
    return [item for part in gather_object(group, objects if is_counted else []) for item in part]


def pad_across_processes(group: Group, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return ``tree`` with each tensor padded along ``dim`` to the longest over all ranks, as in Accelerate.

    ``pad_index`` is the value put in, at the end or (``pad_first``) at the start. Tensors without such a dim are returned as they are.

    Raises:
        ValueError: the ranks have different numbers of tensors, dtypes or numbers of dims (on all ranks).
    """
    if group.cpu is None:
        return tree
    tensors = leaves(tree)
    specs = _exchange_specs(group, tensors, "pad_across_processes")
    results = []
    for index, tensor in enumerate(tensors):
        if not -tensor.ndim <= dim < tensor.ndim:
            results.append(tensor)
            continue
        missing = max(spec[index][1][dim] for spec in specs) - tensor.shape[dim]
        shape = list(tensor.shape)
        shape[dim] = missing
        parts = [tensor.detach(), tensor.new_full(shape, pad_index)]
        results.append(torch.cat(parts[::-1] if pad_first else parts, dim) if missing else tensor.detach())
    return _rebuild(tree, results)


def gather_object(group: Group, obj: Any) -> list[Any]:
    """Return every rank's ``obj`` in the order of ranks, on every rank. Objects are pickled: the ranks of a job trust each other.
    Tensors in objects arrive on the CPU. Objects are sent over gloo's connections, on the interface that ``GLOO_SOCKET_IFNAME`` names.

    Raises:
        TypeError: some rank's object cannot be pickled (on all ranks; the message names the rank).
    """
    if group.cpu is None:
        return [obj]
    sent: list[Any] = [None] * group.world_size
    dist.all_gather_object(sent, _packed(obj), group=group.cpu)
    return [_unpacked(item, rank) for rank, item in enumerate(sent)]


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return every rank's JSON ``value`` in the order of ranks, on every rank. Nothing is pickled."""
    if group.cpu is None:
        return [value]
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = gather_row(group, torch.tensor([encoded.numel()])).flatten().tolist()
    rows = _gather_rows(group, encoded, sizes).split(sizes)
    return [json.loads(row.numpy().tobytes()) for row in rows]


def broadcast_object(group: Group, obj: Any, src: int = 0) -> Any:
    """Return rank ``src``'s ``obj`` on every rank. The object is pickled, and tensors in it arrive on the CPU.

    Raises:
        ValueError: there is no rank ``src``.
        TypeError: the object cannot be pickled (on all ranks).
    """
    _check_src(group, src)
    if group.cpu is None:
        return obj
    sent = [_packed(obj) if group.rank == src else ""]
    dist.broadcast_object_list(sent, group_src=src, group=group.cpu)
    return obj if group.rank == src and isinstance(sent[0], bytes) else _unpacked(sent[0], src)


def all_or_none(group: Group, work: Callable[[], Any]) -> list[Any]:
    """Call ``work`` on every rank and return all ranks' results (JSON values); if it fails on one rank, raise an error on all."""
    failure: Exception | None = None
    row: dict[str, Any] = {}
    try:
        row = {"value": work()}
    except Exception as error:
        failure, row = error, {"error": f"{type(error).__name__}: {error}"}
    rows = gather_json(group, row)
    if failure is not None:
        raise failure
    for rank, result in enumerate(rows):
        if "error" in result:
            raise RankError(f"rank {rank} failed with {result['error']}")
    return [result["value"] for result in rows]


def _sent_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are reduced."""
    if dtype is torch.bool:
        return torch.int64 if op in ("sum", "mean") else torch.uint8
    if dtype.is_floating_point:
        # Half formats lose digits in every addition (and fp16 overflows), and gloo cannot add float8.
        return dtype if dtype.itemsize >= 4 else torch.float32
    if dtype.is_complex:
        return dtype
    return torch.int64 if op == "mean" or dtype not in (torch.uint8, torch.int8, torch.int32) else dtype


def _result_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return torch.float32
    return torch.int64 if op == "sum" and dtype is torch.bool else dtype


def _gather_rows(group: Group, tensor: Tensor, lengths: list[int]) -> Tensor:
    """Gather ``[n_r, ...]`` of each rank r into ``[sum(n_r), ...]``.

    Rows are sent as bytes, since gloo does not support every dtype, and padded to the longest rank's number.
    """
    longest, row = max(lengths), tensor.shape[1:]
    if not longest * row.numel():
        return tensor.new_empty((sum(lengths), *row))
    padded = tensor.contiguous()
    if len(padded) < longest:
        padded = torch.cat([padded, tensor.new_zeros((longest - len(padded), *row))])
    out = tensor.new_empty((group.world_size, longest, *row))
    dist.all_gather([_bytes(part) for part in out], _bytes(padded), group=_process_group_for(group, tensor.device))
    if min(lengths) == longest:
        return out.flatten(0, 1)
    return torch.cat([part[:length] for part, length in zip(out, lengths, strict=True)])


def _exchange_specs(group: Group, tensors: Iterable[Tensor], verb: str) -> list[list[_Spec]]:
    """Return the (dtype, shape) of each tensor on each rank; if numbers, dtypes or numbers of dims differ, raise the same error on all ranks."""
    rows = gather_json(group, [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors])
    specs: list[list[_Spec]] = [
        [(getattr(torch, dtype), tuple(shape)) for dtype, shape in rank_specs] for rank_specs in rows
    ]
    for rank, rank_specs in enumerate(specs):
        if len(rank_specs) != len(specs[0]):
            raise ValueError(
                f"{verb}: rank 0 gave {len(specs[0])} tensors, rank {rank} gave {len(rank_specs)}; all must give the same number"
            )
        for index, ((dtype, shape), (dtype_0, shape_0)) in enumerate(zip(rank_specs, specs[0], strict=True)):
            if dtype != dtype_0:
                raise ValueError(_mismatch_text(verb, index, specs, "dtypes"))
            if len(shape) != len(shape_0):
                raise ValueError(_mismatch_text(verb, index, specs, "numbers of dims"))
    return specs


def _mismatch_text(verb: str, index: int, specs: list[list[_Spec]], what: str) -> str:
    """The message of an error about tensor ``index``, whose ``what`` differs between ranks."""
    first = specs[0][index]
    rank = next(rank for rank, rank_specs in enumerate(specs) if rank_specs[index] != first)
    differing = specs[rank][index]
    return (
        f"{verb}: tensor {index} has different {what} on the ranks: rank 0 gave {first[0]} {list(first[1])}, "
        f"rank {rank} gave {differing[0]} {list(differing[1])}"
    )


def _check_src(group: Group, src: int) -> None:
    if not 0 <= src < group.world_size:
        raise ValueError(f"src={src} is not a rank of this job: possible are 0 to {group.world_size - 1}")


def _process_group_for(group: Group, device: torch.device) -> dist.ProcessGroup | None:
    return group.cpu if device.type == "cpu" else group.wide


def _bytes(tensor: Tensor) -> Tensor:
    # Not view(-1): a tensor of one element counts as contiguous with any stride, such as that of a column.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles device tensors as CPU tensors: unpickled on the sender's device, they would open a context there in every process."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or isinstance(obj, Parameter) or obj.device.type in ("cpu", "meta"):
            return NotImplemented  # a parameter is pickled with its tensor, which this method gets separately
        return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _packed(obj: Any) -> bytes | str:
    """Pickle an object; if that fails, return the error as text."""
    # If an object cannot be pickled, send the error in its place, since other ranks wait for something.
    packed = io.BytesIO()
    try:
        _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump(obj)
        return packed.getvalue()
    except Exception as error:
        return f"{type(obj).__name__}: {error}"


def _unpacked(sent: bytes | str, rank: int) -> Any:
    if isinstance(sent, str):
        raise TypeError(
            f"rank {rank} gave an object that cannot be pickled: {sent}. Send numbers, strings, tensors, containers"
        )
    return pickle.loads(sent)


def _rebuild(tree: Any, tensors: list[Tensor]) -> Any:
    iterator = iter(tensors)
    return map_tensors(lambda tensor: next(iterator), tree)
