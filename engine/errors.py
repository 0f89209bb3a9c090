"""What every error of this library shares: the nearest legal name, and the failure of another rank."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, choices: Iterable[str]) -> str:
    """A hint for an unknown name: ``"; did you mean 'ddp'?"``, or an empty string when nothing is close."""
    known = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {known[found[0]]!r}?" if found else ""


class RankError(RuntimeError):
    """Another rank of this job failed. The message names it and carries its traceback."""
