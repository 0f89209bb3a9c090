"""Draw cases with hypothesis, run them, shrink what fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis.errors import Unsatisfiable

from .cases import STRATEGIES, Case, Wanted, cases
from .pool import Pools
from .runner import run_case

Verdict = tuple[Case, list[str]]


class Mismatch(AssertionError):
    """A case that is not as expected."""


@dataclass
class Search:
    """A search among the cases of one strategy."""

    strategy: str
    pools: Pools
    shrink_seconds: float = 90.0
    deadline: float = float("inf")
    """Of ``time.monotonic``: cases after it are not run."""
    without: Sequence[tuple[str, str]] = ()
    """Names and values of fields: cases with one of them are not run."""
    report: Callable[[str], None] = lambda line: None
    wanted: Wanted = field(default_factory=dict)
    """Values that the cases must have, by name of the field."""
    then: Sequence[str] = ("", *STRATEGIES)
    """Under which strategies resumed runs continue (empty: their own)."""
    fixed: bool = False
    """The same cases each time."""
    ran: int = 0
    mismatches: int = 0
    found: list[Verdict] = field(default_factory=list)
    """The smallest case of each mismatch that was shrunk."""

    def run(self, count: int, start: int) -> None:
        """Up to ``count`` cases out of that seed; the first that fails is shrunk, and ends it."""
        known: dict[Case, list[str]] = {}
        shrinking: list[float] = []

        def verdict(case: Case) -> list[str]:
            if case in known:
                return known[case]
            now = time.monotonic()
            if now > self.deadline or (shrinking and now - shrinking[0] > self.shrink_seconds):
                return []
            if not shrinking:
                self.ran += 1
            known[case] = run_case(case, self.pools)
            if known[case] and not shrinking:
                self.mismatches += 1
                shrinking.append(time.monotonic())
                self.report(f"{case}\n  {known[case][0]}")
            return known[case]

        @settings(
            max_examples=count, database=None, deadline=None, derandomize=self.fixed, report_multiple_bugs=False, print_blob=False,
            phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(cases(self.strategy, tuple(self.then), self.wanted))
        def trains_as_the_plain_loop(case: Case) -> None:
            assume(not any(str(getattr(case, name)) == value for name, value in self.without))
            problems = verdict(case)
            if problems:
                raise Mismatch

        try:
            (trains_as_the_plain_loop if self.fixed else seed(start)(trains_as_the_plain_loop))()
        except Unsatisfiable:
            self.report(f"{self.strategy}: no such cases")
        except Mismatch:
            failing = [(case, problems) for case, problems in known.items() if problems]
            self.found.append(min(failing, key=lambda item: (len(item[0].changes()), item[0].samples)))


def reproducer(verdict: Verdict) -> str:
    """A few lines of Python that show a mismatch, and what they print."""
    case, problems = verdict
    shown = "\n".join(f"# {line}" for problem in problems for line in problem.splitlines())
    return f"from tests.parity.differential import Case, check\n\ncheck({case})\n{shown}\n"
