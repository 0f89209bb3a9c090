"""Dividing a model's layers into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engine.step.precision import Precision
from engine.strategies.pipeline_shapes import Spec, local, through
from engine.utils.errors import nearest


class Stage(nn.Module):
    """Consecutive modules of a model, which pass a tensor or a tuple of tensors from one to the next."""

    def __init__(self, parts: Sequence[nn.Module], precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._precision, self._device = precision, device
        self.input_specs: Spec = ()
        """The forms of the tensors that the previous stage passes on."""
        self.output_specs: Spec = ()
        """The forms of the tensors that the next stage expects."""

    def forward(self, *inputs: Any) -> Any:
        with self._precision.context(self._device):
            outputs = through(
                self.parts, tuple(spec.restore_layout(t) for spec, t in zip(self.input_specs, inputs, strict=True))
            )
        results = tuple(local(t) for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
        if [tuple(t.shape) for t in results] != [spec.shape for spec in self.output_specs]:
            raise ValueError(
                f"pipeline parallel: a stage returned {[list(t.shape) for t in results]}, not {[list(spec.shape) for spec in self.output_specs]} as "
                "inferred: its output's shape must follow from its inputs' shapes"
            )
        # Under FSDP's mixed precision an embedding's output is in half precision, unlike under autocast alone.
        cast = tuple(
            (t if t.dtype == spec.dtype else t.to(spec.dtype)).contiguous()
            for t, spec in zip(results, self.output_specs, strict=True)
        )
        return cast if isinstance(outputs, tuple) else cast[0]


def has_parts(model: nn.Module) -> bool:
    """Whether a model says into which modules a pipeline may divide it."""
    return isinstance(model, nn.Sequential) or callable(getattr(type(model), "pipeline_stages", None))


def stages_of(model: nn.Module, count: int, split: Sequence[str]) -> list[list[nn.Module]]:
    """The model's modules in the order of its forward pass, divided into ``count`` stages.

    Raises:
        ValueError: the model does not name its modules, has fewer than ``count``, or ``split`` does not fit.
    """
    if isinstance(model, nn.Sequential):
        parts = list(model)
    elif has_parts(model):
        parts = list(model.pipeline_stages())  # type: ignore[operator]
    else:
        raise ValueError(
            f"pipeline parallel: {type(model).__name__} does not define pipeline_stages(self): let it return the modules "
            "that, called one after another, are its forward pass: [self.embed, *self.layers, self.head]"
        )
    inside = {id(m) for m in model.modules()}
    for part in parts:
        if not isinstance(part, nn.Module) or id(part) not in inside:
            raise ValueError(
                f"{type(model).__name__}.pipeline_stages() has a {type(part).__name__}: return modules in the order of forward"
            )
    if len(parts) < count:
        raise ValueError(
            f"pipeline parallel: {type(model).__name__} has {len(parts)} modules for {count} stages; return more, or lower pp"
        )
    names = {id(m): name for name, m in model.named_modules()}
    starts = (
        _starts([names[id(p)] for p in parts], split, count) if split else _balanced([_weight(p) for p in parts], count)
    )
    return [parts[low:high] for low, high in zip(starts, [*starts[1:], len(parts)], strict=True)]


def _starts(names: list[str], split: Sequence[str], count: int) -> list[int]:
    """The index of each stage's first module, from the names in ``split``."""
    for name in split:
        if name not in names:
            raise ValueError(
                f"MeshParallel(split=...): no module {name!r}{nearest(name, names)}; the modules are {', '.join(names)}"
            )
    starts = [0, *(names.index(name) for name in split)]
    if len(starts) != count or sorted(set(starts)) != starts:
        raise ValueError(
            f"MeshParallel(split={list(split)!r}) must name the first modules of the {count - 1} stages after the first one, in order; "
            f"the modules are {', '.join(names)}"
        )
    return starts


def _balanced(weights: list[int], count: int) -> list[int]:
    """The index of each stage's first module, chosen so that the largest stage is as small as possible."""
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + weight)

    def starts_within(limit: int) -> list[int] | None:
        starts, low = [0], 0
        for index in range(1, len(weights)):
            stages_left = count - len(starts)
            if ends[index + 1] - ends[low] > limit or len(weights) - index == stages_left:
                if not stages_left:
                    return None
                starts.append(index)
                low = index
        return starts if len(starts) == count else None

    limits = sorted({ends[j] - ends[i] for i in range(len(ends)) for j in range(i + 1, len(ends))})
    return next(starts for limit in limits if (starts := starts_within(limit)) is not None)


def _weight(part: nn.Module) -> int:
    return 1 + sum(p.numel() for p in part.parameters() if p.ndim > 1)
