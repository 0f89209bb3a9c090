"""Adds the norm of the gradients, of the whole model and of each parameter, to the logged metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine import Callback, Run


class GradientNorm(Callback):
    """Adds ``grad_norm``, before clipping, to the metrics of the steps that are logged::

        Fit(callbacks=[GradientNorm(per_parameter=True)])  # grad_norm, grad_norm/layers.0.weight, ...

    Nothing is clipped, and steps that are not logged compute nothing. If several optimizers step at different times, each counts with the
    gradients of its latest step. The callback does not work under DeepSpeed, which does not expose its gradients.
    """

    def __init__(self, norm_type: float = 2.0, *, per_parameter: bool = False) -> None:
        """
        Args:
            norm_type: p of the p-norm; ``inf``: the largest element.
            per_parameter: add ``grad_norm/<name>`` for each parameter.

        Raises:
            ValueError: ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise ValueError(f"GradientNorm(norm_type={norm_type!r}): give a number above 0, or inf")
        self.norm_type, self.per_parameter = float(norm_type), per_parameter
        self._newest: dict[str, Tensor] = {}

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._newest = {}
        strategy = run.engine.strategy
        if stage == "fit" and strategy.owns_weights:
            raise ValueError(
                f"GradientNorm does not work under {type(strategy).__name__}, which does not expose its gradients: remove the callback"
            )

    def on_before_optimizer_step(self, run: Run, module: nn.Module, optimizer: Any) -> None:
        every, step = run.settings.log_every_n_steps, run.step + 1
        last = run.max_steps is not None and step >= run.max_steps
        if every and (step == 1 or step % every == 0 or last):
            self._newest.update(run.engine.grad_norms(module, self.norm_type, optimizer=optimizer))

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        if not self._newest:
            return
        norms = torch.stack(list(self._newest.values()))
        by_name = dict(zip(self._newest, norms.tolist(), strict=True))
        metrics["grad_norm"] = float(torch.linalg.vector_norm(norms.cpu().double(), self.norm_type))
        if self.per_parameter:
            metrics.update({f"grad_norm/{name}": value for name, value in by_name.items()})
        self._newest = {}
