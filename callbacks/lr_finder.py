"""A learning rate for a module: train a copy with growing learning rates, and look where the loss falls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine import Callback, DataModule, Device, Fit, Loss, Run, TrainModule

from .lr_sweep import LRSweep
from .trial import is_main, log, train_copy

_SMOOTHING = 0.98


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

    The search restores the module, the loader and the state of all random number generators; set the learning rate yourself. With
    several ranks, call it on all of them: each gets the same result. Learning rate schedulers are left out, and so are validation and callbacks.
    All parameter groups get the same learning rate. Based on Smith, "Cyclical Learning Rates for Training Neural Networks", 2017. Losses of
    small batches are noisy: give at least 10 steps for each factor of 10 between the learning rates. The log says in which range the
    suggestion is stable, and warns if the curve is too short or too noisy.

    Args:
        module, train_loader, datamodule: as in :meth:`engine.Fit.run`.
        fit: gives strategy, devices, precision, accumulation window and clipping; by default a plain ``Fit()``.
        num_steps: optimizer steps.
        mode: the learning rate grows by a constant ``"exponential"`` factor or by a constant ``"linear"`` difference.
        early_stop_threshold: stop when the smoothed loss is this many times the smallest so far; ``None``: only when the loss is not finite.
        smoothing: weight of the past in the moving average of the loss that ``early_stop_threshold`` looks at; 0: none.
        picture: the file for the picture, in ``root_dir`` unless it is absolute; ``None``: none. Formats other than ``.svg`` need matplotlib.

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
    sweep = _Sweep(LRSweep(mode), min_lr, max_lr, num_steps, early_stop_threshold, smoothing)
    # A loss that diverges is the end of the sweep, not an error.
    train_copy(module, train_loader, datamodule, fit, sweep, max_steps=num_steps, on_nonfinite=None)
    found = sweep.found
    found.smooth()
    if is_main(fit):
        estimate = found.estimate()
        if estimate is None:
            said = "too few losses for a suggestion"
        else:
            said = f"suggestion {estimate.suggestion:.3g}, stable from {estimate.low:.3g} to {estimate.high:.3g}"
        if picture is not None:
            root = (Fit() if fit is None else fit).settings.root_dir
            said += f"; picture: {found.save(root / picture)}"
        log().info("find_lr: %s", said)
        if estimate is not None and estimate.warning:
            log().warning("find_lr: do not rely on the suggestion %.3g: %s", estimate.suggestion, estimate.warning)
    return found


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


class _Sweep(Callback):
    """Sets the learning rate before each step, and keeps the loss."""

    def __init__(
        self,
        found: LRSweep,
        min_lr: float,
        max_lr: float,
        num_steps: int,
        threshold: float | None,
        smoothing: float,
    ) -> None:
        self.found, self.smoothing, self.threshold = found, smoothing, threshold
        self._span = min_lr, max_lr, num_steps
        self._sums: list[Tensor] = []
        self._average, self._lowest = 0.0, math.inf

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        if len(run.optimizers) != 1:
            raise ValueError(f"find_lr: {type(module).__name__} has {len(run.optimizers)} optimizers, it must have one")
        run.set_optimizers(run.optimizers, [], True)  # schedulers would change the learning rate too

    def on_train_batch_start(self, run: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if not self._sums:
            lr = self._lr(run.step)
            for group in run.optimizers[0].param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._sums.append(_weighted(outputs, run.recorder.size, run.device))
        if not run.engine.sync_gradients:
            return
        total, weight = run.engine.reduce(torch.stack(self._sums).sum(dim=0)).tolist()
        self._sums.clear()
        if not self.found.stopped and weight:
            self._keep(float(run.optimizers[0].param_groups[0]["lr"]), total / weight)
            if self.found.stopped:
                run.stop("the loss diverged")

    def on_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        """Nothing is shown."""

    def _lr(self, step: int) -> float:
        low, high, steps = self._span
        share = min(step / (steps - 1), 1.0)
        return low * (high / low) ** share if self.found.mode == "exponential" else low + (high - low) * share

    def _keep(self, lr: float, loss: float) -> None:
        results, beta, best = self.found.results, self.smoothing, self._lowest
        results["lr"].append(lr)
        results["loss"].append(loss)
        self._average = beta * self._average + (1 - beta) * loss
        smoothed = self._average / (1 - beta ** len(results["lr"]))
        self._lowest = min(best, smoothed)
        # Written for negative losses as well; for positive ones this is smoothed > threshold * best.
        grown = self.threshold is not None and smoothed > best + (self.threshold - 1) * abs(best)
        self.found.stopped = not math.isfinite(loss) or grown


def _weighted(outputs: Any, size: int, device: torch.device) -> Tensor:
    """A micro-batch's loss times its weight, and the weight. Shape [2], fp64 (fp32 on a device without)."""
    wide = Device(device).wide
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    if loss is None or size == 0:
        return torch.zeros(2, dtype=wide, device=device)
    weight: Any = loss.count if isinstance(loss, Loss) else max(size, 1)
    total = loss.sum if isinstance(loss, Loss) else loss * weight
    pair = [torch.as_tensor(value, dtype=wide, device=device).detach().reshape(()) for value in (total, weight)]
    return torch.stack(pair)
