"""What a plan takes for values that tensors do not have, and which line of the user's code asked for them. A number is 1, a condition
is what it is for such numbers, and a result whose shape depends on values has the shape that it has for them, or the largest one."""

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
_COMPARED: dict[Any, Callable[[Any, Any], bool]] = {
    _aten.eq: python.eq,
    _aten.ne: python.ne,
    _aten.lt: python.lt,
    _aten.le: python.le,
    _aten.gt: python.gt,
    _aten.ge: python.ge,
}
_NOT = (_aten.logical_not, _aten.bitwise_not)
_BOTH = (_aten.logical_and, _aten.bitwise_and, _aten.mul)
_EITHER = (_aten.logical_or, _aten.bitwise_or)
_ALIKE = (
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
_NEVER = (_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf)


def known_truth(operator: Any, args: Any) -> bool | None:
    """What all elements of the result of an operation on conditions or numbers are; ``None``: that depends on the values."""
    packet = operator.overloadpacket
    if packet in _COMPARED:
        return _compared(_COMPARED[packet], *args[:2])
    if packet in _NEVER:
        return False
    known = [each if isinstance(each, bool) else getattr(each, "_truth", None) for each in args[:2]]
    if packet in _NOT:
        return None if known[0] is None else not known[0]
    if packet in _BOTH:
        return False if False in known else True if known == [True, True] else None
    if packet in _EITHER:
        return True if True in known else False if known == [False, False] else None
    if packet in _ALIKE:
        return known[0]
    if packet in (*_ALL, *_ANY):
        whole = len(args) == 1 and args[0].numel() > 1
        return known[0] if known[0] is not None or not whole else packet in _ANY
    return None


def _compared(compare: Callable[[Any, Any], bool], one: Any, other: Any) -> bool | None:
    if one is other:
        return compare(1, 1)
    if isinstance(other, Tensor):
        if other.numel() != 1 or one.numel() != 1:
            return None
        other = 1
    if isinstance(other, (int, float)) and (one.numel() == 1 or isinf(other)):
        return compare(1, other)
    return None


class HostValues(NamedTuple):
    """How to reach values that the host has, where tensors have none."""

    numbers: Callable[[Tensor], list[int] | None]
    """Those of a tensor; ``None``: it has none."""
    tensor: Callable[[list[int]], Tensor]
    """A tensor that has these."""


def assumed_shape(operator: Any, args: Any, kwargs: Any, host: HostValues) -> Any:
    """The result of an operation whose shape depends on values, to be made where tensors have none; ``None``: it is not known."""
    made = _SHAPED.get(operator)
    return None if made is None else made(host, *args, **kwargs)


def shape_is_certain(operator: Any, args: Any, kwargs: Any, host: HostValues) -> bool:
    """Whether the result of :func:`assumed_shape` has the shape that it really has: the lengths are known, or the code says how long it is."""
    if operator is _aten.bincount.default:
        return bool(kwargs.get("minlength") or (len(args) > 2 and args[2]))
    lengths = {_aten._pack_padded_sequence.default: 1, _aten._ctc_loss.Tensor: 3}.get(operator)
    return lengths is not None and host.numbers(args[lengths]) is not None


def _packed(host: HostValues, given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Of each sequence its length, or all of it."""
    count, longest = given.shape[:2] if batch_first else (given.shape[1], given.shape[0])
    kept = host.numbers(lengths) or [longest] * count
    sizes = host.tensor([sum(length > step for length in kept) for step in range(max(kept))])
    return given.new_empty((sum(kept), *given.shape[2:])), sizes


def _repeated(_: HostValues, repeats: Tensor, output_size: int | None = None) -> Tensor:
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


def _temporal(
    host: HostValues, scores: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    longest = max(host.numbers(lengths) or [targets.shape[-1]])
    count = lengths.numel()
    return scores.new_empty(count), scores.new_empty((count, scores.shape[0], 2 * longest + 1))


def _unique(_: Any, given: Tensor, *__: Any, **___: Any) -> tuple[Tensor, ...]:
    counts = [torch.empty(given.numel(), dtype=torch.int64) for _ in range(2)]
    return given.new_empty(given.numel()), counts[0].view(given.shape), counts[1]


def _unique_of(_: Any, given: Tensor, dim: int | None = None, *__: Any, **___: Any) -> tuple[Tensor, ...]:
    counts = [torch.empty(given.numel() if dim is None else given.shape[dim], dtype=torch.int64) for _ in range(2)]
    return given.new_empty(given.shape), counts[0], counts[1]


def _consecutive(_: Any, given: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
    found = _unique_of(_, given, dim)
    return (found[0].flatten() if dim is None else found[0], *found[1:])


_SHAPED: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: lambda _, t: torch.empty((t.numel(), t.ndim), dtype=torch.int64),
    _aten.masked_select.default: lambda _, t, mask: t.new_empty(torch.broadcast_shapes(t.shape, mask.shape).numel()),
    _aten.bincount.default: lambda _, t, weights=None, least=0, **k: torch.empty(
        max(k.get("minlength", least), 1), dtype=torch.int64 if weights is None else weights.dtype
    ),
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_of,
    _aten.unique_consecutive.default: _consecutive,
    _aten.repeat_interleave.Tensor: _repeated,
    _aten._pack_padded_sequence.default: _packed,
    _aten._ctc_loss.Tensor: _temporal,
}


def grouped_product(
    one: Tensor, other: Tensor, offsets: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The result of a product of groups of rows, one for each expert, in every dtype: torch knows its shape for bfloat16 alone."""
    rows, columns = one.shape[-2], other.shape[-1]
    groups = [] if one.ndim != other.ndim else [one.shape[0] if offsets is None else offsets.numel()]
    return one.new_empty((*groups, rows, columns), dtype=out_dtype)


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(overrides.__file__).parent.parent)
_PLANNING = str(Path(__file__).parent)
_DISTRIBUTIONS = str(Path(torch.__file__).parent / "distributions")
_PACKAGES = "site-packages"
DEEPSPEED = os.path.join(_PACKAGES, "deepspeed", "")
"""In the paths of DeepSpeed's files."""
_SIGNS = ("faketensor", "fake tensor", "data is not allocated", "data pointer", "tensor subclasses", "meta tensor")
"""What torch's errors about tensors without values say."""


class MissingValues:
    """Notes what a :class:`engine.planning.fake_tensors.Simulation` answers, with the line of the user's code that asked.

    The library's own questions have the usual answer, 0: no gradient is infinite. Checks of torch's distributions find what they check.
    """

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def __call__(self, question: str, answer: Any) -> Any:
        """Note it, unless the library has asked; the answer."""
        if type(answer) is bool and _checks_distribution(sys._getframe(1)):
            return True
        place = _line_that_asks(sys._getframe(1))
        if place is None:
            return type(answer)(0)
        self._found[f"{place} {question}: the plan continues with {answer}"] = None
        return answer

    def sentences(self) -> tuple[str, ...]:
        """One for each line that asked."""
        return tuple(self._found)

    def leave_out(self, hook: Callable[..., Any], error: Exception) -> None:
        """A hook failed that is no part of the step itself."""
        name = getattr(hook, "__qualname__", None) or getattr(getattr(hook, "func", None), "__qualname__", repr(hook))
        self._found[f"{name} is left out: without values it raises {type(error).__name__}: {error}"] = None

    def comes_from_missing_values(self, error: Exception) -> bool:
        """Whether an error of the training comes from values that are not there, or from an answer, and not from the training itself."""
        said = str(error).lower()
        untraceable = (*torch_private.UNREADABLE, torch_private.UNSUPPORTED)
        return isinstance(error, untraceable) or bool(self._found) or any(sign in said for sign in _SIGNS)

    def users_line(self, error: Exception) -> str:
        """The user's line in an error's traceback, if there is one."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if not each.filename.startswith((_TORCH, _OWN, "<"))]
        if not own:
            return "an operation of torch's own"
        last = own[-1]
        return f"{last.filename}:{last.lineno} ({last.line})"


def _checks_distribution(frame: FrameType | None) -> bool:
    """Whether a distribution checks its parameters or values."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PLANNING, "<")):
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def _line_that_asks(frame: FrameType | None) -> str | None:
    """The training's line that needs a value, in its own code if another package's reads it; ``None`` if the library asks for itself."""
    others = None
    while frame is not None:
        name = frame.f_code.co_filename
        if DEEPSPEED in name:  # a norm, and whether it is finite: the library asks through it
            frame = frame.f_back
            continue
        own = name.startswith(_OWN)
        if own and not name.startswith(_PLANNING) and others is None:
            return None
        if not own and not name.startswith((_TORCH, "<")):
            here = f"{name}:{frame.f_lineno} ({linecache.getline(name, frame.f_lineno).strip()})"
            if _PACKAGES not in name:
                return here
            others = others or here
        elif (
            own
            and others is not None
            and not name.startswith(_PLANNING)
            and "training_step" not in frame.f_code.co_name
        ):
            return others
        frame = frame.f_back
    return others
