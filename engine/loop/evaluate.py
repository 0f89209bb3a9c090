"""Validation, test and prediction."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from engine.data.loader import PreparedLoader
from engine.distributed.collectives import gather_object
from engine.loop.lifecycle import watched
from engine.loop.logbook import EvaluationValues
from engine.loop.method_arguments import step_accepting
from engine.loop.run import Run
from engine.loop.stopping import Preempted
from engine.metrics.recorder import Recorder
from engine.metrics.torchmetrics_states import unchanged
from engine.metrics.torchmetrics_values import put_back
from engine.module import overrides
from engine.utils.seed import isolated
from engine.utils.tree import full_tensor, map_tensors


def validate(run: Run, limit: int | None = None, *, was_due: bool = True) -> list[dict[str, float]]:
    """Validate, during training or before it; restore gradients, random number states and every module's train/eval flag afterwards.

    Args:
        limit: the maximum number of batches per loader.
        was_due: the interval between validations has asked for this one, and asks again if it does not come to its end.
    """
    previous_validated_step = run.state.validated_step
    if run.stage == "fit":
        if previous_validated_step == run.state.step:
            return []
        run.state.validated_step = run.state.step
        assert run.optimization is not None
        run.optimization.before_validation()
    began, checkpoint_s, outer_recorder = time.perf_counter(), run.times.checkpoint, run.logbook.recorder
    run.engine.checkpoint_writer.before_validation()
    if run.loaders.reload_for("validation", run.state.epoch):
        run.loaders.for_validation(run.val_every)
    for loader in run.loaders.validation:
        loader.set_epoch(run.state.epoch)  # so that a shuffled loader gives the same order after a resume
    results: list[dict[str, float]] = []
    completed = False
    try:
        with run.garbage.automatic(), run.optimizer_set.modes.evaluating():
            results = evaluate(
                run, run.loaders.validation, "validation", run.placed.evaluation_step("validation_step"), limit
            )
        completed = True
    except Preempted:
        pass
    finally:
        if not completed:  # interrupted, or ended by an error: a run that resumes from here validates again
            run.logbook.record_to(outer_recorder)
            run.state.validated_step = previous_validated_step
            if was_due:
                run.intervals.validation.keep_due()
    run.times.validation += time.perf_counter() - began - (run.times.checkpoint - checkpoint_s)
    if run.stage == "fit":
        run.control.agree_now()
    return results


def sanity_check(run: Run) -> None:
    """Validate on a few batches before the training, so that errors in validation show before the end of the first epoch. Changes no state."""
    count = run.settings.num_sanity_val_steps
    if not count or not run.loaders.validation or run.state.step:
        return
    with run.in_sanity_check():
        call_hooks(run, run.hooks.on_sanity_check_start)
        with watched(run):
            run.logbook.sanity_names = set().union(*validate(run, None if count < 0 else count))
        call_hooks(run, run.hooks.on_sanity_check_end)
        run.logbook.sanity = None


def evaluate(
    run: Run, loaders: Sequence[PreparedLoader], name: str, step: Callable[..., Any], limit: int | None = None
) -> list[dict[str, float]]:
    """Run ``step`` on every batch of every loader without gradients; return one dict of metrics per loader.

    Args:
        name: ``"validation"`` or ``"test"``, as in the names of the hooks to call.
        limit: the maximum number of batches per loader.
    """
    hooks, module, logbook, outer_recorder = run.hooks, run.module, run.logbook, run.logbook.recorder
    several = len(loaders) > 1
    step = step_accepting(module, f"{name}_step", step, several)
    suffixes = [f"/dataloader_idx_{i}" if several else "" for i in range(len(loaders))]
    # One recorder for each loader, and one for values that hooks log outside of batches.
    *recorders, common = all_recorders = [
        run.engine.recorder(on_step=False, on_epoch=True, suffix=suffix) for suffix in [*suffixes, ""]
    ]
    if several:
        shared_names: dict[str, Recorder] = {}
        for recorder in all_recorders:
            recorder.taken = shared_names
    with run.phases.timed(name), evaluating(run, name):
        logbook.record_to(common)
        call_hooks(run, getattr(hooks, f"on_{name}_start"))
        call_hooks(run, getattr(hooks, f"on_{name}_epoch_start"))
        run.engine.share_buffers(module)  # checkpoints save rank 0's buffers: measure with these
        try:
            for index, (loader, recorder) in enumerate(zip(loaders, recorders, strict=True)):
                logbook.record_to(recorder)
                loader_index = index if several else None
                deque(batches(run, loader, name, step, loader_index, limit), maxlen=0)  # runs all, keeps no output
                if several:
                    recorder.set_aside()
            put_back(logged for recorder in recorders for logged in recorder.logged)
            logbook.record_to(common)
            values = [recorder.epoch_values(clear=False) for recorder in recorders]
            logbook.evaluation = evaluation = EvaluationValues(values, recorders)
            call_hooks(run, getattr(hooks, f"on_{name}_epoch_end"))
            evaluation.check(f"on_{name}_epoch_end")
            shared = common.epoch_values(clear=False)
        finally:
            logbook.evaluation = None
            # Only after all values are computed: several recorders may have the same torchmetrics object.
            for recorder in all_recorders:
                recorder.clear()
        logbook.record_to(outer_recorder)
        if run.stage in ("validate", "test"):
            logbook.close(f"after the {name}'s epoch", f"log it in on_{name}_epoch_end")
        if run.stage == "sanity":
            logbook.sanity = EvaluationValues([*values, shared], all_recorders)
        else:
            for recorder, epoch_values in zip(all_recorders, [*values, shared], strict=True):
                if epoch_values:
                    run.publish(dict(epoch_values), recorder)
        call_hooks(run, getattr(hooks, f"on_{name}_end"))
    if name == "validation":
        call_hooks(run, hooks.last_on_validation_end)
    return [{**epoch_values, **shared} for epoch_values in values]


def predict(run: Run, loaders: Sequence[PreparedLoader], keep: bool = True) -> list[list[Any]]:
    """Return the outputs of ``predict_step`` for each loader: one entry per batch in the order of the data, from all ranks, on the CPU.

    Args:
        keep: ``False``: drop each output once the hooks have got it, and return empty lists.
    """
    results: list[list[Any]] = []
    with run.phases.timed("predict"), evaluating(run, "predict"):
        call_hooks(run, run.hooks.on_predict_start)
        call_hooks(run, run.hooks.on_predict_epoch_start)
        run.engine.share_buffers(run.module)
        run.logbook.close("in a prediction", "return the value from predict_step")
        step = step_accepting(run.module, "predict_step", run.placed.evaluation_step("predict_step"), len(loaders) > 1)
        for index, loader in enumerate(loaders):
            several = index if len(loaders) > 1 else None
            outputs = batches(run, loader, "predict", step, several, None)
            if not keep:
                deque(outputs, maxlen=0)
                results.append([])
                continue
            outputs_of_rank = [map_tensors(lambda t: full_tensor(t).cpu(), out) for out in outputs]
            by_rank = gather_object(run.engine.loss_group, outputs_of_rank)
            # Batches are dealt to the ranks in turn; the last ranks may have one fewer.
            by_turn = itertools.zip_longest(*by_rank, fillvalue=_NO_BATCH)
            results.append([out for turn in by_turn for out in turn if out is not _NO_BATCH])
        call_hooks(run, run.hooks.on_predict_epoch_end)
        call_hooks(run, run.hooks.on_predict_end)
    return results


_NO_BATCH = object()


def batches(
    run: Run, loader: PreparedLoader, name: str, step: Callable[..., Any], index: int | None, limit: int | None
) -> Iterator[Any]:
    """Run ``step`` on this rank's batches, with their hooks, and yield its outputs. ``index``: the loader's index; ``None``: there is one loader.

    Raises:
        Preempted: Ctrl-C or SIGTERM reached some rank.
    """
    engine, module, control, logbook = run.engine, run.module, run.control, run.logbook
    starts, ends = getattr(run.hooks, f"on_{name}_batch_start"), getattr(run.hooks, f"on_{name}_batch_end")
    loader_index = () if index is None else (index,)
    autocast = engine.autocast()
    control.agreement.restart()
    began = time.perf_counter()
    number = -1
    with engine.window.position.nested():
        # Not enumerate(), which would keep the last batch alive.
        for batch, share in itertools.islice(loader.micro_batches(), limit):
            number += 1
            began, waited = time.perf_counter(), time.perf_counter() - began
            run.pulse += 1
            if control.agreement.poll(control.urgency, waited):
                control.accept()
                if control.preempted:
                    raise Preempted
            engine.window.begin(share)
            size, is_repeated = share.size, not share.size and not share.empty
            if is_repeated and not engine.strategy.matched_forward:
                continue  # this rank has no more data, and repeats samples that need not be computed
            logbook.recorder.size, logbook.recorder.guess, logbook.recorder.batch = size, share.guess, batch
            # Hooks do not get a repeated batch, which is computed only for the collectives in the forward pass.
            for hook in () if is_repeated else starts:
                hook(run, module, batch, number, *loader_index)
            with autocast, nullcontext() if size else unchanged(module, logbook.recorder.metrics):
                outputs = step(batch, number, *loader_index)
            for hook in () if is_repeated else ends:
                hook(run, module, outputs, batch, number, *loader_index)
            if not is_repeated:
                yield outputs
            batch = outputs = logbook.recorder.batch = (
                None  # frees its memory before the next batch is copied to the device
            )
    logbook.recorder.size = 1


@contextmanager
def evaluating(run: Run, name: str) -> Iterator[None]:
    """Inside the block, eval mode without gradients; afterwards random number states, and (unless overridden) each submodule's mode, are restored.

    ``TrainModule.on_validation_model_eval`` or its like for ``"test"`` and ``"predict"`` switches the modes, ``on_validation_model_train`` back.
    """
    module = run.module
    flags = [(m, m.training) for m in module.modules()]
    run.evaluating = True
    try:
        with isolated(), torch.no_grad():
            getattr(module, f"on_{name}_model_eval")()  # a user's override may enable gradients for this evaluation
            yield
    finally:
        for m, flag in flags:
            m.training = flag
        run.evaluating = False
    if name != "predict" and overrides(module, f"on_{name}_model_train"):
        getattr(module, f"on_{name}_model_train")()


def call_hooks(run: Run, hooks: Sequence[Callable[..., Any]]) -> None:
    """Call hooks whose only arguments are the run and the module."""
    for hook in hooks:
        hook(run, run.module)
