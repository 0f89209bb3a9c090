"""The arguments of users' hooks and steps, which may take fewer, or need more, than a run passes: inspected once, before the first step."""

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
"""Methods of a module that are no events, but are called with a run's arguments too."""
_BY_NAME = ("configure_gradient_clipping", "clip_gradients")
"""Methods whose arguments after the first are passed by name, if they have the same names as the base's."""
_LOADER_INDEX = "dataloader_idx"


def accepting(method: Method, owner: object, event: str, base: type, first: Sequence[str] = ()) -> Method:
    """Adapt ``method`` so that a run can call it with the arguments that ``base`` defines for ``event``; usually return ``method`` itself.

    Supported are also a ``setup()`` or ``teardown()`` without an argument, keyword-only arguments, and batch events that require a
    ``dataloader_idx`` (0 with one loader) or lack it. ``first``: other names for the first arguments.

    Raises:
        TypeError: ``method`` takes other arguments.
    """
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # not a Python function
        return method
    if event not in vars(base):
        return method
    arguments = [*first, *_arguments_of_run(base, event)[len(first) :]]
    short = arguments[:-1] if arguments[-1:] == [_LOADER_INDEX] and vars(base)[event].__defaults__ else arguments
    if event in _BY_NAME and _binds(signature, arguments[:1], arguments[1:]):
        return lambda first, *args: method(first, **dict(zip(arguments[1:], args, strict=True)))
    if event == "clip_gradients":
        pass  # a run always passes its arguments by name: other names are an error
    elif _binds(signature, arguments) and _binds(signature, short):
        return method
    elif _binds(signature, short):
        return lambda *args: method(*args[: len(short)])
    elif _binds(signature, arguments):
        return lambda *args: method(*args, *([0] if len(args) < len(arguments) else []))
    elif event in ("setup", "teardown") and _binds(signature, arguments[:-1]):
        return lambda *args: method(*args[:-1])
    elif _binds(signature, [], arguments):
        return lambda *args: method(**dict(zip(arguments, args, strict=False)))
    raise TypeError(
        f"{type(owner).__name__}.{event}({', '.join(signature.parameters)}) cannot be called: a run gives it ({', '.join(arguments)}); "
        "change its arguments"
    )


def check_method_arguments(module: TrainModule, base: type) -> None:
    """Check the arguments of ``state_dict`` and of the methods in :data:`BESIDES_EVENTS` that ``module`` overrides.

    Raises:
        TypeError: a method takes other arguments.
    """
    if overridden(module, "state_dict", base):
        signature = inspect.signature(module.state_dict)
        if not _binds(signature, [], ["keep_vars"]):
            raise TypeError(
                f"{type(module).__name__}.state_dict({', '.join(signature.parameters)}) cannot be called: a save calls it with keep_vars=True; "
                "give it torch's arguments, state_dict(self, *args, **kwargs)"
            )
    for name in overridden_methods(module, [name for name in BESIDES_EVENTS if hasattr(base, name)], base):
        accepting(getattr(module, name), module, name, base)


def _arguments_of_run(base: type, event: str) -> list[str]:
    """The names of the positional arguments that ``base`` defines for ``event``, without ``self``."""
    parameters = list(inspect.signature(getattr(base, event)).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def _binds(signature: inspect.Signature, positional: list[str], named: list[str] | None = None) -> bool:
    """Whether a call with these positional arguments, and arguments by name, fits the signature."""
    try:
        signature.bind(*positional, **dict.fromkeys(named or (), None))
    except TypeError:
        return False
    return True


ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
"""The arguments that a loop can pass to a step."""
_REMOVED_ARGUMENTS = {
    "optimizer_idx": "with several optimizers set automatic_optimization = False and use self.optimizers()",
    "hiddens": "split the sequence in training_step, with automatic_optimization = False",
    "dataloader_iter": "the run reads the loader, and passes each batch",
}
"""Arguments of steps in other versions of Lightning, and what to do instead."""


def argument_count(step: Callable[..., Any], who: str, several: bool = False, indexed: bool = True) -> int | None:
    """Count how many of :data:`ARGUMENTS` to pass by position to ``step``, a bound method; ``None``: its signature is unknown, pass all.

    Args:
        who: the name of the step for errors, such as ``Net.training_step``.
        several: whether there are several loaders, so that a step that takes the loader's index gets it.
        indexed: whether the step may require the loader's index (which is 0 if there is one loader).

    Raises:
        TypeError: the step takes no batch, or requires another argument, which the message names.
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # native code has no signature
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
    unsupported = [name for index, name in enumerate(needed) if index >= len(allowed) or name in _REMOVED_ARGUMENTS]
    unsupported += [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if unsupported or not positional:
        what = f"needs {unsupported[0]!r}" if unsupported else "takes no batch"
        advice = (
            f"; {_REMOVED_ARGUMENTS[unsupported[0]]}" if unsupported and unsupported[0] in _REMOVED_ARGUMENTS else ""
        )
        raise TypeError(f"{who} {what}: it gets {', '.join(allowed)}, of which it may leave out the last{advice}")
    if len(needed) == 3:
        return 3
    return min(len(positional), 3 if several else 2)


def _passing(call: Callable[..., Any], count: int | None, passed: int) -> Callable[..., Any]:
    """Wrap ``call``, which takes ``count`` arguments, for a loop that passes ``passed``; return ``call`` itself if the numbers are equal."""
    if count is None or count == passed:
        return call
    if count > passed:
        return lambda *args: call(*args, 0)  # 0: the index of the only loader
    return lambda *args: call(*args[:count])


def step_accepting(
    module: TrainModule, name: str, call: Callable[..., Any], several: bool = False, training: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """Wrap ``call``, which runs the module's step ``name``, so that it passes the step only as many of the loop's arguments as it declares.

    Args:
        several: whether the loop passes the loader's index too.
        training: whether the step is ``training_step``, which cannot ask for the loader's index.

    Raises:
        TypeError: as for :func:`argument_count`.
    """
    count = argument_count(getattr(module, name), f"{type(module).__name__}.{name}", several, not training)
    return _passing(call, count, 3 if several else 2)
