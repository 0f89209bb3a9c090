"""The options of ``log``: resolving them, and refusing those that logging cannot honour."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.utils.errors import nearest
from engine.utils.log import warn_once

if TYPE_CHECKING:
    from torch import nn

REDUCTIONS = ("mean", "sum", "min", "max")
_FUNCTIONS = {"mean": "mean", "sum": "sum", "min": "min", "amin": "min", "max": "max", "amax": "max"}
"""The reductions by the names of torch's functions. Names rather than functions, because ``fit migrate`` reads options without importing torch."""


_BUILTINS = {"sum": sum, "min": min, "max": max}
"""Python's functions by the names of the reductions."""


class Options(NamedTuple):
    """The options of a logged name. Checkpoints store the values in this order; older checkpoints have only the first four."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool = False
    reduce_fx: str = "mean"
    logger: bool = True
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False


class LogArguments(NamedTuple):
    """The options as passed to ``log``, before ``None`` is resolved to a default."""

    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    enable_graph: bool
    sync_dist_group: Any
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool
    reduce: Any


def options_of(name: str, arguments: LogArguments, on_step: bool, on_epoch: bool, world_size: int) -> Options:
    """Resolve the options of a call of ``log``.

    Args:
        on_step, on_epoch: the defaults at this moment of the run.

    Raises:
        ValueError: an option cannot be honoured; the message names it.
    """
    if arguments.enable_graph:
        raise ValueError(
            f"log({name!r}, enable_graph=True): a logged value is detached, since it is kept until the next log boundary; "
            "leave it out, and return what needs a gradient from the step"
        )
    if arguments.sync_dist_group is not None and (ranks := arguments.sync_dist_group.size()) != world_size:
        raise ValueError(
            f"log({name!r}, sync_dist_group=...) is a group of {ranks} rank(s), but logged values are always over all {world_size}: "
            "leave it out, or reduce the value yourself and log the result with rank_zero_only=True"
        )
    return Options(
        on_step if arguments.on_step is None else bool(arguments.on_step),
        on_epoch if arguments.on_epoch is None else bool(arguments.on_epoch),
        bool(arguments.prog_bar),
        _reduction(name, arguments),
        arguments.logger is not False,
        bool(arguments.add_dataloader_idx),
        bool(arguments.rank_zero_only),
    )


def _reduction(name: str, arguments: LogArguments) -> str:
    """The name of the reduction that ``reduce_fx`` or ``reduce`` asks for.

    Raises:
        ValueError: the reduction is unknown, or the two ask for different ones.
    """
    keyword, requested = (
        ("reduce_fx", arguments.reduce_fx) if arguments.reduce is None else ("reduce", arguments.reduce)
    )
    if arguments.reduce is not None and arguments.reduce_fx not in ("mean", arguments.reduce):
        raise ValueError(
            f"log({name!r}) got reduce_fx={arguments.reduce_fx!r} and reduce={arguments.reduce!r}, two names of one option: give one of them"
        )
    if isinstance(requested, str):
        reduction = "mean" if requested.lower() == "avg" else requested.lower()
        if reduction in REDUCTIONS:
            return reduction
        raise ValueError(
            f"log({name!r}, {keyword}={requested!r}) is unknown{nearest(requested, REDUCTIONS)}; possible: {', '.join(REDUCTIONS)}"
        )
    for reduction, builtin in _BUILTINS.items():
        if requested is builtin:
            return reduction
    for function, reduction in _FUNCTIONS.items():
        if requested is not None and requested is getattr(sys.modules.get("torch"), function, None):
            return reduction
    raise ValueError(
        f"log({name!r}, {keyword}={requested!r}) is not possible: values are reduced over micro-batches and ranks by one of "
        f"{', '.join(REDUCTIONS)} (or Python's or torch's functions of that name); for another one log a torchmetrics object, or collect the values "
        "yourself and log the result at the epoch's end"
    )


def without_steps(name: str, options: Options, evaluates: bool) -> Options:
    """Warn that ``on_step=True`` has no effect outside of steps, and return the options with which the epoch's value is reported.

    Args:
        evaluates: whether an evaluation logs the value. It reports the epoch's value also without ``on_epoch``.

    Raises:
        ValueError: a training asks for no epoch's value either.
    """
    what = f"log({name!r}, on_step=True) in an evaluation or at an epoch's start or end, where values belong to no step"
    if not options.on_epoch and not evaluates:
        raise ValueError(f"{what}: leave on_step out")
    warn_once(f"{what}: only the epoch's value is reported")
    return options if options.on_epoch else options._replace(on_step=False, on_epoch=True)


def check_metric(name: str, arguments: LogArguments, metric: Any, module: nn.Module | None, world_size: int) -> None:
    """Check the options that do not go with a torchmetrics object.

    Raises:
        ValueError: ``metric_attribute`` is not the name of ``metric``, or ``rank_zero_only`` is set on several ranks.
    """
    if arguments.rank_zero_only and world_size > 1:
        raise ValueError(
            f"log({name!r}, rank_zero_only=True) got a torchmetrics object, which is computed over all {world_size} ranks: leave it out, or "
            "log a number"
        )
    path = arguments.metric_attribute
    if path is None or module is None:
        return
    try:
        attribute = module.get_submodule(path)
    except AttributeError:
        raise ValueError(
            f"log({name!r}, metric_attribute={path!r}): {type(module).__name__} has no metric of this name; leave it out, a torchmetrics "
            "object is recognized"
        ) from None
    if all(part is not metric for part in attribute.modules()):
        raise ValueError(
            f"log({name!r}, metric_attribute={path!r}) got another object than {type(module).__name__}.{path}: log that object, or leave "
            "metric_attribute out"
        )
