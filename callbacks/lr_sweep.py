"""The result of ``find_lr``: losses over learning rates, a suggestion, and a picture."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

_WIDTH, _HEIGHT, _MARGIN = 720, 420, 64


@dataclass
class LRSweep:
    """Losses at growing learning rates, the same on all ranks."""

    mode: Literal["exponential", "linear"]
    """How the learning rate grew."""
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": [], "smoothed": []})
    """One entry a step: ``"lr"``; ``"loss"``: the step's mean loss over all ranks, before the step; ``"smoothed"``: its moving average, which
    Lightning's finder has under ``"loss"``."""
    stopped: bool = False
    """The loss diverged before ``max_lr``."""

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The learning rate at which the smoothed loss falls fastest (per step); ``None``: too few losses.

        Args:
            skip_begin: how many of the first losses to leave out.
            skip_end: how many of the last losses to leave out.

        Raises:
            ValueError: one of them is negative.
        """
        if skip_begin < 0 or skip_end < 0:
            raise ValueError(f"suggestion(skip_begin={skip_begin}, skip_end={skip_end}): both must be at least 0")
        losses = self.results["smoothed"]
        kept = [i for i in range(skip_begin, len(losses) - skip_end) if math.isfinite(losses[i])]
        if len(kept) < 2:
            return None
        slopes = _slopes([losses[i] for i in kept])
        return self.results["lr"][kept[slopes.index(min(slopes))]]

    def save(self, path: str | Path, suggest: bool = True) -> Path:
        """Write the picture: ``.svg`` needs nothing, any other format (``.png``, ``.pdf``) needs matplotlib.

        Args:
            suggest: mark :meth:`suggestion`.

        Raises:
            ModuleNotFoundError: matplotlib is needed and not installed.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".svg":
            path.write_text(self._svg(self.suggestion() if suggest else None), encoding="utf-8")
        else:
            canvas = _matplotlib("matplotlib.backends.backend_agg").FigureCanvasAgg  # draws without a screen
            figure = self._draw(_matplotlib("matplotlib.figure").Figure(layout="constrained"), suggest)
            canvas(figure)
            figure.savefig(path)
        return path

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """A matplotlib figure, or that of ``ax``. ``show``: open its window.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if ax is not None:
            self._draw(ax.figure, suggest, ax)
            return ax.figure
        pyplot = _matplotlib("matplotlib.pyplot")
        figure = self._draw(pyplot.figure(layout="constrained"), suggest)
        if show:
            pyplot.show()
        return figure

    def _draw(self, figure: Any, suggest: bool, ax: Any = None) -> Any:
        ax = figure.add_subplot() if ax is None else ax
        lrs, best = self.results["lr"], self.suggestion() if suggest else None
        ax.plot(lrs, self.results["loss"], alpha=0.3, label="loss")
        ax.plot(lrs, self.results["smoothed"], label="smoothed")
        if best is not None:
            ax.axvline(best, color="tab:red", label=f"suggestion: {best:.3g}")
        ax.set_xscale("log" if self.mode == "exponential" else "linear")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        ax.legend()
        return figure

    def _svg(self, best: float | None) -> str:
        lrs = [math.log10(lr) for lr in self.results["lr"]] if self.mode == "exponential" else self.results["lr"]
        smoothed = self.results["smoothed"]
        finite = [loss for loss in smoothed if math.isfinite(loss)] or [0.0]
        low, high = min(finite), max(finite)
        left, right = (min(lrs), max(lrs)) if lrs else (0.0, 1.0)

        def x(lr: float) -> float:
            return _MARGIN + (lr - left) / ((right - left) or 1.0) * (_WIDTH - 2 * _MARGIN)

        def y(loss: float) -> float:
            share = min(1.0, max(0.0, (loss - low) / ((high - low) or 1.0)))  # a raw loss may lie outside
            return _HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN)

        def line(losses: Sequence[float], style: str) -> str:
            points = " ".join(
                f"{x(lr):.1f},{y(loss):.1f}" for lr, loss in zip(lrs, losses, strict=True) if math.isfinite(loss)
            )
            return f'<polyline fill="none" {style} points="{points}"/>'

        def text(at_x: float, at_y: float, content: str, anchor: str = "middle") -> str:
            return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

        bottom, title = _HEIGHT - _MARGIN, "loss over the learning rate"
        shown = [10**lr for lr in (left, right)] if self.mode == "exponential" else [left, right]
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13" role="img">',
            f'<title>{title}</title><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="#555"/>',
            line(self.results["loss"], 'stroke="#9bbce0"'),
            line(smoothed, 'stroke="#1f5fa8" stroke-width="2"'),
            text(x(left), bottom + 20, f"{shown[0]:.3g}"),
            text(x(right), bottom + 20, f"{shown[1]:.3g}"),
            text(_WIDTH / 2, bottom + 40, f"learning rate ({self.mode} scale)"),
            text(_MARGIN - 8, y(low), f"{low:.3g}", "end"),
            text(_MARGIN - 8, y(high), f"{high:.3g}", "end"),
        ]
        if best is not None:
            at = x(math.log10(best) if self.mode == "exponential" else best)
            parts.append(f'<path d="M{at:.1f} {_MARGIN}V{bottom}" stroke="#c0392b" stroke-dasharray="4 3"/>')
            parts.append(text(at, _MARGIN - 10, f"suggestion: {best:.3g}"))
        return "\n".join([*parts, "</svg>", ""])


def _slopes(values: Sequence[float]) -> list[float]:
    """Differences per step: central ones, one-sided at the ends."""
    last = len(values) - 1
    return [
        (values[min(i + 1, last)] - values[max(i - 1, 0)]) / (min(i + 1, last) - max(i - 1, 0)) for i in range(last + 1)
    ]


def _matplotlib(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this picture needs matplotlib: pip install matplotlib, or save it as .svg, which needs nothing"
        ) from error
