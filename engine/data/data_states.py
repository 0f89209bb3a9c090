"""The states of users' data: which objects have one, how it is read and loaded, and parts of a pipeline that lose their place."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from types import FunctionType
from typing import Any

from torch.utils.data import Sampler, SequentialSampler

from engine.utils.log import warn_once

_BYTES = "bytes"
"""The key under which a state of bytes is stored as text, because a checkpoint has JSON and tensors only."""


def stateful(item: Any) -> bool:
    """True if the item has ``state_dict()`` and ``load_state_dict(state)``, as torchdata's ``StatefulDataLoader`` has, or ``get_state()`` and
    ``set_state(state)``, as Grain's iterators have.

    A ``state_dict`` that needs arguments belongs to a protocol of another library (litData's data sets) and does not count.
    """
    return has_state_dict(item) or _has(item, "get_state", "set_state")


def state_of(item: Any) -> Any:
    """A copy of the state of a :func:`stateful` item."""
    if has_state_dict(item):
        return copy.deepcopy(item.state_dict())
    state = copy.deepcopy(item.get_state())
    return {_BYTES: state.decode("latin-1")} if isinstance(state, bytes) else state


def load_state(item: Any, state: Any) -> None:
    """Let the item continue from a result of :func:`state_of`."""
    if has_state_dict(item):
        item.load_state_dict(state)
    elif isinstance(state, dict) and set(state) == {_BYTES}:
        item.set_state(state[_BYTES].encode("latin-1"))
    else:
        item.set_state(state)


def states_of(**owners: Any) -> dict[str, Any] | None:
    """Copies of the states of those ``owners`` that have one; ``None`` if none has."""
    return {name: state_of(owner) for name, owner in owners.items() if stateful(owner)} or None


def has_state_dict(item: Any) -> bool:
    """True if the item has ``state_dict()``, without arguments, and ``load_state_dict(state)``."""
    return _has(item, "state_dict", "load_state_dict")


def _has(item: Any, read: str, load: str) -> bool:
    """True if the item's method ``read`` can be called without arguments, and it has the method ``load``."""
    method = getattr(item, read, None)
    if not callable(method) or not callable(getattr(item, load, None)) or isinstance(item, type):
        return False
    function = getattr(type(item), read, None)
    # Usually remembered for the class, since a stream's state is read in each window.
    return not (
        _method_needs_arguments(function) if isinstance(function, FunctionType) else _needs_arguments(method, 0)
    )


@cache
def _method_needs_arguments(function: FunctionType) -> bool:
    return _needs_arguments(function, 1)


def _needs_arguments(function: Any, skipped: int) -> bool:
    """True if the function has parameters without a default after the first ``skipped``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skipped:]
    except (TypeError, ValueError):  # written in C
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.default is parameter.empty and parameter.kind not in optional for parameter in parameters)


def warn_of_forgetful_samplers(data: Any) -> None:
    """Warn about samplers in a torchdata graph (``torchdata.nodes``) whose order cannot be drawn again after a resume, although the graph has a
    state: the graph skips as many indices of another order."""
    for sampler in _forgetful_samplers(data):
        warn_once(
            f"{type(data).__name__} is a torchdata graph over {type(sampler).__name__}, whose order a resume within an epoch cannot draw again: it "
            "would skip samples of another order, so that samples are repeated and left out. Give SamplerWrapper a sampler with set_epoch(epoch), or "
            "with state_dict() and load_state_dict(state) of its own (those of its iterator are not asked)"
        )


def _forgetful_samplers(data: Any) -> list[Sampler[Any]]:
    """The samplers in a torchdata graph that neither have a state nor follow from the epoch."""
    samplers = []
    for node in _nodes(data):
        sampler = getattr(
            node, {"SamplerWrapper": "sampler", "IterableWrapper": "iterable"}.get(type(node).__name__, ""), None
        )
        if not isinstance(sampler, Sampler) or type(sampler) is SequentialSampler or has_state_dict(sampler):
            continue
        if type(node).__name__ == "IterableWrapper" or not callable(getattr(sampler, "set_epoch", None)):
            samplers.append(sampler)
    return samplers


def _nodes(data: Any) -> list[Any]:
    """A torchdata graph's loader and all nodes in it; ``[]`` for other data."""
    if not type(data).__module__.startswith("torchdata.nodes"):
        return []
    parts = [data]
    for part in parts:
        for value in getattr(part, "__dict__", {}).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            parts += [
                inner
                for inner in values
                if any(cls.__module__.startswith("torchdata.nodes") for cls in type(inner).__mro__)
                and not any(inner is listed for listed in parts)
            ]
    return parts
