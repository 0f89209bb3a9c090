"""The arguments of users' hooks and steps, which may take less, or ask for more, than a run gives them: looked at once, before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engine.utils.overrides import overridden, overridden_methods

if TYPE_CHECKING:
    from engine.module import TrainModule

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
"""Methods whose arguments after the first are given by name, as far as the method has an argument of that name."""
_INDEX = "dataloader_idx"


def accepting(method: Method, owner: object, event: str, base: type, first: Sequence[str] = ()) -> Method:
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
    arguments = [*first, *_arguments_of_run(base, event)[len(first) :]]
    short = arguments[:-1] if arguments[-1:] == [_INDEX] and vars(base)[event].__defaults__ else arguments
    if event in _BY_NAME and _binds(takes, arguments[:1], arguments[1:]):
        return lambda first, *args: method(first, **dict(zip(arguments[1:], args, strict=True)))
    if event == "clip_gradients":
        pass  # which is called by name
    elif _binds(takes, arguments) and _binds(takes, short):
        return method
    elif _binds(takes, short):
        return lambda *args: method(*args[: len(short)])
    elif _binds(takes, arguments):
        return lambda *args: method(*args, *([0] if len(args) < len(arguments) else []))
    elif event in ("setup", "teardown") and _binds(takes, arguments[:-1]):
        return lambda *args: method(*args[:-1])
    elif _binds(takes, [], arguments):
        return lambda *args: method(**dict(zip(arguments, args, strict=False)))
    raise TypeError(
        f"{type(owner).__name__}.{event}({', '.join(takes.parameters)}) cannot be called: a run gives it ({', '.join(arguments)}); "
        "change its arguments"
    )


def check(module: TrainModule, base: type) -> None:
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
    for name in overridden_methods(module, [name for name in BESIDES_EVENTS if hasattr(base, name)], base):
        accepting(getattr(module, name), module, name, base)


def _arguments_of_run(base: type, event: str) -> list[str]:
    parameters = list(inspect.signature(getattr(base, event)).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def _binds(takes: inspect.Signature, positional: list[str], named: list[str] | None = None) -> bool:
    try:
        takes.bind(*positional, **dict.fromkeys(named or (), None))
    except TypeError:
        return False
    return True


ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
_GONE = {
    "optimizer_idx": "with several optimizers set automatic_optimization = False and use self.optimizers()",
    "hiddens": "split the sequence in training_step, with automatic_optimization = False",
    "dataloader_iter": "the run reads the loader, and gives each batch",
}


def argument_count(step: Callable[..., Any], who: str, several: bool = False, indexed: bool = True) -> int | None:
    """Count the :data:`ARGUMENTS` to pass by position to a bound method; ``None``: all that there are.

    Args:
        who: its name for errors, such as ``Net.training_step``.
        several: there are several loaders, so that their number is passed when it is taken.
        indexed: it may ask for the loader's number (which is 0 if there is one loader).

    Raises:
        TypeError: it takes no batch, or needs something else; the message names it.
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # native code does not say
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3 if several else 2
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    allowed = ARGUMENTS if indexed else ARGUMENTS[:2]
    strange = [name for index, name in enumerate(needed) if index >= len(allowed) or name in _GONE]
    strange += [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if strange or not positional:
        what = f"needs {strange[0]!r}" if strange else "takes no batch"
        advice = f"; {_GONE[strange[0]]}" if strange and strange[0] in _GONE else ""
        raise TypeError(f"{who} {what}: it gets {', '.join(allowed)}, of which it may leave out the last{advice}")
    if len(needed) == 3:
        return 3
    return min(len(positional), 3 if several else 2)


def _passing(call: Callable[..., Any], count: int | None, passed: int) -> Callable[..., Any]:
    """``call`` for a caller that passes ``passed`` arguments, where ``count`` are taken; ``call`` itself when both are equal."""
    if count is None or count == passed:
        return call
    if count > passed:
        return lambda *args: call(*args, 0)  # the only loader's number
    return lambda *args: call(*args[:count])


def step_accepting(
    module: TrainModule, name: str, call: Callable[..., Any], several: bool = False, training: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """``call``, which runs the module's step of this name, for the arguments that a loop passes.

    Raises:
        TypeError: as :func:`argument_count`.
    """
    count = argument_count(getattr(module, name), f"{type(module).__name__}.{name}", several, not training)
    return _passing(call, count, 3 if several else 2)
