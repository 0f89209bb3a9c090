"""A job from its first start to its end: killed, started again, killed, and compared with one that nobody disturbed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .check import Found, check_files, check_outcome, check_rows, check_steps
from .kills import DECK, Kill, draw
from .recipes import RECIPES, Recipe
from .setups import TREE, Setup
from .start import PATIENCE, Start, marked

NEXT_JOB = "from engine.utils import scratch; scratch.remove(scratch.make_directory('fitw-'))"
"""What any job does with data workers as it begins."""
SHOWN = 3000
"""Characters of a failed start's output that are shown."""


class References:
    """Undisturbed runs: one for each number of ranks, strategy, model and recipe, whoever starts the ranks.

    Args:
        place: a directory for them.
        tree: the tree whose library trains.
    """

    def __init__(self, place: Path, tree: Path = TREE) -> None:
        self.place, self.tree = place, tree
        self._found: dict[tuple[int, str, str, str], Reference] = {}
        self._lock = threading.Lock()

    def of(self, setup: Setup, recipe: Recipe) -> Reference:
        """Runs it, if it is the first of its kind.

        Raises:
            RuntimeError: it fails.
        """
        key = (setup.ranks, setup.strategy, setup.model, recipe.name)
        with self._lock:
            if key not in self._found:
                place = self.place / "-".join(("undisturbed", *map(str, key))).replace(" ", "-")
                start = Start(setup, recipe, self.tree, prepared(place), 0, (), 0.0, lambda line: None)
                if start.run() or len(start.counts) < setup.ranks:
                    raise RuntimeError(f"the undisturbed run failed:\n{start.output.read_text()[-SHOWN:]}")
                self._found[key] = Reference(place, start.counts, start.seconds or 1.0)
            return self._found[key]


@dataclass(frozen=True)
class Reference:
    """One of them: its files, the events of each phase by rank, and the seconds to its first step."""

    place: Path
    counts: dict[int, dict[str, int]]
    seconds: float


def prepared(place: Path) -> Path:
    """An empty place for a job."""
    (place / "tmp").mkdir(parents=True)
    return place


@dataclass
class Life:
    """What became of one job."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By phase and victim."""
    starts: int = 0
    found: Found = field(default_factory=Found)


class Plans:
    """Draws the kills of one job, one start after the other."""

    def __init__(self, setup: Setup, seed: str, reference: Reference) -> None:
        self.setup, self.reference = setup, reference
        self.chance = random.Random(seed)
        self.phases = [*self.chance.sample(DECK, len(DECK)), "end"]

    def next(self, most: int) -> list[Kill]:
        """Those of the next start, at most so many: of ranks as long as the launcher starts them again."""
        restarts = min(self.chance.choice(self.setup.restarts), max(0, most - 1), max(0, len(self.phases) - 1))
        plan: list[Kill] = []
        for index in range(min(restarts + 1, most, len(self.phases))):
            ranks = tuple(name for name in self.setup.victims if name.startswith("rank"))
            plan.append(
                draw(
                    self.chance,
                    self.setup,
                    self.phases.pop(0),
                    self.reference.counts,
                    self.setup.victims if index == restarts else ranks,
                )
            )
        return plan


def live(
    setup: Setup, references: References, place: Path, seed: str, most: int, report: Callable[[str], None]
) -> Life:
    """One job: killed up to ``most`` times, until it ends.

    Args:
        place: a new directory; it stays when something is found.
        report: called with a line for each kill.
    """
    recipe = random.Random(f"{seed} recipe").choice(RECIPES)
    report(f"saves and validates as {recipe.name!r}")
    reference = references.of(setup, recipe)
    life, plans = Life(), Plans(setup, seed, reference)
    prepared(place)
    typical = reference.seconds
    while True:
        plan = plans.next(most - life.kills.total())
        start = Start(setup, recipe, references.tree, place, life.starts, plan, typical, report)
        code = start.run()
        life.starts += 1
        life.kills.update(start.killed)
        typical = start.seconds or typical
        if start.hangs:
            life.found.lose("failed resumes", 1, f"start {life.starts - 1} hangs\n{start.output.read_text()[-SHOWN:]}")
        life.found.lose("orphans", start.orphans, f"processes of start {life.starts - 1} outlived their launcher")
        if code == 0:
            break
        if len(start.killed) < start.attempts:
            life.found.lose(
                "failed resumes",
                1,
                f"start {life.starts - 1} ended with {code} by itself\n{start.output.read_text()[-SHOWN:]}",
            )
            break
    deadline = time.monotonic() + PATIENCE
    while (left := marked(str(place / "root"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    life.found.lose("orphans", len(left), f"processes {left}")
    if life.found.texts:  # it is not over
        return life
    if (
        not setup.waits
    ):  # a loader's worker of the killed start held its directory as the last one began: the next job removes it
        environment = setup.environment(references.tree, place, "")
        subprocess.run([sys.executable, "-c", NEXT_JOB], env=environment, check=True)
    check_steps(place, reference.place, setup.ranks, recipe.steps, life.found)
    check_files(place, reference.place, life.found)
    check_outcome(place, reference.place, life.found)
    check_rows(place, reference.place, life.found)
    if not life.found.texts:
        shutil.rmtree(place)
    return life
