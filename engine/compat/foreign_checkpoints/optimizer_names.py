"""Renames the numbered parameters in optimizer states to their names, and builds trees from paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.checkpoint.tensor_files import Stored

_LIKE_THE_PARAMETER = ("exp_avg", "momentum_buffer", "square_avg", "exp_avg_sq", "sum", "ax", "acc_delta", "prev")
"""Entries of torch's optimizer states that have the shape of their parameter."""
_BUFFERS = ("running_mean", "running_var")


def with_parameter_names(state: Mapping[str, Any], model: Mapping[str, Stored]) -> dict[str, Any] | None:
    """Replace the numbers of parameters in an ``optimizer.state_dict()`` by their names; ``None`` if the parameters cannot be identified.

    They can be if the groups have ``param_names``, or if the shapes of the states fit only one choice of names for each group. Groups are
    assumed to list their parameters in the model's order, as ``module.parameters()`` does.

    Args:
        model: the model's tensors in order, with one entry for tied weights.
    """
    groups = state["param_groups"]
    if all("param_names" in group for group in groups):
        names_of_groups = [list(group["param_names"]) for group in groups]
    else:
        usable = {
            n: s
            for n, s in model.items()
            if (s.dtype.is_floating_point or s.dtype.is_complex) and n.rpartition(".")[2] not in _BUFFERS
        }
        names_of_groups = [
            _only_order([_shape(state["state"].get(number)) for number in group["params"]], usable) for group in groups
        ]
    all_names = [name for names in names_of_groups for name in names]
    is_complete = [len(names) == len(group["params"]) for names, group in zip(names_of_groups, groups, strict=True)]
    if not all(is_complete) or len(set(all_names)) != len(all_names) or not set(all_names) <= model.keys():
        return None
    name_of = dict(zip((number for group in groups for number in group["params"]), all_names, strict=True))
    return {
        **state,
        "state": {name_of.get(number, number): entry for number, entry in state["state"].items()},
        "param_groups": [{**group, "params": names} for group, names in zip(groups, names_of_groups, strict=True)],
    }


def _shape(entry: Any) -> tuple[int, ...] | None:
    """The shape of the parameter that an optimizer's state belongs to; ``None`` if the state does not show it."""
    if not isinstance(entry, Mapping):
        return None
    return next((tuple(entry[name].shape) for name in _LIKE_THE_PARAMETER if isinstance(entry.get(name), Tensor)), None)


def _only_order(shapes: Sequence[tuple[int, ...] | None], model: Mapping[str, Stored]) -> list[str]:
    """Choose a name of the model, in order, for each of ``shapes`` (``None`` fits any). Return an empty list unless exactly one choice fits."""
    names = list(model)

    def first_fit(shapes: Sequence[tuple[int, ...] | None], names: Sequence[str]) -> list[str]:
        remaining = iter(names)
        return [
            name
            for shape in shapes
            if (name := next((n for n in remaining if shape in (None, tuple(model[n].shape))), None)) is not None
        ]

    forward, backward = first_fit(shapes, names), first_fit(shapes[::-1], names[::-1])[::-1]
    # If the earliest and the latest possible choice are equal, there is no other.
    return forward if forward == backward and len(forward) == len(shapes) else []


def nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Build the tree that has these leaves at these paths; a node with the keys 0, 1, ... becomes a list."""
    if () in values:
        return values[()]
    inner: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    tree = {key: nested(entries) for key, entries in inner.items()}
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [tree[index] for index in range(len(tree))]
    return tree
