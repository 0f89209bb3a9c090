"""The logged values of a run: the recorder that its module logs to, the published values, and values between two log boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.loop.timing import Intervals
from engine.metrics.recorder import ClosedRecorder, Recorder
from engine.module import TrainModule


class EvaluationValues:
    """The computed values of an evaluation before they are published, as hooks such as ``on_validation_epoch_end`` can see them."""

    def __init__(self, values: Sequence[dict[str, float]], recorders: Sequence[Recorder]) -> None:
        self.values = {name: value for of_loader in values for name, value in of_loader.items()}
        """The values by name, over all ranks."""
        self._recorders = recorders
        self._updates = self._update_counts()

    @property
    def progress_names(self) -> set[str]:
        """The names that were logged with ``prog_bar=True``."""
        return {name for recorder in self._recorders for name in recorder.progress_names()}

    def check(self, hook: str) -> None:
        """Check after ``hook`` that it has not changed the torchmetrics objects whose values were computed before.

        Raises:
            ValueError: one was updated in the hook.
        """
        for name, (before, after) in zip(
            self._updates, zip(self._updates.values(), self._update_counts().values(), strict=True), strict=True
        ):
            if after > before:
                raise ValueError(
                    f"the metric that was logged as {name!r} was updated in {hook}, after its value was computed: update it in the step, or log it "
                    "in the hook alone"
                )

    def _update_counts(self) -> dict[str, int]:
        """By name, the number of updates of each torchmetrics object."""
        return {
            slot.name: sum(part._update_count for part in slot.metric.parts)
            for recorder in self._recorders
            for slot in recorder.all_slots
            if slot.metric is not None
        }


class Logbook:
    """The logged values of a run.

    Args:
        module: the run's module.
        training: the recorder of training values.
        intervals: says when values are published.
    """

    def __init__(self, module: TrainModule, training: Recorder, intervals: Intervals) -> None:
        self._module, self._intervals = module, intervals
        self.training = training
        """The recorder of training values, also while an evaluation logs to another one."""
        self.metrics: dict[str, float] = {}
        """The latest value of every logged name; a name logged ``on_step`` and ``on_epoch`` also has its epoch value without a suffix."""
        self.from_training: set[str] = set()
        """The names in :attr:`metrics` that were measured in training, with the trained weights, rather than in an evaluation."""
        self.progress: dict[str, float] = {}
        """The entries of :attr:`metrics` that were logged with ``prog_bar=True``, in this epoch or the one before."""
        self._shown: set[str] = set()
        self._first_window = 0
        self.withheld: frozenset[str] = frozenset()
        """Names logged with ``logger=False`` among the values published last: loggers do not get these."""
        self.is_partial = False
        """Whether the values that are published now are an epoch's that is not over: the run that resumes it publishes those of the whole epoch."""
        self.evaluation: EvaluationValues | None = None
        """The values of an evaluation that are computed, but not yet published."""
        self.sanity_names: set[str] | None = None
        """The names that validation logged in the sanity check; ``None``: there was no sanity check."""
        self.sanity: EvaluationValues | None = None
        """The values of the sanity check, which are not published, until its end."""
        self.published_step = -1
        """The step whose values were published last, or at which the training began; -1: the training has not begun."""
        self.step_window = -1
        """The latest accumulation window whose values were published as those of a step."""
        self.settled_window = -1
        """The latest window whose values :attr:`metrics` has, published or not."""
        self.epoch_windows: dict[str, int] = {}
        """By name, the last window before its epoch or evaluation value was published: values of steps up to it are older than that value."""
        self.recorder = training
        """The recorder that the module logs to; see :meth:`record_to`."""

    def record_to(self, recorder: Recorder) -> None:
        """Send what the module logs to ``recorder`` from now on."""
        self.recorder, recorder.module = recorder, self._module
        self._module.log_to(recorder)

    def close(self, when: str, instead: str) -> None:
        """Drop what the module logs from now on, with a warning that says ``when`` that is and what to do ``instead``."""
        self._module.log_to(ClosedRecorder(when, instead))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block, drop what the module logs."""
        recorder = self.recorder
        self._module.log_to(ClosedRecorder())
        try:
            yield
        finally:
            self.record_to(recorder)

    def begin(self, step: int) -> None:
        """Start or resume the training at ``step``, whose values will not be published again."""
        self.published_step = step

    def begin_epoch(self) -> None:
        """Start or continue an epoch."""
        self._shown.clear()
        self._first_window = self.training.window

    def end_epoch(self) -> None:
        """Leave out of :attr:`progress` what this epoch has not logged: it would stand beside the epoch's number like a new value."""
        self.progress = {name: value for name, value in self.progress.items() if name in self._shown}

    def due(self, step: int) -> bool:
        """Whether to publish the values of ``step``: those of the run's first step, and of every ``log_every_n_steps``-th."""
        return self._intervals.publishing.due(step, None, 0.0) or (not self.published_step and step > 0)

    def note(self, values: dict[str, float], window: int | None) -> None:
        """Take note that ``values`` are published now, so that nothing is published twice.

        Args:
            window: the accumulation window of the step in which the values were logged; ``None``: they are of an epoch or an evaluation.
        """
        if window is not None:
            self.step_window = window
            return
        last_window = self.training.window - (self.training.batch is None)  # without a batch, the window has not begun
        self.epoch_windows |= dict.fromkeys((name.removesuffix("_epoch") for name in values), last_window)

    def take_over(self, values: dict[str, float], recorder: Recorder, in_training: bool) -> None:
        """Put published ``values`` of ``recorder`` into :attr:`metrics`; ``in_training``: they were measured in training, not in an evaluation."""
        metrics = {name.removesuffix("_epoch"): value for name, value in values.items() if name.endswith("_epoch")}
        metrics |= values
        self.metrics.update(metrics)
        (self.from_training.update if in_training else self.from_training.difference_update)(metrics)
        self.withheld = recorder.withheld_names()
        self._show(values, recorder)

    def _show(self, values: dict[str, float], recorder: Recorder) -> None:
        """Put the ``values`` of ``recorder`` that were logged with ``prog_bar=True`` into :attr:`progress`."""
        if names := recorder.progress_names():
            bar_values = {name: value for name, value in values.items() if name in names}
            self.progress.update(bar_values)
            self._shown.update(bar_values)

    def with_this_step(self) -> dict[str, float]:
        """:attr:`metrics`, updated with the values of the current step over all ranks. A collective; waits for the device."""
        values = self.training.step_values()
        with_both = [slot.name for slot in self.training.all_slots if slot.on_epoch and f"{slot.name}_step" in values]
        return {**self.metrics, **values, **{name: values[f"{name}_step"] for name in with_both}}

    def latest(self) -> dict[str, float]:
        """:attr:`metrics`, updated with the latest logged value of each training metric over all ranks, even if no log boundary has come yet. A name
        logged ``on_step`` and ``on_epoch`` also has its step value without a suffix. A collective; waits for the device."""
        values, with_both, _ = self.training.latest_values(self.epoch_windows)
        values |= {name: values[f"{name}_step"] for name in with_both if f"{name}_step" in values}
        self.from_training.update(values)
        return {**self.metrics, **values}

    def take_unpublished(self) -> None:
        """At the end of an epoch, update :attr:`metrics` and :attr:`progress` with values of steps after the last log boundary, over all ranks. A
        collective; waits for the device."""
        values, _, windows = self.training.latest_values(self.epoch_windows)
        self.metrics.update(values)
        of_epoch = {name: value for name, value in values.items() if windows[name] >= self._first_window}
        self._show(of_epoch, self.training)
        self.from_training.update(values)
        self.settled_window = self.training.window - 1
