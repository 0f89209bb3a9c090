"""Finds the rank that failed first, and writes the report on its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.distributed import failures
from engine.launch.supervisor import Rank
from engine.utils.errors import INTERRUPTED, TERMINATED

LAST_LINES = 15
"""Number of lines of a rank's standard error that are shown if it contains no traceback."""
NO_TAILS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class Failure:
    """The failure of the rank that failed first."""

    rank: Rank
    is_consequence: bool
    """Whether the rank failed only because of another rank's end, which was not among the ranks of :func:`first_failure`."""
    report: str
    """The rank's number, where and how it ended, and its traceback."""
    other_failures: str
    """A line for each other rank that has failed as well, or was ended because of this failure."""


def first_failure(
    ranks: Sequence[Rank], tails: Mapping[int, str] = NO_TAILS, still_needed: bool = False
) -> Failure | None:
    """Find the failure among ``ranks`` that came first; ``None`` when none failed.

    If all failures are only consequences, and a rank has ended with exit code 0, that rank counts as the first to fail.

    Args:
        tails: the end of each rank's standard error, for ranks that have left no error file; empty if it is not kept.
        still_needed: whether the job is not done, so that an end with exit code 0 is a failure by itself.
    """
    failed = [
        (_is_consequence(rank, tails.get(rank.rank, "")), failures.read(rank.error_file)[1] or rank.ended_at, rank)
        for rank in ranks
        if rank.failed
    ]
    early = [rank for rank in ranks if rank.exit_code == 0 and not rank.ended_by_launcher]
    if failed:
        is_consequence, _, first = min(failed, key=lambda entry: entry[:2])
        early = early if is_consequence and all(rank.exit_code != TERMINATED for rank in ranks) else []
    elif not (early and still_needed):
        return None
    if early:
        is_consequence, first = False, min(early, key=lambda rank: rank.ended_at)
    return Failure(
        first, is_consequence, report(first, tails.get(first.rank, "")), lines_of_others(ranks, first, tails)
    )


def was_preempted(ranks: Iterable[Rank]) -> bool:
    """Whether no rank failed, and some ended because of a SIGTERM from a scheduler or from another machine's agent."""
    codes = {rank.exit_code for rank in ranks}
    return TERMINATED in codes and codes <= {None, 0, TERMINATED, -signal.SIGTERM}


def was_interrupted(ranks: Iterable[Rank]) -> bool:
    """Whether no rank failed, and some ended because of a Ctrl-C that the launcher did not get."""
    codes = {rank.exit_code for rank in ranks}
    return INTERRUPTED in codes and codes <= {None, 0, INTERRUPTED, -signal.SIGINT}


def report(rank: Rank, tail: str = "") -> str:
    """The report on a rank's end: which rank ended, where and how, and its traceback."""
    code = rank.exit_code or 0
    ending = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        ending += " (the system may have run out of memory)"
    if code == 0:
        ending = "ended early (exit code 0) while others still needed it: all ranks must make the same calls"
    where = f" on {rank.host} (process {rank.pid})" if rank.host else ""
    head = f"rank {rank.rank}{where} {ending}"
    if rank.log is not None:
        head += f"; its output: {rank.log}"
    if code == 0:
        return head
    text = failures.read(rank.error_file)[0].rstrip() or traceback_in(tail)
    if text:
        return f"{head}. Its traceback:\n\n{text}"
    last = "\n".join(tail.rstrip().splitlines()[-LAST_LINES:])
    return f"{head}. It left no traceback" + (
        f"; its last lines:\n\n{last}" if last else " and no last words." if rank.log else ": see its output above."
    )


def lines_of_others(ranks: Iterable[Rank], first: Rank | None, tails: Mapping[int, str] = NO_TAILS) -> str:
    """A line for each rank that has failed, or was ended, apart from the ``first`` to fail."""
    lines = []
    seen = "" if first is None else summary(_text_of(first, tails))
    for rank in ranks:
        if rank is first or rank.exit_code == 0:
            continue
        code, text, is_consequence = rank.exit_code or 0, _text_of(rank, tails), failures.read(rank.error_file)[2]
        if is_consequence:
            ending = failures.LOST
        elif text:
            ending = "the same error" if seen and summary(text) == seen else summary(text)
        elif rank.ended_by_launcher or not code:
            ending = "was ended because of it"
        else:
            ending = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        lines.append(f"rank {rank.rank}: {ending}")
    return "\n".join(lines)


def _text_of(rank: Rank, tails: Mapping[int, str]) -> str:
    """The traceback of a rank, from its error file or its standard error."""
    return failures.read(rank.error_file)[0] or traceback_in(tails.get(rank.rank, ""))


def summary(text: str) -> str:
    """The line of a traceback that names the exception, with the first line of its message."""
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return next((line for line in lines if line and not line.startswith(" ")), "")


def traceback_in(text: str) -> str:
    """The last Python traceback in ``text``, with its chained causes; ``""`` without one."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]
    if not starts:
        return ""
    start = starts[-1]
    for earlier_start in reversed(starts[:-1]):  # chained causes belong to the traceback
        between = [
            line
            for line in lines[earlier_start:start]
            if line.startswith(("The above exception", "During handling of"))
        ]
        if not between:
            break
        start = earlier_start
    end = starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    return "\n".join(lines[start : end + 1])


def _is_consequence(rank: Rank, tail: str) -> bool:
    """Whether a rank failed only because another rank was gone."""
    if rank.exit_code == TERMINATED:  # after a SIGTERM all ranks save and end; a rank that fails is the cause
        return True
    text, _, is_consequence = failures.read(rank.error_file)
    last = (text.rstrip() or traceback_in(tail)).splitlines()[-1:]
    return is_consequence or any(
        line.startswith(("RuntimeError", "torch.distributed.")) and failures.blames_peer(RuntimeError(line))
        for line in last
    )


def signal_name(number: int) -> str:
    """The name of a signal: ``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
