"""The library's own exception classes, and hints with the nearest valid name."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C, as a shell shows it."""
TERMINATED = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as a shell shows it."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """A hint for an unknown name: ``"; did you mean 'ddp'?"``, or an empty string when nothing is close."""
    originals = {choice.lower(): choice for choice in choices if choice != name}
    wanted_text = str(name).lower()
    begun = [
        choice for choice in originals if len(wanted_text) > 2 and choice.startswith(wanted_text)
    ]  # a prefix of a long name differs by many letters
    cutoff = 0.0 if begun else 0.55 if len(wanted_text) > 3 else 0.5  # for two letters one may differ
    matches = begun if len(begun) == 1 else difflib.get_close_matches(wanted_text, begun or originals, cutoff=cutoff)
    if (
        len(wanted_text) < 4
    ):  # a letter left out counts less than a wrong one here, but the first letter is rarely wrong
        matches = sorted(matches, key=lambda choice: choice[:1] != wanted_text[:1])
    return f"; did you mean {originals[matches[0]]!r}?" if matches else ""


class RankError(RuntimeError):
    """Another rank of this job failed. The message names it and has its traceback."""


class HangError(RuntimeError):
    """No batch finished within ``Fit(timeout=)``. The message names the ranks that lag, and where they are."""

    waiting = False
    """Whether this rank only waited for ranks that lag."""


class MismatchError(RuntimeError):
    """The ranks entered one collective with different operations, shapes or dtypes (found by ``debug=True``)."""


class FolderInUse(RuntimeError):
    """Another run is writing into the folder that this one would continue in. The message names it."""


class CheckError(RuntimeError):
    """``check=True`` found differences between the ranks before the first step."""


class DoesNotFit(ValueError):
    """The weights of a checkpoint do not fit the module. The message names what differs, and how the saved module was created."""
