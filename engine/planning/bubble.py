"""The share of a step in which a pipeline's ranks wait."""

from __future__ import annotations

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2, "dualpipev": 2}
"""Of a pipeline on one rank, by the schedule; those of :data:`engine.strategies.pipeline.SCHEDULES`, whose import takes a second."""
SOURCES = {
    "gpipe": "GPipe (Huang et al. 2019): (p-1)/(m+p-1)",
    "1f1b": "PipeDream-Flush (Narayanan et al. 2021): (p-1)/(m+p-1)",
    "interleaved": "interleaved 1F1B (Narayanan et al. 2021): (p-1)/(v m+p-1)",
    "zero_bubble": "ZB-H1 (Qi et al. 2023), interleaved: (p-1)/(3 v m+p-1), where forward, input gradients and weight gradients take equal times",
    "zbv": "ZB-V (Qi et al. 2024): (p-1)/(6 m+p-1) from the step's start to its end on all ranks, twice the waiting with at most p parts, where "
    "those three take equal times",
    "dualpipev": "DualPipeV (DeepSeek 2025): (p-1)/(3 m+p-1), where those three take equal times and nothing overlaps",
}
"""The formula of each schedule of :class:`engine.MeshParallel`: ``p`` ranks, ``m`` parts of a micro-batch, ``v`` stages on a rank."""


def bubble_fraction(schedule: str, ranks: int, parts: int) -> float:
    """The part of the step's time in which a rank of the pipeline has nothing to do, if all stages take equally long.

    Args:
        schedule: a key of :data:`SOURCES`.
        ranks: of the pipeline's axis.
        parts: of a micro-batch, ``num_microbatches``.
    """
    waiting, stages = ranks - 1, STAGES[schedule]
    if ranks < 2:
        return 0.0
    if schedule == "zbv" and parts <= ranks:
        waiting *= 2
    work = {"zero_bubble": 3 * stages * parts, "dualpipev": 3 * parts, "zbv": 3 * stages * parts}
    return waiting / (work.get(schedule, stages * parts) + waiting)
