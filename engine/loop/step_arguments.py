"""How many of its arguments a step takes: a module may leave out ``batch_idx`` and ``dataloader_idx``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

ARGUMENTS = ("batch", "batch_idx", "dataloader_idx")
_GONE = {
    "optimizer_idx": "with several optimizers set automatic_optimization = False and use self.optimizers()",
    "hiddens": "split the sequence in training_step, with automatic_optimization = False",
    "dataloader_iter": "the run reads the loader, and gives each batch",
}


def taken(step: Callable[..., Any], who: str, several: bool = False, indexed: bool = True) -> int | None:
    """How many of :data:`ARGUMENTS` to pass by position to a bound method; ``None``: all that there are.

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
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return 3 if several else 2
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each.name for each in positional if each.default is each.empty]
    known = ARGUMENTS if indexed else ARGUMENTS[:2]
    strange = [name for index, name in enumerate(needed) if index >= len(known) or name in _GONE]
    strange += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    if strange or not positional:
        what = f"needs {strange[0]!r}" if strange else "takes no batch"
        advice = f"; {_GONE[strange[0]]}" if strange and strange[0] in _GONE else ""
        raise TypeError(f"{who} {what}: it gets {', '.join(known)}, of which it may leave out the last{advice}")
    if len(needed) == 3:
        return 3
    return min(len(positional), 3 if several else 2)


def fitted(call: Callable[..., Any], count: int | None, given: int) -> Callable[..., Any]:
    """``call`` for a caller that passes ``given`` arguments, where ``count`` are taken; ``call`` itself when that is the same."""
    if count is None or count == given:
        return call
    if count > given:
        return lambda *args: call(*args, 0)  # the only loader's number
    return lambda *args: call(*args[:count])


def fitted_step(
    module: Any, name: str, call: Callable[..., Any], several: bool = False, training: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """``call``, which runs the module's step of this name, for the arguments that a loop passes.

    Raises:
        TypeError: as :func:`taken`.
    """
    count = taken(getattr(module, name), f"{type(module).__name__}.{name}", several, not training)
    return fitted(call, count, 3 if several else 2)
