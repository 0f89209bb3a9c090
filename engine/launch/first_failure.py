"""Which rank failed first, and the report of its end, for those who start ranks: ``fit launch`` and ``Fit(devices=n)``."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.distributed import failures
from engine.utils.errors import INTERRUPTED, TERMINATED

LAST_LINES = 15
"""Lines of a rank's standard error that are shown when there is no traceback in it."""


@dataclass(eq=False)
class Rank:
    """A process that a launcher has started."""

    local: int
    rank: int
    pid: int
    error_file: Path
    code: int | None = None
    """The exit code, or minus the signal's number; ``None`` while it runs."""
    ended: float = 0.0
    """Seconds since 1970."""
    told: bool = False
    """The launcher ended it; it did not end by itself."""
    host: str = ""
    """Its machine, if the ranks may be on several."""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return not self.told and self.code not in (None, 0)


def cause(ranks: Sequence[Rank], tails: Mapping[int, str] = MappingProxyType({})) -> tuple[Rank, bool] | None:
    """The rank that failed first, and whether it failed only because another one did; ``None`` when none failed.

    If all failures are only consequences, and a rank has ended with exit code 0 meanwhile, it is that one.

    Args:
        tails: the end of each rank's standard error, for ranks that have left no error file; none, if it is not kept.
    """
    found = [
        (_only_saw(rank, tails.get(rank.rank, "")), failures.read(rank.error_file)[1] or rank.ended, rank)
        for rank in ranks
        if rank.failed
    ]
    if not found:
        return None
    saw, _, rank = min(found, key=lambda each: each[:2])
    early = [each for each in ranks if each.code == 0 and not each.told]
    if saw and early and all(each.code != TERMINATED for each in ranks):
        return min(early, key=lambda each: each.ended), False
    return rank, saw


def preempted(ranks: Iterable[Rank]) -> bool:
    """Whether no rank failed, and some ended on SIGTERM from a scheduler, or from another machine's agent."""
    codes = {rank.code for rank in ranks}
    return TERMINATED in codes and codes <= {None, 0, TERMINATED, -signal.SIGTERM}


def interrupted(ranks: Iterable[Rank]) -> bool:
    """Whether no rank failed, and some ended on a Ctrl-C that the launcher did not get."""
    codes = {rank.code for rank in ranks}
    return INTERRUPTED in codes and codes <= {None, 0, INTERRUPTED, -signal.SIGINT}


def story(rank: Rank, tail: str = "", log: Path | None = None) -> str:
    """A report of a rank's end: which rank, where and how, and finally its traceback."""
    code = rank.code or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
    if code == -signal.SIGKILL:
        how += " (the system may have run out of memory)"
    if code == 0:
        how = "ended early (exit code 0) while others still needed it: all ranks must make the same calls"
    where = f" on {rank.host} (process {rank.pid})" if rank.host else ""
    head = f"rank {rank.rank}{where} {how}"
    if log is not None:
        head += f"; its output: {log}"
    if code == 0:
        return head
    text = failures.read(rank.error_file)[0].rstrip() or traceback_in(tail)
    if text:
        return f"{head}. Its traceback:\n\n{text}"
    last = "\n".join(tail.rstrip().splitlines()[-LAST_LINES:])
    return f"{head}. It left no traceback" + (
        f"; its last lines:\n\n{last}" if last else " and no last words." if log else ": see its output above."
    )


def lines_of_others(ranks: Iterable[Rank], first: Rank | None, tails: Mapping[int, str] = MappingProxyType({})) -> str:
    """A line for each rank but the ``first`` to fail that has failed as well, or was ended because of it."""
    lines = []
    for rank in ranks:
        if rank is first or rank.code == 0:
            continue
        code, (text, _, saw) = rank.code or 0, failures.read(rank.error_file)
        text = text or traceback_in(tails.get(rank.rank, ""))
        if saw:
            how = failures.LOST
        elif text:
            how = summary(text)
        elif rank.told or not code:
            how = "was ended because of it"
        else:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        lines.append(f"rank {rank.rank}: {how}")
    return "\n".join(lines)


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


def _only_saw(rank: Rank, tail: str) -> bool:
    if rank.code == TERMINATED:  # all ranks save and end when one gets SIGTERM; another failure is the cause
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
