"""Jobs of every set-up, one after the other or beside each other, until so many kills are done."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .check import Found
from .kills import DECK
from .life import References, live
from .setups import Setup

MISSED = 3
"""Jobs in a row that end without a kill before the campaign gives up."""


@dataclass
class Row:
    """What was found about a set-up."""

    setup: Setup
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    jobs: int = 0
    starts: int = 0
    found: Found = field(default_factory=Found)


class Campaign:
    """Over some set-ups.

    Args:
        place: a directory for the jobs' files.
        tree: the tree whose library trains.
        seed: another one draws other kills.
        report: called with a line for each thing that happens.
    """

    def __init__(
        self, setups: Sequence[Setup], place: Path, tree: Path, seed: int, report: Callable[[str], None]
    ) -> None:
        self.place, self.seed, self.report = place, seed, report
        self.references = References(place, tree)
        self.rows = [Row(setup) for setup in setups]
        self._lock, self._over = threading.Lock(), False

    def run(self, kills: int, at_once: int = 2, job: int | None = None) -> list[Row]:
        """So many kills in all, or those of one job of each set-up. Ends early when something was lost.

        Raises:
            RuntimeError: a job that is not killed fails, or kills do not come about.
        """
        share, more = divmod(kills, len(self.rows))
        wanted = [share + (index < more) for index in range(len(self.rows))]
        with ThreadPoolExecutor(at_once) as pool:
            works = [
                pool.submit(self._fill, row, count, job) for row, count in zip(self.rows, wanted, strict=True) if count
            ]
            try:
                for work in works:
                    work.result()
            finally:  # after an error, or Ctrl-C, each set-up ends the job that it is at
                self._over = True
        return self.rows

    def clean(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.place)

    def _fill(self, row: Row, kills: int, job: int | None) -> None:
        """Jobs of one set-up until it has its kills, or one has lost something."""
        missed, number = 0, job or 0
        while row.kills.total() < kills and not (row.found.texts or self._over) and missed < MISSED:
            before = row.kills.total()
            self._job(row, number, min(kills - before, len(DECK) + 1))
            missed = missed + 1 if row.kills.total() == before else 0
            number += 1
            if job is not None:
                return
        if missed >= MISSED:
            raise RuntimeError(f"{row.setup.name}: {MISSED} jobs in a row ended before they were killed")

    def _job(self, row: Row, number: int, most: int) -> None:
        name, seed = row.setup.name, self.seed
        again = f"--seed {seed} --setups '{name}' --job {number}"
        place = self.place / f"{name.replace(' ', '-')}-{number}"
        life = live(
            row.setup,
            self.references,
            place,
            f"{seed} {name} {number}",
            most,
            lambda line: self.report(f"{again}  {line}"),
        )
        with self._lock:
            row.kills.update(life.kills)
            row.jobs += 1
            row.starts += life.starts
            life.found.texts = [f"{again}: {text}" for text in life.found.texts]
            row.found.add(life.found)
        self.report(
            f"{again}  is over: {life.kills.total()} kills, {life.starts} starts, {'; '.join(life.found.texts) or 'nothing lost'}"
        )
