"""The training loop: free functions over :class:`engine.loop.run.Run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.config.duration import NEVER
from engine.data.feed import MicroBatch
from engine.distributed.watchdog import collective_limit
from engine.loop.evaluate import validate
from engine.loop.first_checks import check_monitors, report_endless, report_nan
from engine.loop.last_checks import (
    check_trained,
    report_batches_told,
    report_limit_passed,
    report_nonfinite,
    report_stop_of_resumed,
)
from engine.loop.late_methods import take_late_methods
from engine.loop.rank_checks import with_first_batch_compared
from engine.loop.run import Run
from engine.loop.timing import EpochClock
from engine.utils.log import logger


def train(run: Run) -> None:
    """Train until a limit is reached, or a callback, a signal or another rank asks to stop::

    while no limit is reached:
        on_train_epoch_start
        for each micro-batch:
            on_train_batch_start; training_step; backward
            at the end of an accumulation window: finish gradients; optimizer step; step schedulers; zero_grad
            on_train_batch_end
            at the end of a step, when due: log, validate, stop
        validate when due, or when the training stops early; on_train_epoch_end; log; epoch schedulers
    """
    take_late_methods(run)
    state, control, loaders = run.state, run.control, run.loaders
    loaders.locate(state)
    run.begin()
    run.checkpoints.training_began = True
    if state.epoch_done:
        state.next_epoch()
    elif (
        state.position
        and run.loaders.validation
        and run.intervals.validation.due(state.step, None, control.elapsed_s, run.epochs)
    ):
        validate(run)  # the run that saved this step was killed before its validation
    control.ask_postponed()  # the run that saved this step may have ended before it could
    control.agree_now()  # a callback may have asked to stop before the first step
    resumed = state.step > 0
    if control.stops_early and control.resumes_stop:
        report_stop_of_resumed(run)
    # The run that saved the epoch's last step ended before it could validate and call the hooks of the epoch's end; or it was killed in the step at
    # which it stopped early, before it could do so within the epoch.
    end_is_due = state.position > 0 and (loaders.train_batches == state.batch_idx or _stops_early_again(run))
    control.epoch_is_cut = control.epoch_is_cut and control.stops_early
    while end_is_due or not control.limit_reached(loaders.train_batches, resumed, run.epochs):
        resumed = end_is_due = False
        train_epoch(run)
        if not state.epoch_done:
            break
        if not control.limit_reached(loaders.train_batches, epochs=run.epochs):
            state.next_epoch()
    if control.passed_before and run.is_main_process:
        report_limit_passed(run)
    run.publish_last()
    check_trained(run)
    report_batches_told(run)
    report_nonfinite(run)
    run.logbook.close("after the training", "log it in on_train_epoch_end")


def _stops_early_again(run: Run) -> bool:
    """Whether the run that is resumed within an epoch was killed as it stopped there, by a request or ``max_time``, and had not ended the epoch."""
    control = run.control
    if control.epoch_is_cut or not (control.resumes_stop or control.resumes_killed):
        return False
    return control.limit_reached(run.loaders.train_batches, before=True) and control.stops_early


def train_epoch(run: Run) -> None:
    """Train on one pass over the training data, or on the rest of a pass that was interrupted."""
    window, module, state, hooks, recorder = run.engine.window, run.module, run.state, run.hooks, run.logbook.training
    weights = window.weights
    optimization, loaders, optimizer_set = run.optimization, run.loaders, run.optimizer_set
    assert optimization is not None
    micro, accumulates = optimization.micro, optimization.accumulates
    micro_batches = begin_epoch(run)
    optimization.begin()
    window.position.begin_pass(accumulates)
    tokens_per_sample, counts_batches = run.clock.tokens_per_sample, run.clock.counts_batches
    clock, ends_window = EpochClock(run.times, run.phases), True
    for batch, share in clock.waits_for(micro_batches):
        index = state.batch_idx
        window.begin(share)
        recorder.size, recorder.guess, recorder.batch = share.size, share.guess, batch
        # A list, not a generator: all hooks are called, even after one returned -1.
        if hooks.on_train_batch_start and -1 in [
            hook(run, module, batch, index) for hook in hooks.on_train_batch_start
        ]:
            break
        outputs = micro(batch, index, share)
        state.batch_idx = index + 1
        state.batches += 1
        ends_window = share.last or not accumulates
        if ends_window:
            optimization.stepping = True
            optimization.step()
            state.position += loaders.stride
            state.whole_batches = state.batch_idx
            samples = share.samples if share.samples >= 0 else recorder.samples()
            state.samples += samples
            if tokens_per_sample:
                state.clock_tokens += samples * tokens_per_sample
            elif counts_batches:
                run.clock.add_window(loaders.stride)
            if optimizer_set.counted_schedules:
                run.follow_clock()
            if weights.items is not None:
                run.items.add(weights.items)
                weights.items = None
            optimization.stepping = False
        for hook in hooks.on_train_batch_end:
            hook(run, module, outputs, batch, index)
        if ends_window:
            epoch_ends = end_step(run, clock.previous_s, outputs)
            recorder.window += 1
            if epoch_ends:
                break
        batch = outputs = recorder.batch = None  # frees its memory before the next batch is copied to the device
    window.position.end_pass()
    recorder.batch = None
    if not ends_window:
        optimization.cut()
    clock.stop()
    end_epoch(run)


def end_step(run: Run, seconds: float, outputs: Any) -> bool:
    """Do what is due after an optimizer step; return whether the epoch ends here.

    Args:
        seconds: the duration of the micro-batch measured last. The faster the steps, the fewer of them exchange requests to stop.
        outputs: what the step's last ``training_step`` returned.
    """
    control = run.control
    if control.agreement.poll(control.urgency, seconds):
        control.accept()
    if control.agreement.news:
        run.announce_checkpoints()
    state = run.state
    steps_left = control.due_step - state.step
    if (
        steps_left <= 0
        or (steps_left == 1 and run.engine.pending_steps)
        or state.samples >= control.due_samples
        or state.clock_tokens >= control.due_tokens
        or control.reason
    ):
        do_what_is_due(run, outputs)
    return bool(control.reason)


def do_what_is_due(run: Run, outputs: Any) -> None:
    """Log, validate, collect garbage and check whether a limit is reached, each if due. ``outputs``: as in :func:`end_step`."""
    run.engine.settle()
    control, step = run.control, run.state.step
    first = not control.first_step_done
    if first:
        shorten_timeout(run)
    if run.publish_due():
        report_nan(run, outputs)
        report_endless(run)
    if first:
        check_monitors(run)
    if (
        run.loaders.validation
        and not control.reason
        and run.intervals.validation.due(step, None, control.elapsed_s, run.epochs)
    ):
        validate(run)
    if control.below_min_steps and step >= (run.settings.min_steps or 0):
        control.below_min_steps = False
        control.ask_postponed()
        control.agree_now()
    control.limit_reached(run.loaders.train_batches, epochs=run.epochs if control.max_length is not None else None)
    if run.intervals.garbage.due(step, None, 0.0):
        run.garbage.collect(control.elapsed_s)
    find_next_due_step(run)


def shorten_timeout(run: Run) -> None:
    """After the first step, set the timeout of collectives to ``timeout``: connecting and compiling are over, so a longer wait means a hang."""
    control = run.control
    control.first_step_done = True
    if run.is_main_process and run.logs_itself:
        logger.info("first step done, %.1f s after the start", control.stopwatch.seconds_here())
    run.start_log.close()
    if run.settings.timeout is not None and run.world_size > 1:
        run.engine.group.barrier()  # other ranks may still be compiling
        run.engine.group.limit(collective_limit(run.settings.timeout.value, run.device))


def find_next_due_step(run: Run) -> None:
    """Find the next step after which something is due, so that the steps before it need only one comparison."""
    step, settings, control = run.state.step, run.settings, run.control
    due_steps = [limit for limit in (control.max_steps, settings.min_steps) if limit is not None and limit > step]
    if run.loaders.validation:
        due_steps.append(run.intervals.validation.next_step(step))
    intervals = [settings.log_every_n_steps, settings.gc_every_n_steps]
    if not control.first_step_done or control.max_time is not None:
        intervals.append(1)
    due_steps += [(step // n + 1) * n for n in intervals if n]
    control.due_samples = control.due_tokens = NEVER
    if control.max_length is not None:
        length_step, control.due_samples, control.due_tokens = control.find_length()
        due_steps.append(length_step)
    if run.intervals.validation.is_counted and run.loaders.validation:
        control.due_samples = min(control.due_samples, run.intervals.validation.next_samples)
        control.due_tokens = min(control.due_tokens, run.intervals.validation.next_tokens)
    control.due_step = min(due_steps, default=NEVER)


def begin_epoch(run: Run) -> Iterator[MicroBatch]:
    """Set the window and the loader to the position in the epoch, call ``on_train_epoch_start`` and return the iterator over micro-batches."""
    state, loaders = run.state, run.loaders
    loaders.reload_for("train", state.epoch)
    loader = loaders.training()
    loaders.locate(state)
    loader.resume(state.epoch, state.position, loaders.take_stream())
    run.clock.measure(loader)
    find_next_due_step(run)
    run.logbook.begin_epoch()
    call_epoch_hooks(run, run.hooks.on_train_epoch_start)
    if run.control.stops_early and state.batch_idx != loaders.train_batches:
        return iter(())  # a stop of the run that is resumed
    changes = loaders.batch_sizes is not None and loaders.batch_sizes.changes
    micro_batches: Iterator[MicroBatch] = loaders.in_stages(state) if changes else loader.micro_batches()
    if run.clock.users:
        micro_batches = run.clock.checked(micro_batches)
    if loaders.row_lengths is not None:
        micro_batches = loaders.in_row_lengths(micro_batches, state)
    if mixture_stages := loader.stages_in(state.epoch):
        micro_batches = loaders.in_mixture_stages(micro_batches, state, mixture_stages)
    if run.settings.check and not run.control.first_step_done:
        return with_first_batch_compared(run, micro_batches)
    return micro_batches


def call_epoch_hooks(run: Run, hooks: Sequence[Callable[..., Any]]) -> None:
    """Call hooks outside of steps, where logged values belong to the epoch by default."""
    with run.logbook.recorder.outside_steps():
        for hook in hooks:
            hook(run, run.module)


def end_epoch(run: Run) -> None:
    """Validate when due, and when the training stops early; call hooks, publish the epoch's values and step schedulers.

    An epoch that ends early keeps its position and its values, and its schedulers do not step.
    """
    run.engine.settle()
    state, module, control = run.state, run.module, run.control
    exhausted = run.loaders.train_batches is not None and state.batch_idx >= run.loaders.train_batches
    epoch_complete = exhausted or not control.reason
    if control.reason or (control.max_epochs is not None and state.epoch + 1 >= control.max_epochs):
        run.publish_last()
    run.logbook.take_unpublished()
    if (
        epoch_complete
        and run.loaders.validation
        and run.intervals.validation.due(state.step, state.epoch + 1, control.elapsed_s, run.epochs)
    ):
        validate(run)
        # If Ctrl-C or SIGTERM has interrupted the validation, the epoch is not complete: a resumed run validates, then ends it.
        epoch_complete = state.validated_step == state.step
    elif control.stops_early and run.loaders.validation:
        validate(run, was_due=False)  # so that the last weights have a score
    training, logbook = run.logbook.training, run.logbook
    hook_values = training.hook_values()
    call_epoch_hooks(run, run.hooks.on_train_epoch_end)
    logbook.is_partial = not epoch_complete
    if epoch_complete or not control.preempted:  # after a signal the run that resumes completes these values
        run.publish(training.epoch_values(clear=epoch_complete), training)
    logbook.is_partial = False
    if not epoch_complete:
        training.restore_hook_values(hook_values)  # the hooks of the run that resumes log them again
    logbook.end_epoch()
    control.epoch_is_cut = control.stops_early and not epoch_complete
    if epoch_complete:
        for schedule in run.optimizer_set.schedules:
            if (
                schedule.interval == "epoch"
                and module.automatic_optimization
                and (state.epoch + 1) % schedule.frequency == 0
            ):
                schedule.advance(run.logbook.metrics, state.epoch + 1)
        state.epoch_done = True
        for hook in run.hooks.last_on_train_epoch_end:
            hook(run, module)
        control.ask_postponed()
        control.agree_now()
        if control.agreement.news:
            run.announce_checkpoints()
