"""The rank that failed first, and the report of its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.distributed import failures
from engine.launch.supervisor import Rank
from engine.utils.errors import INTERRUPTED, TERMINATED

LAST_LINES = 15
"""Lines of a rank's standard error that are shown when there is no traceback in it."""
NO_TAILS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class Failure:
    """The failure of the rank that failed first."""

    rank: Rank
    is_consequence: bool
    """Whether the rank failed only because another rank was gone, one that :func:`first_failure` does not see."""
    report: str
    """The rank's number, where and how it ended, and its traceback."""
    other_failures: str
    """A line for each other rank that has failed as well, or is ended because of it."""


def first_failure(
    ranks: Sequence[Rank], tails: Mapping[int, str] = NO_TAILS, still_needed: bool = False
) -> Failure | None:
    """Find the failure among ``ranks`` that came first; ``None`` when none failed.

    If all failures are only consequences, and a rank has ended with exit code 0 meanwhile, that rank is the first failure.

    Args:
        tails: the end of each rank's standard error, for ranks that have left no error file; none, if it is not kept.
        still_needed: the job is not done, so an end with exit code 0 is a failure by itself.
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
    """Check whether no rank failed, and some ended on SIGTERM from a scheduler, or from another machine's agent."""
    codes = {rank.exit_code for rank in ranks}
    return TERMINATED in codes and codes <= {None, 0, TERMINATED, -signal.SIGTERM}


def was_interrupted(ranks: Iterable[Rank]) -> bool:
    """Check whether no rank failed, and some ended on a Ctrl-C that the launcher did not get."""
    codes = {rank.exit_code for rank in ranks}
    return INTERRUPTED in codes and codes <= {None, 0, INTERRUPTED, -signal.SIGINT}


def report(rank: Rank, tail: str = "") -> str:
    """The report of a rank's end: which rank, where and how, and finally its traceback."""
    code = rank.exit_code or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        how += " (the system may have run out of memory)"
    if code == 0:
        how = "ended early (exit code 0) while others still needed it: all ranks must make the same calls"
    where = f" on {rank.host} (process {rank.pid})" if rank.host else ""
    head = f"rank {rank.rank}{where} {how}"
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
    """A line for each rank but the ``first`` to fail that has failed as well, or was ended because of it."""
    lines = []
    seen = "" if first is None else summary(_text_of(first, tails))
    for rank in ranks:
        if rank is first or rank.exit_code == 0:
            continue
        code, text, is_consequence = rank.exit_code or 0, _text_of(rank, tails), failures.read(rank.error_file)[2]
        if is_consequence:
            how = failures.LOST
        elif text:
            how = "the same error" if seen and summary(text) == seen else summary(text)
        elif rank.ended_by_launcher or not code:
            how = "was ended because of it"
        else:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        lines.append(f"rank {rank.rank}: {how}")
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
    first = starts[-1]
    for earlier in reversed(starts[:-1]):  # "The above exception was the direct cause": the chain belongs together
        between = [
            line for line in lines[earlier:first] if line.startswith(("The above exception", "During handling of"))
        ]
        if not between:
            break
        first = earlier
    end = starts[-1] + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    return "\n".join(lines[first : end + 1])


def _is_consequence(rank: Rank, tail: str) -> bool:
    if rank.exit_code == TERMINATED:  # all ranks save and end when one gets SIGTERM; another failure is the cause
        return True
    text, _, saw = failures.read(rank.error_file)
    last = (text.rstrip() or traceback_in(tail)).splitlines()[-1:]
    return saw or any(
        line.startswith(("RuntimeError", "torch.distributed.")) and failures.blames_peer(RuntimeError(line))
        for line in last
    )


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
