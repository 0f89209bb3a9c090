"""Whether an overridden method takes what a run gives it: looked at once, before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from engine.utils.overrides import overridden

Method = Callable[..., Any]

BESIDES_EVENTS = (
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "clip_gradients",
    "backward",
    "lr_scheduler_step",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)
"""Methods of a module, besides events, whose arguments a run gives."""
_BY_NAME = ("configure_gradient_clipping", "clip_gradients")
"""Methods whose arguments after the first are given by name, if they have these names."""
_INDEX = "dataloader_idx"


def fitted(method: Method, owner: object, event: str, base: type, first: Sequence[str] = ()) -> Method:
    """``method`` as a run calls it, with the arguments that ``base`` has for this ``event``; ``first``: other names of the first ones.

    ``method`` itself in the usual case. A ``setup()`` or ``teardown()`` without an argument, arguments that can only be given by name, and a batch
    event that needs a ``dataloader_idx``, or has none, are called as they are defined; with one loader the index is 0.

    Raises:
        TypeError: it takes other arguments.
    """
    try:
        takes = inspect.signature(method)
    except (TypeError, ValueError):  # not a Python function
        return method
    if event not in vars(base):
        return method
    given = [*first, *_given(base, event)[len(first) :]]
    short = given[:-1] if given[-1:] == [_INDEX] and vars(base)[event].__defaults__ else given
    if event in _BY_NAME and _binds(takes, given[:1], given[1:]):
        return lambda first, *args: method(first, **dict(zip(given[1:], args, strict=True)))
    if event == "clip_gradients":
        pass  # which is called by name
    elif _binds(takes, given) and _binds(takes, short):
        return method
    elif _binds(takes, short):
        return lambda *args: method(*args[: len(short)])
    elif _binds(takes, given):
        return lambda *args: method(*args, *([0] if len(args) < len(given) else []))
    elif event in ("setup", "teardown") and _binds(takes, given[:-1]):
        return lambda *args: method(*args[:-1])
    elif _binds(takes, [], given):
        return lambda *args: method(**dict(zip(given, args, strict=False)))
    raise TypeError(
        f"{type(owner).__name__}.{event}({', '.join(takes.parameters)}) cannot be called: a run gives it ({', '.join(given)}); change its arguments"
    )


def check(module: Any, base: type) -> None:
    """Check the methods in :data:`BESIDES_EVENTS` that ``module`` overrides.

    Raises:
        TypeError: one takes other arguments.
    """
    if overridden(module, "state_dict", base):
        takes = inspect.signature(module.state_dict)
        if not _binds(takes, [], ["keep_vars"]):
            raise TypeError(
                f"{type(module).__name__}.state_dict({', '.join(takes.parameters)}) cannot be called: a save calls it with keep_vars=True; give it "
                "torch's arguments, state_dict(self, *args, **kwargs)"
            )
    for name in BESIDES_EVENTS:
        if hasattr(base, name) and overridden(module, name, base):
            fitted(getattr(module, name), module, name, base)


def _given(base: type, event: str) -> list[str]:
    parameters = list(inspect.signature(getattr(base, event)).parameters.values())[1:]
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


def _binds(takes: inspect.Signature, positional: list[str], named: list[str] | None = None) -> bool:
    try:
        takes.bind(*positional, **dict.fromkeys(named or (), None))
    except TypeError:
        return False
    return True
