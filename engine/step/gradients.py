"""The loss in what a step returns, and the passes over gradients before a step: dividing, scaling, clipping, checking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from engine.utils import accelerator
from engine.utils.loss import Loss as Loss
from engine.utils.loss import nonzero as nonzero
from engine.utils.parameters import parameters_of
from engine.utils.torch_private import multiply, norms
from engine.utils.tree import full_tensor

CPU = torch.device("cpu")


def scalar(loss: Any) -> Tensor:
    """The loss as a tensor of shape ``()``; a sharded tensor is gathered.

    Raises:
        TypeError: not a tensor.
        ValueError: the loss has no graph, or several elements.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(f"a loss must be a scalar tensor or Loss(sum, count), got {type(loss).__name__}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph, so nothing would be trained: it was computed under no_grad, detached, made with .item(), "
            "or all parameters that it depends on are frozen (requires_grad=False)"
        )
    loss = full_tensor(loss)
    if loss.ndim:
        if loss.numel() != 1:
            raise ValueError(
                f"a loss must have one element, got shape {tuple(loss.shape)}: reduce it, for example with .mean()"
            )
        return loss.reshape(())
    return loss


def loss_in(outputs: Any, who: str) -> Any:
    """The loss inside a training step's outputs, or ``None``. ``who``: the class of the module, for messages."""
    if outputs is None or isinstance(outputs, (Tensor, Loss)):
        return outputs
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"{who}.training_step returned {type(outputs).__name__}; "
            "possible: a scalar tensor, Loss(sum, count), a dict with one of them under 'loss', or None"
        )
    if "loss" not in outputs:
        raise ValueError(
            f"{who}.training_step returned a dict without 'loss'; its keys: {', '.join(map(str, outputs))}"
        )
    return outputs["loss"]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters' gradients, to read and change in place. A sparse gradient is coalesced, and its dense tensor of values is returned."""
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            if grad.is_sparse:
                if not grad.is_coalesced():
                    parameter.grad = grad = grad.coalesce()
                grad = grad._values()
            grads.append(grad)
    return grads


def listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """The tensors as a list. Like torch's clipping functions, this accepts a single tensor or an iterable."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def check_limit(argument: str, limit: Any) -> None:
    """Check a limit for gradients. A tensor on a device is not looked at, which would wait for the device.

    Args:
        argument: the call and its argument in messages, such as ``"clip_grad_norm_(max_norm"``.

    Raises:
        TypeError: ``limit`` is not a number.
        ValueError: it is 0, negative or NaN.
    """
    if isinstance(limit, (bool, str)) or not hasattr(limit, "__float__"):
        raise TypeError(f"{argument}={limit!r}) must be a number above 0")
    if getattr(limit, "device", CPU) != CPU or (number := float(limit)) > 0:
        return
    effect = (
        "sets every gradient to 0, so that nothing is trained"
        if number == 0
        else "turns the gradients round"
        if number < 0
        else "makes the gradients NaN"
    )
    raise ValueError(f"{argument}={limit!r}) {effect}: give a number above 0. To train without clipping, leave it out")


def traces(optimizers: Sequence[Optimizer]) -> list[tuple[Any, int]]:
    """Each parameter's gradient and the gradient's version counter; a backward pass that reaches the parameter changes one of the two."""
    grads = (p.grad for p in parameters_of(optimizers))
    return [(None, 0) if grad is None else (grad, grad._version) for grad in grads]


@torch.no_grad()
def divide(grads: list[Tensor], divisor: Tensor | float) -> None:
    """Divide gradients in place, one fused pass for each device and dtype."""
    if grads:
        scale(
            grads,
            1.0 / divisor if isinstance(divisor, float) else divisor.to(accelerator.wide(divisor.device)).reciprocal(),
        )


@torch.no_grad()
def scale(grads: list[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place, one fused pass for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), group in groups.items():
        multiply(group, factor.to(device, dtype, non_blocking=True) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def clip_values(grads: list[Tensor], limit: float) -> None:
    """Clamp each element to [-limit, limit] in place."""
    for grad in grads:
        grad.clamp_(-limit, limit)


@torch.no_grad()
def clip_norm(grads: list[Tensor], norm: Tensor, limit: float, divisor: Tensor | float | None) -> Tensor:
    """Divide by ``divisor`` and clip to a norm of at most ``limit``, in one pass. Return the norm between the two, shape ``()``."""
    if divisor is not None:
        norm = norm / divisor
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # the formula of torch.nn.utils.clip_grad_norm_
    scale(grads, factor if divisor is None else factor / divisor)
    return norm


@torch.no_grad()
def squares_of(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The square of each tensor's 2-norm, shapes ``()``, on ``device`` and in its widest format; one pass for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    squares: list[Tensor] = [torch.empty(0)] * len(tensors)
    for (_, dtype), indices in groups.items():
        wide = torch.promote_types(dtype.to_real(), torch.float32)
        of_group = torch.stack(
            norms([tensors[i] for i in indices], 2.0, dtype=wide if dtype.is_floating_point else None)
        )
        for index, square in zip(
            indices, of_group.to(device, accelerator.wide(device), non_blocking=True).square().unbind(), strict=True
        ):
            squares[index] = square
    return squares


@torch.no_grad()
def clip_each_norm(
    grads: Sequence[Tensor], norms_of_grads: Tensor, limit: float, divisor: Tensor | float | None
) -> None:
    """Divide by ``divisor`` and clip each gradient to a norm of at most ``limit``, in one pass.

    Args:
        norms_of_grads: the norms of the gradients before the division. Shape ``[len(grads)]``.
    """
    factors = torch.clamp(limit / ((norms_of_grads if divisor is None else norms_of_grads / divisor) + 1e-6), max=1.0)
    factors = factors if divisor is None else factors / divisor
    for grad, factor in zip(grads, factors.unbind(), strict=True):
        grad.mul_(factor.to(grad.device, non_blocking=True))


def where_nonfinite(
    named_parameters: Iterable[tuple[str, Tensor]], local: Callable[[list[Tensor]], list[Tensor]] = lambda grads: grads
) -> list[str]:
    """Names of parameters whose gradient contains a NaN or an infinity; ``local`` selects this rank's shards to check. Waits for the device."""
    return [
        name
        for name, p in named_parameters
        if p.grad is not None and not bool(local(gradients([p]))[0].isfinite().all())
    ]


def check_held(before: Mapping[str, Tensor], now: Mapping[str, Tensor], optimizers: Iterable[Optimizer]) -> None:
    """Check that the optimizers still have a model's parameters.

    Args:
        before: the parameters by name, as they were when the optimizers were created or last checked.
        now: the current parameters by name.

    Raises:
        ValueError: some parameters were replaced, and the optimizers still have the old ones.
    """
    held_ids = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    lost = [
        name
        for name, old in before.items()
        if (new := now.get(name)) is not None
        and new is not old
        and new.requires_grad
        and id(old) in held_ids
        and id(new) not in held_ids
    ]
    if lost:
        names = ", ".join(lost[:6]) + (f" and {len(lost) - 6} more" if len(lost) > 6 else "")
        raise ValueError(
            f"parameters were replaced after their optimizer was created: {names}. The optimizer still has the old ones and would train nothing. "
            "load_state_dict(assign=True) replaces parameters, and so does another module in a module's place. Create the optimizer afterwards, "
            "give it the new parameters, or copy values in place (load_state_dict without assign)"
        )
