"""Shapes of the tensors between a pipeline's stages, inferred without values and without communication."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.step.precision import Precision
from engine.utils import torch_private
from engine.utils.seed import isolated


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a ``DTensor`` over the ranks of tensor parallelism."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageTensor:
    """The form of a tensor that one stage passes to the next. Ranks send plain tensors; of a ``DTensor`` they send their own part."""

    shape: tuple[int, ...]
    """Shape of this rank's part."""
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None = None
    """Layout of a ``DTensor``, which the next stage restores; ``None`` for a plain tensor."""

    def empty(self, device: torch.device | str) -> Tensor:
        """An uninitialized tensor for this rank's part."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def restore_layout(self, local: Tensor) -> Tensor:
        """Turn this rank's part into the tensor that the stage before has sent: a ``DTensor`` with :attr:`layout`, or the part itself if there
        is none. The graph is kept."""
        layout = self.layout
        if layout is None:
            return local
        return DTensor.from_local(
            local, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
        )


Spec = tuple[StageTensor, ...]
"""The forms of all tensors that one stage passes to the next."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, ready to send: not a view, and not waiting for a collective. It keeps the graph."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return _SendableTensor.apply(part) if torch_private.is_in_flight(part) or part._base is not None else part


class _SendableTensor(torch.autograd.Function):
    """Makes a tensor ready to send. Sending, unlike other operations, does not wait for the collective that produces the tensor; and FSDP warns
    about views, whose hooks would be lost by an operation in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return (tensor.wait() if torch_private.is_in_flight(tensor) else tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def through(parts: Any, inputs: Any) -> Any:
    """Call modules one after another, each with the previous one's result: a tensor or a tuple of tensors."""
    passed: Any = inputs
    for part in parts:
        passed = part(*passed) if isinstance(passed, tuple) else part(passed)
    return passed


class Shapes:
    """Infers the shapes between stages with a copy of the model and its stages whose tensors have no values.

    Args:
        model: the model on this rank.
        parts: the modules of all stages.
        device: the device of the real stages.
        precision: the precision of the real stages.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: list[list[nn.Module]],
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._name, self._device, self._precision = type(model).__name__, device, precision
        self._specs: dict[Any, list[Spec]] = {}
        memo: dict[int, Any] = {}
        with torch_private.fake_mode() as self._fake:
            for tensor in (*model.parameters(), *model.buffers()):
                like = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                memo[id(tensor)] = (
                    nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
                )
            self._stages = [[copy.deepcopy(part, memo) for part in stage] for stage in parts]
            self._model = _shell(model, memo)

    def change(self, function: Callable[[nn.Module], None]) -> None:
        """Apply ``function`` to the copy, as it was applied to the model: tensor parallelism, for example, changes shapes."""
        with self._without_values():
            function(self._model)

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        """Compute without values inside the block, unseen by modes that count operations or watch memory, and without using random numbers."""
        with isolated(), torch_private.without_modes(), self._fake:
            yield

    def kinds(self) -> list[Any]:
        """The structure of each stage: its modules, and the forms of their parameters. Stages with equal values compute alike."""
        parameters = [{id(p) for part in stage for p in part.parameters()} for stage in self._stages]
        uses = Counter(key for ids in parameters for key in ids)
        return [
            tuple(
                (
                    type(m),
                    *(
                        (name, tuple(p.shape), p.dtype, p.requires_grad, uses[id(p)])
                        for name, p in m._parameters.items()
                        if p is not None
                    ),
                )
                for part in stage
                for m in part.modules()
            )
            for stage in self._stages
        ]

    def specs_for(self, inputs: tuple[Tensor, ...]) -> list[Spec]:
        """The forms of each stage's input, and of the last stage's output, when the first stage gets inputs like ``inputs``.

        Raises:
            ValueError: a stage fails when it runs without values.
            TypeError: a stage returns something other than tensors.
        """
        key = tuple((tuple(t.shape), t.dtype) for t in inputs)
        if key not in self._specs:
            with self._without_values(), self._precision.context(self._device), torch.enable_grad():
                passed: Any = tuple(torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in inputs)
                specs = [_spec(passed)]
                for index, stage in enumerate(self._stages):
                    try:
                        passed = through(stage, passed)
                    except Exception as error:
                        raise ValueError(
                            f"pipeline parallel: stage {index} of {self._name} failed on the meta device:  {error}"
                        ) from error
                    passed = passed if isinstance(passed, tuple) else (passed,)
                    specs.append(_spec(passed))
            self._specs[key] = specs
        return self._specs[key]


def _spec(tensors: tuple[Any, ...]) -> Spec:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"pipeline parallel: a stage returned {type(tensor).__name__}; it must return a tensor or a tuple of tensors"
            )
    return tuple(StageTensor(tuple(local(t).shape), t.dtype, t.requires_grad, _layout(t)) for t in tensors)


def _layout(tensor: Tensor) -> Layout | None:
    if not isinstance(tensor, DTensor):
        return None
    return Layout(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())


def _shell(module: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A copy of a module that contains the copies in ``memo``; attributes other than modules, parameters and buffers are shared."""
    shared: nn.Module | None = memo.get(id(module))
    if shared is not None:
        return shared
    shell = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # the copy gets dicts of hooks of its own
            vars(shell)[name] = value.copy()
    for store in (shell._parameters, shell._buffers):
        for key, tensor in store.items():
            store[key] = memo.get(id(tensor), tensor)
    for key, child in module._modules.items():
        shell._modules[key] = None if child is None else _shell(child, memo)
    return shell
