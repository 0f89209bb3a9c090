"""Errors of ``debug=True``: ranks that enter one collective with different operations, shapes or dtypes, as a table of ranks."""

from __future__ import annotations

import re

from engine.distributed.board import Board
from engine.distributed.group import Group
from engine.health import stacks
from engine.utils.errors import MismatchError

NOTES_S = 3.0
"""How long the other ranks' notes may take (s): all ranks find the mismatch in the same collective."""
# The form of torch's message since 2.0.
_FOUND = "Detected mismatch between collectives on ranks"
_OWN = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, TensorShape=\[(?P<shapes>[^\]]*)\])?(?:, TensorDtypes=(?P<dtypes>[\w, ]*?))?(?:, TensorDeviceTypes=|\))"
)


def explain(error: BaseException, group: Group) -> MismatchError | None:
    """The error to raise instead of torch's, with a line per rank; ``None`` when ``error`` is another one. All ranks call it together."""
    text = str(error)
    found = _OWN.search(text) if _FOUND in text else None
    if found is None:
        return None
    number = found["number"] or "0"
    board = Board(group, f"mismatch/{number}")
    mine = [
        found["operation"].lower(),
        f"[{found['shapes'] or ''}]",
        (found["dtypes"] or "").lower(),
        stacks.raised_at(error.__traceback__),
    ]
    board.put(str(group.rank), mine)
    rows = [["rank", "collective", "shape", "dtype", "called at"]]
    for rank in range(group.world_size):
        rows.append(
            [str(rank), *(mine if rank == group.rank else board.get(str(rank), NOTES_S) or ["(no answer)", "", "", ""])]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
    return MismatchError(
        f"the ranks entered one collective with different arguments:\n{table}\nAll ranks must make the same calls, with equal shapes and dtypes."
    )
