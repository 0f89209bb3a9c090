"""The functions to call at each event of a run, collected once before the run starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.callback import Callback
from engine.checkpoint.writer import CheckpointWriter
from engine.loop.logbook import Logbook
from engine.loop.method_arguments import accepting, check_method_arguments
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


class Hooks:
    """The bound methods to call for each event: of callbacks in their order, then of the module, then of callbacks that run last.

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
        self._added: dict[str, int] = {}  # by event, the number of hooks of add(), which are the last
        self._failed: dict[int, set[str]] = {}  # by the callback's id: the events in which it failed
        names = (*_events(), *(f"last_{event}" for event in SPLIT_EVENTS))
        self._owners: dict[str, list[str]] = {name: [] for name in names}  # by event: the names of its hooks' owners
        vars(self).update(dict.fromkeys(names, ()))
        check_method_arguments(module, TrainModule)
        self._attributes = _attributes(callbacks, module)
        for name, pairs in self._collected(_events(), callbacks, module):
            if pairs:
                self._set(name, pairs)

    def _collected(
        self, events: Sequence[str], callbacks: Sequence[Callback], module: TrainModule
    ) -> Iterator[tuple[str, list[tuple[str, Hook]]]]:
        """For each of these events, and its second group of hooks if it has one, the owners' names and their present methods."""
        of_module = overridden_methods(module, events, TrainModule)
        named = [(f"[Callback]{c.state_key}", c) for c in callbacks]
        early, late = ([(name, c) for name, c in named if c.runs_last is last] for last in (False, True))
        stopping = [(name, c) for name, c in early if c.is_early_stopping]
        owner = f"[TrainModule]{type(module).__name__}"
        for event in events:
            first, last = (
                ([pair for pair in early if not pair[1].is_early_stopping], stopping + late)
                if event in SPLIT_EVENTS
                else (early, late)
            )
            pairs = self._pairs(first, event) if first else []
            if event in of_module:
                pairs.append((owner, _of_module(module, event)))
            closing = self._pairs(last, event) if last else []
            if event in SPLIT_EVENTS:
                yield f"last_{event}", closing
            else:
                pairs += closing
            yield event, pairs

    def _pairs(self, owners: Sequence[tuple[str, Callback]], event: str) -> list[tuple[str, Hook]]:
        """The names and hooks of the callbacks that override the event."""
        return [(name, hook) for name, callback in owners if (hook := self._of_callback(callback, event)) is not None]

    def take_late(self, callbacks: Sequence[Callback], module: TrainModule) -> None:
        """Call from now on the hooks that ``module`` and ``callbacks``, those of the run, have now, for each event for which an attribute of one of
        them was set or deleted since the last call. An attribute that is ``None`` removes the hook."""
        before, self._attributes = self._attributes, _attributes(callbacks, module)
        # A missing attribute counts as its own key, which no method is.
        keys = before.keys() | self._attributes.keys()
        changed = {key[1] for key in keys if before.get(key, key) != self._attributes.get(key, key)}
        if not changed:
            return
        for name, pairs in self._collected(tuple(filter(changed.__contains__, _events())), callbacks, module):
            named = self._named(name)
            added = named[len(named) - self._added.get(name, 0) :]
            self._set(name, pairs)
            for wrapper in self._wrappers:
                self._wrap(name, wrapper)
            self._replace(name, [*self._named(name), *added])

    def _set(self, name: str, pairs: list[tuple[str, Hook]]) -> None:
        if pairs and name in WEIGHT_CHANGING_EVENTS:
            pairs.insert(0, ("[Run]copies of the checkpoint", _wait_for_copies(self._writer)))
        self._replace(name, pairs)

    def _replace(self, name: str, pairs: Sequence[tuple[str, Hook]]) -> None:
        self._owners[name] = [owner for owner, _ in pairs]
        setattr(self, name, tuple([hook for _, hook in pairs]))

    def _named(self, name: str) -> list[tuple[str, Hook]]:
        """The names of the owners of the present hooks, and the hooks."""
        return list(zip(self._owners[name], getattr(self, name), strict=True))

    def add(self, event: str, owner: str, hook: Hook) -> None:
        """Add a hook of ``event``, called from now on after the existing ones. ``owner``: its owner's name for :meth:`wrap`."""
        self._replace(event, [*self._named(event), (owner, hook)])
        self._added[event] = self._added.get(event, 0) + 1

    def of_module(self, event: str) -> tuple[Hook, ...]:
        """The module's own hook of ``event``, if it has one."""
        return tuple(hook for owner, hook in self._named(event) if owner.startswith("[TrainModule]"))

    def leave_out(self, event: str) -> None:
        """Stop calling the module's own hook of ``event``."""
        self._replace(event, [pair for pair in self._named(event) if not pair[0].startswith("[TrainModule]")])

    def wrap(self, wrapper: Callable[[str, Hook], Hook]) -> None:
        """Wrap every hook called from now on, for example to time it.

        Args:
            wrapper: a function that gets the name of a hook, ``"[Callback]EarlyStopping.on_validation_end"`` or
                ``"[TrainModule]Net.on_fit_start"``, and the hook, and returns the function to call instead.
        """
        self._wrappers.append(wrapper)
        for name in self._owners:
            self._wrap(name, wrapper)

    def _wrap(self, name: str, wrapper: Callable[[str, Hook], Hook]) -> None:
        event = name.removeprefix("last_")
        self._replace(name, [(owner, wrapper(f"{owner}.{event}", hook)) for owner, hook in self._named(name)])

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
