"""How jobs save, validate and end: each job draws one. Nothing of torch or of the library is imported, as in ``watch.py``."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 40
"""Of the whole training, unless it stops before."""


@dataclass(frozen=True)
class Recipe:
    """What differs between jobs."""

    name: str
    saves: tuple[tuple[str, str | None, int], ...]
    """``every``, ``monitor`` and ``save_top_k`` of each ``ModelCheckpoint``, in their order."""
    val_every: str | None = "3 steps"
    batches: int | None = None
    """Validate after so many micro-batches, in the place of ``val_every``."""
    stop: tuple[int, int] | None = None
    """The step after which the last rank asks to stop, and the steps until which that waits."""

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return STEPS if self.stop is None else self.stop[1]


RECIPES = (
    Recipe("newest", (("2 steps", None, 2),)),
    Recipe("best first", (("3 steps", "val_loss", 2), ("2 steps", None, 2))),
    Recipe("best last", (("2 steps", None, 2), ("1 epochs", "val_loss", 1)), "0.25 epochs"),
    Recipe("batches", (("1 epochs", "val_loss", 2), ("3 steps", None, 1)), None, batches=3),
    Recipe("between", (("2 steps", "val_loss", 1),), "1 epochs"),
    Recipe("stop", (("2 steps", None, 1), ("1 epochs", "val_loss", 1)), "5 steps", stop=(9, 31)),
)
