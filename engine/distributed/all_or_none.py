"""Work of all ranks that fails on all of them when it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.errors import RankError


def together(group: Group, work: Callable[[], Any]) -> list[Any]:
    """Run a part of a job that may fail on some rank; if one failed, raise on all. Returns each rank's result (JSON)."""
    mine: Exception | None = None
    row: dict[str, Any] = {}
    try:
        row = {"value": work()}
    except Exception as error:
        mine, row = error, {"error": f"{type(error).__name__}: {error}"}
    rows = gather_json(group, row)
    if mine is not None:
        raise mine
    for rank, other in enumerate(rows):
        if "error" in other:
            raise RankError(f"rank {rank} failed with {other['error']}")
    return [other["value"] for other in rows]
