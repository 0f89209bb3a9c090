"""The loops: train, evaluate, predict. Free functions over :class:`engine.loop.run.Run`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from engine.data.prepared_loader import PreparedLoader
from engine.distributed.collectives import gather_object
from engine.loop.rank_checks import checked
from engine.loop.run import Run
from engine.metrics.torchmetrics_states import unchanged
from engine.metrics.torchmetrics_values import put_back
from engine.module import TrainModule, overrides
from engine.utils.seed import isolated
from engine.utils.tree import map_tensors, whole


def train(run: Run) -> None:
    """Train until a limit is reached or someone asks to stop::

        while no limit is reached:
            on_train_epoch_start
            for each micro-batch:
                on_train_batch_start; training_step; backward
                at its window's end: finish gradients; optimizer step; zero_grad; step schedulers
                on_train_batch_end
                at a step's end, when due: log, validate, stop
            validate when due; on_train_epoch_end; log; epoch schedulers
    """
    state = run.state
    locate(run)
    run.begin()
    if state.epoch_done:
        next_epoch(run)
    elif state.position and run.val_loaders and run.val_every.due(state.step, None, run.elapsed_s, run.epochs):
        validate(run)  # the run was killed between the save of this step and its validation
    if run.agreement.now(run.stop_level):  # asked for before the first step
        run.accept_stop()
    while not reached_limit(run):
        train_epoch(run)
        if not state.epoch_done:
            break
        if not reached_limit(run):
            next_epoch(run)
    run.publish_last()


def train_epoch(run: Run) -> None:
    """One pass over the training data, or what is left of it."""
    window, module, state, hooks, times, recorder = run.engine.window, run.module, run.state, run.hooks, run.times, run.recorder
    optimization, clock = run.optimization, time.perf_counter
    micro, accumulates = optimization.micro, optimization.accumulates
    batches = begin_epoch(run)
    optimization.begin()
    window.accumulating = accumulates
    entered, apart, waited = clock(), times.apart, 0.0
    mark, closes = entered, True
    for batch in batches:
        began = clock()
        waited += began - mark
        index = state.batch_idx
        share = window.share
        recorder.size, recorder.batch = share.size, batch
        if hooks.on_train_batch_start:
            run.saver.hold()  # hooks may change weights
            if any([hook(run, module, batch, index) == -1 for hook in hooks.on_train_batch_start]):  # noqa: C419  (all are called)
                break
        outputs = micro(batch, index, share)
        state.batch_idx = index + 1
        state.batches += 1
        closes = share.last or not accumulates
        if closes:
            run.stepping = True
            optimization.step()
            state.position += run.stride
            state.whole_batches = state.batch_idx
            run.stepping = False
        for hook in hooks.on_train_batch_end:
            hook(run, module, outputs, batch, index)
        mark = clock()
        if closes:
            leave = end_step(run, mark - began)
            recorder.window += 1
            if leave:
                break
    window.accumulating = False
    if not closes:
        optimization.cut()
    times.data += waited
    times.compute += clock() - entered - (times.apart - apart)
    end_epoch(run)


def end_step(run: Run, seconds: float) -> bool:
    """After an optimizer step: whatever is due. Whether the epoch is to be left."""
    if run.agreement.poll(run.stop_level, seconds):
        run.accept_stop()
    left = run.due_step - run.state.step
    if left <= 0 or (left == 1 and run.engine.pending_steps) or run.stop_reason:
        due(run)
    return bool(run.stop_reason)


def due(run: Run) -> None:
    """Log, validate and find out whether a limit is reached."""
    run.engine.settle()
    step = run.state.step
    if not run.started:
        run.tighten()
    run.publish_due()
    if run.below_minimum and step >= (run.settings.min_steps or 0):
        run.below_minimum = False
        run.recall_stop()
        if run.agreement.now(run.stop_level):
            run.accept_stop()
    if run.val_loaders and not run.stop_reason and run.val_every.due(step, None, run.elapsed_s, run.epochs):
        validate(run)
    reached_limit(run)
    if run.gc_every.due(step, None, 0.0):
        run.garbage.collect()
    run.plan_next()


def reached_limit(run: Run) -> bool:
    """Whether a limit or a request ends the training; the reason is noted."""
    state, settings = run.state, run.settings
    finished = state.epoch + state.epoch_done
    if run.stop_reason:
        return True
    if run.num_train_batches == 0:
        run.stop_reason = "limit_train_batches=0 reached"
    elif run.max_steps is not None and state.step >= run.max_steps:
        run.stop_reason = f"max_steps={run.max_steps} reached"
    elif run.max_epochs is not None and finished >= run.max_epochs:
        run.stop_reason = f"max_epochs={run.max_epochs} reached"
    elif settings.max_time is not None and run.elapsed_s >= settings.max_time.value and run.may_stop:
        run.stop_reason = f"max_time={settings.max_time} reached"
    return bool(run.stop_reason)


def locate(run: Run) -> None:
    """Set the window, and where the epoch is in micro-batches: from its position, which another world size may have saved."""
    assert run.train_loader is not None
    window = run.engine.accumulate_grad_batches = run.window_at(run.state.epoch)
    run.stride = run.train_loader.stride
    run.state.batch_idx = run.state.position // (run.stride // window)


def begin_epoch(run: Run) -> Iterator[Any]:
    """Set the window and the loader to where the epoch is."""
    state, loader = run.state, run.train_loader
    assert loader is not None
    locate(run)
    loader.resume(state.epoch, state.position, run.take_stream())
    run.plan_next()
    run.saver.hold()
    for hook in run.hooks.on_train_epoch_start:
        hook(run, run.module)
    return checked(run, iter(loader)) if run.settings.check and not run.started else iter(loader)


def end_epoch(run: Run) -> None:
    """Validation when due, then hooks, values, schedulers. An epoch left in the middle keeps its place and its values."""
    run.engine.settle()
    run.saver.hold()  # hooks may change weights
    state, module = run.state, run.module
    exhausted = run.num_train_batches is not None and state.batch_idx >= run.num_train_batches
    whole = exhausted or not run.stop_reason
    if run.stop_reason or (run.max_epochs is not None and state.epoch + 1 >= run.max_epochs):
        run.publish_last()
    if whole and run.val_loaders and run.val_every.due(state.step, state.epoch + 1, run.elapsed_s, run.epochs):
        validate(run)
        run.saver.hold()
    run.recorder.size, run.recorder.on_step, run.recorder.on_epoch = 1, False, True
    for hook in run.hooks.on_train_epoch_end:
        hook(run, module)
    run.recorder.on_step, run.recorder.on_epoch = True, False
    run.publish(run.recorder.epoch_values(clear=whole), run.recorder)
    if whole:
        for schedule in run.schedulers:
            if schedule.interval == "epoch" and module.automatic_optimization and (state.epoch + 1) % schedule.frequency == 0:
                schedule.advance(run.metrics, state.epoch + 1)
        state.epoch_done = True
        for hook in run.hooks.last_on_train_epoch_end:
            hook(run, module)
        run.recall_stop()
        if run.agreement.now(run.stop_level):
            run.accept_stop()


def next_epoch(run: Run) -> None:
    """Move the counters on."""
    state = run.state
    state.epoch, state.batch_idx, state.whole_batches, state.position, state.epoch_done = state.epoch + 1, 0, 0, 0, False


# -- evaluation -----------------------------------------------------------------------------------------------------------------------


def validate(run: Run, limit: int | None = None) -> list[dict[str, float]]:
    """Validation inside of a training; it leaves gradients, random numbers and every module's train/eval flag as they were."""
    before = run.state.validated_step
    if run.stage == "fit":
        if before == run.state.step:
            return []
        run.state.validated_step = run.state.step
        run.optimization.before_validation()
    began, saving, outer = time.perf_counter(), run.times.checkpoint, run.recorder
    run.saver.hold()  # callbacks may put other weights in place
    for loader in run.val_loaders:
        loader.set_epoch(run.state.epoch)  # a shuffled one gives the same order after a resume
    try:
        with run.garbage.automatic(), run.modes.evaluating():
            results = evaluate(run, run.val_loaders, "validation", run.method("validation_step"), limit)
    except Preempted:
        run.record_to(outer)
        run.state.validated_step, results = before, []
    run.times.validation += time.perf_counter() - began - (run.times.checkpoint - saving)
    if run.stage == "fit" and run.agreement.now(run.stop_level):
        run.accept_stop()
    return results


def evaluate(
    run: Run, loaders: Sequence[PreparedLoader], name: str, step: Callable[..., Any], limit: int | None = None
) -> list[dict[str, float]]:
    """Run ``step`` on every batch of every loader without gradients; one dict of metrics for each loader.

    Args:
        name: ``"validation"`` or ``"test"``: whose hooks are called.
        limit: at most so many batches of each loader.
    """
    hooks, module, outer = run.hooks, run.module, run.recorder
    several = len(loaders) > 1
    suffixes = [f"/dataloader_idx_{i}" if several else "" for i in range(len(loaders))]
    *recorders, common = every = [run.engine.recorder(on_step=False, on_epoch=True, suffix=suffix) for suffix in [*suffixes, ""]]
    with evaluating(module, name):
        run.record_to(common)
        call_all(run, getattr(hooks, f"on_{name}_start"))
        call_all(run, getattr(hooks, f"on_{name}_epoch_start"))
        run.engine.share_buffers(module)  # the values belong to the weights that are saved
        try:
            for index, (loader, recorder) in enumerate(zip(loaders, recorders, strict=True)):
                run.record_to(recorder)
                for _ in batches(run, loader, name, step, index if several else None, limit):
                    pass
                if several:
                    recorder.set_aside()
            put_back(logged for recorder in recorders for logged in recorder.logged)
            run.record_to(common)
            call_all(run, getattr(hooks, f"on_{name}_epoch_end"))
            shared = common.epoch_values(clear=False)
            values = [recorder.epoch_values(clear=False) for recorder in recorders]
        finally:
            for recorder in every:  # not before all are computed: one torchmetrics object may stand in several
                recorder.clear()
        run.record_to(outer)
        if run.stage != "sanity":
            for recorder, found in zip(every, [*values, shared], strict=True):
                if found:
                    run.publish(dict(found), recorder)
        call_all(run, getattr(hooks, f"on_{name}_end"))
    if name == "validation":
        call_all(run, hooks.last_on_validation_end)
    return [{**found, **shared} for found in values]


def predict(run: Run, loaders: Sequence[PreparedLoader]) -> list[list[Any]]:
    """The outputs of ``predict_step`` for each loader: one entry a batch in the data's order, from all ranks, on the CPU."""
    run.num_eval_batches = [loader.length for loader in loaders]
    results = []
    with evaluating(run.module, "predict"):
        call_all(run, run.hooks.on_predict_start)
        call_all(run, run.hooks.on_predict_epoch_start)
        run.engine.share_buffers(run.module)
        for index, loader in enumerate(loaders):
            several = index if len(loaders) > 1 else None
            own = [map_tensors(lambda t: whole(t).cpu(), out) for out in batches(run, loader, "predict", run.method("predict_step"), several, None)]
            by_rank = gather_object(run.engine.data_group, own)
            dealt = itertools.zip_longest(*by_rank, fillvalue=_NOTHING)
            results.append([out for row in dealt for out in row if out is not _NOTHING])
        call_all(run, run.hooks.on_predict_epoch_end)
        call_all(run, run.hooks.on_predict_end)
    return results


_NOTHING = object()


class Preempted(Exception):
    """Ctrl-C or SIGTERM during an evaluation: all ranks leave it at the same batch, without results."""


def batches(run: Run, loader: PreparedLoader, name: str, step: Callable[..., Any], index: int | None, limit: int | None) -> Iterator[Any]:
    """The outputs of ``step`` on this rank's batches. ``index``: the loader's, when there are several.

    Raises:
        Preempted: Ctrl-C or SIGTERM on some rank.
    """
    engine, module = run.engine, run.module
    starts, ends = getattr(run.hooks, f"on_{name}_batch_start"), getattr(run.hooks, f"on_{name}_batch_end")
    place = () if index is None else (index,)
    autocast = engine.autocast()
    run.agreement.restart()
    began = time.perf_counter()
    for number, batch in enumerate(loader if limit is None else itertools.islice(loader, limit)):
        began, waited = time.perf_counter(), time.perf_counter() - began
        run.pulse += 1
        if run.agreement.poll(run.stop_level, waited):
            run.accept_stop()
            if run.preempted:
                raise Preempted
        size = engine.window.share.size
        if not size and not engine.strategy.matched_forward:
            continue  # repeated samples of a rank that has run out
        run.recorder.size, run.recorder.batch = size, batch
        # A batch that only keeps the ranks matched is not told to anyone.
        for hook in starts if size else ():
            hook(run, module, batch, number, *place)
        with autocast, nullcontext() if size else unchanged(module, run.recorder.metrics):
            outputs = step(batch, number, *place)
        for hook in ends if size else ():
            hook(run, module, outputs, batch, number, *place)
        if size:
            yield outputs
    run.recorder.size = 1


@contextmanager
def evaluating(module: TrainModule, name: str) -> Iterator[None]:
    """Eval mode, no gradients; afterwards each submodule's own flag (unless the module does otherwise) and all random numbers are back."""
    flags = [(m, m.training) for m in module.modules()]
    getattr(module, f"on_{name}_model_eval")()
    try:
        with isolated(), torch.no_grad():
            yield
    finally:
        for m, flag in flags:
            m.training = flag
    if name != "predict" and overrides(module, f"on_{name}_model_train"):
        getattr(module, f"on_{name}_model_train")()


def call_all(run: Run, hooks: Sequence[Callable[..., Any]]) -> None:
    """Call hooks that take nothing but the run and the module."""
    for hook in hooks:
        hook(run, run.module)
