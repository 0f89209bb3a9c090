"""Resumes a run: restores the parts of a checkpoint in their order, with the hooks in between.

:mod:`engine.checkpoint.resume` chooses and opens the checkpoint.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoint.manifest import FOLDERS, SCORED_WITH, TRAINED, WEIGHTS
from engine.checkpoint.reader import weights_folder
from engine.checkpoint.resume import Loaded, Resume, opening, replaced_hyperparameters
from engine.distributed.collectives import all_or_none
from engine.loop.run import Run
from engine.utils.log import logger
from engine.utils.text import terminal_text

_SHOWN = 6
"""Hyperparameters that a warning shows."""


def resume_run(run: Run, checkpoint: str | Path | Resume) -> None:
    """Resume from a checkpoint: parameters, optimizers, schedulers, counters, data position, random number states, callbacks.

    Raises:
        FileNotFoundError: there is no such checkpoint (except with ``"auto"``).
        DamagedCheckpoint: the checkpoint cannot be used, or (for ``"auto"``, ``"last"``, ...) none of the existing ones can.
        ValueError: the checkpoint does not fit the module or its optimizers.
    """
    how, checkpoints = checkpoint if isinstance(checkpoint, Resume) else Resume(checkpoint), run.checkpoints
    where, what = checkpoints.run_folder.source(str(how.path))
    checkpoints.run_folder.named = checkpoints.folder.storage.root
    folders = ("model", *weights_folder(how.weights)) if how.weights_only else (*FOLDERS, WEIGHTS)
    with ExitStack() as stack:
        try:
            loaded = stack.enter_context(opening(run.engine.group, where, what, folders))
        except FileNotFoundError:
            if str(how.path) != "auto":
                raise
            return
        checkpoints.folder.protected = {loaded.name, *loaded.passed}
        if how.weights_only:
            run.snapshot.load_weights(loaded, how.strict, how.weights)
        else:
            _continue(run, loaded, how)
            checkpoints.last = loaded.path
        checkpoints.loaded_from = loaded.path


def _continue(run: Run, loaded: Loaded, how: Resume) -> None:
    """Restore the whole state of the run, with the hooks at their place in the order. The data is located in :func:`engine.loop.train.begin_epoch`.

    A user's own loop does the same in :meth:`engine.engine_snapshot.EngineCheckpoints.load`, without hooks.
    """
    engine, snapshot = run.engine, run.snapshot
    run.checkpoints.folder.take_over(loaded.shared.get("postponed", []), loaded.path)
    snapshot.load_weights(loaded, how.strict, TRAINED)
    engine.snapshot.restore_seed(loaded)
    snapshot.restore_order(loaded)
    engine.snapshot.restore_shared(loaded)  # the loss scaler, the window, registered objects
    snapshot.restore_shared(loaded)  # counters, logged values, the data module, callbacks
    if loaded.saved_by_run:  # a checkpoint of a loop with Engine has neither entries nor other weights
        _load_entries(run, loaded)
        for name, tensors in run.other_weights().items():  # after the hooks, which may have added parameters
            loaded.source.others.read_into(name, tensors)
    configured_groups = snapshot.trained().hyperparameters() if how.optimizer else []
    all_or_none(engine.group, partial(snapshot.check, loaded, how))  # raises on all ranks if it does on one
    if how.optimizer:
        snapshot.restore_optimizers(loaded, how)
    own_state = engine.snapshot.own_state(loaded)
    snapshot.restore_logged_values(loaded, own_state)
    snapshot.restore_waiting_stops(loaded, own_state)
    snapshot.restore_stream(loaded, own_state)
    engine.snapshot.restore_random_numbers(loaded, own_state)  # last: restoring something else may draw some
    if engine.is_main_process:
        if how.optimizer and how.hyperparameters == "checkpoint":
            _warn_about_replaced(run, configured_groups, how)
        logger.info("resumed from %s: epoch %d, step %d", loaded.path, run.state.epoch, run.state.step)


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


def _load_entries(run: Run, loaded: Loaded) -> None:
    """Call ``on_load_checkpoint`` with the entries that ``on_save_checkpoint`` has added; warn if no hook reads them."""
    user_entries, hooks = loaded.shared["user"], run.hooks.on_load_checkpoint
    entries = run.snapshot.entries(user_entries)
    for hook in hooks:
        hook(run, run.module, entries)
    if user_entries and not hooks:
        names = terminal_text(", ".join(map(str, user_entries)), one_line=True)
        logger.warning(
            "%s has entries of on_save_checkpoint (%s), and nothing here defines on_load_checkpoint: they are not read",
            loaded.path,
            names,
        )


def load_weights(run: Run, checkpoint: str | Path | None, weights: str | None = None) -> None:
    """Load only the parameters and buffers of a checkpoint, and its step, epoch and samples, with which an evaluation's values are logged.

    Args:
        weights: ``"trained"``, or the name of other weights; ``None``: those that the checkpoint's score was measured with.
    """
    if checkpoint is None and weights is not None:
        raise ValueError(f"weights={weights!r} are those of a checkpoint: give it with checkpoint=...")
    if checkpoint is None:
        return
    folders = ("model", *weights_folder(weights))
    with opening(
        run.engine.group, *run.checkpoints.run_folder.source(str(checkpoint)), folders, "checkpoint"
    ) as loaded:
        run.snapshot.load_weights(loaded, True, weights)
        run.checkpoints.loaded_from = loaded.path
        counters = loaded.manifest.get("counters")
        if isinstance(counters, dict):
            for name in ("step", "epoch", "samples"):
                if type(value := counters.get(name)) is int and value >= 0:
                    setattr(run.state, name, value)


def reload_best(run: Run) -> None:
    """Load the weights of the best checkpoint after the training, if ``reload_best`` is set; all ranks call this together."""
    best = run.checkpoints.best
    if not run.settings.reload_best or run.settings.fast_dev_run or run.preempted:
        return
    if best is None:
        logger.warning("reload_best=True: no checkpoint has a score, so the module keeps its last weights")
        return
    run.wait_for_checkpoint()
    with opening(run.engine.group, run.checkpoints.folder.storage, str(best), ("model", WEIGHTS)) as loaded:
        names = dict.fromkeys(loaded.source.others.names)
        weights = loaded.manifest.get(SCORED_WITH) or run.snapshot.scored_with(names, None)
        run.snapshot.load_weights(loaded, True, weights)
