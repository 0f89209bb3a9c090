"""The functions to call at each event of a run, collected once before the run starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from engine.callback import Callback
from engine.checkpoint.writer import CheckpointWriter
from engine.loop.logbook import Logbook
from engine.loop.method_arguments import BESIDES_EVENTS, accepting, check_method_arguments
from engine.module import TrainModule
from engine.utils.errors import HangError
from engine.utils.log import logger
from engine.utils.overrides import overridden_methods

Hook = Callable[..., Any]


SPLIT_EVENTS = ("on_train_epoch_end", "on_validation_end")
"""Events with a second group of hooks, ``last_<event>``: early stopping, then the callbacks that run last, such as checkpoint callbacks. The second
group is called a little later, when the epoch's values are known and the state can be saved: schedulers have stepped, and the training's random
number states are restored."""


WEIGHT_CHANGING_EVENTS = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
"""Events whose hooks may change weights. Before them the run waits until a checkpoint in progress has copied the weights."""


_COPIES = "[Run]copies of the checkpoint"
"""The owner of the hook that waits before :data:`WEIGHT_CHANGING_EVENTS`."""


class Hooks:
    """For each event, the bound methods to call: callbacks in their order, then the module, then the callbacks that run last.

    Events are attributes: ``hooks.on_train_batch_end`` is a tuple of methods. It is empty if nobody overrides the event, which then costs nothing.

    Args:
        callbacks: the callbacks, in the user's order.
        module: the run's module; its events are called without the run and the module as arguments.
        writer: the writer whose checkpoint in progress must have been copied before hooks change weights.
        logbook: knows the values to withhold from loggers.
    """

    last_on_train_epoch_end: tuple[Hook, ...]
    """``on_train_epoch_end`` of early stopping, and of callbacks that run last, such as ``ModelCheckpoint``; see :data:`SPLIT_EVENTS`."""
    last_on_validation_end: tuple[Hook, ...]
    """``on_validation_end`` of early stopping, and of callbacks that run last."""

    def __init__(
        self, callbacks: Sequence[Callback], module: TrainModule, writer: CheckpointWriter, logbook: Logbook
    ) -> None:
        self._writer, self._logbook = writer, logbook
        self._wrappers: list[Callable[[str, Hook], Hook]] = []
        self._failed: dict[int, set[str]] = {}  # by the callback's id: the events in which it failed
        names = (*_events(), *(f"last_{event}" for event in SPLIT_EVENTS))
        self._owners: dict[str, list[str]] = {name: [] for name in names}  # by event: the names of its hooks' owners
        vars(self).update(dict.fromkeys(names, ()))
        self._called: set[tuple[int, str]] = set()  # the ids of owners, and the events whose hooks they have
        check_method_arguments(module, TrainModule)
        of_module = overridden_methods(module, _events(), TrainModule)
        named = [(f"[Callback]{c.state_key}", c) for c in callbacks]
        early, late = ([(name, c) for name, c in named if c.runs_last is last] for last in (False, True))
        stopping = [(name, c) for name, c in early if c.is_early_stopping]
        owner = f"[TrainModule]{type(module).__name__}"
        for event in _events():
            first, last = (
                ([pair for pair in early if not pair[1].is_early_stopping], stopping + late)
                if event in SPLIT_EVENTS
                else (early, late)
            )
            pairs = self._pairs(first, event) if first else []
            if event in of_module:
                pairs.append((owner, _of_module(module, event)))
                self._called.add((id(module), event))
            closing = self._pairs(last, event) if last else []
            if event in SPLIT_EVENTS:
                if closing:
                    self._set(f"last_{event}", closing)
            else:
                pairs += closing
            if pairs:
                self._set(event, pairs)
        self._attributes = _attributes(callbacks, module)

    def _pairs(self, owners: Sequence[tuple[str, Callback]], event: str) -> list[tuple[str, Hook]]:
        """The names and hooks of the callbacks that override the event."""
        pairs = []
        for name, callback in owners:
            if (hook := self._of_callback(callback, event)) is not None:
                pairs.append((name, hook))
                self._called.add((id(callback), event))
        return pairs

    def take_late(self, callbacks: Sequence[Callback], module: TrainModule) -> None:
        """Take over the hooks that were set on ``module`` or ``callbacks``, those of the run, as attributes since the last call, each in the place of
        its owner. An attribute that is ``None`` removes the hook."""
        before, self._attributes = self._attributes, _attributes(callbacks, module)
        changed = {key for key, method in self._attributes.items() if key not in before or before[key] != method}
        if not changed:
            return
        first, last = ([callback for callback in callbacks if callback.runs_last is late] for late in (False, True))
        owners: list[tuple[str, TrainModule | Callback]]
        owners = [(f"[Callback]{callback.state_key}", callback) for callback in first]
        owners.append((f"[TrainModule]{type(module).__name__}", module))
        owners += [(f"[Callback]{callback.state_key}", callback) for callback in last]
        for place, (_, owner) in enumerate(owners):
            for event in _events():
                if (id(owner), event) in changed:
                    self._replace(event, owners, place)

    def _replace(self, event: str, owners: Sequence[tuple[str, TrainModule | Callback]], place: int) -> None:
        """Call the present method of the owner at ``place`` instead of the one before. ``owners``: all, in the order of their hooks."""
        name, owner = owners[place]
        if isinstance(owner, Callback):
            hook, is_last = self._of_callback(owner, event), owner.runs_last or owner.is_early_stopping
        else:
            is_overridden = event in overridden_methods(owner, (event,), TrainModule)
            hook, is_last = _of_module(owner, event) if is_overridden else None, False
        if hook is not None:
            for wrapper in self._wrappers:
                hook = wrapper(f"{name}.{event}", hook)
        group = f"last_{event}" if is_last and event in SPLIT_EVENTS else event
        pairs = [pair for pair in zip(self._owners[group], getattr(self, group), strict=True) if pair[0] != _COPIES]
        # Two owners may have one name: theirs are in the order of the owners.
        before = sum(label == name and (id(other), event) in self._called for label, other in owners[:place])
        indices = [index for index, (label, _) in enumerate(pairs) if label == name]
        index = indices[before] if before < len(indices) else None
        if (id(owner), event) in self._called:
            if index is None:  # left out
                return
            del pairs[index]
        elif index is None:
            later = {label for label, _ in owners[place + 1 :] if label != name}
            index = next((index for index, (label, _) in enumerate(pairs) if label in later), len(pairs))
        if hook is not None:
            pairs.insert(index, (name, hook))
        (self._called.discard if hook is None else self._called.add)((id(owner), event))
        self._set(group, pairs)

    @staticmethod
    def methods_of_steps(module: TrainModule) -> dict[str, Any]:
        """The methods of ``module`` that a training's set-up hands to the steps."""
        return {name: getattr(module, name) for name in ("training_step", *BESIDES_EVENTS)}

    def _set(self, name: str, pairs: list[tuple[str, Hook]]) -> None:
        if pairs and name in WEIGHT_CHANGING_EVENTS:
            pairs.insert(0, (_COPIES, _wait_for_copies(self._writer)))
        self._owners[name] = [owner for owner, _ in pairs]
        setattr(self, name, tuple([hook for _, hook in pairs]))

    def add(self, event: str, owner: str, hook: Hook) -> None:
        """Add a hook of ``event``, called from now on after the existing ones. ``owner``: its owner's name for :meth:`wrap`."""
        setattr(self, event, (*getattr(self, event), hook))
        self._owners[event].append(owner)

    def of_module(self, event: str) -> tuple[Hook, ...]:
        """The module's own hook of ``event``, if it has one."""
        pairs = zip(self._owners[event], getattr(self, event), strict=True)
        return tuple(hook for owner, hook in pairs if owner.startswith("[TrainModule]"))

    def leave_out(self, event: str) -> None:
        """Stop calling the module's own hook of ``event``."""
        pairs = zip(self._owners[event], getattr(self, event), strict=True)
        self._set(event, [(owner, hook) for owner, hook in pairs if not owner.startswith("[TrainModule]")])

    def wrap(self, wrapper: Callable[[str, Hook], Hook]) -> None:
        """Wrap every hook called from now on, for example to time it.

        Args:
            wrapper: a function that gets the name of a hook, ``"[Callback]EarlyStopping.on_validation_end"`` or
                ``"[TrainModule]Net.on_fit_start"``, and the hook, and returns the function to call instead.
        """
        self._wrappers.append(wrapper)
        for name, owners in self._owners.items():
            event = name.removeprefix("last_")
            hooks: tuple[Hook, ...] = getattr(self, name)
            wrapped = (wrapper(f"{owner}.{event}", hook) for owner, hook in zip(owners, hooks, strict=True))
            setattr(self, name, tuple(wrapped))

    def _of_callback(self, callback: Callback, event: str) -> Hook | None:
        """The callback's hook of ``event``, wrapped as its kind of callback needs; ``None`` if the event is not overridden."""
        method: Hook | None = getattr(callback, event, None)
        if method is None or getattr(method, "__func__", None) is getattr(Callback, event):
            return None
        method = accepting(method, callback, event, Callback)
        if event == "on_log" and callback.is_logger:
            method = _without_withheld(method, self._logbook)
        return method if callback.critical or event == "setup" else self._not_critical(callback, event, method)

    def _not_critical(self, callback: Callback, event: str, method: Hook) -> Hook:
        """Wrap the hook of a callback that is not critical: its errors are logged instead of ending the run."""

        failed = self._failed.setdefault(id(callback), set())

        def hook(*args: Any) -> Any:
            if failed and event != "teardown":
                return None
            try:
                return method(*args)
            except HangError:
                raise
            except Exception:
                name = type(callback).__name__
                logger.exception("%s.%s failed; the run continues without %s (critical = False)", name, event, name)
                failed.add(event)
                return None

        return hook

    def __getattr__(self, name: str) -> tuple[Hook, ...]:
        # Defined so that type checkers accept events, which __init__ sets, as attributes.
        raise AttributeError(f"there is no event {name!r}")


@functools.cache
def _events() -> tuple[str, ...]:
    """The names of all events, as :class:`engine.Callback` defines them."""
    return tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


@functools.cache
def _event_names() -> frozenset[str]:
    return frozenset(_events())


def _attributes(callbacks: Sequence[Callback], module: TrainModule) -> dict[tuple[int, str], Any]:
    """The hooks that are attributes of the objects themselves, by the id of the object and the event."""
    owners: list[TrainModule | Callback] = [module, *callbacks]
    return {(id(owner), event): vars(owner)[event] for owner in owners for event in vars(owner).keys() & _event_names()}


def _without_withheld(method: Hook, logbook: Logbook) -> Hook:
    """Wrap a logger's ``on_log``, so that it does not get the values that were logged with ``logger=False``."""

    def on_log(*arguments: Any) -> None:
        run, module, metrics, step = arguments
        reported = {name: value for name, value in metrics.items() if name not in logbook.withheld}
        if reported:
            method(run, module, reported, step)

    return on_log


def _wait_for_copies(writer: CheckpointWriter) -> Hook:
    """Return the first hook of :data:`WEIGHT_CHANGING_EVENTS`: not a bound method, with which :class:`Hooks` would be a reference cycle."""

    def hold(*args: Any) -> None:
        writer.before_hooks()

    return hold


def _of_module(module: TrainModule, event: str) -> Hook:
    """Wrap the module's own hook in a function with a callback's arguments."""
    method = accepting(getattr(module, event), module, event, TrainModule)

    def hook(*arguments: Any) -> Any:
        return method(*arguments[2:])  # the first two are the run and the module

    return hook
