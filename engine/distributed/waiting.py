"""Tell the user that this rank waits for the others at a place where they may never come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.distributed import stacks
from engine.distributed.group import Group
from engine.utils.log import logger

PATIENCE_S = 5.0
"""Seconds after which a waiting rank warns."""


@contextmanager
def told_waiting(ranks: Group, why: str) -> Iterator[str]:
    """Warn if the block, in which this rank waits for the others, takes longer than :data:`PATIENCE_S`; reports of hangs tell it, too.

    Args:
        why: the reason, as in "because requires_grad of head.weight has changed here".

    Yields:
        What this rank is doing, for an error.
    """
    doing = f"waiting for the other ranks, {why}"
    warning = threading.Timer(PATIENCE_S, logger.warning, [f"rank {ranks.rank} is {doing}"])
    warning.daemon = True
    warning.start()
    try:
        with stacks.doing(doing):
            yield doing
    finally:
        warning.cancel()
