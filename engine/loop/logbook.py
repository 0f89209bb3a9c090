"""The logged values of a run: where its module logs to, what was published, and what is known between two log boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.loop.timing import Intervals
from engine.metrics.recorder import ClosedRecorder, Recorder
from engine.module import TrainModule


class EvaluationValues:
    """The values of an evaluation from its last batch on, until they are published: in ``on_validation_epoch_end``."""

    def __init__(self, values: Sequence[dict[str, float]], recorders: Sequence[Recorder]) -> None:
        self.values = {name: value for of_loader in values for name, value in of_loader.items()}
        """Over all ranks."""
        self._recorders = recorders
        self._updates = self._counted()

    @property
    def progress_names(self) -> set[str]:
        """The names that were logged with ``prog_bar=True``."""
        return {name for recorder in self._recorders for name in recorder.progress_names()}

    def check(self, hook: str) -> None:
        """Check after ``hook`` that the torchmetrics objects still have the values that were reported.

        Raises:
            ValueError: one was updated in the hook, after its value was computed.
        """
        for name, (before, after) in zip(
            self._updates, zip(self._updates.values(), self._counted().values(), strict=True), strict=True
        ):
            if after > before:
                raise ValueError(
                    f"the metric that was logged as {name!r} was updated in {hook}, after its value was computed: update it in the step, or log it "
                    "in the hook alone"
                )

    def _counted(self) -> dict[str, int]:
        return {
            slot.name: sum(part._update_count for part in slot.metric.parts)
            for recorder in self._recorders
            for slot in recorder.slots.values()
            if slot.metric is not None
        }


class Logbook:
    """The logged values of a run.

    Args:
        module: the run's.
        training: the recorder of its training.
        intervals: when values are published.
    """

    def __init__(self, module: TrainModule, training: Recorder, intervals: Intervals) -> None:
        self._module, self._intervals = module, intervals
        self.training = training
        """The training's recorder, also while an evaluation logs to another."""
        self.metrics: dict[str, float] = {}
        """The latest value of every logged name. A name logged ``on_step`` and ``on_epoch`` has an entry without a suffix, too: the epoch's value."""
        self.from_training: set[str] = set()
        """The names in :attr:`metrics` that were measured in training, with the trained weights, rather than in an evaluation."""
        self.progress: dict[str, float] = {}
        """The entries of :attr:`metrics` that were logged with ``prog_bar=True``."""
        self.withheld: frozenset[str] = frozenset()
        """The names, among the values that were published last, that were logged with ``logger=False``: loggers do not get them."""
        self.evaluation: EvaluationValues | None = None
        """The values of an evaluation that are computed, but not published."""
        self.sanity_names: set[str] | None = None
        """The metrics that validation has logged in the sanity check; ``None``: there was none."""
        self.published_step = -1
        """The step whose values were published last, or at which the training began; -1: it has not begun."""
        self.step_window = -1
        """The window whose values were published last as a step's."""
        self.settled_window = -1
        """The last window whose values are in :attr:`metrics`, published or not."""
        self.epoch_windows: dict[str, int] = {}
        """Name -> the last window before the value of an epoch or an evaluation was published."""
        self.recorder = training
        """The recorder in use; the module logs to it from :meth:`record_to` on."""

    def record_to(self, recorder: Recorder) -> None:
        """Send what the module logs to ``recorder`` from now on."""
        self.recorder, recorder.module = recorder, self._module
        self._module.log_to(recorder)

    def close(self, when: str, instead: str) -> None:
        """Report nothing that the module logs from now on, and warn it: ``when`` that is, and what to do ``instead``."""
        self._module.log_to(ClosedRecorder(when, instead))

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block what the module logs is dropped."""
        recorder = self.recorder
        self._module.log_to(ClosedRecorder())
        try:
            yield
        finally:
            self.record_to(recorder)

    def begin(self, step: int) -> None:
        """Start or resume the training at ``step``, which is not published again."""
        self.published_step = step

    def due(self, step: int) -> bool:
        """Tell whether the values of ``step`` are to be published: of the run's first step, and every ``log_every_n_steps`` steps."""
        return self._intervals.publishing.due(step, None, 0.0) or (not self.published_step and step > 0)

    def note(self, values: dict[str, float], window: int | None) -> None:
        """Note that ``values`` are published now: those of the step ``window``, or of an epoch or an evaluation (``None``)."""
        if window is not None:
            self.step_window = window
            return
        before = self.training.window - (self.training.batch is None)
        self.epoch_windows |= dict.fromkeys((name.removesuffix("_epoch") for name in values), before)

    def take_over(self, values: dict[str, float], recorder: Recorder, in_training: bool) -> None:
        """Take over published ``values`` of ``recorder``; ``in_training``: they were measured in training, not in an evaluation."""
        named = {name.removesuffix("_epoch"): value for name, value in values.items() if name.endswith("_epoch")}
        named |= values
        self.metrics.update(named)
        (self.from_training.update if in_training else self.from_training.difference_update)(named)
        self.withheld = recorder.withheld_names()
        if names := recorder.progress_names():
            self.progress.update({name: value for name, value in values.items() if name in names})

    def with_this_step(self) -> dict[str, float]:
        """:attr:`metrics` with the values of the step under way, over all ranks. A collective; waits for the device."""
        values = self.training.step_values()
        slots = self.training.slots.values()
        forked = [slot.name for slot in slots if slot.on_epoch and f"{slot.name}_step" in values]
        return {**self.metrics, **values, **{name: values[f"{name}_step"] for name in forked}}

    def latest(self) -> dict[str, float]:
        """:attr:`metrics` with each training value of the latest step that logged it, over all ranks, also between log boundaries; one logged
        ``on_step`` and ``on_epoch`` without a suffix too. A collective; waits for the device."""
        values, forked = self.training.latest_values(self.epoch_windows)
        values |= {name: values[f"{name}_step"] for name in forked if f"{name}_step" in values}
        self.from_training.update(values)
        return {**self.metrics, **values}

    def take_unpublished(self) -> None:
        """Take over into :attr:`metrics` what the steps logged that no log boundary has published, over all ranks. A collective; waits for the
        device."""
        values, _ = self.training.latest_values(self.epoch_windows)
        self.metrics.update(values)
        self.from_training.update(values)
        self.settled_window = self.training.window - 1
