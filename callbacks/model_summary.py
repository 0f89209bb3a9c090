"""The model as a table before the training: parameters, bytes, FLOPs and shapes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from engine import Callback, Run, Strategy, terminal_text

from .example_pass import NotMeasured, SubmodulePass, pass_through
from .text import rich_table


@dataclass(slots=True)
class Layer:
    """A submodule and everything inside it. Parameters that two submodules share count in both."""

    name: str
    """Name of the submodule; ``""``: the whole module."""
    type: str
    parameters: int
    """Elements of all parameters, over all ranks."""
    trainable: int
    """Elements of the parameters that require a gradient, over all ranks."""
    bytes: int
    """Bytes of parameters and buffers, over all ranks."""
    held: int
    """Bytes of parameters and buffers on this rank."""
    flops: int | None = None
    """FLOPs of a forward pass of the example batch on this rank; a multiplication and an addition are two. ``None``: not measured."""
    inputs: Any = field(default=None)
    """Shapes of the inputs of the first call, ``[2, 10]`` or a list of shapes; ``None``: not measured, or not called."""
    outputs: Any = field(default=None)
    """Shapes of the outputs of the first call."""


class ModelSummary(Callback):
    """Prints the module as a table when a training starts, on the main process: for each submodule its type, parameters (and how many are
    trainable), bytes, FLOPs and shapes; below, the totals and the part of a sharded model that one rank holds.

    FLOPs (multiplications and additions of matrix products, convolutions and attention, by ``torch.utils.flop_counter``) and shapes come
    from one call of ``training_step`` with ``run.example_batch``, without gradients. The training does not change: random numbers,
    buffers, parameters, modes and the modules' attributes are restored, and nothing is logged. Other effects of ``training_step``
    (printing, counting in an object that is not a module) happen once more; ``measure=False`` leaves the call out. Where the call
    is not possible, the table says why: manual optimization, pipelines, DeepSpeed, streams, lazy modules.
    """

    def __init__(self, max_depth: int = 1, measure: bool = True) -> None:
        """
        Args:
            max_depth: levels of submodules to show; 0: only the totals; -1: all.
            measure: whether to measure FLOPs and shapes.

        Raises:
            ValueError: ``max_depth`` is not -1 or more.
        """
        if isinstance(max_depth, bool) or not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"ModelSummary(max_depth={max_depth!r}): it must be -1 (all levels), 0 (totals) or more")
        self.max_depth, self.measure = max_depth, measure
        self.layers: list[Layer] = []
        """The rows of the latest training's table; the first is the whole module."""

    def on_fit_start(self, run: Run, module: nn.Module) -> None:
        self.layers = [
            _layer(name, submodule, run.engine.strategy)
            for name, submodule in module.named_modules()
            if self._shows(name)
        ]
        note = ""
        if self.measure:
            try:
                note = self._measure(run)
            except NotMeasured as reason:
                note = f"FLOPs and shapes are not measured: {reason}"
            except Exception as error:  # the first step will show it with its traceback
                note = f"FLOPs and shapes are not measured: {type(error).__name__}: {error}"
        if run.is_main_process:
            lines = [*self._table(), *self._totals(run), *([note] if note else [])]
            print(*(terminal_text(line, one_line=True) for line in lines), sep="\n", flush=True)

    def _shows(self, name: str) -> bool:
        return not name or self.max_depth < 0 or name.count(".") < self.max_depth

    def _measure(self, run: Run) -> str:
        seen = pass_through(run, [layer.name for layer in self.layers])
        for layer in self.layers:
            measured = seen.get(layer.name, SubmodulePass())
            layer.flops, layer.inputs, layer.outputs = measured.flops, measured.inputs, measured.outputs
        return (
            f"{quantity(self.layers[0].flops or 0)} FLOPs in a forward pass of a batch {_text(self.layers[0].inputs)}"
        )

    def _table(self) -> list[str]:
        layers = self.layers[1:]
        if not layers:
            return []
        measured = any(layer.flops is not None for layer in layers)
        rows = []
        for layer in layers:
            trains = (
                "all"
                if layer.trainable == layer.parameters
                else quantity(layer.trainable)
                if layer.trainable
                else "none"
            )
            cells = [
                layer.name,
                layer.type,
                quantity(layer.parameters),
                trains if layer.parameters else "",
                size(layer.bytes),
            ]
            if measured:
                cells += [quantity(layer.flops or 0), _text(layer.inputs), _text(layer.outputs)]
            rows.append(cells)
        columns = ["name", "type", "params", "trainable", "bytes", *(["FLOPs", "in", "out"] if measured else [])]
        width = shutil.get_terminal_size((120, 24)).columns
        return rich_table(columns, rows, width, text_columns=("name", "type", "in", "out")).split("\n")

    def _totals(self, run: Run) -> list[str]:
        whole = self.layers[0]
        text = f"{quantity(whole.parameters)} parameters, {quantity(whole.trainable)} trainable, {size(whole.bytes)}"
        if run.world_size > 1:
            text += f"; rank {run.rank} of {run.world_size} holds {size(whole.held)}"
        return [f"{whole.type}: {text}"]


def _layer(name: str, module: nn.Module, strategy: Strategy) -> Layer:
    parameters = list(module.parameters())
    elements = [_elements(p, strategy) for p in parameters]
    trainable = sum(n for n, p in zip(elements, parameters, strict=True) if p.requires_grad)
    tensors = [*parameters, *module.buffers()]
    return Layer(
        name,
        type(module).__name__,
        sum(elements),
        trainable,
        sum(_elements(t, strategy) * t.element_size() for t in tensors),
        sum(_local_elements(t, strategy) * t.element_size() for t in tensors),
    )


def _elements(tensor: Tensor, strategy: Strategy) -> int:
    """Elements of the whole tensor, over all ranks."""
    return 0 if nn.parameter.is_lazy(tensor) else strategy.whole_shape(tensor).numel()


def _local_elements(tensor: Tensor, strategy: Strategy) -> int:
    """Elements of the tensor on this rank."""
    if nn.parameter.is_lazy(tensor):
        return 0
    part: Any = strategy.local([tensor])[0]
    return int(part.to_local().numel() if hasattr(part, "to_local") else part.numel())


def _text(shape: Any) -> str:
    return "" if shape is None else str(shape)


def quantity(number: int) -> str:
    """A number in three digits: ``"1.23 M"``."""
    return _scaled(float(number), 1000, ("", " K", " M", " G", " T", " P", " E"))


def size(number: int) -> str:
    """A number of bytes in three digits: ``"4.94 MB"``."""
    return _scaled(float(number), 1000, (" B", " KB", " MB", " GB", " TB", " PB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    place = 0
    while value >= base * 0.9995 and place < len(units) - 1:
        value, place = value / base, place + 1
    return f"{value:.3g}{units[place]}" if place else f"{value:.0f}{units[0]}"
