"""``linear_cross_entropy`` and ``token_log_probs``: an output layer and what is computed of its logits, in one function."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils.parametrize import is_parametrized

from engine.losses import backends
from engine.losses.chunks import Form, RowLosses, SummedLoss, part_of, row_losses, rows_of_chunk
from engine.utils import torch_private
from engine.utils.loss import Loss

_TP = "tp"
"""The axis of a mesh whose ranks see the same samples, so that they can share the vocabulary."""


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | Literal["auto"] = "auto",
    recompute: bool | Literal["auto"] = "auto",
    backend: str | None = None,
) -> Loss:
    """Compute the cross entropy of an output layer without its logits, which for a vocabulary of 131,072 take more memory than anything else::

        hidden = self.body(batch["tokens"])  # [batch, length, width]
        return linear_cross_entropy(hidden, self.head, batch["targets"], z_loss=1e-4)

    The result is that of ``logits = head(hidden).float()`` and ``F.cross_entropy(logits, targets, reduction="sum")``, with the number of targets that
    are not ``ignore_index``. Rows are computed a few at a time, and their gradients with them. It can be used in ``training_step`` and in a loop of
    your own, under autocast, compiled, with a weight that an embedding shares, and with an output layer that tensor parallel has sharded by the
    vocabulary: then the ranks share the work, and no rank has whole rows.

    Args:
        hidden: hidden states ``[..., width]``.
        head: the output layer, or its weight ``[vocabulary, width]``. The layer itself is not called: its weight and bias are read.
        targets: classes, integers ``[...]``. They are not shifted: for a language model, pass ``hidden[:, :-1]`` and ``tokens[:, 1:]``.
        bias: the bias ``[vocabulary]`` if ``head`` is a weight.
        ignore_index: the target of rows that do not count.
        label_smoothing: the share of a target that is spread over all classes, as in ``F.cross_entropy``.
        z_loss: add ``z_loss * logsumexp(logits) ** 2`` to each row's loss, which keeps logits from growing (PaLM, arXiv:2204.02311).
        softcap: replace logits by ``softcap * tanh(logits / softcap)``, as Gemma 2 does.
        scale: multiply logits by this before they are capped.
        chunk: rows that are computed at a time; by default as many as are fast and small beside the weight's gradient. It changes last bits.
        recompute: compute gradients in the backward pass, with a fourth matrix product. By default so in fp16 alone, where gradients have to be
            scaled before they are rounded. Several backward passes through one loss need ``True``.
        backend: another implementation: ``"torch"`` (``F.linear_cross_entropy`` of torch 2.13), ``"liger"``, ``"cut_cross_entropy"``. The latter two
            need a GPU, and were never run here.

    Returns:
        The sum of losses and the number of targets that count, a tensor on the device. ``loss.sum / loss.count`` is the mean.

    Raises:
        TypeError: ``hidden``, ``head`` or ``targets`` is of the wrong kind or format, or ``head`` computes something else than ``nn.Linear``.
        ValueError: shapes, devices or formats do not fit, an argument or a target is out of its range (on a GPU a target is an assertion of the
            device, as in ``F.cross_entropy``), the weight is sharded in another way, or a backend lacks an argument.
        ImportError: a backend is not installed.
    """
    who = "linear_cross_entropy"
    if backend is not None:
        differing = {
            "label_smoothing": label_smoothing if label_smoothing else None,
            "z_loss": z_loss if z_loss else None,
            "softcap": softcap,
            "scale": None if scale == 1.0 else scale,
            "chunk": None if chunk == "auto" else chunk,
            "recompute": None if recompute == "auto" else recompute,
        }
        backends.check(backend, {name: value for name, value in differing.items() if value is not None})
    inputs = _Inputs(who, hidden, head, targets, bias)
    for name, value, maximum in (("label_smoothing", label_smoothing, 1.0), ("z_loss", z_loss, math.inf)):
        if not _is_number(value) or not 0.0 <= value <= maximum or value == math.inf:
            raise ValueError(
                f"{who}({name}={value!r}) must be a number of at least 0{' and at most 1' * (maximum == 1.0)}"
            )
    if recompute != "auto" and not isinstance(recompute, bool):
        raise ValueError(f"{who}(recompute={recompute!r}) must be True, False or 'auto'")
    form = inputs.form(ignore_index, float(label_smoothing), float(z_loss), softcap, scale, chunk)
    arguments = inputs.hidden, inputs.weight, inputs.bias, inputs.targets, form
    count = (inputs.targets != ignore_index).sum()
    if backend is not None:
        return Loss(backends.summed_loss(backend, *arguments, None if chunk == "auto" else chunk), count)
    if not inputs.needs_gradients:
        return Loss(row_losses(*arguments)[0].sum(), count)
    again = (
        torch.float16 in (form.dtype, inputs.hidden.dtype, inputs.weight.dtype) if recompute == "auto" else recompute
    )
    return Loss(RowLosses.apply(*arguments).sum() if again else SummedLoss.apply(*arguments), count)


def token_log_probs(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    scale: float = 1.0,
    chunk: int | Literal["auto"] = "auto",
) -> Tensor:
    """Compute the log-probability of each target under an output layer, without its logits: for preference learning, distillation, policy gradients::

        chosen = token_log_probs(hidden, self.head, tokens).sum(-1)  # [batch]

    The result is that of ``head(hidden).float().log_softmax(-1)`` at the targets. Gradients flow into ``hidden``, weight and bias; logits are
    computed a second time in the backward pass.

    Args:
        hidden, head, targets, bias, softcap, chunk: as for :func:`engine.losses.linear_cross_entropy`.
        ignore_index: the target of rows whose log-probability is 0 and has no gradient.
        scale: multiply logits by this before they are capped; 1 / temperature.

    Returns:
        Log-probabilities with the shape of ``targets``, fp32 (fp64 if ``hidden`` is).

    Raises:
        TypeError, ValueError: the errors of :func:`engine.losses.linear_cross_entropy`.
    """
    inputs = _Inputs("token_log_probs", hidden, head, targets, bias)
    form = inputs.form(ignore_index, 0.0, 0.0, softcap, scale, chunk)
    arguments = inputs.hidden, inputs.weight, inputs.bias, inputs.targets, form
    losses: Tensor = RowLosses.apply(*arguments) if inputs.needs_gradients else row_losses(*arguments)[0]
    return losses.neg().reshape(inputs.shape)


class _Inputs:
    """The tensors of a call as rows, checked: hidden states ``[rows, width]``, this rank's part of weight and bias, targets ``[rows]``.

    Args:
        who: the function's name in messages.
    """

    def __init__(
        self, who: str, hidden: Tensor, head: nn.Linear | Tensor, targets: Tensor, bias: Tensor | None
    ) -> None:
        self.who = who
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            raise TypeError(f"{who}: hidden must be a tensor of floats [..., width], got {_kind(hidden)}")
        if (
            not isinstance(targets, Tensor)
            or targets.is_floating_point()
            or targets.is_complex()
            or targets.dtype == torch.bool
        ):
            raise TypeError(
                f"{who}: targets must be a tensor of classes (integers), got {_kind(targets)}; for probabilities of classes compute plain logits"
            )
        weight, bias = self._layer(head, bias)
        if isinstance(hidden, DTensor):  # under sequence parallel each rank has a part of the sequence
            hidden = hidden.redistribute(placements=[Replicate()] * hidden.device_mesh.ndim).to_local()
        if isinstance(targets, DTensor):
            targets = targets.full_tensor()
        self.vocabulary, self.group = weight.shape[0], self._group_of(weight)
        self.weight, self.bias = _local(weight), None if bias is None else _local(bias)
        self._check_shapes(hidden, weight, bias, targets)
        self.shape = targets.shape
        self.hidden, self.targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
        self.needs_gradients = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (hidden, self.weight, self.bias)
        )

    def form(
        self,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        softcap: float | None,
        scale: float,
        chunk: int | Literal["auto"],
    ) -> Form:
        """The cross entropy's arguments, checked, and with them the targets' range."""
        who = self.who
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise TypeError(
                f"{who}(ignore_index={ignore_index!r}) must be an int: the target of rows that do not count"
            )
        if softcap is not None and (not _is_number(softcap) or not 0.0 < softcap < math.inf):
            raise ValueError(
                f"{who}(softcap={softcap!r}) must be a number above 0, or None for logits that are not capped"
            )
        if not _is_number(scale) or not -math.inf < scale < math.inf:
            raise ValueError(f"{who}(scale={scale!r}) must be a finite number")
        if chunk != "auto" and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise ValueError(f"{who}(chunk={chunk!r}) must be a number of rows, or 'auto'")
        self._check_range(ignore_index)
        rows, width = map(int, self.hidden.shape)  # a compiled function has its chunks one by one
        return Form(
            ignore_index,
            label_smoothing,
            z_loss,
            None if softcap is None else float(softcap),
            float(scale),
            self.vocabulary,
            part_of(self.vocabulary, self.group)[0],
            self.group,
            rows_of_chunk(rows, self.weight.shape[0], width) if chunk == "auto" else chunk,
            self._format(),
        )

    def _layer(self, head: Any, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias of the output layer."""
        if isinstance(head, Tensor):
            return head, bias
        name = type(head).__name__
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"{self.who}: head is a {name}, which computes something else than nn.Linear (an adapter, quantized or fp8 weights, several layers): "
                "compute plain logits with it, or pass a weight [vocabulary, width] and bias="
            )
        if bias is not None:
            raise ValueError(f"{self.who}: bias= goes with a weight; {name} has its own bias, which is used")
        if "weight" not in dict(head.named_parameters(recurse=False)) and not is_parametrized(head, "weight"):
            raise TypeError(
                f"{self.who}: a hook computes the weight of head before each call (weight_norm, spectral_norm or pruning), and the layer is not "
                "called: use torch.nn.utils.parametrizations, or compute plain logits"
            )
        return head.weight, head.bias

    def _group_of(self, weight: Tensor) -> dist.ProcessGroup | None:
        """The ranks that the vocabulary is sharded over."""
        if not isinstance(weight, DTensor):
            return None
        mesh, group = weight.device_mesh, None
        names = mesh.mesh_dim_names or ("without a name",) * mesh.ndim
        for axis, (name, placement) in enumerate(zip(names, weight.placements, strict=True)):
            if placement.is_replicate():
                continue
            if name != _TP:
                raise ValueError(
                    f"{self.who}: the weight is sharded over the axis {name!r} of the mesh, whose ranks see different samples. Call it in "
                    "training_step or in the model's forward, where FSDP has gathered the weight; the output layer must not be a block of its own "
                    "(FSDP(blocks=...))"
                )
            if not placement.is_shard(0):
                raise ValueError(
                    f"{self.who}: the weight is sharded by {placement} over the axis 'tp'; it can be sharded by the vocabulary ('colwise')"
                )
            group = mesh.get_group(axis)
        return group

    def _check_shapes(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
        who = self.who
        if weight.ndim != 2 or not weight.is_floating_point():
            empty = " (the strategy has partitioned it)" if hasattr(weight, "ds_shape") else ""
            raise ValueError(f"{who}: the weight must be [vocabulary, width] of floats, got {_kind(weight)}{empty}")
        if not hidden.ndim or hidden.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{who}: hidden has shape {list(hidden.shape)}, and the weight takes [..., {weight.shape[1]}] (it is {list(weight.shape)})"
            )
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{who}: targets have shape {list(targets.shape)}, but hidden {list(hidden.shape)} has rows {list(hidden.shape[:-1])}: pass one "
                "target for each row; for a language model hidden[:, :-1] and tokens[:, 1:]"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"{who}: the bias has shape {list(bias.shape)}, and the weight {list(weight.shape)}")
        devices = {str(t.device) for t in (hidden, weight, targets, *([] if bias is None else [bias]))}
        if len(devices) > 1:
            raise ValueError(
                f"{who}: hidden, weight, bias and targets are on several devices: {', '.join(sorted(devices))}"
            )

    def _format(self) -> torch.dtype:
        """The format of the matrix products, as ``F.linear`` chooses it."""
        kind, formats = self.hidden.device.type, {self.hidden.dtype, self.weight.dtype}
        if torch.is_autocast_enabled(kind) and torch.float64 not in formats:
            return torch.get_autocast_dtype(kind)
        if len(formats) > 1:
            raise ValueError(
                f"{self.who}: hidden is {self.hidden.dtype}, and the weight {self.weight.dtype}: call it where autocast is on (in "
                "training_step or the model's forward), or cast one of them"
            )
        return self.hidden.dtype

    def _check_range(self, ignore_index: int) -> None:
        targets = self.targets
        inside = (targets >= 0) & (targets < self.vocabulary) | (targets == ignore_index)
        if targets.device.type != "cpu" or torch.compiler.is_compiling() or torch_private.is_simulated():
            torch_private.assert_later(inside.all(), f"{self.who}: a target is not in the vocabulary")
        elif not bool(inside.all()):
            outside = targets[~inside]
            raise ValueError(
                f"{self.who}: {len(outside)} of {len(targets)} targets are not classes of a vocabulary of {self.vocabulary}, the first is "
                f"{int(outside[0])}: classes are 0 to {self.vocabulary - 1}, and rows that do not count have ignore_index={ignore_index}"
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
