"""When to save a checkpoint, and which ones to keep."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch import nn

from engine import Callback, Duration, Every, Run


class ModelCheckpoint(Callback):
    """Saves every Duration, when training ends and when it fails; keeps the best and the last.

    Without ``monitor`` a checkpoint is saved as soon as it is due. With ``monitor`` one that is due waits for the end of the next
    validation, because a score counts only when it was measured on the very weights that are saved; give a second ``ModelCheckpoint``
    without ``monitor`` to also save between validations. In a run without validation the score is what training logged last, at an epoch's
    end. Lower scores win with ``mode="min"``; NaN and a missing score lose against every number; of equal ones the earlier wins.

    The checkpoint at the end of training is saved unless this step is saved already. After an error in a run of one process
    the last whole step is saved, too; with several processes it is not, since saving takes all of them and one may be gone.

    Sets ``run.best_checkpoint`` (with ``monitor`` only) and ``run.last_checkpoint``. ``Fit`` leaves it out under ``fast_dev_run``.
    """

    runs_last = True

    def __init__(
        self,
        every: str | int | timedelta | Duration | None = "1 epochs",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
    ) -> None:
        """
        Args:
            every: a Duration: ``"1 epochs"``, ``"500 steps"``, ``"10 min"``, an int of steps; ``None``: only at the end.
            monitor: the name of a logged metric by which checkpoints are compared; ``None``: the newest is the best.
            mode: ``"min"``: a smaller ``monitor`` is better; ``"max"``: a larger one.
            save_top_k: how many of the best are kept; -1 keeps all.
            save_last: also keep the newest, whatever its score.

        Raises:
            ValueError: an argument is not possible, or nothing would be kept.
        """
        if mode not in ("min", "max"):
            raise ValueError(f"ModelCheckpoint(mode={mode!r}): mode must be 'min' or 'max'")
        if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
            raise ValueError(f"ModelCheckpoint(save_top_k={save_top_k!r}): it must be a number of checkpoints, or -1 for all")
        if save_top_k == 0 and not save_last:
            raise ValueError("ModelCheckpoint(save_top_k=0, save_last=False) would keep no checkpoint; raise one of the two")
        self.every = Every(every)
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.scores: dict[int, float | None] = {}
        """The checkpoints that are kept, oldest first: step and score (``None``: not measured)."""
        self._given_every = every
        self._owed = False
        self._step = 0
        self._first_step = 0
        self._training = False

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._training = False

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._training = True
        self._owed = False
        self._step = self._first_step = run.step
        if run.step == 0:
            self.scores = {}
            self.every = Every(self._given_every)
        self.scores = {step: score for step, score in self.scores.items() if _path(run, step).is_dir()}
        self._publish(run)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        batches = run.num_train_batches
        self.every.steps_per_epoch = None if batches is None else -(-batches // run.window_at(run.epoch))

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Between the micro-batches of a window there is nothing whole to save.
        step = run.step + run.engine.pending_steps
        if step != self._step and self._training:
            self._step = step
            if self.every.due(step, None, run.elapsed_s):
                self._save_or_wait(run)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        if self._training and self._owed:
            self._save(run)

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        if self._training and self.every.due(run.step, run.epoch + 1, run.elapsed_s):
            self._save_or_wait(run)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if self._training and run.step > self._first_step and run.step not in self.scores:
            self._save(run)
        self._training = False

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        """Save the last whole step, if that takes this process only."""
        if self._training and run.world_size == 1 and run.step > self._first_step and run.step not in self.scores:
            self._training = False
            run.engine.settle()
            self.scores[run.step] = None
            run.last_checkpoint = run.save_checkpoint()

    def state_dict(self) -> dict[str, Any]:
        return {"scores": dict(self.scores), "every": self.every.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = dict(state["scores"])
        self.every.load_state_dict(state["every"])

    def _save_or_wait(self, run: Run) -> None:
        run.engine.settle()  # a step whose check for overflow is still on the device counts from here on, or was left out
        self._owed = self.monitor is not None and _validates(run) and run.validated_step != run.step
        if not self._owed:
            self._save(run)

    def _save(self, run: Run) -> None:
        """Save this step if it would be kept, and remove those that no longer are. All ranks come here at the same step."""
        self._owed = False
        step = run.step
        scores = {**self.scores, step: self._score(run)}
        if step not in self._kept(scores):
            return
        earlier = self.scores
        # Set before saving: the checkpoint's own state then counts the checkpoint itself.
        self.scores = scores
        try:
            run.save_checkpoint()
        except BaseException:
            self.scores = earlier
            raise
        kept = self._kept(scores)
        for old in [old for old in scores if old not in kept]:
            del scores[old]
            if old not in _held(run):
                run.remove_checkpoint(_path(run, old))
        self._publish(run)

    def _score(self, run: Run) -> float | None:
        """The value of ``monitor`` for the present weights; ``None``: it was not measured.

        Raises:
            ValueError: nothing of that name was logged.
        """
        if self.monitor is None or (_validates(run) and run.validated_step != run.step):
            return None
        if self.monitor not in run.metrics:
            there = ", ".join(sorted(run.metrics)) or "none"
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}): no metric of that name was logged (logged so far: {there}); "
                f"log it with self.log({self.monitor!r}, value) in validation_step"
            )
        return run.metrics[self.monitor]

    def _ranked(self, scores: dict[int, float | None]) -> list[int]:
        """Steps, best first."""
        if self.monitor is None:
            return sorted(scores, reverse=True)
        sign = 1.0 if self.mode == "min" else -1.0

        def key(step: int) -> tuple[bool, float, int]:
            score = scores[step]
            return (True, 0.0, step) if score is None or math.isnan(score) else (False, sign * score, step)

        return sorted(scores, key=key)

    def _kept(self, scores: dict[int, float | None]) -> set[int]:
        kept = set(self._ranked(scores)[: None if self.save_top_k == -1 else self.save_top_k])
        return kept | {max(scores)} if self.save_last else kept

    def _publish(self, run: Run) -> None:
        """Tell the run which checkpoints are the best and the last."""
        held = _held(run)
        if held:
            run.last_checkpoint = _path(run, max(held))
        if self.monitor is not None:
            best = next(iter(self._ranked(self.scores)), None)
            score = None if best is None else self.scores[best]
            run.best_checkpoint = None if best is None or score is None or math.isnan(score) else _path(run, best)


def _held(run: Run) -> set[int]:
    """The steps whose checkpoints some ModelCheckpoint of this run keeps: several of them share one folder."""
    return {step for callback in run.callbacks if isinstance(callback, ModelCheckpoint) for step in callback.scores}


def _path(run: Run, step: int) -> Path:
    return run.root_dir / "checkpoints" / f"step={step:08d}"


def _validates(run: Run) -> bool:
    return run.settings.val_every is not None and any(count != 0 for count in run.num_eval_batches)
