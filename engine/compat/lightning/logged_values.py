"""The latest value of every logged name, also between log boundaries; computed only when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from engine.compat.lightning.before_run import BeforeRun
from engine.loop.run import Run
from engine.metrics.recorder import Recorder
from engine.metrics.reductions import Slot, reduced, unzipped


class Values(dict[str, Any]):
    """A read-only copy of the values by name; writing to it would have no effect, so it is an error."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("these values are a copy to read: log a value with self.log(name, value)")

    __setitem__ = __delitem__ = update = pop = popitem = setdefault = clear = __ior__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy or a pickle of it is a plain dict


def latest_values(run: Run | BeforeRun) -> dict[str, Any]:
    """The latest values by name, as numbers or tensors of shape () on the device.

    ``x`` and ``x_step``: of the current or the latest step, as far as this rank knows them. ``x`` and ``x_epoch`` of an epoch: over all ranks. With
    several ranks this is a collective in ``on_train_epoch_end``, and nowhere else.
    """
    values = dict(run.metrics)
    training = run.logbook.training
    if run.logbook.sanity is not None:
        values |= _with_unsuffixed(run.logbook.sanity.values)
    for slot, value in _step_values(run, training):
        values[slot.name] = value
        if slot.on_epoch:
            values[f"{slot.name}_step"] = value
    if run.recorder is training:
        if training.on_epoch:  # in on_train_epoch_end
            values |= _with_unsuffixed(training.epoch_values(clear=False))
        return values
    if run.logbook.evaluation is not None:
        values |= _with_unsuffixed(run.logbook.evaluation.values)
        for slot in run.recorder.all_slots:  # this rank's values from the hook that is running
            if (value := _epoch_value(slot)) is not None:
                values[slot.name] = value
    return values


def latest_shown(run: Run | BeforeRun) -> dict[str, Any]:
    """The values of :func:`latest_values` that were logged with ``prog_bar=True``."""
    names = set(run.progress) | run.logbook.training.progress_names() | run.recorder.progress_names()
    for evaluation in (run.logbook.evaluation, run.logbook.sanity):
        names |= set() if evaluation is None else evaluation.progress_names
    values = latest_values(run)
    forked = {name.removesuffix("_step") for name in values if name.endswith("_step")}
    return {name: value for name, value in values.items() if name in names and name not in forked}


def _with_unsuffixed(values: dict[str, float]) -> dict[str, float]:
    """Return ``values`` with each ``x_epoch`` also under the name ``x``, unless there is a value of this name."""
    return {name.removesuffix("_epoch"): value for name, value in values.items()} | values


def _step_values(run: Run | BeforeRun, recorder: Recorder) -> Iterator[tuple[Slot, Any]]:
    """Yield the values of the latest steps, except for names of which an evaluation or an epoch has reported a newer value."""
    for slot in recorder.all_slots:
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


def _epoch_value(slot: Slot) -> Any:
    """This rank's value over the epoch so far; ``None`` if nothing was logged."""
    if slot.metric is not None:
        return slot.metric.value(slot.name, slot.metric.all())
    _, values, weights = slot.column()
    return _value(slot.reduce, values, weights) if values else None


def _value(reduce: str, values: list[Any], weights: list[Any]) -> Any:
    total, weight = reduced(values, weights, reduce)
    return total / weight if reduce == "mean" else total


def names_withheld(run: Run | BeforeRun) -> frozenset[str]:
    """The names of values that were logged with ``logger=False``."""
    names: frozenset[str] = run.withheld | run.logbook.training.withheld_names() | run.recorder.withheld_names()
    return names
