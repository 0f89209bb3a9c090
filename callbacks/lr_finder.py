"""Finds a learning rate for a module: trains a copy with growing learning rates, and looks where the loss falls."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine import Callback, DataModule, Device, Fit, Loss, Run, TrainModule, separate

from .trial import is_main, log, train_copy

_SMOOTHING = 0.98
_WIDTH, _HEIGHT, _MARGIN = 720, 420, 64
_BELOW_LOWEST = 10.0
_SMOOTHING_WIDTH = 0.05
"""Standard deviation of the smoothing's weights, as a share of the sweep."""
_REPETITIONS = 200
_LONGEST = 1000
"""Longest sweep whose steps are smoothed one by one: time and memory grow with the square."""
_PER_DECADE = 10
"""Fewest steps for a factor of 10 in the learning rate: with fewer, chance decides where the loss is lowest."""
_UNSURE = 30.0
"""Widest range (highest divided by lowest) that is still a suggestion."""


def find_lr(
    module: TrainModule,
    train_loader: Any = None,
    *,
    datamodule: DataModule | None = None,
    fit: Fit | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_steps: int = 100,
    mode: Literal["exponential", "linear"] = "exponential",
    early_stop_threshold: float | None = 4.0,
    smoothing: float = _SMOOTHING,
    picture: str | Path | None = "find_lr.svg",
) -> LRSweep:
    """Train a copy of ``module`` for ``num_steps`` steps, with a learning rate that grows from ``min_lr`` to ``max_lr``.

    The search leaves the module, the loader and all random number generators as they were; set the learning rate yourself. With
    several ranks, call it on all of them: each gets the same result. It runs without learning rate schedulers, validation and callbacks.
    All parameter groups get the same learning rate. Based on Smith, "Cyclical Learning Rates for Training Neural Networks", 2017. Losses of
    small batches are noisy: give at least 10 steps for each factor of 10 between the learning rates. The log says in which range the
    suggestion is stable, and warns if the curve is too short or too noisy.

    Args:
        module, train_loader, datamodule: as in :meth:`engine.Fit.run`.
        fit: gives strategy, devices, precision, accumulation window and clipping; default: a plain ``Fit()``.
        num_steps: optimizer steps.
        mode: the learning rate grows by a constant ``"exponential"`` factor or by a constant ``"linear"`` difference.
        early_stop_threshold: stop when the smoothed loss is this many times the smallest so far; ``None``: only when the loss is not finite.
        smoothing: weight of the past in the moving average of the loss that ``early_stop_threshold`` looks at; 0: no average.
        picture: the path of the picture, in ``root_dir`` unless it is absolute; ``None``: no picture. Formats other than ``.svg`` need matplotlib.

    Returns:
        The losses; ``find_lr(...).suggestion()`` is a tenth of the learning rate at which the smoothed loss is lowest, and ``.estimate()``
        has its range and warning too.

    Raises:
        ValueError: an argument is not valid, or the module optimizes manually or has several optimizers.
    """
    _check(min_lr, max_lr, num_steps, mode, early_stop_threshold, smoothing)
    if isinstance(module, TrainModule) and not module.automatic_optimization:
        raise ValueError(
            f"find_lr: {type(module).__name__} has automatic_optimization = False and steps by itself: try learning rates in training_step"
        )
    recorder = _SweepRecorder(LRSweep(mode), min_lr, max_lr, num_steps, early_stop_threshold, smoothing)
    # A loss that diverges is the end of the sweep, not an error.
    train_copy(module, train_loader, datamodule, fit, recorder, max_steps=num_steps, on_nonfinite=None)
    sweep = recorder.sweep
    sweep.smooth()
    if is_main(fit):
        estimate = sweep.estimate()
        if estimate is None:
            summary = "too few losses for a suggestion"
        else:
            summary = f"suggestion {estimate.suggestion:.3g}, stable from {estimate.low:.3g} to {estimate.high:.3g}"
        if picture is not None:
            root = (Fit() if fit is None else fit).settings.root_dir
            summary += f"; picture: {sweep.save(root / picture)}"
        log().info("find_lr: %s", summary)
        if estimate is not None and estimate.warning:
            log().warning("find_lr: do not rely on the suggestion %.3g: %s", estimate.suggestion, estimate.warning)
    return sweep


def _check(min_lr: float, max_lr: float, num_steps: int, mode: str, threshold: float | None, smoothing: float) -> None:
    if mode not in ("exponential", "linear"):
        raise ValueError(f"find_lr(mode={mode!r}): it must be 'exponential' or 'linear'")
    if not 0.0 <= min_lr < max_lr < math.inf or (mode == "exponential" and min_lr == 0.0):
        raise ValueError(
            f"find_lr(min_lr={min_lr}, max_lr={max_lr}): give 0 < min_lr < max_lr (linear: min_lr may be 0)"
        )
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 2:
        raise ValueError(f"find_lr(num_steps={num_steps!r}): it must be a number of steps, at least 2")
    if threshold is not None and not threshold > 1.0:
        raise ValueError(f"find_lr(early_stop_threshold={threshold}): it must be above 1, or None")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"find_lr(smoothing={smoothing}): it must be in [0, 1)")


class _SweepRecorder(Callback):
    """Sets the learning rate before each step, and records the loss."""

    def __init__(
        self,
        sweep: LRSweep,
        min_lr: float,
        max_lr: float,
        num_steps: int,
        threshold: float | None,
        smoothing: float,
    ) -> None:
        self.sweep, self.smoothing, self.threshold = sweep, smoothing, threshold
        self._span = min_lr, max_lr, num_steps
        self._sums: list[Tensor] = []
        self._average, self._lowest = 0.0, math.inf

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if len(run.optimizers) != 1:
            raise ValueError(
                f"find_lr: {type(module).__name__} has {len(run.optimizers)} optimizers, and find_lr needs exactly one"
            )
        run.set_optimizers(run.optimizers, [], True)  # schedulers would change the learning rate too

    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self._sums:
            lr = self._rate_at(run.step)
            for group in run.optimizers[0].param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._sums.append(_loss_and_weight(outputs, run.recorder.size, run.device))
        if not run.engine.sync_gradients:
            return
        total, weight = run.engine.reduce(torch.stack(self._sums).sum(dim=0)).tolist()
        self._sums.clear()
        if not self.sweep.stopped and weight:
            self._record_loss(float(run.optimizers[0].param_groups[0]["lr"]), total / weight)
            if self.sweep.stopped:
                run.stop("the loss diverged")

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Log nothing."""

    def _rate_at(self, step: int) -> float:
        low, high, steps = self._span
        share = min(step / (steps - 1), 1.0)
        return low * (high / low) ** share if self.sweep.mode == "exponential" else low + (high - low) * share

    def _record_loss(self, lr: float, loss: float) -> None:
        results, beta, best = self.sweep.results, self.smoothing, self._lowest
        results["lr"].append(lr)
        results["loss"].append(loss)
        self._average = beta * self._average + (1 - beta) * loss
        smoothed = self._average / (1 - beta ** len(results["lr"]))
        self._lowest = min(best, smoothed)
        # Written for negative losses as well; for positive ones this is smoothed > threshold * best.
        grown = self.threshold is not None and smoothed > best + (self.threshold - 1) * abs(best)
        self.sweep.stopped = not math.isfinite(loss) or grown


def _loss_and_weight(outputs: Any, size: int, device: torch.device) -> Tensor:
    """A micro-batch's loss times its weight, and the weight. Shape [2], fp64 (fp32 on a device without fp64).

    ``size`` is its number of samples; 0 means a repeated micro-batch, -1 an unknown number, which weighs as one.
    """
    wide = Device(device).wide
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    if loss is None or size == 0:
        return torch.zeros(2, dtype=wide, device=device)
    weight: Tensor | float = loss.count if isinstance(loss, Loss) else max(size, 1)
    total = loss.sum if isinstance(loss, Loss) else loss * weight
    pair = [torch.as_tensor(value, dtype=wide, device=device).detach().reshape(()) for value in (total, weight)]
    return torch.stack(pair)


class Estimate(NamedTuple):
    """Learning rate that a sweep suggests."""

    suggestion: float
    low: float
    high: float
    """Bounds of the suggestion: in 8 of 10 repetitions of the sweep it stays between them, as far as the noise can tell."""
    warning: str
    """Why not to rely on the suggestion, and what to do; empty if nothing is wrong."""


@dataclass
class LRSweep:
    """Losses at growing learning rates. All ranks have equal values."""

    mode: Literal["exponential", "linear"]
    """How the learning rate grew."""
    results: dict[str, list[float]] = field(default_factory=lambda: {"lr": [], "loss": [], "smoothed": []})
    """One entry a step: ``"lr"``; ``"loss"``: the step's mean loss over all ranks, before the step; ``"smoothed"``: the loss smoothed over
    the neighbouring steps on both sides."""
    stopped: bool = False
    """Whether the loss diverged before ``max_lr``."""

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """A tenth of the learning rate at which the smoothed loss is lowest; ``None``: too few losses.

        Args:
            skip_begin: how many of the first losses to leave out, at most a third of all.
            skip_end: how many of the last losses to leave out.

        Raises:
            ValueError: ``skip_begin`` or ``skip_end`` is negative.
        """
        estimate = self.estimate(skip_begin, skip_end)
        return None if estimate is None else estimate.suggestion

    def estimate(self, skip_begin: int = 10, skip_end: int = 1) -> Estimate | None:
        """:meth:`suggestion` with the range in which it is stable, and a warning if the curve is too noisy or too short to trust it.

        For the range, the distances of the losses from the smoothed curve get random signs, 200 times (a "wild bootstrap", Wu 1986), and the
        suggestion is computed again from each curve. The range is never narrower than the smoothing can resolve.
        """
        if skip_begin < 0 or skip_end < 0:
            raise ValueError(f"suggestion(skip_begin={skip_begin}, skip_end={skip_end}): both must be at least 0")
        lrs, losses, block = self._finite_part()
        first, last = min(skip_begin // block, len(losses) // 3), len(losses) - math.ceil(skip_end / block)
        if last - first < 2:
            return None
        weights = _smoothing_weights(len(losses))
        capped, noise = _capped_losses(losses)
        curve = weights @ capped
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (len(losses), _REPETITIONS))
        repeated = weights @ (curve[:, None] + (capped - curve)[:, None] * signs)
        lowest = first + int(curve[first:last].argmin())
        places = first + repeated[first:last].argmin(axis=0)
        resolution = math.ceil(_smoothing_width(len(losses)))
        low = min(int(np.quantile(places, 0.1)), max(lowest - resolution, 0))
        high = max(math.ceil(np.quantile(places, 0.9)), min(lowest + resolution, len(losses) - 1))
        suggestion, lower, upper = (
            max(float(lrs[place]) / _BELOW_LOWEST, float(lrs[0])) for place in (lowest, low, high)
        )
        fall = float(curve[: max(first, 1)].mean() - curve[lowest])
        clear = fall > 3 * noise * float(np.sqrt((weights[lowest] ** 2).sum()))
        return Estimate(suggestion, lower, upper, self._warning(clear, lowest == last - 1, lower, upper))

    def smooth(self) -> None:
        """Fill ``results["smoothed"]`` from ``results["loss"]``; ``find_lr`` has done so."""
        _, losses, block = self._finite_part()
        curve = _smoothing_weights(len(losses)) @ _capped_losses(losses)[0]
        steps = np.arange(len(losses) * block)
        smoothed = np.interp(steps, np.arange(len(losses)) * block + (block - 1) / 2, curve) if len(losses) else curve
        padding = [math.nan] * (len(self.results["loss"]) - len(steps))
        self.results["smoothed"] = [*smoothed.tolist(), *padding]

    def _finite_part(self) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Learning rates and losses before the first loss that is NaN or infinite, and the steps of an entry: long sweeps are means of blocks."""
        losses = np.array(self.results["loss"], dtype=np.float64)
        count = int(np.append(np.isfinite(losses), False).argmin())
        block = math.ceil(count / _LONGEST) or 1
        means = (
            np.array(values[: count // block * block], dtype=np.float64).reshape(-1, block).mean(axis=1)
            for values in (self.results["lr"], self.results["loss"])
        )
        return next(means), next(means), block

    def _warning(self, clear: bool, at_end: bool, low: float, high: float) -> str:
        lrs = self.results["lr"]
        decades = math.log10(lrs[-1] / lrs[0]) if self.mode == "exponential" else 1.0
        if len(lrs) < _PER_DECADE * decades:
            return (
                f"{len(lrs)} steps are few for learning rates from {lrs[0]:.3g} to {lrs[-1]:.3g}: "
                f"give num_steps={math.ceil(2 * _PER_DECADE * decades)} or a narrower range"
            )
        if not clear:
            return "the loss hardly falls beyond its noise: give a larger max_lr, larger batches or accumulate_grad_batches, or more num_steps"
        if at_end and not self.stopped:
            return "the loss still falls at the largest learning rate: give a larger max_lr"
        if high > _UNSURE * low:
            return "the loss is too noisy: give more num_steps, or larger batches or accumulate_grad_batches"
        return ""

    def save(self, path: str | Path, suggest: bool = True) -> Path:
        """Write the picture: ``.svg`` needs nothing more, any other format (``.png``, ``.pdf``) needs matplotlib.

        Args:
            suggest: mark :meth:`suggestion` and the range in which it is stable.

        Raises:
            ModuleNotFoundError: matplotlib is needed and not installed.
        """
        path = Path(path).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        separate(path)
        if path.suffix.lower() == ".svg":
            path.write_text(self._svg(self.estimate() if suggest else None), encoding="utf-8")
        else:
            canvas = _matplotlib("matplotlib.backends.backend_agg").FigureCanvasAgg  # draws without a screen
            figure = self._draw(_matplotlib("matplotlib.figure").Figure(layout="constrained"), suggest)
            canvas(figure)
            figure.savefig(path)
        return path

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the sweep with matplotlib: into a new figure, or into ``ax``. Returns the figure; ``show`` opens its window.

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
        lrs, estimate = self.results["lr"], self.estimate() if suggest else None
        ax.plot(lrs, self.results["loss"], ".", color="#9bbce0", label="loss of each step")
        ax.plot(lrs, self.results["smoothed"], color="#1f5fa8", label="smoothed")
        if estimate is not None:
            ax.axvspan(estimate.low, estimate.high, color="#c0392b", alpha=0.12, label=_range_text(estimate))
            ax.axvline(
                estimate.suggestion, color="#c0392b", linestyle="--", label=f"suggestion: {estimate.suggestion:.3g}"
            )
            ax.set_title(estimate.warning, fontsize="small", wrap=True)
        if lrs:
            ax.set_ylim(*self._loss_limits())
        ax.set_xscale("log" if self.mode == "exponential" else "linear")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        ax.legend()
        return figure

    def _loss_limits(self) -> tuple[float, float]:
        """Lowest and highest loss in the picture: of an explosion of the loss, it shows only the beginning."""
        losses = self._finite_part()[1]
        if not len(losses):
            return 0.0, 1.0
        low, start = float(losses.min()), float(losses[: max(1, len(losses) // 3)].max())
        high = min(float(losses.max()), start + 0.5 * (start - low))
        space = 0.05 * (high - low) or 0.5
        return low - space, high + space

    def _svg(self, estimate: Estimate | None) -> str:
        logarithmic = self.mode == "exponential"
        lrs = [math.log10(lr) for lr in self.results["lr"]] if logarithmic else self.results["lr"]
        low, high = self._loss_limits()
        first_lr, last_lr = (min(lrs), max(lrs)) if lrs else (0.0, 1.0)
        bottom = _HEIGHT - _MARGIN

        def x(lr: float) -> float:
            return _MARGIN + (lr - first_lr) / ((last_lr - first_lr) or 1.0) * (_WIDTH - 2 * _MARGIN)

        def y(loss: float) -> float:
            return bottom - (loss - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)

        def text(at_x: float, at_y: float, content: str, anchor: str = "middle", style: str = "") -> str:
            return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}"{style}>{escape(content)}</text>'

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="13" role="img">',
            f'<title>loss over the learning rate</title><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        ]
        if estimate is not None:
            best, *bounds = (
                x(math.log10(lr) if logarithmic else lr) for lr in (estimate.suggestion, estimate.low, estimate.high)
            )
            parts += [
                f'<rect x="{bounds[0]:.1f}" y="{_MARGIN}" width="{bounds[1] - bounds[0]:.1f}" height="{bottom - _MARGIN}" '
                'fill="#c0392b" fill-opacity="0.12"/>',
                f'<path d="M{best:.1f} {_MARGIN}V{bottom}" stroke="#c0392b" stroke-width="1.5" stroke-dasharray="4 3"/>',
                text(
                    best,
                    _MARGIN - 24,
                    f"suggestion: {estimate.suggestion:.3g}",
                    style=' fill="#c0392b" font-weight="bold"',
                ),
                text(best, _MARGIN - 8, _range_text(estimate), style=' fill="#c0392b"'),
                text(_WIDTH / 2, 16, estimate.warning, style=' font-size="11"'),
            ]
        for tick in _ticks(first_lr, last_lr, whole=logarithmic):
            parts.append(f'<path d="M{x(tick):.1f} {_MARGIN}V{bottom}" stroke="#ddd"/>')
            parts.append(text(x(tick), bottom + 18, f"{10**tick:.3g}" if logarithmic else f"{tick:.3g}"))
        for tick in _ticks(low, high):
            parts.append(f'<path d="M{_MARGIN} {y(tick):.1f}H{_WIDTH - _MARGIN}" stroke="#ddd"/>')
            parts.append(text(_MARGIN - 8, y(tick) + 4, f"{tick:.3g}", "end"))
        steps = [
            (x(lr), y(loss), y(smoothed))
            for lr, loss, smoothed in zip(lrs, self.results["loss"], self.results["smoothed"], strict=True)
            if math.isfinite(loss) and math.isfinite(smoothed)
        ]
        parts += [
            f'<circle cx="{at:.1f}" cy="{max(loss, _MARGIN):.1f}" r="2.2" fill="#9bbce0"/>' for at, loss, _ in steps
        ]
        points = " ".join(f"{at:.1f},{max(smoothed, _MARGIN):.1f}" for at, _, smoothed in steps)
        parts += [
            f'<polyline fill="none" stroke="#1f5fa8" stroke-width="2" points="{points}"/>',
            f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="#555"/>',
            text(_WIDTH / 2, bottom + 38, f"learning rate{' (logarithmic)' if logarithmic else ''}"),
            f'<text transform="translate(18 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">loss</text>',
            f'<circle cx="{_MARGIN}" cy="{_HEIGHT - 14}" r="3" fill="#9bbce0"/>',
            text(_MARGIN + 10, _HEIGHT - 10, "loss of each step", "start"),
            f'<path d="M{_MARGIN + 140} {_HEIGHT - 14}h24" stroke="#1f5fa8" stroke-width="2"/>',
            text(_MARGIN + 170, _HEIGHT - 10, "smoothed", "start"),
        ]
        return "\n".join([*parts, "</svg>", ""])


def _range_text(estimate: Estimate) -> str:
    return f"stable from {estimate.low:.3g} to {estimate.high:.3g}"


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Between two and about ten round numbers from ``low`` to ``high``; ``whole``: whole numbers only, if the range has two."""
    if whole and math.floor(high + 1e-9) > math.ceil(low - 1e-9):
        return [float(tick) for tick in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    if whole or high <= low:
        return [low, high]
    unit = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = next(step for step in (unit, 2 * unit, 5 * unit) if (high - low) / step <= 10)
    return [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _smoothing_width(count: int) -> float:
    return max(1.5, _SMOOTHING_WIDTH * count)


def _smoothing_weights(count: int) -> NDArray[Any]:
    """Weights of the smoothing, shape [count, count]: row ``i`` times the losses is the smoothed loss of step ``i``.

    It is the value at ``i`` of the straight line that fits the neighbours best (local linear regression with Gaussian weights), which follows
    a slope without a delay, up to both ends; a moving average does not.
    """
    away = np.arange(count)[None, :] - np.arange(count)[:, None]
    near = np.exp(-0.5 * (away / _smoothing_width(count)) ** 2)
    sums = [(near * away**power).sum(axis=1, keepdims=True) for power in range(3)]
    determinant = sums[0] * sums[2] - sums[1] ** 2
    weights: NDArray[Any] = near * (sums[2] - sums[1] * away) / np.where(determinant > 0, determinant, 1.0)
    return weights


def _capped_losses(losses: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """The losses, cut off at the level where they began, and the standard deviation of their noise.

    An explosion is cut off so that it does not bend the curve before it. The noise comes from the median difference of neighbours, which a trend
    and a few outliers do not change.
    """
    if len(losses) < 2:
        return losses, 0.0
    noise = 1.4826 * float(np.median(np.abs(np.diff(losses)))) / math.sqrt(2.0)
    return np.minimum(losses, np.median(losses[: max(3, len(losses) // 3)]) + noise), noise


def _matplotlib(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this picture needs matplotlib: pip install matplotlib, or save it as .svg, which needs nothing"
        ) from error
