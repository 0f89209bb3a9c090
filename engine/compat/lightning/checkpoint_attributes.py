"""The attributes of Lightning's ``ModelCheckpoint``, besides paths and scores, that modules and callbacks read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from engine.loop.run import Run


class CheckpointAttributes:
    """Attributes of Lightning's ``ModelCheckpoint`` that repeat its arguments, and its file of scores."""

    dirpath: Any
    mode: Literal["min", "max"]
    verbose = save_weights_only = save_on_exception = False
    auto_insert_metric_name = True
    every_n_epochs, every_n_train_steps, train_time_interval = 1, 0, None
    save_on_train_epoch_end: bool | None = None
    current_score: torch.Tensor | None = None
    """The value of ``monitor`` that was compared last."""

    def keep_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Keep the constructor's ``arguments`` under their names; an interval that is not used is 0, as there."""
        for name in ("verbose", "save_weights_only", "save_on_exception", "auto_insert_metric_name"):
            setattr(self, name, arguments[name])
        steps, epochs, time = (arguments[n] for n in ("every_n_train_steps", "every_n_epochs", "train_time_interval"))
        is_default = steps is None and epochs is None and time is None
        self.every_n_epochs, self.every_n_train_steps = 1 if is_default else epochs or 0, steps or 0
        self.train_time_interval, self.save_on_train_epoch_end = time, arguments["save_on_train_epoch_end"]

    def _score(self, run: Run, metrics: Mapping[str, float]) -> float | None:
        score: float | None = super()._score(run, metrics)  # type: ignore[misc]
        self.current_score = None if score is None else self._as_score(score)
        return score

    def _as_score(self, value: float) -> torch.Tensor:
        """The score as Lightning shows it: NaN is infinitely bad."""
        worst = torch.inf if self.mode == "min" else -torch.inf
        return torch.tensor(worst if math.isnan(value) else value)

    def to_yaml(self: Any, filepath: Any = None) -> None:
        """Write :attr:`best_k_models` with the scores as numbers into a YAML file, by default ``best_k_models.yaml`` beside the checkpoints."""
        import yaml

        scores = {path: None if score is None else float(score) for path, score in self.best_k_models.items()}
        folder = Path(next(iter(scores))).parent if scores else Path(self.dirpath or ".")
        Path(filepath or folder / "best_k_models.yaml").write_text(yaml.safe_dump(scores))
