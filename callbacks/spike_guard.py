"""Leaves out steps whose loss or gradient norm is far beyond the usual."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine import Callback, Device, Loss, Run, TrainModule

_log = logging.getLogger("engine")
_MONITORS = ("loss", "grad_norm")
_ACTIONS = ("skip", "rollback", "raise")


class SpikeGuard(Callback):
    """Leaves out each step whose loss or gradient norm is more than ``sigmas`` standard deviations above the mean of the latest ``window`` steps.

    The decision is made on the device, before the step is applied, and is the same on all ranks: parameters, optimizers, schedulers and
    counters are as if the step's batches were not in the data. (Random numbers that the batches have used stay used, and running statistics of batch
    norms have seen them.) On the CPU, and with optimizers that are not fused, the step waits for the decision, as with ``on_nonfinite``; with
    fused optimizers on a device nothing waits. Values of steps that are left out do not enter the window. Losses are means over the step's
    micro-batches and all ranks.

    Actions: ``"skip"`` continues with the next batches. ``"rollback"`` also takes weights, optimizers and schedulers of the newest
    checkpoint, because the steps before a spike may have led to it; data and counters continue after the bad batches. ``"raise"`` ends the
    run with an error; the parameters stay as they were before the step.

    A loss or norm that is not finite is a spike too, unless ``on_nonfinite`` or fp16's loss scale leaves the step out. The metric
    ``spikes`` counts the steps that were left out.
    """

    def __init__(
        self,
        monitor: Literal["loss", "grad_norm"] | Sequence[Literal["loss", "grad_norm"]] = _MONITORS,  # type: ignore[assignment]
        action: Literal["skip", "rollback", "raise"] = "skip",
        window: int = 100,
        sigmas: float = 6.0,
        warmup_steps: int = 20,
        patience: int = 10,
    ) -> None:
        """
        Args:
            monitor: the values that are compared: ``"loss"``, ``"grad_norm"`` (before clipping) or both.
            action: the action at a spike.
            window: number of steps over which mean and standard deviation are computed.
            sigmas: standard deviations above the mean from which a value is a spike.
            warmup_steps: steps before the first decision.
            patience: number of spikes in a row that raise an error: the training has diverged, or its level has changed.

        Raises:
            ValueError: an argument is not valid.
        """
        self.monitor = (monitor,) if isinstance(monitor, str) else tuple(monitor)
        if not self.monitor or not set(self.monitor) <= set(_MONITORS):
            raise ValueError(f"SpikeGuard(monitor={monitor!r}): it must be 'loss', 'grad_norm' or both")
        if action not in _ACTIONS:
            raise ValueError(f"SpikeGuard(action={action!r}): it must be 'skip', 'rollback' or 'raise'")
        for name, value, minimum in (
            ("window", window, 2),
            ("warmup_steps", warmup_steps, 2),
            ("patience", patience, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"SpikeGuard({name}={value!r}): it must be an int of at least {minimum}")
        if not sigmas > 0:
            raise ValueError(f"SpikeGuard(sigmas={sigmas!r}): it must be above 0")
        self.action, self.window, self.sigmas = action, window, sigmas
        self.warmup_steps, self.patience = warmup_steps, patience
        self.spikes = 0
        """Steps that were left out so far."""
        self._history: Tensor | None = None  # [monitors, window], fp64; column count % window is the next
        self._count: Tensor | None = None  # values that have entered the history, shape ()
        self._wide_dtype = torch.float64
        self._latest: Tensor | None = None  # the latest step's values and limits, [2, monitors]
        self._sums: list[Tensor] = []
        self._spike_pending = self._logs = False
        self._logged = -1
        self._spikes_in_a_row, self._latest_spike_step = 0, -1
        self._saved: list[Path | str] = []  # checkpoints that exist, oldest first

    # -- events of the run --------------------------------------------------------------------------------------------------------

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        self._check_run(run, module)
        self._wide_dtype = Device(run.device).wide
        if run.step == 0 or self._history is None or self._count is None:
            self.spikes = 0
            self._history = torch.zeros(len(self.monitor), self.window, dtype=self._wide_dtype)
            self._count = torch.zeros((), dtype=torch.int64)
        self._history, self._count = self._history.to(run.device, self._wide_dtype), self._count.to(run.device)
        self._columns = torch.arange(self.window, device=run.device)
        self._run, self._spikes_in_a_row, self._latest_spike_step, self._spike_pending = run, 0, -1, False
        self._saved = [] if run.last_checkpoint is None else [run.last_checkpoint]
        self._sums.clear()
        run.engine.prepare_optimizer(run.optimizers[0]).guard_by(self)  # all optimizers of the run step together

    def on_before_backward(self, run: Run, module: nn.Module, loss: Any) -> None:
        if "loss" in self.monitor and run.recorder.size:
            self._sums.append(_loss_and_weight(loss, run.recorder.size, run.device, self._wide_dtype))

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._spike_pending:
            self._spike_pending = False
            self._skip_or_roll_back(run)

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        if self._spike_pending:  # on a device the last step's verdict is known after its batch
            self._spike_pending = False
            self._skip_or_roll_back(run)

    # The count is not a result of a validation.
    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._logs, self._logged = True, -1

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._logs = False

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._logs = run.stage == "fit"

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if self._logs and step != self._logged:  # at an epoch's end the step may have been logged already
            self._logged = step
            metrics["spikes"] = float(self.spikes)

    def on_checkpoint_saved(self, run: Run, module: nn.Module, path: Path | str, score: float | None) -> None:
        self._saved.append(path)

    def on_checkpoint_removed(self, run: Run, module: nn.Module, path: Path | str) -> None:
        self._saved = [saved for saved in self._saved if saved != path]

    def teardown(self, run: Run, module: nn.Module, stage: str) -> None:
        self._run = None  # type: ignore[assignment]
        self._logs = False

    def state_dict(self) -> dict[str, Any]:
        if self._history is None or self._count is None:
            return {}
        return {"monitor": list(self.monitor), "history": self._history, "count": self._count, "spikes": self.spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._history = self._count = None
        if not state:
            return
        self.spikes = int(state["spikes"])
        if list(state["monitor"]) != list(self.monitor) or state["history"].shape[1] != self.window:
            _log.warning("SpikeGuard: monitor or window differ from the checkpoint's, so the window starts empty")
            return
        self._history, self._count = state["history"], state["count"]

    # -- the decision, called within the optimizer step --------------------------------------------------------------------------------

    def check(self, norm: Tensor) -> Tensor:
        """Return 1.0 if this step is a spike, else 0.0, on the device. ``norm``: norm of the step's gradients. Shapes ``()``."""
        history, count = self._history, self._count
        assert history is not None
        assert count is not None
        values = torch.stack(
            [self._mean_loss() if name == "loss" else norm.to(self._wide_dtype) for name in self.monitor]
        )
        filled = self._columns < count
        number = filled.sum()
        mean = history.sum(dim=1) / number
        deviations = (history - mean[:, None]).mul_(filled)
        sigma = (deviations.square().sum(dim=1) / (number - 1)).sqrt()
        # In a window of equal values the deviation is 0: a rounding difference must not count as a spike.
        limits = mean + (self.sigmas * sigma).clamp(min=1e-6 * mean.abs())
        high = (values > limits).any() & (count >= self.warmup_steps)
        spike = high | ~values.isfinite().all()
        entered = (self._columns == count % self.window) & ~spike
        self._history = torch.where(entered, values[:, None], history)
        self._count = count + ~spike
        self._latest = torch.stack([values, limits])
        return spike.float()

    def left_out(self) -> None:
        """Count a step that was left out; the action follows when its micro-batch is over."""
        self.spikes += 1
        step = self._run.step
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if step == self._latest_spike_step else 1
        self._latest_spike_step, self._spike_pending = step, True
        if self._run.is_main_process and self._latest is not None:
            values, limits = self._latest.tolist()  # waits for the device, at spikes only
            values_text = ", ".join(
                f"{name} {value:.4g} (limit {limit:.4g})"
                for name, value, limit in zip(self.monitor, values, limits, strict=True)
            )
            _log.warning("SpikeGuard: the step after step %d is left out: %s", step, values_text)

    # -- parts ------------------------------------------------------------------------------------------------------------------

    def _skip_or_roll_back(self, run: Run) -> None:
        if self.action == "raise":
            raise RuntimeError(
                f"SpikeGuard: the loss or the gradient norm of the step after step {run.step} is more than {self.sigmas:g} standard deviations above "
                "the mean (action='raise'); the parameters are those from before it. Look at the batch, or continue with action='skip'"
            )
        if self._spikes_in_a_row >= self.patience:
            raise RuntimeError(
                f"SpikeGuard: {self._spikes_in_a_row} steps in a row after step {run.step} were left out (patience={self.patience}): the training "
                "has diverged, or its level has changed. Lower the learning rate, or give more sigmas, a longer window or more patience"
            )
        if self.action == "rollback":
            run.finish_checkpoints()  # the newest may not be complete yet
            if not self._saved:
                _log.warning("SpikeGuard: no checkpoint has been saved yet, so the weights stay as they are")
                return
            run.roll_back(self._saved[-1])
            if run.is_main_process:
                _log.warning("SpikeGuard: back to the weights of %s, past the bad batches", self._saved[-1])

    def _mean_loss(self) -> Tensor:
        """Mean loss over the step's micro-batches and all ranks."""
        none = torch.zeros(2, dtype=self._wide_dtype, device=self._columns.device)
        pair = torch.stack(self._sums).sum(dim=0) if self._sums else none
        self._sums.clear()
        total, weight = self._run.engine.reduce(pair) if self._run.world_size > 1 else pair
        return total / weight.clamp(min=1e-12)  # a step without any item has the loss 0

    def _check_run(self, run: Run, module: nn.Module) -> None:
        name = type(module).__name__
        if isinstance(module, TrainModule) and not module.automatic_optimization:
            raise ValueError(
                f"SpikeGuard: {name} has automatic_optimization = False, and SpikeGuard needs automatic optimization: remove the callback"
            )
        if run.optimization is not None and run.optimization.calls_closures:
            raise ValueError(
                f"SpikeGuard: {name} overrides optimizer_step or a related hook, or its optimizer evaluates the loss itself (LBFGS); SpikeGuard "
                "cannot leave out such steps: remove the callback or the override"
            )
        if "loss" in self.monitor and run.engine.strategy.pipelined:
            raise ValueError(
                f"SpikeGuard(monitor={self.monitor}): {type(run.engine.strategy).__name__} is pipelined, so the loss "
                "is not known before the backward pass: use monitor='grad_norm'"
            )
        keeps = run.settings.fast_dev_run or any(type(c).__name__ == "ModelCheckpoint" for c in run.callbacks)
        if self.action == "rollback" and not keeps:
            raise ValueError("SpikeGuard(action='rollback') needs checkpoints to go back to: add a ModelCheckpoint")
        if not run.optimizers:
            raise ValueError(
                f"SpikeGuard: {name} has no optimizer, so there are no steps to guard: remove the callback"
            )


def _loss_and_weight(loss: Tensor | Loss, size: int, device: torch.device, wide: torch.dtype) -> Tensor:
    """A micro-batch's loss times its weight, and the weight. Shape [2], of dtype ``wide``."""
    weight: Tensor | float = loss.count if isinstance(loss, Loss) else max(size, 1)
    total = (loss.sum if isinstance(loss, Loss) else loss).detach().to(wide).reshape(())
    total = total if isinstance(loss, Loss) else total * weight
    count = weight.detach().to(wide) if isinstance(weight, Tensor) else total.new_full((), float(weight))
    return torch.stack([total, count.reshape(()).to(total.device)]).to(device)
