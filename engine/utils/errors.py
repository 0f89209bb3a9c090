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
    """A hint for an unknown name, such as ``"; did you mean 'ddp'?"``; empty if no choice is close."""
    originals = {choice.lower(): choice for choice in choices if choice != name}
    wanted_text = str(name).lower()
    # A prefix of a long name lacks many letters, so difflib does not take it for close.
    longer = [choice for choice in originals if len(wanted_text) > 2 and choice.startswith(wanted_text)]
    cutoff = 0.0 if longer else 0.55 if len(wanted_text) > 3 else 0.5  # of two letters one may differ
    matches = longer if len(longer) == 1 else difflib.get_close_matches(wanted_text, longer or originals, cutoff=cutoff)
    if len(wanted_text) < 4:  # difflib prefers a missing letter to a wrong one, but the first letter is rarely wrong
        matches = sorted(matches, key=lambda choice: choice[:1] != wanted_text[:1])
    return f"; did you mean {originals[matches[0]]!r}?" if matches else ""


class RankError(RuntimeError):
    """Another rank of this job failed. The message names that rank and has its traceback."""


class HangError(RuntimeError):
    """No batch finished within ``Fit(timeout=)``. The message names the ranks that lag behind, and the lines where they are."""

    waiting = False
    """Whether this rank only waited for the ranks that lag behind."""
    terminated = False
    """Whether the ranks waited for each other after a SIGTERM, and would have had more time without one."""


class MismatchError(RuntimeError):
    """The ranks entered a collective with different operations, shapes or dtypes (detected under ``debug=True``)."""


class FolderInUse(RuntimeError):
    """Another run is writing into the folder in which this run would continue. The message names that run."""


class CheckError(RuntimeError):
    """The ranks differ in what they must have in common: settings, loaders, the model, hyperparameters."""


class DoesNotFit(ValueError):
    """A checkpoint's weights do not fit the module. The message says what differs, and how the saved module was created."""
