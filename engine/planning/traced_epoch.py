"""Runs the run's own epoch under observation: its loader repeats the micro-batches of one window until the windows' communication no longer
changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from engine.config.duration import NEVER
from engine.data.feed import MicroBatch
from engine.loop.optimization import Optimization
from engine.loop.run import Run
from engine.loop.train import call_epoch_hooks, train_epoch
from engine.module import TrainModule
from engine.planning.fake_tensors import fake_batch
from engine.planning.missing_values import MissingValues
from engine.planning.rank_trace import Collective
from engine.planning.simulated_run import SimulatedRun
from engine.planning.step_observer import StepObserver
from engine.planning.strategy_facts import strategy_facts
from engine.step.position import Share
from engine.utils.tree import leaves

MOST_MICRO_BATCHES = 64
"""The maximum number of micro-batches until a module that steps the optimizer by itself does so."""
MOST_WINDOWS = 4
"""The maximum number of windows in a trace. The first window creates the optimizer's state, and DDP rebuilds its buckets in the second: a window
is final once it communicates like the window before it."""
_BEFORE_THE_STEP = ("on_fit_start", "on_train_start", "on_train_epoch_start")
"""Events whose hooks are left out of the plan if they fail, because they may need values."""


class WindowTraced(Exception):
    """Raised to leave the epoch once the last window is recorded."""


class EndOfTrace(NamedTuple):
    """The end of a trace."""

    micro_batches: int
    """Micro-batches of the recorded window."""
    missing: str | None = None
    """A sentence on what ended the trace early; ``None``: the trace is complete."""


class TracedWindows:
    """Stands for the run's training loader: the micro-batches of one window, again and again.

    The micro-batches between a window's first and its last are alike: one of them is traced, and represents all of them.
    """

    def __init__(
        self,
        run: Run,
        optimization: TracedOptimization,
        first_batch: Any,
        shares: Sequence[Share],
        observer: StepObserver,
    ) -> None:
        assert run.train_loader is not None
        self._optimization = optimization
        self._run, self._first_batch, self._shares, self._observer = run, first_batch, shares, observer
        self._loader = run.train_loader
        self.traced = 0
        """The number of micro-batches of the current window so far."""
        self._windows_done, self._step_before, self._is_last = 0, 0, False
        self._sent: tuple[Collective, ...] | None = None

    def resume(self, epoch: int, position: int, stream: Any = None) -> None:
        """Do nothing: a trace starts at the beginning of an epoch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # callbacks read the user's loader: its length, its first batch

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of windows, as :meth:`engine.data.loader.PreparedLoader.micro_batches` does."""
        while True:  # until :meth:`window_done` raises
            yield from self._window()

    def _window(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one window, and tell the observer when each begins."""
        run, observer = self._run, self._observer
        # Garbage of an earlier window must not be freed in this one. While nothing is collected automatically, it is among the young objects, and
        # the older ones (all that was imported: 0.2 s) are walked for the first window only.
        gc.collect(2 if not self._windows_done or gc.isenabled() else 1)
        batch = fake_batch(self._first_batch)
        observer.begin_window(
            run.module, self._optimization.optimizers, leaves(batch), strategy_facts(run.engine.strategy).kept_tensors()
        )
        self.traced, self._step_before = 0, run.state.step
        to_trace = _representatives(self._shares, self._optimization)
        for number, (share, times) in enumerate(to_trace, 1):
            batch = fake_batch(self._first_batch) if batch is None else batch
            observer.next_micro_batch(leaves(batch), count_as=times)
            self.traced += times
            self._is_last = number == len(to_trace)
            current_batch, batch = batch, None
            yield current_batch, share
            del current_batch  # only the loop holds a micro-batch, as in a run
            run.state.batch_idx += times - 1
            if self._stepped_by_itself():
                return

    def _stepped_by_itself(self) -> bool:
        """Check whether a module with manual optimization has stepped an optimizer in this window, which ends it."""
        return not self._optimization.accumulates and self._run.state.step > self._step_before

    def window_done(self, run: Run, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a window, as the last hook of ``on_train_batch_end``. What the loop does after the hook (agree to stop, log, validate) is no part of
        the step.

        Raises:
            WindowTraced: the window was the last.
        """
        if not (self._is_last or self._stepped_by_itself()):
            return
        self._observer.end_window()
        self._windows_done += 1
        sent = self._observer.collectives.collectives()
        if sent == self._sent or self._windows_done == MOST_WINDOWS:
            raise WindowTraced
        self._sent = sent
        run.control.due_step = NEVER  # no limit ends a plan, and nothing is logged between two windows


class TracedOptimization(Optimization):
    """Wraps the run's optimization, and tells the observer which phase of the step begins."""

    def __init__(self, optimization: Optimization, run: Run, observer: StepObserver) -> None:
        self._optimization, self._run, self._observer = optimization, run, observer
        self._kept = strategy_facts(run.engine.strategy).kept_tensors
        self.accumulates = optimization.accumulates
        self.evaluates_again, self.calls_closures = optimization.evaluates_again, optimization.calls_closures
        self.backward_pass = optimization.backward_pass
        self.optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimization.optimizers]

    def begin(self) -> None:
        self._optimization.begin()

    def cut(self) -> None:
        self._optimization.cut()

    def before_validation(self) -> None:
        self._optimization.before_validation()

    def micro(self, batch: Any, index: int, share: Share) -> Any:
        """Run one micro-batch; returns the result of ``training_step``."""
        outputs = self._optimization.micro(batch, index, share)
        observer = self._observer
        observer.mark_gradients(self.optimizers)
        observer.mark_kept(self._kept())
        if not share.last:
            observer.mark_kept_gradients(self._run.module)
        observer.enter("optimizer step" if share.last else "end")
        return outputs

    def step(self) -> None:
        """Step the optimizers at the end of the window."""
        self._optimization.step()
        self._observer.mark_kept(self._kept())
        self._observer.enter("end")


def trace_epoch(
    simulated: SimulatedRun, first_batch: Any, shares: Sequence[Share], observer: StepObserver
) -> EndOfTrace:
    """Run the epoch until a window communicates like the window before it. The observer has recorded the last window."""
    run, missing_values = simulated.run, simulated.missing_values
    assert run.optimization is not None
    run.optimization = optimization = TracedOptimization(run.optimization, run, observer)
    windows = TracedWindows(run, optimization, first_batch, shares, observer)
    run.loaders.train = windows  # type: ignore[assignment]
    run.hooks.wrap(_leaving_out_failures(missing_values))
    run.hooks.add("on_train_batch_end", "the plan", windows.window_done)
    optimization.begin()
    call_epoch_hooks(run, (*run.hooks.on_fit_start, *run.hooks.on_train_start))
    try:
        train_epoch(run)
    except WindowTraced:
        run.logbook.recorder.batch = None  # as the loop does after each step: the inputs are freed
    except Exception as error:
        if not missing_values.comes_from_missing_values(error):
            raise
        observer.end_window()
        line = missing_values.users_line(error)
        return EndOfTrace(len(shares), f"the plan ends at {line}: {type(error).__name__}: {error}")
    else:  # on_train_batch_start has returned -1
        observer.end_window()
        return EndOfTrace(max(1, windows.traced), "the plan ends where on_train_batch_start ends the epoch")
    count = windows.traced
    if not optimization.accumulates and run.state.step == 0:
        step = f"{type(run.module).__name__}.training_step"
        return EndOfTrace(count, f"no optimizer has stepped in {count} micro-batches of {step}")
    return EndOfTrace(count)


def _leaving_out_failures(missing_values: MissingValues) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """A wrapper for :meth:`engine.loop.hooks.Hooks.wrap`, so that a hook before the first step that fails does not end the plan."""

    def guard(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Guard a hook that runs before the traced step: any error of the hook, which may need values that fake tensors do not have, is noted in the
        plan instead of raised. Other hooks are returned unchanged."""
        if name.rpartition(".")[2] not in _BEFORE_THE_STEP:
            return hook

        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                missing_values.note_left_out(hook, error)

        return guarded

    return guard


def _representatives(shares: Sequence[Share], optimization: TracedOptimization) -> list[tuple[Share, int]]:
    """The micro-batches of a window to trace, and how many each represents: those between the first, which creates the gradients, and the last are
    alike."""
    if not optimization.accumulates:
        return [(share, 1) for share in shares] * MOST_MICRO_BATCHES
    if optimization.evaluates_again or len(shares) < 4:
        return [(share, 1) for share in shares]
    return [(shares[0], 1), (shares[1], len(shares) - 2), (shares[-1], 1)]
