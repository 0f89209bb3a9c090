"""Numbers, durations, times and statuses as the page's texts."""

from __future__ import annotations

import math
from datetime import datetime

from ..text import Html, element
from .runs import RunData

_GOOD, _BAD = ("completed", "stopped"), ("failed", "no end recorded", "interrupted")


def run_status(run: RunData) -> Html:
    """How a run ended, in a color."""
    kind = "good" if run.status in _GOOD else "bad" if run.status in _BAD else "plain"
    return element("strong", run.status, class_=f"status {kind}")


def number(value: float) -> str:
    """A number as text with six digits."""
    return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "∞")


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``1 h 02 min``, ``3 min 20 s``, ``4.21 s``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {remainder:02} s"


def moment(seconds: float | None) -> str:
    """Return a time as a date and a time of day in this machine's time zone; empty if it is not valid."""
    try:
        return "" if not seconds else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return ""
