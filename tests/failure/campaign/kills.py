"""Who is killed, and when: drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .setups import Setup

DECK = ("start", "steps", "draft", "commit", "validation", "removal", "validation")
"""The phases that a job is killed in, in a drawn order; its last kill is at its end."""
EVENTS = {"steps": 20, "draft": 0.1, "commit": 0.1, "validation": 0.2, "removal": 0.1, "start": 1.0, "end": 1.0}
"""Among how many events of a start one is drawn: a number, or (up to 1) a share of those that an undisturbed run has."""
ERRORS = 0.4
"""How many of the kills in validations are errors."""
LAST = 20e-3
"""The longest delay between the event and the kill (s)."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, or an error: at a moment of ``seconds`` after the start, or at the ``number``-th event of a phase, as ``watcher`` counts them."""

    phase: str
    victim: str
    """``"rank 0"``, ``"rank 1"``, ``"launcher"`` or ``"all"``."""
    watcher: int = 0
    number: int = 0
    delay: float = 0.0
    """Seconds after the event; 0: the watcher waits at it to be killed, or for the other to be."""
    share: float = 0.0
    """Without ``number``: the moment, as a share of the time that the job needs to its first step."""
    error: bool = False
    """Whether the watcher raises an error, and nobody is killed."""

    def __str__(self) -> str:
        if self.error:
            return f"an error of rank {self.watcher} in {self.phase}, event {self.number}"
        when = f"event {self.number} of rank {self.watcher}" if self.number else f"{self.share:.0%} of the time"
        return f"{self.victim} in {self.phase}, {when}" + (f" + {1e6 * self.delay:.0f} us" if self.delay else "")

    def asked(self) -> dict[str, Any]:
        """What the watcher is asked for."""
        asked = {"phase": self.phase, "number": self.number, "delay": self.delay, "error": self.error}
        return asked if self.number else {}


def draw(
    chance: random.Random, setup: Setup, phase: str, counts: Mapping[int, Mapping[str, int]], victims: tuple[str, ...]
) -> Kill:
    """A kill in that phase.

    Args:
        counts: events of each phase in an undisturbed run, by rank.
        victims: of whom one is chosen.
    """
    victim = chance.choice(victims)
    delay = 0.0 if chance.random() < 0.5 else math.exp(chance.uniform(math.log(10e-6), math.log(LAST)))
    if phase == "start" and chance.random() < 0.5:
        return Kill(phase, victim, share=chance.random())
    watchers = [rank for rank in range(setup.ranks) if counts[rank][phase]]
    own = int(victim[-1]) if victim.startswith("rank") else chance.choice(watchers)
    watcher = own if own in watchers else watchers[0]
    most = EVENTS[phase] if EVENTS[phase] > 1 else EVENTS[phase] * counts[watcher][phase]
    number = chance.randint(1, max(1, int(most)))
    if phase == "validation" and chance.random() < ERRORS:
        return Kill(phase, f"rank {watcher}", watcher, number, error=True)
    return Kill(phase, victim, watcher, number, delay)
