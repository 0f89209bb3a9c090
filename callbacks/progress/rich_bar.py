"""A progress bar in rich's look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .base import ProgressBar
from .estimates import Progress, duration, speed
from .screen import Screen

if TYPE_CHECKING:
    from rich.console import Console


class RichProgressBar(ProgressBar):
    """Shows epochs, steps, rate, time left and metrics, in rich's look; see :class:`ProgressBar` for where and how.

    ::

        epoch 1/9 ━━━━━━━━━━━━━─────────────  45/100  step 145/1000  12.3 step/s  ETA 1:23
        validation ━━━━━━━━━━━──────────────  13/40   31.0 batch/s  ETA 0:01
        train/loss=0.1234  val/loss=0.2345  val/accuracy=0.9321

    The time left is that of the whole training and includes validation. Narrow terminals show less of the bar, but always
    the figures that matter: epoch, count and time left.
    """

    def __init__(self, refresh_rate: float = 10.0, interval_s: float = 30.0, console: Console | None = None) -> None:
        """Arguments and errors: as in :class:`ProgressBar`."""
        super().__init__(refresh_rate, interval_s, console)

    def bar(self, shown: Progress, screen: Screen) -> str:
        limit = screen.width - 1
        count = f"{shown.done:>{len(str(shown.total))}}/{shown.total}" if shown.total is not None else str(shown.done)
        if shown.total is None:
            count += f" {shown.unit}{'' if shown.done == 1 else 'es' if shown.unit == 'batch' else 's'}"
        parts = {
            "title": shown.title,
            "bar": "",
            "count": count,
            "whole": "",
            "rate": "",
            "elapsed": "",
            "eta": f"ETA {duration(shown.eta_s)}",
        }
        optional_parts = {"rate": speed(shown.rate, shown.unit), "bar": "-" * 10, "whole": shown.whole}
        optional_parts["elapsed"] = f"{duration(shown.elapsed_s)} elapsed" if limit >= 110 else ""
        for name, text in optional_parts.items():
            if text and len(_joined({**parts, name: text})) <= limit and (name != "bar" or shown.fraction is not None):
                parts[name] = text
        if parts["bar"]:
            length = min(40, 10 + limit - len(_joined(parts)))
            parts["bar"] = _bar_text(shown.fraction or 0.0, length, screen.color)
            return _joined(parts)
        return _joined(parts)[:limit]


def _joined(parts: Mapping[str, str]) -> str:
    return "  ".join(text for text in parts.values() if text)


def _bar_text(fraction: float, length: int, color: bool) -> str:
    full = int(fraction * length)
    done, ahead = "━" * full, "─" * (length - full)
    return f"\x1b[32m{done}\x1b[0;2m{ahead}\x1b[0m" if color else done + ahead
