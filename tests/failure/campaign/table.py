"""The table of a campaign."""

from __future__ import annotations

from collections.abc import Sequence

from .campaign import Row
from .check import LOSSES
from .watch import PHASES


def table(rows: Sequence[Row]) -> str:
    """Kills of each phase and victim by set-up, then what was lost. Plain text."""
    victims = ("rank 0", "rank 1", "launcher", "all")
    heads = ["set-up", *PHASES, "kills", *victims, "jobs", "starts", "repeated", *LOSSES]
    lines: list[list[str | int]] = []
    for row in rows:
        by_phase = [sum(count for (phase, _), count in row.kills.items() if phase == each) for each in PHASES]
        by_victim = [sum(count for (_, victim), count in row.kills.items() if victim == each) for each in victims]
        numbers = [
            *by_phase,
            row.kills.total(),
            *by_victim,
            row.jobs,
            row.starts,
            row.found.repeated,
            *row.found.losses.values(),
        ]
        lines.append([row.setup.name, *numbers])
    sums = [sum(int(line[column]) for line in lines) for column in range(1, len(heads))]
    cells = [[str(cell) for cell in line] for line in [heads, *lines, ["all", *sums]]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
