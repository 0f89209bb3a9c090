"""The check of optimizers' states that a checkpoint of sharded parameters can hold: those from which a resumed run continues alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.strategies.dtensors import shard_count
from engine.utils.checksums import checksum

PLAIN = (bool, int, float, str)


def check(group: Group, optimizer: Optimizer, names: Mapping[int, str | int], lent: Set[int] = frozenset()) -> None:
    """Check that the states of sharded parameters are either sharded like them or equal on all ranks. A collective.

    Args:
        names: the name of each parameter, by its number in the optimizer.
        lent: the ids of parameters whose states are whole, each on one rank.

    Raises:
        ValueError: one is neither, on all ranks; the message names it.
    """
    problem, values = "", dict(_group_values(optimizer))
    for path, value in _entries({key: entry for key, entry in optimizer.state.items() if not isinstance(key, Tensor)}):
        where = f"{path!r} beside those of parameters"
        if isinstance(value, DTensor):
            problem = problem or f"{where} is sharded, and would be whole when it is loaded"
        else:
            values[where] = _fingerprint(value)
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    for number, parameter in enumerate(parameters):
        if not isinstance(parameter, DTensor) or shard_count(parameter) == 1 or id(parameter) in lent:
            continue
        for path, value in _entries(optimizer.state.get(parameter, {})):
            where = f"{path!r} of {str(names[number])!r}"
            problem = problem or _problem(where, value, parameter)
            if not isinstance(value, DTensor):
                values[where] = _fingerprint(value)
    rows = gather_json(group, [problem, values])
    problems = [row[0] for row in rows if row[0]] or list(_differences([row[1] for row in rows]))
    if problems:
        raise ValueError(
            f"{type(optimizer).__name__}: its state {problems[0]}. A training that is resumed from a checkpoint would not continue like this "
            "one: use strategy='ddp', or an optimizer whose states are shaped like the parameters"
        )


def _problem(where: str, value: Any, parameter: DTensor) -> str:
    """Why a state of a sharded parameter cannot be restored, for itself; empty if it can."""
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            return f"{where} is not summed up over the ranks yet ({value.placements})"
        if value.shape != parameter.shape:
            return f"{where} has the shape {list(value.shape)}, its parameter {list(parameter.shape)}, so it could not be sharded again"
    elif isinstance(value, Tensor) and value.numel() > 1 and value.shape == parameter.shape:
        return f"{where} is whole on each rank, and its parameter is sharded, so it would be sharded when it is loaded"
    return ""


def _differences(values_of_ranks: list[dict[str, Any]]) -> Iterator[str]:
    """The values that are not equal on all ranks that have them."""
    for name in dict.fromkeys(name for values in values_of_ranks for name in values):
        ranks = [rank for rank, values in enumerate(values_of_ranks) if name in values]
        for rank in ranks:
            if values_of_ranks[rank][name] != values_of_ranks[ranks[0]][name]:
                yield f"{name} is each rank's own (ranks {ranks[0]} and {rank} differ), and a checkpoint has it once"
                break


def _entries(entry: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a parameter's state, with their paths."""
    if isinstance(entry, Mapping):
        for key, value in entry.items():
            yield from _entries(value, f"{path}.{key}" if path else str(key))
    elif isinstance(entry, (list, tuple)):
        for index, value in enumerate(entry):
            yield from _entries(value, f"{path}.{index}")
    elif isinstance(entry, (Tensor, *PLAIN)):
        yield path, entry


def _group_values(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The values of the parameter groups, such as an estimated learning rate."""
    for number, param_group in enumerate(optimizer.param_groups):
        for path, value in _entries({key: value for key, value in param_group.items() if key != "params"}):
            if not isinstance(value, DTensor):
                yield f"{path!r} of parameter group {number}", _fingerprint(value)


def _fingerprint(value: Any) -> Any:
    """A JSON value that differs if the value does. Waits for the device."""
    if not isinstance(value, Tensor):
        return repr(value)
    return [str(value.dtype), list(value.shape), checksum(value)]
