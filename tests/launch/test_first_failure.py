"""Which rank failed first, and its report: from exit codes, error files and the ends of outputs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.distributed import failures
from engine.launch.first_failure import (
    NO_TAILS,
    Rank,
    first_failure,
    lines_of_others,
    report,
    traceback_in,
    was_interrupted,
    was_preempted,
)

GONE = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
RuntimeError: [gloo/pair.cc:553] Connection closed by peer [1.2.3.4]:1"""


class Ended(Rank):
    def wait(self) -> int:
        raise AssertionError("it has ended")


def ended(
    place: Path, rank: int, code: int | None, moment: float, error: Exception | None = None, told: bool = False
) -> Rank:
    result = Ended(rank, rank, 1000 + rank, place / f"{rank}.json", "node7", place / f"rank={rank}.log")
    result.exit_code, result.ended_at, result.ended_by_launcher = code, moment, told
    if error is not None:
        failures.record(error, result.error_file)
    return result


def cause(
    ranks: list[Rank], tails: Mapping[int, str] = NO_TAILS, still_needed: bool = False
) -> tuple[Rank, bool] | None:
    failure = first_failure(ranks, tails, still_needed)
    return failure and (failure.rank, failure.is_consequence)


def test_the_cause_is_the_first_that_went_by_itself(tmp_path: Path) -> None:
    ranks = [
        ended(tmp_path, 0, 1, 100.0),  # has seen rank 2 go, by its output
        ended(tmp_path, 1, 1, 100.1, RuntimeError("Timed out in gloo")),  # has seen it too, by its error file
        ended(tmp_path, 2, -signal.SIGKILL, 101.0),  # noticed last
        ended(tmp_path, 3, -signal.SIGTERM, 99.0, told=True),  # ended by the agent
        ended(tmp_path, 4, 143, 98.0),
        ended(tmp_path, 5, 0, 97.0),
    ]
    tails = {0: GONE, **dict.fromkeys(range(1, 6), "")}
    assert cause(ranks, tails) == (ranks[2], False)
    assert cause([*ranks[:2], *ranks[3:4]], tails) == (ranks[0], True)
    assert cause(ranks[3:4] + ranks[5:], tails) is None
    own = [ended(tmp_path, 6, 1, 102.0, ValueError("a word on gloo")), ended(tmp_path, 7, 1, 101.5)]
    assert cause(own) == (own[1], False)


def test_a_rank_that_left_early_and_well_is_the_cause(tmp_path: Path) -> None:
    lost = RuntimeError("[gloo] Connection closed by peer")
    ranks = [
        ended(tmp_path, 0, 1, 100.0, lost),
        ended(tmp_path, 1, 0, 100.2),
        ended(tmp_path, 2, -signal.SIGTERM, 101.0, told=True),
    ]
    tails = dict.fromkeys(range(3), "")
    assert cause(ranks, tails) == (ranks[1], False)
    assert "rank 1 on " in report(ranks[1], "last words")
    assert "ended early (exit code 0) while others still needed it" in report(ranks[1], "last words")
    preempted = first_failure([*ranks, ended(tmp_path, 3, 143, 99.0)], tails)
    assert preempted is not None
    assert preempted.is_consequence  # the others end as they can


def test_a_rank_that_is_still_needed_fails_by_its_end(tmp_path: Path) -> None:
    ranks = [ended(tmp_path, 0, None, 0.0), ended(tmp_path, 1, 0, 101.0), ended(tmp_path, 2, 0, 100.0)]
    assert cause(ranks) is None
    assert cause(ranks, still_needed=True) == (ranks[2], False)
    assert cause(ranks[:1], still_needed=True) is None


def test_ranks_that_were_told_to_end_have_not_failed(tmp_path: Path) -> None:
    assert was_preempted(
        [ended(tmp_path, 0, 143, 1.0), ended(tmp_path, 1, None, 0.0), ended(tmp_path, 2, -signal.SIGTERM, 1.0)]
    )
    assert not was_preempted([ended(tmp_path, 0, 143, 1.0), ended(tmp_path, 1, 1, 1.0)])
    assert not was_preempted([ended(tmp_path, 0, -signal.SIGTERM, 1.0)])  # killed without having saved
    assert was_interrupted([ended(tmp_path, 0, 0, 1.0), ended(tmp_path, 1, 130, 1.0)])
    assert not was_interrupted([ended(tmp_path, 0, 1, 1.0), ended(tmp_path, 1, 130, 1.0)])


def test_each_other_rank_has_a_line(tmp_path: Path) -> None:
    ranks = [
        ended(tmp_path, 0, 1, 100.0, ValueError("the first")),
        ended(tmp_path, 1, 1, 100.1, RuntimeError("[gloo] Connection closed by peer")),
        ended(tmp_path, 2, 1, 100.2, KeyError("of its own")),
        ended(tmp_path, 3, -signal.SIGTERM, 100.3, told=True),
        ended(tmp_path, 4, -signal.SIGKILL, 100.3),
        ended(tmp_path, 5, 3, 100.3),
        ended(tmp_path, 6, 1, 100.4),  # without an error file: from its output
        ended(tmp_path, 7, 0, 100.4),
        ended(tmp_path, 8, 1, 100.4, ValueError("the first")),
    ]
    assert lines_of_others(ranks, ranks[0], {6: f"noise\n{GONE}\n"}).splitlines() == [
        "rank 1: lost another rank",
        "rank 2: KeyError: 'of its own'",
        "rank 3: was ended because of it",
        "rank 4: was killed by SIGKILL",
        "rank 5: failed with exit code 3",
        "rank 6: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [1.2.3.4]:1",
        "rank 8: the same error",
    ]


def test_stories(tmp_path: Path) -> None:
    killed = report(ended(tmp_path, 2, -signal.SIGKILL, 1.0))
    assert "rank 2 on node7 (process 1002) was killed by SIGKILL (the system may have run out of memory)" in killed
    assert killed.partition("; its output: ")[2].startswith(str(tmp_path / "rank=2.log"))
    assert report(ended(tmp_path, 3, 3, 1.0), "no such file\n").endswith("its last lines:\n\nno such file")
    told = report(ended(tmp_path, 4, 1, 1.0, KeyError("layer")), "other words")
    assert told.endswith("KeyError: 'layer'")
    assert "other words" not in told
    without_log = Ended(1, 1, 1001, tmp_path / "1.json", exit_code=7)
    assert report(without_log) == ("rank 1 failed with exit code 7. It left no traceback: see its output above.")


def test_the_last_traceback_and_its_chain(tmp_path: Path) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('no ratio') from error"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    text = f"{GONE}\nwarning: x\n{done.stderr}\nbye\n"
    assert traceback_in(text) == done.stderr.rstrip()
    assert traceback_in("all is well\n") == ""
