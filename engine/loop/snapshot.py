"""The content of a run's checkpoint, and resuming from one."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import FOLDERS, SCORED_WITH, TRAINED, WEIGHTS
from engine.checkpoint.other_weights import weights_folder
from engine.checkpoint.reader import Source
from engine.checkpoint.resume import (
    Loaded,
    Resume,
    check_optimizers,
    check_samples,
    configure,
    fitting,
    load_scheduler,
    opening,
    rebase,
)
from engine.checkpoint.storage import split
from engine.checkpoint.user_entries import Entries
from engine.checkpoint.writer import Content, stepped
from engine.config.hyperparameters import as_data
from engine.config.masked import without_secrets
from engine.distributed.all_or_none import together
from engine.distributed.collectives import gather_json
from engine.loop.callback_states import load_states, states, weights
from engine.loop.own_loop_counters import state_of_loop
from engine.loop.run import Run
from engine.loop.state import TrainState
from engine.metrics.recorder import named
from engine.metrics.torchmetrics_states import load_metric_states, metric_states
from engine.step.optimizers import counters
from engine.utils.log import logger
from engine.utils.seed import restore
from engine.utils.text import terminal_text


def content(run: Run, score: Mapping[str, Any] | None = None) -> Content:
    """This rank's content of a checkpoint at this moment."""
    shared, strategy = _shared(run), run.engine.strategy
    if run.hooks.on_save_checkpoint:
        entries = Entries({}, _facts(run))
        for hook in run.hooks.on_save_checkpoint:
            hook(run, run.module, entries)
        shared["user"] = dict(entries)
    others = weights(run.callbacks, run, run.module)
    shared["callbacks"] = states(run.callbacks)
    facts = {
        "counters": {name: getattr(run.state, name) for name in ("epoch", "step", "batch_idx", "samples")},
        "metrics": dict(run.metrics),
        "module": f"{type(run.module).__module__}:{type(run.module).__qualname__}",
        "hparams": without_secrets(_readable(run.module.hparams)),
        "config": run.config,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    if others:
        facts[SCORED_WITH] = _scored_with(run, others, score)
    return Content(
        model=strategy.model_parts(run.module),
        optim={str(i): strategy.optimizer_parts(o, run.module) for i, o in enumerate(run.optimizers)},
        shared=shared,
        own={
            **run.engine.snapshot.own([_stream(run)]),
            "recorder": run.recorder.state_dict(),
            "metrics": metric_states(run.module),
            "logged": run.recorder.logged_metrics(),
        },
        facts=facts if score is None else {**facts, "score": dict(score)},
        partial=strategy.parts_differ,
        stepped=stepped(run.optimizers),
        weights=others,
    )


def _scored_with(run: Run, others: Mapping[str, Any], score: Mapping[str, Any] | None) -> str:
    """The name of the weights that a score is measured with: those of validation, unless the metric was logged in training."""
    if score is not None and score["monitor"] in run.logbook.from_training:
        return TRAINED
    return next((c.validates_with for c in run.callbacks if c.validates_with in others), None) or TRAINED


def _shared(run: Run) -> dict[str, Any]:
    """The state that is the same on all ranks, except for parameters and optimizers."""
    state, order = run.state, None if run.train_loader is None else run.train_loader.order
    samples = None if run.train_loader is None else run.train_loader.samples
    loader = {
        "epoch": state.finished_epochs,
        "position": 0 if state.epoch_done else state.position,
        "samples": samples,
    }
    return {
        **run.engine.snapshot.shared(
            run.optimizers, run.schedulers, [loader if order is None else {**loader, "order": order}]
        ),
        "state": asdict(state),
        "metrics": dict(run.metrics),
        "elapsed_s": run.control.stopwatch.seconds(),
        "items": run.items.total(),
        "val_every": run.val_every.state_dict(),
        "datamodule": None if run.datamodule is None else run.datamodule.state_dict(),
        "hparams": _storable(run.module.hparams),
        "hparams_name": run.module.hparams_name,
        "datamodule_hparams": _storable(getattr(run.datamodule, "hparams", {})),
        "datamodule_hparams_name": getattr(run.datamodule, "hparams_name", None),
        "postponed": list(run.saver.postponed),
        "user": {},
    }


def _stream(run: Run) -> Any:
    """The state of training data for which a position is not enough; ``None`` for other data."""
    if run.train_loader is None:
        return None
    if run.state.epoch_done:
        return run.train_loader.carried()
    return run.train_loader.state(run.state.position)


def resume(run: Run, wanted: str | Path | Resume) -> None:
    """Resume from a checkpoint: parameters, optimizers, schedulers, counters, data position, random numbers, callbacks.

    Raises:
        FileNotFoundError: there is none (except with ``"auto"``).
        DamagedCheckpoint: it cannot be used, or (for a name such as ``"auto"``) none of the existing ones can.
        ValueError: it does not fit the module or its optimizers.
    """
    how = wanted if isinstance(wanted, Resume) else Resume(wanted)
    where, what = run.home.source(str(how.path))
    run.home.named = run.saver.location.root  # from now on
    try:
        with opening(
            run.engine.group,
            where,
            what,
            ("model", *weights_folder(how.weights)) if how.weights_only else (*FOLDERS, WEIGHTS),
        ) as loaded:
            run.saver.kept = {loaded.name, *loaded.passed}
            if how.weights_only:
                _load_weights(run, loaded, how.strict, how.weights)
                run.loaded_from = loaded.path
            else:
                _go_on(run, loaded, how)
    except FileNotFoundError:
        if str(how.path) != "auto":
            raise


def check_best(run: Run) -> None:
    """Check that something finds the best checkpoint, if it is to be loaded after the training.

    Raises:
        ValueError: nothing does.
    """
    if run.settings.reload_best and not run.settings.fast_dev_run and not any(c.finds_best for c in run.callbacks):
        raise ValueError(
            "reload_best=True needs to know which checkpoint is the best: attach ModelCheckpoint(monitor=<a logged metric>, mode='min' or 'max')"
        )


def reload_best(run: Run) -> None:
    """Load the weights of the best checkpoint after the training, if that was asked for; all ranks call this together."""
    if not run.settings.reload_best or run.settings.fast_dev_run or run.preempted:
        return
    if run.best_checkpoint is None:
        logger.warning("reload_best=True: no checkpoint has a score, so the module keeps its last weights")
        return
    run.wait_for_checkpoint()
    with opening(run.engine.group, run.saver.location, str(run.best_checkpoint), ("model", WEIGHTS)) as loaded:
        others = dict.fromkeys(loaded.source.others.names)
        _load_weights(run, loaded, True, loaded.manifest.get(SCORED_WITH) or _scored_with(run, others, None))


def best_weights(run: Run) -> str | None:
    """The weights that the best checkpoint's score was measured with, as its manifest names them; all ranks call this together.

    ``None``: there is no best checkpoint, or it cannot be read.
    """
    if run.best_checkpoint is None:
        return None
    name: str | None = None
    if run.engine.is_main_process:
        with suppress(OSError, ValueError):
            where, what = split(run.best_checkpoint)
            name = str(where.manifest(what).get(SCORED_WITH, TRAINED))
    found: str | None = gather_json(run.engine.group, name)[0]
    return found


def roll_back(run: Run, path: Path | str) -> None:
    """Take weights, optimizers and schedulers of a checkpoint in the middle of a training; counters, data and random numbers continue."""
    how = Resume(path)
    with opening(run.engine.group, *run.home.source(str(path)), FOLDERS) as loaded:
        _load_weights(run, loaded, how.strict, TRAINED)
        _load_optimizers(run, loaded, loaded.shared["schedulers"], how)


def reseed(run: Run, seed: int, order: str | None) -> None:
    """Take over another run's data order."""
    run.engine.seed = seed
    if run.train_loader is not None:
        run.train_loader.reseed(seed, order)


def load_weights(run: Run, wanted: str | Path | None, which: str | None = None) -> None:
    """Take only the parameters and buffers of a checkpoint, and its step, epoch and samples, at which an evaluation is logged.

    Args:
        which: ``"trained"``, or the name of others; ``None``: those that its score was measured with.
    """
    if wanted is None and which is not None:
        raise ValueError(f"weights={which!r} are those of a checkpoint: give it with checkpoint=...")
    if wanted is not None:
        folders = ("model", *weights_folder(which))
        with opening(run.engine.group, *run.home.source(str(wanted)), folders, "checkpoint") as loaded:
            _load_weights(run, loaded, True, which)
            run.loaded_from = loaded.path
            counters = loaded.manifest.get("counters")
            if isinstance(counters, dict):
                for name in ("step", "epoch", "samples"):
                    if type(value := counters.get(name)) is int and value >= 0:
                        setattr(run.state, name, value)


def _load_weights(run: Run, loaded: Loaded, strict: bool, which: str | None) -> None:
    """``which``: as in :func:`load_weights`."""
    source = loaded.source if which == TRAINED else Source(loaded.opened, which)
    if source.weights != TRAINED and run.engine.is_main_process:
        logger.info("%s: its weights %r are loaded", loaded.path, source.weights)
    report = run.engine.strategy.load_model(run.module, source, strict and run.module.strict_loading)
    if report:
        logger.warning("%s fits in part: %s", loaded.path, report)


def _go_on(run: Run, loaded: Loaded, how: Resume) -> None:
    shared = loaded.shared
    run.saver.take_over(shared.get("postponed", []), loaded.path)
    _load_weights(run, loaded, how.strict, TRAINED)
    if shared["seed"] is not None:
        reseed(run, shared["seed"], shared["loaders"][0].get("order") if shared["loaders"] else None)
    run.engine.snapshot.load_shared(loaded)
    if "state" in shared:
        _go_on_with_run(run, loaded, shared)
    else:
        run.state.restore(asdict(_state_of_loop(run, loaded, shared["loaders"])))
    together(
        run.engine.group, partial(_check_loaded, run, loaded, how)
    )  # after hooks added the training's parameter groups
    if how.optimizer:
        _load_optimizers(run, loaded, shared["schedulers"], how)
    _load_own(run, loaded)
    run.last_checkpoint = run.loaded_from = loaded.path
    if run.engine.is_main_process:
        logger.info("resumed from %s: epoch %d, step %d", loaded.path, run.state.epoch, run.state.step)


def _go_on_with_run(run: Run, loaded: Loaded, shared: Any) -> None:
    """Load what only runs save, and not loops with ``Engine``."""
    loaded.give("the counters", run.state.restore, shared["state"])
    run.metrics.update(shared["metrics"])
    run.control.stopwatch.seconds_before = shared["elapsed_s"]
    run.items.restore(shared.get("items"))
    loaded.give("val_every", run.val_every.load_state_dict, shared["val_every"])
    if run.datamodule is not None and shared["datamodule"] is not None:
        loaded.give(type(run.datamodule).__name__, run.datamodule.load_state_dict, shared["datamodule"])
    elif shared["datamodule"]:
        logger.warning("%s has the state of a DataModule, and this run has none: it is not restored", loaded.path)
    loaded.give(
        "the callbacks",
        lambda states: load_states(run.callbacks, states, loaded.path, loaded.give),
        shared["callbacks"],
    )
    entries = Entries(shared["user"], _facts(run))
    for hook in run.hooks.on_load_checkpoint:
        hook(run, run.module, entries)
    for name, tensors in weights(run.callbacks, run, run.module).items():  # hooks may have added parameters
        loaded.source.others.read_into(name, tensors)
    if shared["user"] and not run.hooks.on_load_checkpoint:
        names = terminal_text(", ".join(map(str, shared["user"])), one_line=True)
        logger.warning(
            "%s has entries of on_save_checkpoint (%s), and nothing here defines on_load_checkpoint: they are not read",
            loaded.path,
            names,
        )


def _facts(run: Run) -> dict[str, Any]:
    """What hooks may read besides their entries."""
    return {"epoch": run.state.epoch, "global_step": run.state.step, "hyper_parameters": dict(run.module.hparams)}


def _state_of_loop(run: Run, loaded: Loaded, loaders: list[Any]) -> TrainState:
    """Set the position of a run that resumes a checkpoint of a loop with ``Engine``."""
    window = run.engine.accumulate_grad_batches = run.window_at(loaders[0]["epoch"] if loaders else 0)
    assert run.train_loader is not None
    stride = run.train_loader.stride // window
    return state_of_loop(
        loaded.path, loaders, loaded.manifest, run.loaders.train_batches, run.loaders.window_at, stride
    )


def _load_own(run: Run, loaded: Loaded) -> None:
    """Load each rank's own state. If the number of ranks, or their parts of the model, differ, the saved ranks' values are redistributed,
    and random numbers are those of a new run."""
    own = loaded.own(run.engine.snapshot.position_among_ranks())
    if own is not None:
        loaded.give("random generators", restore, own["rng"])
    known = own or loaded.of_rank(0)
    if known is not None and "recorder" not in known:  # from a loop with Engine
        rows = []
    elif own is not None:
        rows = [own]
    elif run.engine.data_group.rank == 0:
        rows = [row for row in loaded.every() if row["place"][-1]]
    else:
        rows = []
    loaded.give("the logged values", run.recorder.load_state_dicts, [row["recorder"] for row in rows])
    loaded.give("the metrics", partial(load_metric_states, run.module), [row["metrics"] for row in rows])
    if known is not None:  # a converted checkpoint has none
        # Under a pipeline only ranks of the last stage have logged metrics; the last rank is one of them.
        last = loaded.of_rank(loaded.manifest["world_size"] - 1)
        if last is not None and "logged" in last:
            logged = [row["logged"] for row in rows] or [named(last["logged"])]
            loaded.give("the logged metrics", run.recorder.load_logged_metrics, logged)
        run.loaders.continue_stream(next(iter(known["streams"]), None))


def _check_loaded(run: Run, loaded: Loaded, how: Resume) -> None:
    """Check that the data, the optimizers and the schedulers are those of the checkpoint."""
    loaders = loaded.shared["loaders"]
    if run.train_loader is not None and run.state.position and not run.state.epoch_done and loaders:
        check_samples(loaded.path, loaders[0].get("samples"), run.train_loader.samples, run.state.position, how.strict)
    if how.optimizer:
        check_optimizers(loaded, run.optimizers, [each.scheduler for each in run.schedulers])


def _load_optimizers(run: Run, loaded: Loaded, schedules: list[Any], how: Resume) -> None:
    source = loaded.source
    given = [
        [{k: v for k, v in group.items() if k not in {"params", *counters(o)}} for group in o.param_groups]
        for o in run.optimizers
    ]
    for index, optimizer in enumerate(run.optimizers):
        state = source.optim[str(index)]
        if not how.strict:
            state = fitting(state, run.engine.strategy.optimizer_parts(optimizer, run.module), run.module, source)
        take = partial(run.engine.strategy.load_optimizer, optimizer, run.module, source=source)
        loaded.give(f"optimizer {index} ({type(optimizer).__name__})", take, state)
        optimizer._opt_called = (
            run.state.step > 0
        )  # else torch warns of a scheduler that steps first, at an epoch's end
    for index, state in enumerate(schedules):
        load_scheduler(loaded, index, run.schedulers[index].scheduler, state)
    if how.hyperparameters == "configured":
        for optimizer, groups in zip(run.optimizers, given, strict=True):
            configure(optimizer, groups)
        for schedule in run.schedulers:
            rebase(schedule.scheduler)


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a checkpoint can hold; a network or a function must be given again when the module is created."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError):
            data = as_data(value)
            pack(data)
            found[name] = data
    return found


def _readable(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as JSON; what JSON cannot hold becomes text."""
    plain = (str, int, float, bool, type(None))
    return {str(k): v if isinstance(v, plain) else repr(v)[:200] for k, v in values.items()}
