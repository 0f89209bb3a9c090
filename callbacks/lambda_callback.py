"""A callback made of functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from engine import Callback

EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class LambdaCallback(Callback):
    """Calls your functions at events of the run: ``LambdaCallback(on_train_epoch_end=lambda run, module: print(run.metrics))``.

    Functions get the arguments of the methods of :class:`engine.Callback`. The callback has no state in checkpoints: write a class to have one.

    Args:
        functions: a function for each event; ``None`` means no function.

    Raises:
        TypeError: a name is not an event of :class:`engine.Callback`, or a function does not take the event's arguments.
    """

    def __init__(self, **functions: Callable[..., Any] | None) -> None:
        for event, function in functions.items():
            if event not in EVENTS:
                near = difflib.get_close_matches(event, EVENTS, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"events: {', '.join(EVENTS)}"
                raise TypeError(f"LambdaCallback: {event!r} is not an event; {hint}")
            if function is None:
                continue
            _check(event, function)
            setattr(self, event, function)


def _check(event: str, function: Any) -> None:
    """Check that the function takes the arguments of the event. Arguments with defaults are not always passed."""
    if not callable(function):
        raise TypeError(f"LambdaCallback({event}={function!r}): it must be a function")
    passed = [
        name
        for name, parameter in inspect.signature(getattr(Callback, event)).parameters.items()
        if name != "self" and parameter.default is parameter.empty
    ]
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*passed)
    except TypeError:
        raise TypeError(
            f"LambdaCallback({event}=...): the event passes ({', '.join(passed)}), and the function takes {signature}: give it the event's arguments"
        ) from None
