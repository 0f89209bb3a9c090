"""The functions called at each event of a run: found once, before it starts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from engine.callback import Callback
from engine.checkpoint.writer import CheckpointWriter
from engine.loop.logbook import Logbook
from engine.loop.method_arguments import accepting, check
from engine.module import TrainModule
from engine.utils.errors import HangError
from engine.utils.log import logger
from engine.utils.overrides import overridden_methods

Hook = Callable[..., Any]


APART = ("on_train_epoch_end", "on_validation_end")
"""Events whose last callbacks come a little later, when the epoch's values are known and the state can be saved: schedulers have stepped, and the
training's random numbers are restored. Callbacks that end trainings early come there, before those that save. They are called by the name
``last_<event>``."""


HOLDING = (
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
"""Events in which weights may be changed while a checkpoint of them is under way: its copies are awaited first."""


class Hooks:
    """For each event, the bound methods to call: callbacks in their order, then the module, then the callbacks that run last.

    ``hooks.on_train_batch_end`` is a tuple; it is empty for an event that nobody overrides, which then costs nothing.

    Args:
        callbacks: in the user's order.
        module: its methods named after events are called without the run and the module.
        writer: hooks that may change weights wait for the copies of its checkpoint in progress.
        logbook: knows the values that loggers do not get.
    """

    last_on_train_epoch_end: tuple[Hook, ...]
    """``on_train_epoch_end`` of early stopping, and of callbacks that run last, such as ``ModelCheckpoint``; see :data:`APART`."""
    last_on_validation_end: tuple[Hook, ...]
    """``on_validation_end`` of early stopping, and of callbacks that run last."""

    def __init__(
        self, callbacks: Sequence[Callback], module: TrainModule, writer: CheckpointWriter, logbook: Logbook
    ) -> None:
        self._writer, self._logbook = writer, logbook
        self._failed: dict[int, set[str]] = {}  # by id of a callback: the events in which it failed
        names = (*_events(), *(f"last_{event}" for event in APART))
        self._owners: dict[str, list[str]] = {name: [] for name in names}  # whose the hooks of each event are
        vars(self).update(dict.fromkeys(names, ()))
        check(module, TrainModule)
        of_module = overridden_methods(module, _events(), TrainModule)
        named = [(f"[Callback]{c.state_key}", c) for c in callbacks]
        early, late = ([(name, c) for name, c in named if c.runs_last is last] for last in (False, True))
        stopping = [(name, c) for name, c in early if c.is_early_stopping]
        owner = f"[TrainModule]{type(module).__name__}"
        for event in _events():
            first, last = (
                ([pair for pair in early if not pair[1].is_early_stopping], stopping + late)
                if event in APART
                else (early, late)
            )
            pairs = [(name, hook) for name, c in first if (hook := self._of_callback(c, event)) is not None]
            if event in of_module:
                pairs.append((owner, _of_module(module, event)))
            closing = [(name, hook) for name, c in last if (hook := self._of_callback(c, event)) is not None]
            if event in APART:
                if closing:
                    self._set(f"last_{event}", closing)
            else:
                pairs += closing
            if pairs:
                self._set(event, pairs)

    def _set(self, name: str, pairs: list[tuple[str, Hook]]) -> None:
        if pairs and name in HOLDING:
            pairs.insert(0, ("[Run]copies of the checkpoint", _holding(self._writer)))
        self._owners[name] = [owner for owner, _ in pairs]
        setattr(self, name, tuple([hook for _, hook in pairs]))

    def add(self, event: str, owner: str, hook: Hook) -> None:
        """Call one more hook of ``event`` from now on, as the last one. ``owner``: its name for :meth:`wrap`."""
        setattr(self, event, (*getattr(self, event), hook))
        self._owners[event].append(owner)

    def leave_out(self, event: str) -> None:
        """Call the module's own hook of ``event`` no more."""
        pairs = zip(self._owners[event], getattr(self, event), strict=True)
        self._set(event, [(owner, hook) for owner, hook in pairs if not owner.startswith("[TrainModule]")])

    def wrap(self, wrapper: Callable[[str, Hook], Hook]) -> None:
        """Replace each hook from now on, to measure it.

        Args:
            wrapper: called with the name of each hook, ``"[Callback]EarlyStopping.on_validation_end"`` or ``"[TrainModule]Net.on_fit_start"``,
                and the hook; returns what is called instead.
        """
        for name, owners in self._owners.items():
            event = name.removeprefix("last_")
            hooks: tuple[Hook, ...] = getattr(self, name)
            wrapped = (wrapper(f"{owner}.{event}", hook) for owner, hook in zip(owners, hooks, strict=True))
            setattr(self, name, tuple(wrapped))

    def _of_callback(self, callback: Callback, event: str) -> Hook | None:
        method: Hook | None = getattr(callback, event, None)
        if method is None or getattr(method, "__func__", None) is getattr(Callback, event):
            return None
        method = accepting(method, callback, event, Callback)
        if event == "on_log" and callback.is_logger:
            method = _for_a_logger(method, self._logbook)
        return method if callback.critical or event == "setup" else self._surviving(callback, event, method)

    def _surviving(self, callback: Callback, event: str, method: Hook) -> Hook:
        """A hook whose errors do not end the run."""

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
        raise AttributeError(f"there is no event {name!r}")  # also tells type checkers that events are attributes


@functools.cache
def _events() -> tuple[str, ...]:
    """The names of the events, which :class:`engine.Callback` defines."""
    return tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


def _for_a_logger(method: Hook, logbook: Logbook) -> Hook:
    """A logger's ``on_log``: without the values that were logged with ``logger=False``."""

    def on_log(*arguments: Any) -> None:
        run, module, metrics, step = arguments
        reported = {name: value for name, value in metrics.items() if name not in logbook.withheld}
        if reported:
            method(run, module, reported, step)

    return on_log


def _holding(writer: CheckpointWriter) -> Hook:
    """The first of the hooks of an event in :data:`HOLDING`; a function, because a bound method in :class:`Hooks` would be a circle."""

    def hold(*args: Any) -> None:
        writer.hold()

    return hold


def _of_module(module: TrainModule, event: str) -> Hook:
    """The module's own hook with a callback's signature."""
    method = accepting(getattr(module, event), module, event, TrainModule)

    def hook(*arguments: Any) -> Any:
        return method(*arguments[2:])  # without the run and the module

    return hook
