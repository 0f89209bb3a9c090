"""Reads whole numbers, and numbers of tokens by document, as users give them to datasets."""

from __future__ import annotations

import operator
from typing import Any

import numpy
from torch import Tensor

MOST = 2**31 - 1
"""The most tokens in a row or a batch; the most samples in an epoch are far more."""


def whole_number(text: str, value: Any, meaning: str, lowest: int = 1, highest: int = 2**62) -> int:
    """A user's number as an int. Ints of numpy and tensors of one whole number are accepted, a bool is not.

    Args:
        text: the argument as the user wrote it, for errors: ``"Packed(length=0)"``.
        meaning: what the number says: ``"the number of tokens in a row"``.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is below ``lowest`` or above ``highest``.
    """
    try:
        number = None if _is_bool(value) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{text}: give an int, {meaning}")
    if not lowest <= number <= highest:
        raise ValueError(f"{text}: must be at least {lowest} and at most {highest}; it is {meaning}")
    return number


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, numpy.bool_)) or (isinstance(value, Tensor) and str(value.dtype) == "torch.bool")


def lengths_array(what: str, lengths: Any) -> numpy.ndarray[Any, numpy.dtype[Any]]:
    """Numbers of tokens as an array of any dtype. Shape ``[samples]``.

    Args:
        what: a name for errors: ``"Packed: lengths"``.

    Raises:
        TypeError: they are not a sequence of numbers.
    """
    advice = "give a sequence of whole numbers, the tokens of each sample"
    if isinstance(lengths, (str, bytes, dict, set, frozenset)):
        raise TypeError(
            f"{what} is {lengths!r:.60} ({type(lengths).__name__}), which is not in the order of the samples: {advice}"
        )
    try:
        values = lengths.cpu() if isinstance(lengths, Tensor) else lengths
        array = numpy.asarray(values if isinstance(values, (numpy.ndarray, Tensor)) else list(values))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{what} is {lengths!r:.60} ({type(lengths).__name__}): {advice} ({error})") from None
    if array.dtype.kind == "O":
        raise TypeError(f"{what} has values that are not numbers, or too large: {advice}")
    return array
