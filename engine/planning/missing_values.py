"""The values that a plan assumes where code reads a tensor that has none, and the lines of the user's code that do so.

A number is assumed to be 1, and a condition what it is for such numbers. A result whose shape depends on values gets the shape that it has for
such numbers, or the largest possible one.
"""

from __future__ import annotations

import linecache
import operator as python
import os
import sys
import traceback
from collections.abc import Callable
from math import isinf
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.planning import torch_private
from engine.utils import overrides

_aten = torch.ops.aten
_COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.eq: python.eq,
    _aten.ne: python.ne,
    _aten.lt: python.lt,
    _aten.le: python.le,
    _aten.gt: python.gt,
    _aten.ge: python.ge,
}
_NOT = (_aten.logical_not, _aten.bitwise_not)
_AND = (_aten.logical_and, _aten.bitwise_and, _aten.mul)
_OR = (_aten.logical_or, _aten.bitwise_or)
_KEEPING_VALUES = (
    _aten.view,
    _aten.clone,
    _aten.detach,
    _aten.squeeze,
    _aten.unsqueeze,
    _aten.expand,
    _aten._to_copy,
    _aten._unsafe_view,
)
_ALL, _ANY = (_aten.all, _aten._is_all_true), (_aten.any, _aten._is_any_true)
_FALSE_FOR_NUMBERS = (_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf)


def known_truth(operator: Any, args: Any) -> bool | None:
    """The truth value that all elements of an operation's result have if all numbers are 1; ``None``: it depends on the values."""
    packet = operator.overloadpacket
    if packet in _COMPARISONS:
        return _compared(_COMPARISONS[packet], *args[:2])
    if packet in _FALSE_FOR_NUMBERS:
        return False
    truths = [operand if isinstance(operand, bool) else getattr(operand, "_truth", None) for operand in args[:2]]
    if packet in _NOT:
        return None if truths[0] is None else not truths[0]
    if packet in _AND:
        return False if False in truths else True if truths == [True, True] else None
    if packet in _OR:
        return True if True in truths else False if truths == [False, False] else None
    if packet in _KEEPING_VALUES:
        return truths[0]
    if packet in (*_ALL, *_ANY):
        several = len(args) == 1 and args[0].numel() > 1
        return truths[0] if truths[0] is not None or not several else packet in _ANY
    return None


def _compared(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool | None:
    """The result of comparing numbers that are assumed to be 1; ``None``: it is not known, because several elements or another tensor are
    compared."""
    if left is right:
        return compare(1, 1)
    if isinstance(right, Tensor):
        if right.numel() != 1 or left.numel() != 1:
            return None
        right = 1
    if isinstance(right, (int, float)) and (left.numel() == 1 or isinf(right)):
        return compare(1, right)
    return None


class HostValues(NamedTuple):
    """Functions that read and create tensors with values on the host, while other tensors have none."""

    numbers: Callable[[Tensor], list[int] | None]
    """Return the values of a tensor of integers; ``None``: it has none."""
    tensor: Callable[[list[int]], Tensor]
    """Create a tensor with the given values."""


def assumed_shape(operator: Any, args: Any, kwargs: Any, host: HostValues) -> Any:
    """Create the result, without values, of an operation whose shape depends on values; ``None``: the operation is not known. Called where new
    tensors have no values."""
    create = _SHAPED.get(operator)
    return None if create is None else create(host, *args, **kwargs)


def shape_is_certain(operator: Any, args: Any, kwargs: Any, host: HostValues) -> bool:
    """Check whether the result of :func:`assumed_shape` has the real shape: the lengths have values, or the call states how long the result is."""
    if operator is _aten.bincount.default:
        return bool(kwargs.get("minlength") or (len(args) > 2 and args[2]))
    lengths = {_aten._pack_padded_sequence.default: 1, _aten._ctc_loss.Tensor: 3}.get(operator)
    return lengths is not None and host.numbers(args[lengths]) is not None


def _pack_padded_sequence(
    host: HostValues, values: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """The packed sequences, and the number of sequences at each step. If the lengths have no values, every sequence is as long as the longest."""
    count, longest = values.shape[:2] if batch_first else (values.shape[1], values.shape[0])
    assumed_lengths = host.numbers(lengths) or [longest] * count
    sizes = host.tensor([sum(length > step for length in assumed_lengths) for step in range(max(assumed_lengths))])
    return values.new_empty((sum(assumed_lengths), *values.shape[2:])), sizes


def _repeat_interleave(_: HostValues, repeats: Tensor, output_size: int | None = None) -> Tensor:
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


def _ctc_loss(
    host: HostValues, scores: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """The loss of each sample, and the table of log-probabilities that the backward pass needs."""
    longest = max(host.numbers(lengths) or [targets.shape[-1]])
    count = lengths.numel()
    return scores.new_empty(count), scores.new_empty((count, scores.shape[0], 2 * longest + 1))


def _unique(_: Any, values: Tensor, *__: Any, **___: Any) -> tuple[Tensor, ...]:
    counts = [torch.empty(values.numel(), dtype=torch.int64) for _ in range(2)]
    return values.new_empty(values.numel()), counts[0].view(values.shape), counts[1]


def _unique_along(_: Any, values: Tensor, dim: int | None = None, *__: Any, **___: Any) -> tuple[Tensor, ...]:
    """The unique entries along ``dim`` with their inverse indices and counts, as many as there are entries: all may differ."""
    counts = [torch.empty(values.numel() if dim is None else values.shape[dim], dtype=torch.int64) for _ in range(2)]
    return values.new_empty(values.shape), counts[0], counts[1]


def _unique_consecutive(
    _: Any, values: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None
) -> Any:
    result = _unique_along(_, values, dim)
    return (result[0].flatten() if dim is None else result[0], *result[1:])


_SHAPED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: lambda _, t: torch.empty((t.numel(), t.ndim), dtype=torch.int64),
    _aten.masked_select.default: lambda _, t, mask: t.new_empty(torch.broadcast_shapes(t.shape, mask.shape).numel()),
    _aten.bincount.default: lambda _, t, weights=None, minimum=0, **k: torch.empty(
        max(k.get("minlength", minimum), 1), dtype=torch.int64 if weights is None else weights.dtype
    ),
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_along,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten._pack_padded_sequence.default: _pack_padded_sequence,
    _aten._ctc_loss.Tensor: _ctc_loss,
}


def grouped_product(
    left: Tensor, right: Tensor, offsets: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor of the shape and dtype of torch's grouped matrix product: rows in groups, one for each expert. torch computes this
    shape for bfloat16 only; here it is computed for every dtype."""
    rows, columns = left.shape[-2], right.shape[-1]
    groups = [] if left.ndim != right.ndim else [left.shape[0] if offsets is None else offsets.numel()]
    return left.new_empty((*groups, rows, columns), dtype=out_dtype)


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(overrides.__file__).parent.parent)
_PLANNING = str(Path(__file__).parent)
_DISTRIBUTIONS = str(Path(torch.__file__).parent / "distributions")
_PACKAGES = "site-packages"
DEEPSPEED = os.path.join(_PACKAGES, "deepspeed", "")
"""Part of the paths of DeepSpeed's files."""
_PHRASES = ("faketensor", "fake tensor", "data is not allocated", "data pointer", "tensor subclasses", "meta tensor")
"""Phrases of torch's errors about tensors without values."""


class MissingValues:
    """Notes each value that a :class:`engine.planning.fake_tensors.Simulation` assumes, with the line of the user's code that reads it.

    The library itself reads 0, the usual value: no gradient is infinite. A check of one of torch's distributions passes.
    """

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    def __call__(self, question: str, answer: Any) -> Any:
        """Return the value for code that asks ``question``: ``answer``, which is noted; without a note, ``True`` for a distribution's check and 0 for
        the library."""
        if type(answer) is bool and _checks_distribution(sys._getframe(1)):
            return True
        place = _line_that_asks(sys._getframe(1))
        if place is None:
            return type(answer)(0)
        self._sentences[f"{place} {question}: the plan continues with {answer}"] = None
        return answer

    def sentences(self) -> tuple[str, ...]:
        """One sentence for each value that was assumed, and for each hook that was left out."""
        return tuple(self._sentences)

    def note_left_out(self, hook: Callable[..., Any], error: Exception) -> None:
        """Note that the plan leaves out ``hook``, which raised ``error``; it is not part of the step itself."""
        name = getattr(hook, "__qualname__", None) or getattr(getattr(hook, "func", None), "__qualname__", repr(hook))
        self._sentences[f"{name} is left out: without values it raises {type(error).__name__}: {error}"] = None

    def comes_from_missing_values(self, error: Exception) -> bool:
        """Check whether an error of the training may come from a missing or an assumed value, rather than from the training itself."""
        message = str(error).lower()
        untraceable = (*torch_private.UNREADABLE, torch_private.UNSUPPORTED)
        return isinstance(error, untraceable) or bool(self._sentences) or any(phrase in message for phrase in _PHRASES)

    def users_line(self, error: Exception) -> str:
        """The line of the user's code in the traceback of an error, or a text that there is none."""
        frames = traceback.extract_tb(error.__traceback__)
        users_frames = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OWN, "<"))]
        if not users_frames:
            return "an operation of torch's own"
        last = users_frames[-1]
        return f"{last.filename}:{last.lineno} ({last.line})"


def _checks_distribution(frame: FrameType | None) -> bool:
    """Check whether a distribution of torch, which checks its parameters or a sample, reads the value."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PLANNING, "<")):
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def _line_that_asks(frame: FrameType | None) -> str | None:
    """The line of the user's code that reads a value, or another package's line if none of the user's calls it; ``None`` if the library reads it for
    itself."""
    package_line = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if DEEPSPEED in filename:  # the library reads norms through it, and whether they are finite
            frame = frame.f_back
            continue
        is_library = filename.startswith(_OWN)
        if is_library and not filename.startswith(_PLANNING) and package_line is None:
            return None
        if not is_library and not filename.startswith((_TORCH, "<")):
            line = f"{filename}:{frame.f_lineno} ({linecache.getline(filename, frame.f_lineno).strip()})"
            if _PACKAGES not in filename:
                return line
            package_line = package_line or line
        elif (
            is_library
            and package_line is not None
            and not filename.startswith(_PLANNING)
            and "training_step" not in frame.f_code.co_name
        ):
            return package_line
        frame = frame.f_back
    return package_line
