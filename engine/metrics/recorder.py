"""``Recorder``: keeps logged values on their device, and reduces them over micro-batches and ranks when they are read."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed.collectives import gather_json, gather_row
from engine.distributed.group import Group
from engine.metrics.log_options import LogArguments, Options, check_metric, options_of, without_steps
from engine.metrics.reductions import FOLD, Column, Slot, Weighted, as_floats, combined, reduced, total_of, unzipped
from engine.metrics.torchmetrics_states import Entry, add, entry
from engine.metrics.torchmetrics_values import Logged, Offer, Watch, agree, check, gather_states, leader, limit
from engine.utils.log import warn_once
from engine.utils.loss import Loss, mean_of
from engine.utils.sample_count import SingleTensors, counted, guess_text
from engine.utils.tree import full_tensor

_OF_HOOKS = "\0"
"""The end of a name in the exchange of an epoch's values, if hooks outside of steps have logged it."""
Row = tuple[list[str], list[str], list[float]]
"""The logged names of a rank, their reductions, and for each name its total and its weight."""


class Recorder:
    """Stores the values that a module logs. A run has one recorder for training, and one for each loader of an evaluation."""

    def __init__(
        self,
        group: Group,
        loss_group: Group | None = None,
        is_counted: bool = True,
        on_step: bool = False,
        on_epoch: bool = True,
        suffix: str = "",
        parts: int = 1,
    ) -> None:
        self.group, self.suffix = group, suffix
        """``group``: the ranks over which values are reduced; ranks that compute the same losses count once. ``suffix``: appended to all names."""
        self.loss_group = loss_group or group
        """The ranks whose values count, over which torchmetrics objects are computed."""
        self.parts = parts
        """The ranks that log values of the same samples, each of its part of them. A checkpoint has weights of whole samples, so that an epoch can
        continue with another number of parts."""
        self.on_step, self.on_epoch = on_step, on_epoch
        """The defaults for names logged without these options."""
        self.module: nn.Module | None = None
        """The module in which torchmetrics objects are looked up by name."""
        self._of_steps: dict[str, Slot] = {}
        self._of_hooks: dict[str, Slot] = {}
        self.slots = self._of_steps
        """The names logged where the module logs now: in steps, or in hooks outside of them; see :meth:`outside_steps`."""
        self.taken: dict[str, Recorder] | None = None
        """Names logged without the loader's index, and the recorder that logged each; shared by the recorders of all loaders of an evaluation."""
        self._logged: dict[int, Logged] = {}
        self._watches: dict[int, Watch] = {}
        self._exchange = RankExchange(group, is_counted)
        self.window = 0
        """The index of the accumulation window that values of a step belong to."""
        self.size: int = 1
        """The samples in the current micro-batch, which are the weight of its values; 0: its values do not count; -1: to be found from ``batch``."""
        self.guess = ""
        """Why :attr:`size` is a guess; empty: it is none."""
        self.batch: Any = None
        """The current micro-batch; ``None`` between micro-batches."""
        self._single_tensors = SingleTensors()

    @property
    def all_slots(self) -> list[Slot]:
        """The slots of all names, those of hooks outside of steps last."""
        return [*self._of_steps.values(), *self._of_hooks.values()]

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Inside the block hooks run outside of steps, where values belong to the epoch by default.

        A name that they log is another value than that of the same name in a step: the epoch reports it in the place of the steps' value.
        """
        self.slots, self.size, self.on_step, self.on_epoch = self._of_hooks, 1, False, True
        try:
            yield
        finally:
            self.slots, self.on_step, self.on_epoch = self._of_steps, True, False

    def record(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: Any = "mean", enable_graph: bool = False, sync_dist: bool = False,
        sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: Any = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False, reduce: Any = None,
    ) -> None:  # fmt: skip
        """Store one value, without computing anything or waiting for a device. Arguments: see :meth:`engine.TrainModule.log`.

        Raises:
            TypeError: the value is not a number, a one-element tensor or a torchmetrics object.
            ValueError: the value has several elements, or the name was logged with other options before.
        """
        # sync_dist is ignored: values are reduced over all ranks either way.
        arguments = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist_group,
            add_dataloader_idx, metric_attribute, rank_zero_only, reduce,
        )  # fmt: skip
        if name not in self.slots or (slot := self.slots[name]).value_arguments != arguments:
            slot = self._slot(name, arguments, value)
        if type(value) is Tensor and value.shape == ():  # the usual case: called in every step
            # Clone a view, which would keep its whole base alive and change with it, a leaf, which may be a buffer that changes, and a tensor
            # that was changed in place: a later change in place is noticed by a version above 0, so what is stored must start at 0.
            stays_the_same = value._base is None and value.grad_fn is not None and not value._version
            value = value.detach() if stays_the_same else value.detach().clone()
        elif isinstance(value, Tensor):
            value = _one_element(name, value)
        elif not isinstance(value, (int, float)):
            value, batch_size = self._other_value(slot, value, batch_size)
            if value is None:
                return
        if self.size < 0 and batch_size is None:
            self.samples()
        if (
            not self.size or slot.silent
        ):  # an empty or a repeated micro-batch, or a value of rank 0 alone on another rank: not stored
            self._forget_earlier_window(slot)
            return
        if batch_size is None:
            batch_size = self.size
            if self.guess and slot.on_epoch and slot.reduce == "mean":
                warn_once(guess_text(self.guess))
            if self.parts > 1:  # so many ranks log values of the same samples
                batch_size /= self.parts
        if slot.on_step:
            if slot.window != self.window:
                slot.window, slot.window_values = self.window, [(value, batch_size)]
            else:
                slot.window_values.append((value, batch_size))
        if slot.on_epoch:
            slot.values.append((value, batch_size))
            if len(slot.values) >= FOLD:
                slot.fold()

    def _forget_earlier_window(self, slot: Slot) -> None:
        """Forget the values of the window before, although none of this one is stored."""
        if slot.on_step and self.size and slot.window != self.window:
            slot.window, slot.window_values = self.window, []

    def _mean_of_loss(self, slot: Slot, loss: Loss, batch_size: Any) -> tuple[Tensor, Tensor | float]:
        """The value and the weight of a logged ``Loss``: its mean and its count, so that means over steps, ranks and the epoch are those that are
        minimized.

        Raises:
            ValueError: the call asks for another weight, or another reduction.
        """
        if batch_size is not None or slot.reduce != "mean":
            option = f"reduce_fx={slot.reduce!r}" if slot.reduce != "mean" else f"batch_size={batch_size!r}"
            raise ValueError(
                f"log({slot.name!r}, {option}) got a Loss, which is logged as its sum / count and weighs by its count: leave the option out, or log "
                "a number"
            )
        mean, count = mean_of(loss)
        return full_tensor(mean).reshape(()), count

    def samples(self) -> int:
        """The number of samples in the current micro-batch."""
        if self.size < 0:
            self.size, self.guess = counted(self.batch)
            if type(self.batch) is Tensor:
                self.guess = self.guess or self._single_tensors.doubt(self.batch)
        return self.size

    def _slot(self, name: str, arguments: tuple[Any, ...], value: Any) -> Slot:
        """Find or create the slot of a name that is new, has a torchmetrics object, or whose options are passed differently than before."""
        if not isinstance(name, str):
            raise TypeError(f"log() takes a name (str) first, got {name!r}")
        slot, computes = self.slots.get(name), _is_metric_like(value)
        if slot is None or slot.arguments != arguments:
            log_arguments = LogArguments(*arguments)
            options = options_of(name, log_arguments, self.on_step, self.on_epoch, self.group.world_size)
            if log_arguments.on_step and not self.on_step:
                options = without_steps(name, options, evaluates=self.slots is self._of_steps)
            if slot is None:
                self._reserve_name(name, options)
                slot = self._new_slot(name, options)
            elif slot.options != options:
                slot.refuse(options)
            if computes:
                check_metric(name, log_arguments, value, self.module, self.loss_group.world_size)
            slot.arguments = arguments
        if slot.metric is None:
            slot.value_arguments = arguments
        elif not computes:
            raise ValueError(f"log({name!r}) got a number, and a torchmetrics object before: give each its own name")
        return slot

    def _new_slot(self, name: str, options: Options) -> Slot:
        slot = self.slots[name] = Slot(name, options, options.rank_zero_only and self.loss_group.rank > 0)
        return slot

    def _reserve_name(self, name: str, options: Options) -> None:
        """Reserve a new name without the loader's index for this recorder; two loaders may not share such a name."""
        if self.taken is None or (self.suffix and options.add_dataloader_idx):
            return
        if self.taken.setdefault(name, self) is not self:
            raise ValueError(
                f"log({name!r}, add_dataloader_idx=False): another loader of this evaluation logs this name too; give each its own name, "
                "or leave add_dataloader_idx out"
            )

    def _other_value(self, slot: Slot, value: Any, batch_size: Any = None) -> tuple[Any, Any]:
        """Handle a value that is no Python number or tensor; return the value to store, and its weight.

        A torchmetrics object is kept, to be read later: nothing is stored (``None``). A ``Loss`` is its mean, with its count as the weight. Another
        library's number becomes a float.
        """
        if isinstance(value, Loss):
            return self._mean_of_loss(slot, value, batch_size)
        if _is_metric_like(value):
            if slot.metric is None or slot.metric.metric is not value:
                self._attach_metric(slot, value)
            assert slot.metric is not None
            slot.window = self.window
            slot.metric.end_micro_batch()
            return None, None
        if isinstance(value, Mapping):
            raise TypeError(
                f"log({slot.name!r}) got a dict: use log_dict, with one number under each name (no nested dicts)"
            )
        return slot.number(value), batch_size

    def _attach_metric(self, slot: Slot, metric: Any) -> None:
        """Check a torchmetrics object that is logged for the first time, and attach it to its slot."""
        name = slot.name
        if callable(getattr(metric, "items", None)):
            raise TypeError(f"log({name!r}) got a MetricCollection: use log_dict(collection)")
        if slot.metric is not None or slot.values or slot.total is not None or slot.window_values:
            before = "a number" if slot.metric is None else "another torchmetrics object"
            raise ValueError(f"log({name!r}) got a torchmetrics object, and {before} before: give each its own name")
        check(name, metric, self.loss_group, slot.on_step)
        slot.value_arguments, slot.metric = None, self._record_of(metric)
        logged = slot.metric
        if not self.size and logged.path is None:
            metric.reset()  # so far it was updated only with a repeated micro-batch
        for part in logged.parts:
            limit(part, self.group, self.loss_group)
        if slot.on_step:
            logged.watch(self._watch)
        for part, entries in zip(logged.parts, slot.pending, strict=False):
            add(name, part, entries)
        slot.pending = []

    def _record_of(self, metric: Any) -> Logged:
        """The record of a metric; the same one for all names under which the metric is logged."""
        if id(metric) not in self._logged:
            modules = () if self.module is None else self.module.named_modules()
            self._logged[id(metric)] = Logged(
                metric, next((path for path, module in modules if module is metric), None)
            )
        return self._logged[id(metric)]

    def _watch(self, part: Any) -> Watch:
        """The object that separates a metric's updates by step. In the run's first step, earlier updates of the metric belong to that step."""
        source = leader(part, self.module)
        if id(source) not in self._watches:
            self._watches[id(source)] = Watch(source, lambda: self.window, begins=not self.window and bool(self.size))
        return self._watches[id(source)]

    # -- reading ----------------------------------------------------------------------------------------------------------------

    def step_values(self, window: int | None = None) -> dict[str, float]:
        """The values of the step ``window`` (by default the current one), over its micro-batches and all ranks. A collective; waits for the device
        once."""
        window = self.window if window is None else window
        return self._step_values(slot for slot in self._of_steps.values() if slot.on_step and slot.window == window)

    def latest_values(self, superseded: Mapping[str, int]) -> tuple[dict[str, float], list[str], dict[str, int]]:
        """By name, the value of the latest step in which any rank logged it; the names that are logged for the epoch as well; and by name, the window
        of that step. A collective; waits for the device once.

        Args:
            superseded: by name, the window up to which values are outdated; the same on all ranks.
        """
        windows_here = {name: (slot.window, slot.on_epoch) for name, slot in self._of_steps.items() if slot.on_step}
        latest: dict[str, tuple[int, bool]] = {}
        for name, (window, on_epoch) in (item for row in gather_json(self.group, windows_here) for item in row.items()):
            if window > superseded.get(name, -1):
                latest[name] = max(latest.get(name, (-1, on_epoch)), (window, on_epoch))
        newest = (name for name, (window, _) in windows_here.items() if latest.get(name, (-1,))[0] == window)
        slots = (self._of_steps[name] for name in newest)
        windows = {f"{name}_step" if on_epoch else name: window for name, (window, on_epoch) in latest.items()}
        return self._step_values(slots), [name for name, (_, on_epoch) in latest.items() if on_epoch], windows

    def _step_values(self, slots: Iterable[Slot]) -> dict[str, float]:
        """The values of ``slots``, of the step in which each was logged last."""
        columns: dict[str, Column] = {}
        objects: dict[str, Object] = {}
        for slot in slots:
            name = _step_name(slot)
            if slot.metric is None:
                columns[name] = (slot.reduce, *unzipped(slot.window_values, slot.name))
            elif (seen := slot.metric.step(slot.window)) is not None:
                objects[name] = (slot, seen)
        return self._over_ranks(columns, objects, adopt=False)

    def epoch_values(self, clear: bool = True) -> dict[str, float]:
        """Return the epoch's values over all micro-batches and ranks; ``clear``: start a new epoch. A collective; waits for the device once."""
        columns: dict[str, Column] = {}
        objects: dict[str, Object] = {}
        for slots, mark in ((self._of_steps, ""), (self._of_hooks, _OF_HOOKS)):
            for slot in slots.values():
                if slot.on_epoch:
                    name = self._epoch_name(slot) + mark
                    if slot.metric is None:
                        columns[name] = slot.column()
                    else:
                        objects[name] = (slot, slot.metric.all())
        values = self._over_ranks(columns, objects, adopt=True)
        if self._of_hooks:
            of_hooks = {name: value for name, value in values.items() if name.endswith(_OF_HOOKS)}
            values = {name: value for name, value in values.items() if name not in of_hooks}
            values |= {name.removesuffix(_OF_HOOKS): value for name, value in of_hooks.items()}
        if clear:
            self.clear()
        return values

    def hook_values(self) -> dict[str, tuple[list[Weighted], Any, Any]]:
        """The epoch's values so far of hooks outside of steps, for :meth:`restore_hook_values`."""
        return {name: (list(slot.values), slot.total, slot.weight) for name, slot in self._of_hooks.items()}

    def restore_hook_values(self, values: Mapping[str, tuple[list[Weighted], Any, Any]]) -> None:
        """Forget what hooks outside of steps have logged since :meth:`hook_values` returned ``values``."""
        for name, slot in self._of_hooks.items():
            slot.clear()
            if name in values:
                slot.values, slot.total, slot.weight = values[name]

    def clear(self) -> None:
        """Start a new epoch: discard all values, and reset torchmetrics objects."""
        for slot in self.all_slots:
            slot.clear()
        for logged in self._logged.values():
            logged.reset()

    def set_aside(self) -> None:
        """At the end of a loader, set the states of torchmetrics objects aside, and reset the objects for the next loader. A collective."""
        offers = {slot.name: self._offer(slot) for slot in self._of_steps.values() if slot.metric is not None}
        self._adopt_metrics(agree(self.loss_group, offers)[0])
        for logged in self._logged.values():
            logged.set_aside()

    @property
    def logged(self) -> list[Logged]:
        """The torchmetrics objects that were logged."""
        return list(self._logged.values())

    @property
    def metrics(self) -> list[Any]:
        """All logged torchmetrics objects, members of compositions and collections included."""
        return [part for logged in self._logged.values() for part in logged.parts]

    def close(self) -> None:
        """Discard all values, and restore the ``update`` methods of torchmetrics objects."""
        for watch in self._watches.values():
            watch.end()
        self._watches.clear()
        self._logged.clear()
        self._of_steps.clear()
        self._of_hooks.clear()

    def _epoch_name(self, slot: Slot) -> str:
        """The name under which the slot's epoch value is reported."""
        ending = "_epoch" if slot.on_step else ""
        return slot.name + ending + (self.suffix if slot.options.add_dataloader_idx else "")

    def _offer(self, slot: Slot) -> list[Any]:
        """Describe the slot's torchmetrics object for the other ranks; see :data:`engine.metrics.torchmetrics_values.Offer`."""
        assert slot.metric is not None
        return [slot.metric.path, slot.name, list(slot.options)]

    def _adopt_metrics(self, offers: Offer) -> None:
        """Add metrics of the module that only other ranks have logged, because their updates on this rank count too."""
        for path, name, options in offers.values():
            is_known = name in self._of_steps or name in self._of_hooks
            if path is not None and not is_known and self.module is not None:
                self.restore_metric(name, self.module.get_submodule(path), Options(*options))

    def state_dict(self) -> dict[str, Any]:
        """This rank's values of the epoch so far that were logged in steps (for torchmetrics objects see
        :mod:`engine.metrics.torchmetrics_states`)."""
        return _totals(self._of_steps)

    def hook_state_dict(self) -> dict[str, Any]:
        """This rank's values of the epoch so far that hooks outside of steps have logged."""
        return _totals(self._of_hooks)

    def load_state_dicts(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the :meth:`state_dict` of this rank, or of several saved ranks whose values this rank takes over; in the block of
        :meth:`outside_steps` from their :meth:`hook_state_dict`."""
        for name, saved in ((name, saved) for state in states for name, saved in state.items()):
            slot = self.slots.get(name)
            if slot is None or slot.total is None:
                slot = self._new_slot(name, Options(*saved["options"]))
                slot.total, slot.weight = saved["total"], saved["weight"]
            elif slot.reduce in ("mean", "sum"):
                slot.total, slot.weight = slot.total + saved["total"], slot.weight + saved["weight"]
            else:
                slot.total = reduced([slot.total, saved["total"]], [1.0, 1.0], slot.reduce)[0]
                slot.weight = slot.weight + saved["weight"]

    def logged_metrics(self) -> dict[str, Any]:
        """The logged torchmetrics objects with their options, by name; for objects outside of the module, with their states."""
        saved: dict[str, dict[str, Any]] = {}
        for slots in (self._of_hooks, self._of_steps):
            for name, slot in slots.items():
                if slot.metric is not None:
                    logged = slot.metric
                    parts = None if logged.path is not None else [[list(entry(part))] for part in logged.parts]
                    saved[name] = {"metric": logged.path, "options": list(slot.options), "parts": parts}
                    if slots is self._of_hooks:
                        saved[name]["of_hooks"] = True
        return saved

    def load_logged_metrics(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the :meth:`logged_metrics` of this rank, or of several saved ranks that this rank takes over: an epoch that is resumed at its
        end logs nothing more, but must still report values."""
        paths = {path for path, _ in self.module.named_modules()} if self.module is not None else set()
        for name, saved in ((name, saved) for state in states for name, saved in state.items()):
            with self.outside_steps() if saved.get("of_hooks") else nullcontext():
                if saved["metric"] is None:
                    slot = self.slots.get(name) or self._new_slot(name, Options(*saved["options"]))
                    parts = [[(state, updates) for state, updates in part] for part in saved["parts"]]
                    slot.pending = [[*a, *b] for a, b in itertools.zip_longest(slot.pending, parts, fillvalue=())]
                elif saved["metric"] in paths and self.module is not None:
                    self.restore_metric(name, self.module.get_submodule(saved["metric"]), Options(*saved["options"]))

    def restore_metric(self, name: str, metric: Any, options: Options) -> None:
        """Add a torchmetrics object under a ``name`` and with ``options`` as if it were logged now."""
        window, self.window = self.window, -2  # a window that never comes: earlier updates belong to no later step
        self._other_value(self.slots.get(name) or self._new_slot(name, options), metric)
        self.window = window

    def progress_names(self) -> frozenset[str]:
        """The names to show in a progress bar, as reported for steps and for epochs."""
        return self._names(slot for slot in self.all_slots if slot.options.prog_bar)

    def withheld_names(self) -> frozenset[str]:
        """Names logged with ``logger=False``, in the forms in which steps and epochs report them; loggers do not get their values."""
        return self._names(slot for slot in self.all_slots if not slot.options.logger)

    def _names(self, slots: Iterable[Slot]) -> frozenset[str]:
        return frozenset(name for slot in slots for name in (_step_name(slot), self._epoch_name(slot)))

    def _over_ranks(self, columns: dict[str, Column], objects: dict[str, Object], adopt: bool) -> dict[str, float]:
        """Reduce columns and torchmetrics objects over all ranks; ``adopt``: include objects of the module that only other ranks have logged."""
        floats = iter(as_floats([item for _, values, weights in columns.values() for item in (*values, *weights)]))
        numbers: list[float] = []
        for op, values, weights in columns.values():
            values, weights = list(itertools.islice(floats, len(values))), list(itertools.islice(floats, len(weights)))
            if op == "mean":
                numbers += total_of([v * w for v, w in zip(values, weights, strict=True)]), total_of(weights)
            else:
                numbers += reduced(values, weights, op) if values else (0.0, 0.0)
        names, ops = list(columns), [op for op, _, _ in columns.values()]
        if self.group.world_size > 1:
            computed = partial(self._computed, objects, adopt)
            return combined(self._exchange.rows(names, ops, numbers, adopt, len(objects), computed))
        parts = zip(columns.items(), numbers[::2], numbers[1::2], strict=True)
        numbers_by_name = {
            name: total / weight if op == "mean" else total for (name, (op, _, _)), total, weight in parts if weight
        }
        return numbers_by_name | {
            name: slot.metric.value(slot.name, seen)
            for name, (slot, seen) in objects.items()
            if slot.metric is not None
        }

    def _computed(self, objects: dict[str, Object], adopt: bool) -> dict[str, float]:
        """The values of torchmetrics objects over all ranks. Every rank that knows an object computes it, and the first of these reports it."""
        offers, reporting_ranks = agree(
            self.loss_group, {name: self._offer(slot) for name, (slot, _) in objects.items()}
        )
        if adopt:
            self._adopt_metrics(offers)
            for name, (_, slot_name, _) in offers.items():
                slot = (self._of_hooks if name.endswith(_OF_HOOKS) else self._of_steps).get(slot_name)
                if name not in objects and slot is not None and slot.metric is not None:
                    objects[name] = (slot, slot.metric.all())
        states = gather_states(self.loss_group, {name: seen for name, (_, seen) in objects.items()})
        values = {}
        for name in offers:
            if name in objects:
                slot, _ = objects[name]
                assert slot.metric is not None
                value = slot.metric.value(slot.name, states[name])
                if self.loss_group.rank == reporting_ranks[name]:
                    values[name] = value
        return values


class RankExchange:
    """Exchanges the totals and weights of logged values over ``group``. Of ranks that see the same data only one ``is_counted``; the others send
    weights of 0."""

    def __init__(self, group: Group, is_counted: bool) -> None:
        self.group, self.is_counted = group, is_counted
        self._widths = {False: 0, True: 0}
        """How many numbers the ranks exchanged last, for the values of a step (``False``) and of an epoch (``True``); the same on all ranks."""

    def rows(
        self,
        names: list[str],
        ops: list[str],
        numbers: list[float],
        epoch: bool,
        objects: int,
        compute: Callable[[], dict[str, float]],
    ) -> list[Row]:
        """Gather the rows of all ranks. One collective is enough in the usual case, in which all ranks log the same names as in the last exchange.

        Args:
            names: the logged names of this rank.
            ops: the reduction of each name.
            numbers: the total and the weight of each name, alternating.
            epoch: whether these are values of an epoch rather than of a step.
            objects: the number of torchmetrics objects that this rank has logged.
            compute: computes the values of these objects; called on all ranks if any rank has logged some.
        """
        if not self.is_counted:
            numbers[1::2] = [0.0] * (len(numbers) // 2)
        head, width = [zlib.crc32(repr((names, ops)).encode()), objects], self._widths[epoch]
        # Gathering needs the same width on all ranks: if the names are new, send zeros of the old width first.
        body = numbers if len(numbers) == width else [0.0] * width
        rows = gather_row(self.group, torch.tensor([*head, *body], dtype=torch.float64)).tolist()
        has_objects, names_differ = any(row[1] for row in rows), len({row[0] for row in rows}) > 1
        if has_objects:
            for name, value in compute().items():
                names, ops, numbers = [*names, name], [*ops, "mean"], [*numbers, value, float(self.is_counted)]
        if has_objects or names_differ:
            return gather_json(self.group, (names, ops, numbers))
        if len(numbers) == width:
            return [(names, ops, row[2:]) for row in rows]
        self._widths[epoch] = len(numbers)
        rows = gather_row(self.group, torch.tensor(numbers, dtype=torch.float64)).tolist()
        return [(names, ops, row) for row in rows]


class ClosedRecorder:
    """Takes the place of a :class:`Recorder` when logged values are not reported: drops them, and warns once for each name.

    Args:
        when: the time at which values are not reported, as text for the warning; empty: no warnings.
        instead: what to do instead, as text for the warning.
    """

    def __init__(self, when: str = "", instead: str = "") -> None:
        self._when, self._instead = when, instead

    def record(self, name: str, *arguments: Any) -> None:
        """Drop a logged value and its options."""
        if self._when:
            warn_once(f"log({name!r}) {self._when} is not reported: {self._instead}")


Object = tuple[Slot, list[list[Entry]]]
"""The slot of a torchmetrics object, and the object's states of the requested step or epoch."""


def _totals(slots: Mapping[str, Slot]) -> dict[str, Any]:
    """By name, the epoch's total of ``slots`` with their options."""
    state = {}
    for name, slot in slots.items():
        slot.to_one_pair()
        if slot.total is not None:
            state[name] = {"options": list(slot.options), "total": slot.total, "weight": slot.weight}
    return state


def _step_name(slot: Slot) -> str:
    """The name under which the slot's step value is reported."""
    return f"{slot.name}_step" if slot.on_epoch else slot.name


def named(logged: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of :meth:`Recorder.logged_metrics` for metrics of the module, which do not contain a rank's states."""
    return {name: saved for name, saved in logged.items() if saved["metric"] is not None}


def _one_element(name: str, tensor: Tensor) -> Tensor:
    """A copy of a logged tensor that is not a plain scalar; often it is a parameter or a view."""
    if tensor.numel() != 1:
        raise ValueError(
            f"log({name!r}) got a tensor of shape {tuple(tensor.shape)}: log one number, for example its .mean()"
        )
    return full_tensor(tensor.detach()).clone()


def _is_metric_like(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics object, or has the methods of one."""
    return callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None))
