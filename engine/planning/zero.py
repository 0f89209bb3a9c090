"""DeepSpeed in a simulated job: its own code runs the step, apart from the process's real groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def apart() -> Iterator[None]:
    """Inside the block DeepSpeed knows no process group from before, and afterwards none from the block: it keeps them in modules."""
    _forget_groups()
    try:
        yield
    finally:
        _forget_groups()


def _forget_groups() -> None:
    comm, groups = sys.modules.get("deepspeed.comm.comm"), sys.modules.get("deepspeed.utils.groups")
    if comm is not None and groups is not None:
        vars(comm)["cdb"] = None
        groups._release_process_group_references()
