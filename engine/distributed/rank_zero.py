"""Functions and loggers of scripts of several processes: rank 0 runs or speaks, or all of them do so in turn."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from engine.distributed.environment import detect

P = ParamSpec("P")
T = TypeVar("T")


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logs on rank 0. With ``main_process_only=False`` every rank does; with ``in_order=True`` they do so one after the other, and all ranks make
    the call together."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        everywhere, in_order = not kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        joined, own = _joined(), own_rank()
        for rank in range(dist.get_world_size()) if in_order and joined else [own]:
            if rank == own and (everywhere or in_order or own == 0):
                self.logger.log(level, msg, *args, **kwargs)
            if in_order and joined:
                dist.barrier()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """A warning that appears once for each text and its arguments."""
        said = self.__dict__.setdefault("_said", set())
        if (told := (msg, args)) not in said:
            said.add(told)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def rank_zero_only(function: Callable[P, T], default: Any = None) -> Callable[P, T]:
    """Decorator: ``function`` runs on rank 0; other ranks get ``default``. It needs no ``Engine`` or ``Fit``, and works before processes join."""

    @functools.wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs) if own_rank() == 0 else default

    return on_rank_zero


class _Nothing:
    """All attributes and calls of it are itself."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    __getitem__ = __setitem__ = __call__


def rank_zero_experiment(function: Callable[P, Any]) -> Callable[P, Any]:
    """Decorator of a logger's ``experiment``: other ranks than 0 get an object on which every call does nothing."""
    return rank_zero_only(function, _Nothing())


def own_rank() -> int:
    """This process's rank: in the job that it has joined, or as the launcher's variables say."""
    return dist.get_rank() if _joined() else detect(os.environ).rank


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """``logging.getLogger(name)`` for scripts of several processes: by default only rank 0 logs; see :class:`RankLogger`.

    Args:
        log_level: ``"INFO"``, ...; by default unchanged.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
    return RankLogger(logger, {})
