"""What is known of logged values between two log boundaries, for those who read them there."""

from __future__ import annotations

from collections.abc import Sequence

from engine.metrics.recorder import Recorder


class Pending:
    """The values of an evaluation from its last batch on, until they are published: in ``on_validation_epoch_end``."""

    def __init__(self, values: Sequence[dict[str, float]], recorders: Sequence[Recorder]) -> None:
        self.values = {name: value for found in values for name, value in found.items()}
        """Over all ranks."""
        self._recorders = recorders
        self._updates = self._counted()

    @property
    def shown(self) -> set[str]:
        """The names that were logged with ``prog_bar=True``."""
        return {name for recorder in self._recorders for name in recorder.progress_names()}

    def check(self, hook: str) -> None:
        """Check after ``hook`` that the values still are those of the torchmetrics objects.

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


class LiveMetrics:
    """What is known of logged values between two log boundaries."""

    def __init__(self, training: Recorder) -> None:
        self.training = training
        """The training's recorder, also while an evaluation logs to another."""
        self.pending: Pending | None = None
        """Values of an evaluation that are not published yet."""
        self.sanity_names: set[str] | None = None
        """The metrics that validation has logged in the sanity check; ``None``: there was none."""
        self.step_window = -1
        """The window whose values were published last as a step's."""
        self.settled_window = -1
        """The last window of those whose values are in the run's ``metrics``, published or not."""
        self.epoch_windows: dict[str, int] = {}
        """By name, the last window before the value of an epoch or an evaluation was published."""

    def published(self, values: dict[str, float], window: int | None) -> None:
        """``values`` are published: those of the step ``window``, or of an epoch or an evaluation (``None``)."""
        if window is not None:
            self.step_window = window
            return
        before = self.training.window - (self.training.batch is None)
        self.epoch_windows |= dict.fromkeys((name.removesuffix("_epoch") for name in values), before)
