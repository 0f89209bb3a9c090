"""What a search over plans has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.config.masked import plain
from engine.planning.candidates import Candidate, written
from engine.planning.plan import Plan
from engine.planning.search_table import show
from engine.planning.tables import printed

VERDICTS = ("fits", "too large", "slower", "refused", "failed", "not planned")


@dataclass(frozen=True)
class Tried:
    """A candidate and what became of it."""

    candidate: Candidate
    verdict: str
    """One of :data:`VERDICTS`. ``"slower"``: not planned, because one that fits does the same with less work; ``"refused"``: by the strategy;
    ``"failed"``: its plan ended with another error."""
    reason: str = ""
    """Why it does not fit, or was not planned."""
    plan: Plan | None = None
    """``None``: it was ruled out without a trace."""

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory it needs."""
        return self.verdict == "fits"

    def as_json(self, derived: bool = False) -> dict[str, Any]:
        """Plain dicts and values; ``derived``: as of :class:`PlanSearch`."""
        plan = self.plan
        return {
            **self.candidate.settings,
            "strategy": plain(_told(self.candidate.layout.strategy)),
            "precision": str(self.candidate.precision),
            "micro_batch": self.candidate.micro_batch,
            "fit": self.candidate.code(derived),
            "set": self.candidate.command(derived),
            "verdict": self.verdict,
            "reason": self.reason,
            "need_bytes": None if plan is None else plan.peak_bytes,
            "step_s": None if plan is None else plan.step_seconds,
            "samples_per_second": None if plan is None else plan.samples_per_second,
            "tokens_per_second": None if plan is None else plan.tokens_per_second,
            "computed": [] if plan is None else list(plan.computed),
            "missing": [] if plan is None else list(plan.missing),
        }


@dataclass(frozen=True)
class PlanSearch:
    """What a search has found. ``print(found)`` shows it as a table."""

    tried: tuple[Tried, ...]
    """Those that fit first, the fastest first; then those that need the least memory."""
    world_size: int
    device: str
    memory_bytes: int
    """That a rank may use."""
    global_batch: int
    """Samples of a step, over all ranks; the same for every candidate."""
    seconds: float
    """That the search took."""
    notes: tuple[str, ...] = ()
    """What the search assumed, and what it left out."""
    derived: bool = False
    """Whether ``global_batch_size`` was given: then a run finds the window by itself."""

    @cached_property
    def fitting(self) -> tuple[Tried, ...]:
        """Those that fit, the fastest first."""
        return tuple(each for each in self.tried if each.fits)

    @property
    def best(self) -> Tried | None:
        """The fastest that fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def planned(self) -> int:
        """How many were planned."""
        return sum(each.plan is not None for each in self.tried)

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists; ``candidates`` in the order of :attr:`tried`."""
        return {
            "version": 1,
            "world_size": self.world_size,
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "global_batch": self.global_batch,
            "seconds": self.seconds,
            "planned": self.planned,
            "candidates": [each.as_json(self.derived) for each in self.tried],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return printed(self.as_json(), show)


def _told(strategy: Any) -> Any:
    return strategy if isinstance(strategy, (str, Mapping)) else written(strategy)
