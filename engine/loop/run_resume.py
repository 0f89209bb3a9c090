"""Resumes a run: restores the parts of a checkpoint in their order, with the hooks in between.

:mod:`engine.checkpoint.resume` chooses and opens the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoint.manifest import FOLDERS, SCORED_WITH, TRAINED, WEIGHTS
from engine.checkpoint.reader import weights_folder
from engine.checkpoint.resume import Loaded, Resume, opening, replaced_hyperparameters
from engine.checkpoint.schedule_settings import ConfiguredSchedule
from engine.checkpoint.storage_paths import split_path
from engine.distributed.collectives import all_or_none
from engine.loop.load_hooks import LoadHooks
from engine.loop.run import PendingSetUp, Run
from engine.step.schedules import is_named
from engine.utils.log import logger

_SHOWN = 6
"""Hyperparameters that a warning shows."""


@contextmanager
def resuming(run: Run, checkpoint: str | Path | Resume | None, set_up: PendingSetUp) -> Iterator[Resumption | None]:
    """Open a checkpoint to resume from, and call the module's ``on_load_checkpoint``; ``None``: there is nothing to resume from.

    Args:
        set_up: the set-up of the training that follows, or comes earlier if that hook asks for the optimizers, to add parameter groups.

    Raises:
        FileNotFoundError: there is no such checkpoint (except with ``"auto"``).
        DamagedCheckpoint: the checkpoint cannot be used, or (for ``"auto"``, ``"last"``, ...) none of the existing ones can.
    """
    if checkpoint is None:
        yield None
        return
    how, checkpoints = checkpoint if isinstance(checkpoint, Resume) else Resume(checkpoint), run.checkpoints
    where, what = checkpoints.run_folder.source(str(how.path))
    checkpoints.run_folder.named = checkpoints.folder.storage.root
    folders = weights_and_state(run, how.weights) if how.weights_only else (*FOLDERS, WEIGHTS)
    with ExitStack() as stack:
        try:
            loaded = stack.enter_context(opening(run.engine.group, where, what, folders))
        except FileNotFoundError:
            if str(how.path) != "auto":
                raise
            yield None
            return
        checkpoints.folder.protected = {loaded.name, *loaded.passed}
        resumption = Resumption(run, loaded, how)
        with run.before_set_up(set_up):
            resumption.before_set_up()
        yield resumption


class Resumption:
    """A run that resumes from an open checkpoint: in full, or as a new run that starts with its weights."""

    def __init__(self, run: Run, loaded: Loaded, how: Resume) -> None:
        self._run, self._loaded, self._how = run, loaded, how
        weights = how.weights if how.weights_only else TRAINED
        self._source = run.snapshot.source_of(loaded, weights)
        self._hooks = LoadHooks(run, loaded, self._source)

    def before_set_up(self) -> None:
        """Call the module's ``on_load_checkpoint``, for which the run's counters are known."""
        run, loaded = self._run, self._loaded
        if self._how.weights_only:
            if LoadHooks.need_state(run):
                self._hooks.restore_datamodule(self._how.strict)
                self._hooks.before_set_up()
        elif loaded.saved_by_run and run.hooks.of_module("on_load_checkpoint"):  # a loop with Engine has no entries
            run.snapshot.restore_counters(loaded)
            self._hooks.before_set_up()

    def restore(self) -> None:
        """Restore parameters, optimizers, schedulers, counters, data position, random number states, callbacks; or only the weights.

        Raises:
            ValueError: the checkpoint does not fit the module or its optimizers.
        """
        run, loaded = self._run, self._loaded
        if self._how.weights_only:
            run.snapshot.load_weights(loaded, self._source, self._how.strict)
            self._hooks.after_weights(resumes=False)
        else:
            self._continue()
            run.checkpoints.last = loaded.path
        run.checkpoints.loaded_from = loaded.path
        if not run.checkpoints.continue_in_place:
            run.checkpoints.run_folder.note_beginning(str(loaded.path))

    def _continue(self) -> None:
        """Restore the whole state of the run, with the hooks at their place in the order. The data is located in
        :func:`engine.loop.train.begin_epoch`.

        A user's own loop does the same in :meth:`engine.engine_snapshot.EngineCheckpoints.load`, without hooks.
        """
        run, loaded, how, hooks = self._run, self._loaded, self._how, self._hooks
        engine, snapshot = run.engine, run.snapshot
        run.checkpoints.folder.take_over(loaded.shared.get("postponed", []), loaded.path)
        engine.snapshot.restore_seed(loaded)
        snapshot.restore_order(loaded)
        engine.snapshot.restore_shared(loaded)  # the loss scaler, the window, registered objects
        snapshot.restore_shared(loaded)  # counters, logged values, the data module, callbacks
        if loaded.saved_by_run:
            hooks.before_weights()
        snapshot.load_weights(loaded, self._source, how.strict)
        if loaded.saved_by_run:  # a checkpoint of a loop with Engine has no other weights
            for name, tensors in run.other_weights().items():  # after the hooks, which may have added parameters
                loaded.source.others.read_into(name, tensors)
        trained = snapshot.trained()
        configured_groups = trained.hyperparameters() if how.optimizer else []
        configured_schedules = [ConfiguredSchedule(scheduler) for scheduler in trained.schedulers if how.optimizer]
        all_or_none(engine.group, partial(snapshot.check, loaded, how))  # raises on all ranks if it does on one
        if how.optimizer:
            snapshot.restore_optimizers(loaded, how)
        own_state = engine.snapshot.own_state(loaded)
        snapshot.restore_logged_values(loaded, own_state)
        ends = run.checkpoints.run_folder.ends_of(split_path(loaded.path)[0].root)
        snapshot.restore_stops(loaded, own_state, [] if ends and _starts_again(run, loaded, how) else ends)
        snapshot.restore_stream(loaded, own_state)
        if loaded.saved_by_run:
            hooks.after_weights(resumes=True)
        engine.snapshot.restore_random_numbers(loaded, own_state)  # last: restoring something else may draw some
        if engine.is_main_process:
            if how.optimizer and how.hyperparameters == "checkpoint":
                _warn_about_replaced(run, configured_groups, how)
                _warn_about_schedules(configured_schedules, loaded, how)
            logger.info("resumed from %s: epoch %d, step %d", loaded.path, run.state.epoch, run.state.step)


_LIMITS = ("max_epochs", "max_steps", "max_time", "max_duration")


def _starts_again(run: Run, loaded: Loaded, how: Resume) -> bool:
    """Whether the same training was started again, by a scheduler for example: with ``"auto"``, and with the limits that it had."""
    configs = (run.config, loaded.manifest.get("config"))
    now, before = ({name: _value(config, name) for name in _LIMITS} for config in configs)
    return str(how.path) == "auto" and now == before


def _value(config: Any, name: str) -> Any:
    """The value of a setting in a :attr:`engine.Run.config`, or in what a manifest has in its place."""
    entry = config.get(name) if isinstance(config, dict) else None
    return entry.get("value") if isinstance(entry, dict) else None


def _warn_about_replaced(run: Run, configured_groups: list[list[dict[str, Any]]], how: Resume) -> None:
    """Warn about hyperparameters of optimizers that the checkpoint has replaced: the module may record other ones."""
    optimizers, scheduled = run.optimizers, bool(run.schedulers)
    replaced: list[str] = []
    for index, (optimizer, groups) in enumerate(zip(optimizers, configured_groups, strict=True)):
        texts = replaced_hyperparameters(optimizer, groups, scheduled)
        replaced += [f"optimizer {index}: {text}" for text in texts] if len(optimizers) > 1 else texts
    if replaced:
        names = ", ".join([*replaced[:_SHOWN], *([f"and {len(replaced) - _SHOWN} more"] if replaced[_SHOWN:] else [])])
        logger.warning(
            "the optimizer continues with the checkpoint's %s. To use the values of configure_optimizers: Resume(%r, "
            "hyperparameters='configured') (fit run: --hyperparameters configured)",
            names,
            str(how.path),
        )


def _warn_about_schedules(configured: Sequence[ConfiguredSchedule], loaded: Loaded, how: Resume) -> None:
    """Warn about settings of schedules, such as their lengths, that the checkpoint has replaced, and about functions that it could not replace."""
    replaced: list[str] = []
    for index, (schedule, saved) in enumerate(zip(configured, loaded.shared["schedulers"], strict=True)):
        prefix = f"schedule {index} " if len(configured) > 1 else ""
        replaced += [f"{prefix}{text}" for text in schedule.replaced(saved)]
        rate = schedule.changed_rate(saved)
        if rate is not None:
            source = type(schedule.scheduler).__name__
            parts = "length and warm-up of lr_schedule" if is_named(schedule.scheduler) else f"functions of {source}"
            logger.warning(
                "%sthe %s are those of configure_optimizers, because a checkpoint has none, and give %s: if that is meant, "
                "Resume(%r, hyperparameters='configured') (fit run: --hyperparameters configured) begins with that rate",
                *(prefix, parts, rate, str(how.path)),
            )
    if replaced:
        logger.warning(
            "the schedule continues with the checkpoint's %s. To use the values of configure_optimizers, with the rates of a run that had them from "
            "the start: Resume(%r, hyperparameters='configured') (fit run: --hyperparameters configured)",
            ", ".join([*replaced[:_SHOWN], *([f"and {len(replaced) - _SHOWN} more"] if replaced[_SHOWN:] else [])]),
            str(how.path),
        )


def weights_and_state(run: Run, weights: str | None) -> tuple[str, ...]:
    """The folders of a checkpoint to read: those of ``weights``, and of what the module has saved beside its weights if it wants that."""
    return ("model", *(("state",) if LoadHooks.need_state(run) else ()), *weights_folder(weights))


@contextmanager
def loading_weights(
    run: Run, checkpoint: str | Path | None, weights: str | None = None
) -> Iterator[LoadedWeights | None]:
    """Open a checkpoint whose weights an evaluation uses, and call the module's ``on_load_checkpoint``; ``None``: the module keeps its own.

    Args:
        weights: ``"trained"``, or the name of other weights; ``None``: those that the checkpoint's score was measured with.
    """
    if checkpoint is None and weights is not None:
        raise ValueError(f"weights={weights!r} are those of a checkpoint: give it with checkpoint=...")
    if checkpoint is None:
        yield None
        return
    where, what = run.checkpoints.run_folder.source(str(checkpoint))
    with opening(run.engine.group, where, what, weights_and_state(run, weights), "checkpoint") as loaded:
        loaded_weights = LoadedWeights(run, loaded, weights)
        loaded_weights.before_set_up()
        yield loaded_weights


class LoadedWeights:
    """The weights of an open checkpoint for a module, and what the module has saved beside them. ``weights``: their name."""

    def __init__(self, run: Run, loaded: Loaded, weights: str | None) -> None:
        self._run, self._loaded = run, loaded
        self._source = run.snapshot.source_of(loaded, weights)
        self._hooks = LoadHooks(run, loaded, self._source)

    def before_set_up(self) -> None:
        """Take over the checkpoint's step, epoch and samples, with which an evaluation's values are logged; restore the data module, and call the
        module's ``on_load_checkpoint``."""
        counters, state = self._loaded.manifest.get("counters"), self._run.state
        if isinstance(counters, dict) and self._run.stage != "fit":
            for name in ("step", "epoch", "samples"):
                if type(value := counters.get(name)) is int and value >= 0:
                    setattr(state, name, value)
        if LoadHooks.need_state(self._run):
            self._hooks.restore_datamodule(strict=True)
            self._hooks.before_set_up()

    def load(self) -> None:
        """Load parameters and buffers, and call the module's ``on_checkpoint_loaded``."""
        run = self._run
        run.snapshot.load_weights(self._loaded, self._source, True)
        self._hooks.after_weights(resumes=False)
        if run.stage != "fit":
            run.checkpoints.loaded_from = self._loaded.path


def reload_best(run: Run) -> None:
    """Load the weights of the best checkpoint after the training, and what the module has saved beside them, if ``reload_best`` is set; all ranks
    call this together."""
    best = run.checkpoints.best
    if not run.settings.reload_best or run.settings.fast_dev_run or run.preempted:
        return
    if best is None:
        logger.warning("reload_best=True: no checkpoint has a score, so the module keeps its last weights")
        return
    run.wait_for_checkpoint()
    folders = weights_and_state(run, None)
    with opening(run.engine.group, split_path(best)[0], str(best), folders) as loaded:
        names = dict.fromkeys(loaded.source.others.names)
        weights = loaded.manifest.get(SCORED_WITH) or run.snapshot.scored_with(names, None)
        loaded_weights = LoadedWeights(run, loaded, weights)
        loaded_weights.before_set_up()
        loaded_weights.load()
