"""Work that differs between ranks: on one rank only (``rank_zero_only``, ``get_logger``), on one before the others, in turn, or a slice on each."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.environments import detect
from engine.distributed.group import Group

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


class Trigger:
    """A flag that any process can raise and all processes see."""

    def __init__(self, group: Group) -> None:
        self._group, self._raised = group, False

    def set(self) -> None:
        """Raise the flag on this process."""
        self._raised = True

    def check(self) -> bool:
        """Return whether any process has raised the flag; if so, lower it again. All processes call this together."""
        anywhere = bool(all_reduce(self._group, torch.tensor(self._raised, dtype=torch.int32), "max"))
        self._raised = self._raised and not anywhere
        return anywhere


def only(function: F | None, condition: Callable[[], bool]) -> Any:
    """Wrap ``function`` so that it runs only on processes where ``condition()`` is true; without ``function``, return the decorator."""
    if function is None:
        return functools.partial(only, condition=condition)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return run


@contextmanager
def before_others(group: Group, first: bool) -> Iterator[None]:
    """Let processes with ``first`` run the block before the other processes. All processes enter it."""
    if not first:
        group.barrier()
    try:
        yield
    finally:  # even after an exception, so that the other processes continue, and later barriers match
        if first:
            group.barrier()


def part(inputs: Any, rank: int, world_size: int, pad: bool) -> Any:
    """One rank's contiguous slice of a list, tuple, tensor, ``datasets.Dataset``, or dict of them.

    Args:
        pad: repeat the last item so that the slices of all ranks have the same length.

    Raises:
        TypeError: ``inputs`` is another kind of object.
        ValueError: ``inputs`` is a dict whose values differ in length.
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
    positions = range(low, low + length + (rank < larger))
    missing = (length + (larger > 0)) - len(positions)
    # Slices of a datasets.Dataset are dicts of columns.
    if hasattr(inputs, "select") and not isinstance(inputs, Tensor):
        return inputs.select([*positions, *[len(inputs) - 1] * (missing if pad and len(inputs) else 0)])
    portion = inputs[positions.start : positions.stop]
    if pad and missing and len(inputs):
        last = inputs[-1:]
        portion = torch.cat([portion, *[last] * missing]) if isinstance(inputs, Tensor) else portion + last * missing
    return portion


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that logs only on rank 0. With ``main_process_only=False`` every rank logs; with ``in_order=True`` the ranks log one after the
    other, and all of them make the call together."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        everywhere, in_order = not kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        joined, this_rank = _has_process_group(), own_rank()
        for rank in range(dist.get_world_size()) if in_order and joined else [this_rank]:
            if rank == this_rank and (everywhere or in_order or this_rank == 0):
                self.logger.log(level, msg, *args, **kwargs)
            if in_order and joined:
                dist.barrier()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a warning, but only once for each text with the same arguments."""
        warned = self.__dict__.setdefault("_said", set())
        if (warning := (msg, args)) not in warned:
            warned.add(warning)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def rank_zero_only(function: Callable[P, T], default: Any = None) -> Callable[P, T]:
    """Decorate ``function`` to run on rank 0 only; other ranks get ``default``. Works without ``Engine`` and ``Fit``, and before processes join."""

    @functools.wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs) if own_rank() == 0 else default

    return on_rank_zero


class _NoOp:
    """An object on which every attribute and every call returns the object itself."""

    def __getattr__(self, name: str) -> _NoOp:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _NoOp:
        return self

    __getitem__ = __setitem__ = __call__


def rank_zero_experiment(function: Callable[P, Any]) -> Callable[P, Any]:
    """Decorate a logger's ``experiment``: ranks other than 0 get an object on which every call does nothing."""
    return rank_zero_only(function, _NoOp())


def own_rank() -> int:
    """This process's rank, in the job that it has joined or, before that, as the launcher's variables say."""
    return dist.get_rank() if _has_process_group() else detect(os.environ).rank


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Do the same as ``logging.getLogger(name)`` for scripts of several processes: by default only rank 0 logs; see :class:`RankLogger`.

    Args:
        log_level: the logger's level, such as ``"INFO"``; by default unchanged.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger, {})
