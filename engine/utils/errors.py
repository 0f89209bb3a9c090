"""The errors that this library raises by a name of its own, and what all of them share: the nearest legal name."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

TERMINATED = 128 + signal.SIGTERM
"""The exit status after SIGTERM, as a shell shows it."""


def nearest(name: object, choices: Iterable[str]) -> str:
    """A hint for an unknown name: ``"; did you mean 'ddp'?"``, or an empty string when nothing is close."""
    known = {choice.lower(): choice for choice in choices}
    asked = str(name).lower()
    begun = [choice for choice in known if len(asked) > 2 and choice.startswith(asked)]  # a long name cut short is far by the letters it lacks
    least = 0.0 if begun else 0.55 if len(asked) > 3 else 0.5  # of two letters one may be another's
    found = begun if len(begun) == 1 else difflib.get_close_matches(asked, begun or known, n=1, cutoff=least)
    return f"; did you mean {known[found[0]]!r}?" if found else ""


class RankError(RuntimeError):
    """Another rank of this job failed. The message names it and carries its traceback."""


class HangError(RuntimeError):
    """No batch was finished for the time that ``Fit(timeout=)`` allows. The message names the ranks that lag, and where they are."""

    waiting = False
    """This rank only waited for those that lag."""


class MismatchError(RuntimeError):
    """The ranks came to one collective with different operations, shapes or dtypes (found by ``debug=True``)."""


class FolderInUse(RuntimeError):
    """Another run that is going on writes into the folder that this one would go on in. The message names it."""


class CheckError(RuntimeError):
    """What ``check=True`` found to differ between the ranks before the first step."""


class DoesNotFit(ValueError):
    """The weights of a checkpoint are not those of the module. The message names what differs, and how the saved module was made."""
