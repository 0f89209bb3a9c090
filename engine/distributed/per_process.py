"""Work that differs between processes: on one only, on one before the others, or a slice on each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.group import Group

F = TypeVar("F", bound=Callable[..., Any])


class Trigger:
    """A flag that any process raises and all processes see."""

    def __init__(self, group: Group) -> None:
        self._group, self._raised = group, False

    def set(self) -> None:
        """Raise it here."""
        self._raised = True

    def check(self) -> bool:
        """Whether it is raised anywhere; it is lowered again. All processes call this together."""
        anywhere = bool(all_reduce(self._group, torch.tensor(self._raised, dtype=torch.int32), "max"))
        self._raised = self._raised and not anywhere
        return anywhere


def only(function: F | None, here: Callable[[], bool]) -> Any:
    """``function`` where ``here()``, nothing elsewhere; without a function, the decorator that does this."""
    if function is None:
        return functools.partial(only, here=here)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return run


@contextmanager
def before_others(group: Group, first: bool) -> Iterator[None]:
    """A block that the first processes run before the others. All processes enter it."""
    if not first:
        group.barrier()
    try:
        yield
    finally:  # an exception in the first process still releases the others: later barriers stay matched
        if first:
            group.barrier()


def part(inputs: Any, rank: int, world_size: int, pad: bool) -> Any:
    """One rank's contiguous slice of a list, tuple, tensor, ``datasets.Dataset``, or dict of them.

    Args:
        pad: repeat the last item so that all have the same length.

    Raises:
        TypeError: another kind of object.
        ValueError: a dict whose values differ in length.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"split_between_processes got a dict whose values differ in length: {lengths}")
        return {key: part(value, rank, world_size, pad) for key, value in inputs.items()}
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(
            f"split_between_processes takes a list, tuple, tensor or a dict of them, got {type(inputs).__name__}"
        )
    length, larger = divmod(len(inputs), world_size)
    low = rank * length + min(rank, larger)
    own = range(low, low + length + (rank < larger))
    missing = (length + (larger > 0)) - len(own)
    if hasattr(inputs, "select") and not isinstance(
        inputs, Tensor
    ):  # a dataset of the package datasets: its slices are dicts of columns
        return inputs.select([*own, *[len(inputs) - 1] * (missing if pad and len(inputs) else 0)])
    mine = inputs[own.start : own.stop]
    if pad and missing and len(inputs):
        last = inputs[-1:]
        mine = torch.cat([mine, *[last] * missing]) if isinstance(inputs, Tensor) else mine + last * missing
    return mine
