"""Decides when a checkpoint is saved, and which checkpoints are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from engine import Callback, Duration, Every

from .early_stopping import NO_VALIDATION

if TYPE_CHECKING:
    from torch import nn

    from engine import Run

_COUNTERS = ("epoch", "step")
"""Counters that ``monitor`` may name; they need not be logged, nor measured by a validation."""
_LONGEST_NAME = 200
"""Longest name of a checkpoint in bytes: file systems allow 255, and suffixes are added."""


class ModelCheckpoint(Callback):
    """Saves checkpoints at an interval, and when training ends, fails or is terminated; keeps the best and the last.

    A checkpoint is saved as soon as it is due. With ``monitor`` it is ranked by its score, which counts only if it was measured on exactly the saved
    weights. So a step that validation follows is saved after it, with its score. A checkpoint that is due between validations has no score, and the
    next validation's weights are saved as well. If ``every`` counts whole epochs, the validations within such an epoch are candidates, too: their
    weights are saved if they are among the best.

    In a run without validation the score is the last value logged in training, over all
    ranks: after an epoch the epoch's value, if it has one, otherwise the latest step's, also between log boundaries. Lower scores win with
    ``mode="min"``; NaN and a missing score lose against every number; among equal scores the earlier wins, among missing ones the later.

    Training continues while a checkpoint is written. A failed write is reported as an error in the log, and older checkpoints are kept.
    At the end of training (or at SIGTERM, or Ctrl-C) a checkpoint is saved, unless this step has one already. After an error in a run of
    one process the last complete step is saved too, with random numbers, running statistics and the epoch's means as they were at the error;
    not after an error inside an optimizer step, nor with several processes, since saving needs all of them and one may be gone.

    The callback sets ``run.best_checkpoint`` (with ``monitor`` only) and ``run.last_checkpoint``. ``Fit`` leaves it out under ``fast_dev_run``.
    """

    runs_last = True
    is_checkpoint = True

    def __init__(
        self,
        every: str | int | timedelta | Duration | None = "1 epochs",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        keep_every: str | int | timedelta | Duration | None = None,
        dirpath: str | Path | None = None,
        filename: str = "step={step:08d}",
        asynchronous: bool = True,
        max_failures: int = 3,
    ) -> None:
        """
        Args:
            every: a Duration: ``"1 epochs"``, ``"500 steps"``, ``"1e8 tokens"``, ``"10 min"``, an int of steps; ``None``: only at the end.
            monitor: the name of the logged metric that ranks checkpoints, or ``"epoch"`` or ``"step"`` for the run's counters; ``None``: the newest
                is the best.
            mode: ``"min"``: a smaller ``monitor`` is better; ``"max"``: a larger one.
            save_top_k: number of best checkpoints to keep; -1 keeps all.
            save_last: also keep the newest checkpoint, whatever its score.
            keep_every: a Duration: the first checkpoint after each interval of this length is kept forever.
            dirpath: the directory, or a URL that fsspec knows (``s3://bucket/run``); by default ``checkpoints`` in the run's folder. If it
                has another run's checkpoints already, a new run uses ``<dirpath>/version_1``, and so on.
            filename: a checkpoint's name: ``{epoch}``, ``{step}`` and the names of metrics, formatted as by ``str.format``
                (``"epoch={epoch}-loss={val_loss:.3f}"``). If two steps would have the same name, the later one gets ``-step=N``.
            asynchronous: write while the training continues; ``False`` waits for the disk.
            max_failures: number of consecutive failed writes that ends the training with an error.

        Raises:
            ValueError: an argument is not valid, or nothing would be kept.
        """
        fields = _check(mode, save_top_k, save_last or keep_every is not None, max_failures, filename)
        self.every = Every(every)
        self.keep_every = Every(keep_every)
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.dirpath = dirpath
        self.filename = filename
        self.asynchronous = asynchronous
        self.max_failures = max_failures
        self.scores: dict[int, float | None] = {}
        """Step -> score (``None``: not measured) of the checkpoints that are kept, oldest first."""
        self.names: dict[int, str] = {}
        """Step -> name of the checkpoints that are kept."""
        self.permanent: set[int] = set()
        """Steps whose checkpoints are kept forever."""
        self._every_argument, self._keep_every_argument = every, keep_every
        self._names_metrics = not fields <= {"epoch", "step"}
        self._waits_for_score = self._permanent_next = False
        # The first step, and numbers of samples and tokens, at which a save can be due.
        self._due_step = self._due_samples = self._due_tokens = 0
        self._first_step = 0
        self._training = False
        # Where the latest training's checkpoints are; a reference to the run itself would keep the module in memory.
        self._storage: Any = None
        # Whether the checkpoint that is being collected, or from which this run has resumed, is one of this callback.
        self._is_own = False
        # Step of the save in progress, and scores and names of the checkpoints before it.
        self._save_under_way: tuple[int, dict[int, float | None], dict[int, str]] | None = None

    @property
    def monitored(self) -> str | None:
        return None if self.monitor in _COUNTERS else self.monitor

    @property
    def finds_best(self) -> bool:
        """Whether checkpoints are ranked by a metric: with ``monitor``."""
        return self.monitor is not None

    @property
    def best_k_models(self) -> dict[str, float | None]:
        """Path or URL -> score of the checkpoints that are kept, best first. With ``monitor``, checkpoints without a score are left out."""
        steps = [step for step in self._ranked(self.scores) if self.monitor is None or self.scores[step] is not None]
        return {self._path(step): self.scores[step] for step in steps}

    @property
    def best_model_path(self) -> str:
        """Path or URL of the best checkpoint, the first of :attr:`best_k_models`; empty if there is none.

        It is a folder without a pickle, which ``torch.load`` does not open: ``load_from_checkpoint`` and ``resume`` or ``checkpoint`` of a run do.
        """
        return next(iter(self.best_k_models), "")

    @property
    def best_model_score(self) -> float | None:
        """The value of ``monitor`` for the best checkpoint."""
        return self.best_k_models.get(self.best_model_path)

    @property
    def last_model_path(self) -> str:
        """Path or URL of the newest checkpoint, with ``save_last``; empty if there is none."""
        return self._path(max(self.names)) if self.names and self.save_last else ""

    def _path(self, step: int) -> str:
        return "" if self._storage is None else str(self._storage.path(self.names[step]))

    @property
    def checkpoints_in(self) -> str | Path | None:
        return self.dirpath

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._training = self._waits_for_score = self._is_own = False
        run.checkpoints_at(self.dirpath, self.max_failures)
        if stage == "fit":
            self._storage = run.checkpoints.folder_at(self.dirpath).storage

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        self._training = True
        self._save_under_way = None
        self._first_step = run.step
        if run.step == 0:
            self.scores, self.names, self.permanent = {}, {}, set()
            self.every, self.keep_every = Every(self._every_argument), Every(self._keep_every_argument)
        for name, interval in (("every", self.every), ("keep_every", self.keep_every)):
            interval.follow(run.clock, f"ModelCheckpoint({name}=...)")
            interval.start(run.step, run.epochs)
        self._plan_next(run.step)
        if self._is_own and run.continues_in_place and self._folder(run) is run.checkpoints.folder:
            self.names[run.step] = str(run.loaded_from).rpartition("/")[2]
        self._is_own = False
        # Another folder may have other checkpoints with the same names.
        self._keep_only(self._steps_with_checkpoint(run) if run.continues_in_place else set())
        self._set_best_and_last(run)

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Between the micro-batches of a window there is no complete step to save.
        is_counted = run.state.samples >= self._due_samples or run.state.clock_tokens >= self._due_tokens
        if not self._training or (run.step + 1 < self._due_step and not is_counted):  # at most one step is pending
            return
        step = run.step + run.engine.pending_steps
        if step >= self._due_step or is_counted:
            self._save_if_due(run, step, None)
            self._plan_next(step)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        elapsed_s, epochs = run.elapsed_s, run.epochs
        if not self._training or (
            _is_epoch_end(run) and self.every.is_due(run.step, run.epoch + 1, elapsed_s, epochs)
        ):  # at an epoch's end on_train_epoch_end saves
            return
        # If the run has resumed from a checkpoint of this step, nothing has asked yet whether a save is due.
        self._save_if_due(run, run.step, None)
        # A signal may have cut off the validation of the step that this run resumed from: its checkpoint has no score yet.
        is_unscored = run.step in self.scores and self.scores[run.step] is None
        if self.monitor is not None and (self._waits_for_score or is_unscored or self._is_candidate(run)):
            self._save(run)

    def _is_candidate(self, run: Run) -> bool:
        """Whether the weights that were validated within an epoch are among the best. All ranks call this together."""
        duration = self.every.duration
        if duration is None or duration.unit != "epochs" or self.every.of_epochs or run.step in self.scores:
            return False
        if _is_epoch_end(run) or (run.epoch + 1) % duration.value:
            return False
        # A metric that training logs was not measured by this validation.
        if self.monitor not in run.metrics or self.monitor in run.logbook.from_training:
            return False
        return run.step in self._best({**self.scores, run.step: run.metrics[self.monitor]})

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        if self._training:
            self._save_if_due(run, run.step, run.epoch + 1)

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if not self._training:
            return
        self._catch_up(run)
        if self._saves_at_end(run):
            self._save(run, last=True)
            self._catch_up(run)
            if run.step not in self.names and self.save_last:
                # The checkpoint was lost: now its error ends the run.
                run.save_checkpoint(self._name(run, self._metrics(run), None), folder=self._folder(run))
        self._training = False
        self._set_best_and_last(run)

    def _saves_at_end(self, run: Run) -> bool:
        """Whether the training's last step is to be saved although no interval asks for it."""
        return run.step > self._first_step and run.step not in self.scores

    def on_exception(self, run: Run, module: nn.Module, exception: BaseException) -> None:
        """Save the last complete step, if that needs only this process."""
        if self._training and run.world_size == 1:
            self._training = False
            self._catch_up(run)
            if run.stepping:
                return  # a run cannot continue from the middle of a step
            if run.step > self._first_step and run.step not in self.scores:
                run.engine.settle()
                name = self._name(run, self._metrics(run), None)
                self.scores[run.step], self.names[run.step] = None, name
                self._waits_for_score = self._awaits_validation(run)
                self._is_own = True
                run.last_checkpoint = run.save_checkpoint(name, folder=self._folder(run))

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}[monitor={self.monitor!r}, mode={self.mode!r}]; every={self.every.duration}"

    def state_dict(self) -> dict[str, Any]:
        # This is in each checkpoint: a name of the usual form, and scores that are all None, follow from the steps.
        return {
            "steps": list(self.scores),
            "scores": None if self.monitor is None else list(self.scores.values()),
            "names": {step: name for step, name in self.names.items() if name != _usual_name(step)},
            "permanent": set(self.permanent),
            **({"waits_for_score": True} if self._waits_for_score else {}),
            **({"is_own": True} if self._is_own else {}),
            "every": self.every.state_dict(),
            "keep_every": self.keep_every.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps, names, permanent = state.get("steps"), dict(state["names"]), set(state["permanent"])
        if steps is None:  # a checkpoint of an earlier version
            scores = dict(state["scores"])
        else:
            scores = dict(zip(steps, [None] * len(steps) if state["scores"] is None else state["scores"], strict=True))
            names = {step: names.get(step, _usual_name(step)) for step in steps}
        numbers = all(value is None or type(value) in (int, float) for value in scores.values())
        if (
            not numbers
            or not all(type(step) is int for step in (*scores, *names))
            or not all(type(name) is str for name in names.values())
        ):
            raise ValueError("its state lacks valid steps, scores and names of checkpoints")
        self.scores, self.names, self.permanent = scores, names, permanent
        self._waits_for_score = state.get("waits_for_score") is True
        self._is_own = state.get("is_own") is True
        self.every.load_state_dict(state["every"])
        self.keep_every.load_state_dict(state["keep_every"])

    def _plan_next(self, step: int) -> None:
        intervals = (self.every, self.keep_every)
        self._due_step = min(interval.next_step(step) for interval in intervals)
        self._due_samples = min(interval.next_samples for interval in intervals)
        self._due_tokens = min(interval.next_tokens for interval in intervals)

    def _save_if_due(self, run: Run, step: int, epoch_end: int | None) -> None:
        elapsed_s = run.elapsed_s
        epochs = run.epochs if self.every.of_epochs or self.keep_every.of_epochs else None
        if self.keep_every.due(step, epoch_end, elapsed_s, epochs):
            self._permanent_next = True
        if self.every.due(step, epoch_end, elapsed_s, epochs):
            run.engine.settle()  # a step whose overflow check is still on the device now counts, or was skipped
            self._waits_for_score = self._awaits_validation(run) and run.validated_step != run.step
            if not (self._waits_for_score and epoch_end is None and _validates_now(run)):
                self._save(run)

    def _save(self, run: Run, last: bool = False) -> None:
        """Save the current step if its checkpoint would be kept, and remove checkpoints that no longer are. All ranks call this at the same step.

        Args:
            last: the run ends here. After Ctrl-C or SIGTERM its checkpoint is kept whatever its score: a later run resumes from it.
        """
        self._catch_up(run)
        metrics = run.latest_metrics() if self.monitor is not None else self._metrics(run)
        step, earlier = run.step, (dict(self.scores), dict(self.names))
        score = self._score(run, metrics)
        scores = {**self.scores, step: score}
        # Set before saving, like scores and names: a run that resumes from this checkpoint validates, and saves it with its score.
        self._waits_for_score = score is None and self.monitor is not None
        if self._permanent_next:
            self.permanent.add(step)
        kept_steps = self._steps_to_keep(scores) | ({step} if last and run.preempted else set())
        if step not in kept_steps:
            return
        self._permanent_next = False
        # All of the following is set before saving, because the checkpoint has this callback's state, which must count the checkpoint itself: its
        # name and score, the steps that stay, and that the save is this callback's own. A save that fails takes names and scores back.
        unscored_name = self.names.get(step)
        self.names[step] = self._name(run, metrics, score)
        self.scores = scores
        removed_names = [self.names[old] for old in sorted(scores.keys() - kept_steps)]
        if unscored_name not in (None, self.names[step]):
            removed_names.append(unscored_name)
        self._keep_only(kept_steps)
        entry = None if score is None else {"monitor": self.monitor, "mode": self.mode, "value": score}
        try:
            self._is_own = True
            if removed_names:
                names_in_use = self._kept_names(run)
                removed_names = [name for name in removed_names if name not in names_in_use]
            removed_names += self._replaced(run, unscored_name)
            path = run.save_checkpoint(
                self.names[step],
                score=entry,
                asynchronous=self.asynchronous,
                tolerant=True,
                remove=removed_names,
                folder=self._folder(run),
            )
            self.names[step] = str(path).rpartition("/")[2]  # another one if a checkpoint of that name must stay
        except BaseException:
            self.scores, self.names = earlier
            raise
        finally:
            self._is_own = False
        self._save_under_way = (step, *earlier)
        if not self.asynchronous:
            self._catch_up(run)
        self._set_best_and_last(run)

    def _replaced(self, run: Run, name: str | None) -> list[str]:
        """The checkpoint from which this run has resumed, in a list, if it is saved again with its score: it stays as long as this run needs it, and
        the new one is saved beside it."""
        is_kept = any(name in callback.names.values() for callback in self._in_same_folder(run) if callback is not self)
        return [name] if name is not None and name in self._folder(run).protected and not is_kept else []

    def _folder(self, run: Run) -> Any:
        """The one of the run's checkpoint folders that is this callback's. It is not kept, because it refers to the ranks and the module."""
        return run.checkpoints.folder_of(self._storage)

    def _in_same_folder(self, run: Run) -> list[ModelCheckpoint]:
        """The callbacks of this run that keep checkpoints in the folder of this one, which is one of them."""
        return [callback for callback in _model_checkpoints(run) if callback._storage is self._storage]

    def _kept_names(self, run: Run) -> set[str]:
        return {name for callback in self._in_same_folder(run) for name in callback.names.values()}

    def _catch_up(self, run: Run) -> None:
        """Wait for the checkpoint in progress. If it was lost, keep the checkpoints that it would have replaced."""
        run.wait_for_checkpoint()
        if self._save_under_way is not None:
            step, scores, names = self._save_under_way
            self._save_under_way = None
            if self.names.get(step) in self._folder(run).lost:
                self.scores, self.names = scores, names
                self.permanent &= scores.keys()
            self._set_best_and_last(run)

    def _keep_only(self, steps: set[int]) -> None:
        for step in self.scores.keys() - steps:  # there may be thousands, of which few go
            del self.scores[step]
        for step in self.names.keys() - steps:
            del self.names[step]
        self.permanent &= steps

    def _steps_with_checkpoint(self, run: Run) -> set[int]:
        """The steps of :attr:`names` whose checkpoints still exist. Of these, those are read, and left out if damaged, that are among the
        ``save_top_k``, or with ``save_top_k=-1``, where a folder may have thousands, the best."""
        checkpoints, folder = run.checkpoints, self._folder(run)
        written_names = checkpoints.written_names(folder)
        steps = {step for step, name in self.names.items() if name in written_names}
        damaged = steps
        while damaged:
            best = self._best({step: score for step, score in self.scores.items() if step in steps})
            names = {step: self.names[step] for step in (best[:1] if self.save_top_k == -1 else best)}
            damaged_names = checkpoints.damaged_of([*names.values()], folder)
            damaged = {step for step, name in names.items() if name in damaged_names}
            steps -= damaged
        return steps

    def _metrics(self, run: Run) -> Mapping[str, float]:
        """Values that the file name may contain."""
        return run.latest_metrics() if self._names_metrics else run.metrics

    def _name_without_metrics(self, run: Run) -> str:
        """The name of a checkpoint that was not validated, if ``filename`` has metrics."""
        return _usual_name(run.step)

    def _name(self, run: Run, metrics: Mapping[str, float], score: float | None) -> str:
        if self._names_metrics and score is None and self._awaits_validation(run):
            return self._name_without_metrics(run)  # the metrics of an earlier step, or none
        values: dict[str, Any] = {**metrics, "epoch": run.state.epoch, "step": run.step}
        try:
            name = self.filename.format_map(values).replace("/", "_")
        except (LookupError, AttributeError) as error:
            raise ValueError(
                f"ModelCheckpoint(filename={self.filename!r}): {error} is not known here; available: epoch, step, {', '.join(sorted(metrics))}"
            ) from error
        _check_name(self.filename, name)
        is_used = name in self.names.values() and name != self.names.get(run.step)
        return f"{name}-step={run.step}" if is_used else name

    def _counts(self, run: Run) -> bool:
        """Whether ``monitor`` is a counter of the run, and no metric of the same name is logged."""
        return self.monitor in _COUNTERS and self.monitor not in run.metrics

    def _awaits_validation(self, run: Run) -> bool:
        """Whether a score needs a validation of the saved weights."""
        return self.monitor is not None and not self._counts(run) and _has_validation(run)

    def _score(self, run: Run, metrics: Mapping[str, float]) -> float | None:
        """Return the value of ``monitor`` for the current weights; ``None``: not measured.

        Raises:
            ValueError: the metric was not logged.
        """
        if self.monitor is None or (self._awaits_validation(run) and run.validated_step != run.step):
            return None
        if self._counts(run):
            return float(run.step if self.monitor == "step" else run.state.epoch)
        if self.monitor not in metrics:
            logged = ", ".join(sorted(metrics)) or "none"
            where = "validation_step" if run.val_loaders else f"training_step: {NO_VALIDATION}"
            raise ValueError(
                f"ModelCheckpoint(monitor={self.monitor!r}): this metric was not logged (logged so far: {logged}); "
                f"log it with self.log({self.monitor!r}, value) in {where}"
            )
        return metrics[self.monitor]

    def _ranked(self, scores: dict[int, float | None]) -> list[int]:
        """Steps in the order of their scores, best first."""
        if self.monitor is None:
            return sorted(scores, reverse=True)
        sign = 1.0 if self.mode == "min" else -1.0

        def key(step: int) -> tuple[int, float, int]:
            score = scores[step]
            if score is None:
                return 2, 0.0, -step
            return (1, 0.0, step) if math.isnan(score) else (0, sign * score, step)

        return sorted(scores, key=key)

    def _best(self, scores: dict[int, float | None]) -> list[int]:
        """The ``save_top_k`` best steps."""
        return self._ranked(scores)[: None if self.save_top_k == -1 else self.save_top_k]

    def _steps_to_keep(self, scores: dict[int, float | None]) -> set[int]:
        steps = {*self._best(scores), *(self.permanent & scores.keys())}
        return steps | {max(scores)} if self.save_last else steps

    def _set_best_and_last(self, run: Run) -> None:
        """Tell the run which complete checkpoints are the best and the last."""
        unfinished_step = None if self._save_under_way is None or not self.asynchronous else self._save_under_way[0]
        last_step, last_of = -1, self
        for callback in _model_checkpoints(run):
            if callback._storage is not None:
                unfinished = {unfinished_step} if callback._storage is self._storage else set()
                step = max(callback.names.keys() - unfinished, default=-1)
                last_step, last_of = max((last_step, last_of), (step, callback), key=lambda pair: pair[0])
        if last_step >= 0:
            run.last_checkpoint = last_of._storage.path(last_of.names[last_step])
        if self.monitor is not None:
            best = next((step for step in self._ranked(self.scores) if step != unfinished_step), None)
            score = None if best is None else self.scores[best]
            run.best_checkpoint = (
                None if best is None or score is None or math.isnan(score) else self._storage.path(self.names[best])
            )


def _usual_name(step: object) -> str:
    return f"step={step:0>8}"


def _check(mode: str, save_top_k: Any, keeps_other_checkpoints: bool, max_failures: Any, filename: str) -> set[str]:
    """Check the arguments, and return the names in ``filename``."""
    if mode not in ("min", "max"):
        raise ValueError(f"ModelCheckpoint(mode={mode!r}): mode must be 'min' or 'max'")
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ValueError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): it must be a number of checkpoints, or -1 for all"
        )
    if save_top_k == 0 and not keeps_other_checkpoints:
        raise ValueError(
            "ModelCheckpoint(save_top_k=0, save_last=False) would keep no checkpoint; raise one of the two"
        )
    if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 1:
        raise ValueError(f"ModelCheckpoint(max_failures={max_failures!r}): it must be a number of failures, at least 1")
    try:
        names = re.findall(r"{([^{}:!]*)", filename)
        example = filename.format_map(dict.fromkeys(names, 0))
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"ModelCheckpoint(filename={filename!r}) is not a format ({error}): write it as in 'epoch={{epoch}}-{{loss:.2f}}'"
        ) from error
    _check_name(filename, example)
    return set(names)


def _check_name(filename: str, name: str) -> None:
    if not name or name.startswith(".") or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"ModelCheckpoint(filename={filename!r:.300}) gives {name!r:.300}: names must not be empty, start with a dot, have characters that "
            f"cannot be printed, or be longer than {_LONGEST_NAME} bytes"
        )


def _model_checkpoints(run: Run) -> list[ModelCheckpoint]:
    return [callback for callback in run.callbacks if isinstance(callback, ModelCheckpoint)]


def _has_validation(run: Run) -> bool:
    """Whether validation measures the weights now and then."""
    return not run.val_every.is_never and any(count != 0 for count in run.num_eval_batches)


def _validates_now(run: Run) -> bool:
    """Whether validation follows the step that has just been done, before anything else of the training."""
    every, elapsed_s = run.val_every, run.elapsed_s
    return every.is_due(run.step, None, elapsed_s, run.epochs) or (
        _is_epoch_end(run) and every.is_due(run.step, run.epoch + 1, elapsed_s, run.epochs)
    )


def _is_epoch_end(run: Run) -> bool:
    """Whether the epoch's data is used up, as far as its length is known."""
    return run.num_train_batches is not None and run.state.batch_idx >= run.num_train_batches
