"""The content of a checkpoint that another library wrote, before it is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.json_tree import pack, same_memory
from engine.checkpoint.tensor_files import Stored, storable
from engine.compat.foreign_checkpoints.optimizer_names import with_parameter_names
from engine.compat.foreign_checkpoints.untrusted_files import InMemory, Tensors

MODEL_KEYS = ("model", "state_dict", "module")
"""Keys under which other libraries' checkpoints keep the model."""


@dataclass
class ForeignContent:
    """The content of a foreign checkpoint."""

    kind: str
    model: Tensors
    names: dict[str, str]
    """Name of a model's tensor -> its name in ``model``; one entry for tied weights."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied weights -> the name in ``names`` of the same tensor."""
    optim: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    step: int = 0
    epoch: int = 0
    hparams: dict[str, Any] = field(default_factory=dict)
    hparams_name: str | None = None
    user: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    """The averaged weights, with which the model was validated."""
    notes: list[str] = field(default_factory=list)


def named_tensors(kind: str, state: Mapping[str, Any], source_name: str) -> ForeignContent:
    """The tensors of a ``state_dict``; those that share memory become aliases of the first. Raise ``ValueError`` if a tensor cannot be stored."""
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"{source_name} has no tensors by name; its keys are {', '.join(map(str, list(state)[:8])) or 'none'}"
        )
    for name, tensor in tensors.items():
        if not storable(tensor):
            raise ValueError(
                f"{source_name}: {name!r} ({tensor.dtype}, {tensor.layout}) cannot be stored: convert it to a dense tensor first"
            )
    first: dict[Any, str] = {}
    aliases = {
        name: first_name
        for name, tensor in tensors.items()
        if (first_name := first.setdefault(same_memory(tensor), name)) != name
    }
    left_out = [str(name) for name in state if str(name) not in tensors]
    notes = (
        [
            f"left out, because it is not a tensor: {', '.join(left_out[:5])}{f' and {len(left_out) - 5} more' if len(left_out) > 5 else ''}"
        ]
        if left_out
        else []
    )
    return ForeignContent(
        kind, InMemory(tensors), {name: name for name in tensors if name not in aliases}, aliases, notes=notes
    )


def is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def with_names(state: Any, content: ForeignContent, what: str) -> Any:
    """An optimizer's state with parameter names as keys, if they can be found; otherwise unchanged. ``what``: its name in messages."""
    if not is_optimizer(state) or not is_storable(state, what, content.notes):
        raise ValueError(
            f"{what} is not an optimizer's state, or contains what a checkpoint cannot hold: {'; '.join(content.notes)}"
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        return state
    by_names = with_parameter_names(
        state, {name: Stored(name, *shape_and_dtype(content, name)) for name in content.names}
    )
    if by_names is None:
        content.notes.append(
            f"{what}: its parameters cannot be identified, so it keeps their numbers; these fit an optimizer created in the same way"
        )
        return state
    return by_names


def shape_and_dtype(content: ForeignContent, name: str) -> tuple[torch.Size, torch.dtype]:
    stored = content.model.stored[content.names[name]]
    return stored.shape, stored.dtype


def is_storable(value: Any, what: str, notes: list[str]) -> bool:
    """Whether a checkpoint can store ``value``; if not, add a note that ``what`` is left out."""
    try:
        pack(value)
    except TypeError as error:
        notes.append(f"left out: {what}: {error}")
        return False
    return True
