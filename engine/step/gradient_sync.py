"""How ranks combine their gradients, as windows and optimizer steps need it. The base class is for a single process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.distributed.group import Group
from engine.step.gradients import squares_of, traces
from engine.step.optimizers import explain_missing_graph
from engine.utils import accelerator


class StepStream(NamedTuple):
    """The stream of random numbers from which an optimizer draws in its steps on this rank."""

    number: int
    """Equal on ranks that hold the same values, and different on others."""
    obstacle: str = ""
    """Why ranks with this stream would not draw alike, as the middle of a message; empty if they do."""


class GradientSync:
    """The way in which ranks combine their gradients. This class serves one process; :class:`engine.Strategy` overrides what differs with several.

    A table in ``engine/strategies/README.md`` lists the methods that each strategy overrides.
    """

    group: Group
    """All processes of the job."""
    data_group: Group
    """The ranks that see different samples in training, including this one: all ranks, unless several ranks hold parts of one model."""
    loss_group: Group
    """The ranks whose losses are averaged into one gradient and whose logged values count, including this one.

    It is ``data_group``, unless several ranks train on parts of the same samples: then it has all ranks of ``data_group``, and those with the
    other parts of their samples.
    """

    unreduced: bool = False
    """Whether backward passes of the open window have left gradients unreduced, so that :meth:`reduce_rest` must be called at its end."""

    def follow_pass(self) -> None:
        """Find out whether the backward pass that begins now reduces its gradients. Called after :attr:`Position.reduced_passes` passes only."""

    def watched_passes(self) -> AbstractContextManager[None]:
        """The context for code that may run several backward passes: finds out whether each of them reduces its gradients."""
        return nullcontext()

    def reduce_rest(self, parameters: Sequence[Tensor]) -> None:
        """Reduce the gradients of those ``parameters`` that backward passes have left unreduced, at a window's end. All ranks call this."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that was passed to ``setup``."""
        return model

    def traces(self, optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> list[tuple[Any, int]]:
        """Return an object (``None``: no gradient yet) and a version for each gradient of these optimizers; a backward pass that reaches the gradient
        changes one of them."""
        return traces(optimizers)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum of ``values`` over all ranks. Waits for all ranks."""
        return list(values)

    def drop_repeated(self, parameters: Sequence[Tensor]) -> None:
        """Clear gradients that come from repeated micro-batches only, at the end of a window in which some rank repeats one. All ranks call this."""

    def sum(self, value: Tensor | float) -> Tensor | float:
        """The sum of a scalar over the ranks of ``loss_group``."""
        return value

    def local(self, grads: list[Tensor]) -> list[Tensor]:
        """This rank's shards of these gradients or parameters; they share memory with them, so they can be scaled and clamped in place."""
        return grads

    def norm(self, grads: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients. Shape ``()``."""
        if not grads:
            return torch.zeros(())
        return torch.nn.utils.get_total_norm(grads, norm_type)

    def norms(self, grads: Mapping[str, Tensor], norm_type: float = 2.0) -> dict[str, Tensor]:
        """The norm of each parameter's gradient, by name. Shapes ``()``; all ranks call this together."""
        return {name: torch.nn.utils.get_total_norm([grad], norm_type) for name, grad in grads.items()}

    def norm_of_each(self, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """The 2-norms of gradients, 0 where there is none, and that of all together, at most by one collective. Shapes ``[len(grads)]`` and ``()``.

        All ranks call this together, with the gradients of the same parameters.
        """
        present = [grad for grad in grads if grad is not None]
        if not present:
            return torch.zeros(len(grads)), torch.zeros(())
        device = present[0].device
        squares = iter(squares_of(present, device))
        zero = torch.zeros((), dtype=accelerator.wide(device), device=device)
        norms = torch.stack([zero if grad is None else next(squares) for grad in grads]).sqrt()
        return norms, torch.linalg.vector_norm(norms)

    def agree(self, flag: Tensor) -> Tensor:
        """The maximum of a flag over all ranks, for example 1.0 where a gradient is not finite and else 0.0."""
        return flag

    def step_stream(self, optimizer: Optimizer) -> StepStream | None:
        """The stream from which the optimizer draws random numbers in its steps; ``None``: from the rank's own numbers. Asked at its first step."""
        return None

    def explain(self, error: Exception, doing: str) -> str:
        """Explain an error that torch has raised: its cause, and what to do; empty if there is nothing to add.

        Args:
            doing: the beginning of the sentence: ``"the step of SGD"``, ``"the backward pass"`` or ``"the training step"``.
        """
        return explain_missing_graph(error)
