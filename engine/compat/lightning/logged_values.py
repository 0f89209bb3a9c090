"""The latest value of every logged name, also between log boundaries: computed when somebody reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from engine.compat.lightning.before_run import BeforeRun
from engine.loop.run import Run
from engine.metrics.recorder import Recorder
from engine.metrics.reductions import Slot, reduced, unzipped


class Values(dict[str, Any]):
    """A copy of values by name, to read: what is written here would reach nobody."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("these values are a copy to read: log a value with self.log(name, value)")

    __setitem__ = __delitem__ = update = pop = popitem = setdefault = clear = __ior__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)  # copies are plain dicts


def live(run: Run | BeforeRun) -> dict[str, Any]:
    """Numbers, or tensors of shape () on the device, by name: ``x`` and ``x_step`` of the step under way or the latest one, as far as this rank
    knows them; ``x`` and ``x_epoch`` over all ranks.

    A collective in ``on_train_epoch_end`` with several ranks, and nowhere else.
    """
    values = dict(run.metrics)
    training = run.logbook.training
    for slot, value in _of_steps(run, training):
        values[slot.name] = value
        if slot.on_epoch:
            values[f"{slot.name}_step"] = value
    if run.recorder is training:
        if training.on_epoch:  # in on_train_epoch_end
            values |= _forked(training.epoch_values(clear=False))
        return values
    if run.logbook.evaluation is not None:
        values |= _forked(run.logbook.evaluation.values)
        for slot in run.recorder.slots.values():  # of the hook under way, on this rank
            if (value := _epoch(slot)) is not None:
                values[slot.name] = value
    return values


def live_shown(run: Run | BeforeRun) -> dict[str, Any]:
    """The values of :func:`live` that were logged with ``prog_bar=True``."""
    names = set(run.progress) | run.logbook.training.progress_names() | run.recorder.progress_names()
    names |= set() if run.logbook.evaluation is None else run.logbook.evaluation.progress_names
    values = live(run)
    forked = {name.removesuffix("_step") for name in values if name.endswith("_step")}
    return {name: value for name, value in values.items() if name in names and name not in forked}


def _forked(values: dict[str, float]) -> dict[str, float]:
    return {name.removesuffix("_epoch"): value for name, value in values.items()} | values


def _of_steps(run: Run | BeforeRun, recorder: Recorder) -> Iterator[tuple[Slot, Any]]:
    """The values of the latest steps; a name for which an evaluation or an epoch has reported a newer value is left out."""
    for slot in recorder.slots.values():
        if not slot.on_step or slot.window <= run.logbook.epoch_windows.get(slot.name, -1):
            continue
        published = run.metrics.get(f"{slot.name}_step" if slot.on_epoch else slot.name)
        in_metrics = slot.window == run.logbook.step_window or slot.window <= run.logbook.settled_window
        if in_metrics and published is not None:
            yield slot, published
        elif slot.metric is not None:
            if (seen := slot.metric.step(slot.window)) is not None:
                yield slot, slot.metric.value(slot.name, seen)
        elif slot.window_values:
            yield slot, _value(slot.reduce, *unzipped(slot.window_values, slot.name))


def _epoch(slot: Slot) -> Any:
    """This rank's value of the epoch so far; ``None``: there is none."""
    if slot.metric is not None:
        return slot.metric.value(slot.name, slot.metric.all())
    _, values, weights = slot.column()
    return _value(slot.reduce, values, weights) if values else None


def _value(reduce: str, values: list[Any], weights: list[Any]) -> Any:
    total, weight = reduced(values, weights, reduce)
    return total / weight if reduce == "mean" else total


def withheld(run: Run | BeforeRun) -> frozenset[str]:
    """The names that were logged with ``logger=False``."""
    names: frozenset[str] = run.withheld | run.logbook.training.withheld_names() | run.recorder.withheld_names()
    return names
