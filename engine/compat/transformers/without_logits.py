"""``without_logits``: transformers' causal language models, as they are, whose loss is computed without their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from engine.compat.transformers.loss import IGNORED, CountedFunction, ReplacedFunction, base_of
from engine.losses import linear_cross_entropy
from engine.utils.parameters import is_sharded


def without_logits(model: nn.Module) -> nn.Module:
    """Let a causal language model of transformers compute its loss without logits, in place, and return it::

        model = without_logits(AutoModelForCausalLM.from_pretrained(path))
        loss = model(input_ids=tokens, labels=tokens).loss

    While it trains, its output layer returns an object in place of the logits. That knows the factor and the cap that the model applies to them, and
    the loss is computed from it by :func:`engine.losses.linear_cross_entropy`. Whatever else is done with it is an error: no other loss is computed
    than the model's own. In evaluation, under ``torch.no_grad`` and in ``generate`` there are logits as before. Names of parameters, checkpoints and
    exports stay the same, and it goes with :class:`engine.huggingface.HFModule`, in whatever order.

    Args:
        model: a ``PreTrainedModel``, or a ``PeftModel`` around one whose output layer has no adapter.

    Raises:
        TypeError: the model has no output layer that is a plain ``nn.Linear``, or computes its loss in another way than transformers' causal models.
            In the forward pass: it uses its logits otherwise.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"without_logits takes a model of transformers or peft, got {type(model).__name__}")
    name, head = type(base).__name__, base.get_output_embeddings()
    if isinstance(head, OutputLayer):
        return model
    if type(head) is not nn.Linear and not _is_block_of_fsdp(head):
        raise TypeError(
            f"without_logits: the output layer of {name} is a {type(head).__name__}, not an nn.Linear (an adapter or quantized weights "
            "compute something else, and some models have none): train it with its logits"
        )
    function = base.loss_function
    counted = function if isinstance(function, CountedFunction) else None
    plain = function if counted is None else counted.function
    if plain is not loss_utils.ForCausalLMLoss:
        raise TypeError(
            f"without_logits: the loss of {name} is {getattr(plain, '__name__', type(plain).__name__)}, not transformers' ForCausalLMLoss, which is "
            "that of causal language models: train it with its logits, or compute its loss with engine.losses.linear_cross_entropy"
        )
    replaced = CausalLoss(plain, head)
    if counted is None:
        base.loss_function = replaced
    else:
        counted.replace(replaced)
    if is_sharded(head.weight):  # transformers' tensor parallelism computes in a function in place of the method
        head.replaced_forward = vars(head).pop("forward", None)
    wrappers = type(head).__bases__[:-1] if _is_block_of_fsdp(head) else ()
    head.__class__ = type(f"FSDP{OutputLayer.__name__}", (*wrappers, OutputLayer), {}) if wrappers else OutputLayer
    return model


def _is_block_of_fsdp(head: Any) -> bool:
    """Whether an output layer is an ``nn.Linear`` that transformers has made a block of FSDP when it loaded the model."""
    return type(head).__bases__[-1:] == (nn.Linear,) and hasattr(type(head), "set_requires_gradient_sync")


class OutputLayer(nn.Linear):
    """A model's output layer, which returns :class:`Logits` while it trains."""

    replaced_forward: Callable[[Tensor], Tensor] | None = None
    """The function that computes the logits in place of the method ``forward``."""

    def forward(self, hidden: Tensor) -> Any:
        if self.training and torch.is_grad_enabled():
            return Logits(hidden, self)
        return super().forward(hidden) if self.replaced_forward is None else self.replaced_forward(hidden)


_UNCHANGED = ("float", "contiguous", "to", "redistribute", "to_local")
"""Methods that change nothing: losses are computed in fp32, and the weight says how tensor parallelism has sharded the vocabulary."""


class Logits:
    """The output of an output layer, not computed: ``scale * head(hidden)``, or ``softcap * tanh(scale * head(hidden) / softcap)``."""

    placements = None
    """Tensor parallelism's hook of the output layer compares them with those that it wants, and calls ``redistribute``."""

    def __init__(self, hidden: Tensor, head: nn.Linear, scale: float = 1.0, softcap: float | None = None) -> None:
        self.hidden, self.head, self.scale, self.softcap = hidden, head, scale, softcap

    def loss(self, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        """The sum of the cross entropy, and the number of targets that count."""
        hidden, head = self.hidden.flatten(0, -2), self.head
        loss = linear_cross_entropy(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            ignore_index=ignore_index,
            scale=self.scale,
            softcap=self.softcap,
        )
        assert isinstance(loss.count, Tensor)
        return loss.sum, loss.count

    # -- what models do with their logits ---------------------------------------------------------------------------------------

    def __mul__(self, factor: Any) -> Logits:
        return self._scaled(factor, "*", 1)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        return self._scaled(divisor, "/", -1)

    def tanh(self) -> Logits:
        if self.softcap is not None:
            _refuse("tanh twice")
        return Logits(self.hidden, self.head, self.scale, 1.0)

    def _scaled(self, number: Any, operation: str, exponent: int) -> Logits:
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            _refuse(f"{operation} with a {type(number).__name__}")
        if number <= 0.0:
            _refuse(f"{operation} with {number}")
        factor = float(number) ** exponent
        return Logits(
            self.hidden, self.head, self.scale * factor, None if self.softcap is None else self.softcap * factor
        )

    # -- what they ask of them --------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.weight.shape[0]))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # -- everything else --------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.tanh or len(args) != 1 or kwargs:
            _refuse(getattr(function, "__name__", str(function)))
        return args[0].tanh()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask for methods that may be absent
            raise AttributeError(name)
        if name not in _UNCHANGED:
            _refuse(name)
        return partial(_unchanged, self)

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("an index")

    def __iter__(self) -> NoReturn:
        _refuse("iteration")

    def __len__(self) -> NoReturn:
        _refuse("len")

    def __bool__(self) -> NoReturn:
        _refuse("bool")

    def __add__(self, other: Any) -> NoReturn:
        _refuse("+")

    __radd__ = __add__

    def __sub__(self, other: Any) -> NoReturn:
        _refuse("-")

    __rsub__ = __sub__

    def __eq__(self, other: object) -> NoReturn:
        _refuse("==")

    __hash__ = object.__hash__


def _unchanged(logits: Logits, *args: Any, **kwargs: Any) -> Logits:
    return logits


def _refuse(use: str) -> NoReturn:
    raise TypeError(
        f"without_logits: the logits of a model that trains are used beyond a factor, a cap and the model's own loss ({use}), and they do not exist: "
        "give the model labels, take logits under torch.no_grad() or after model.eval(), or train the model with its logits"
    )


class CausalLoss(ReplacedFunction):
    """transformers' ``ForCausalLMLoss`` of :class:`Logits`; of the logits that there are in evaluation, the original's.

    Args:
        function: the original.
        head: the model's output layer.
    """

    def __init__(self, function: Callable[..., Tensor], head: nn.Linear) -> None:
        super().__init__(function)
        self.head = head

    def __call__(
        self,
        logits: Any,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(logits, Logits):
            if self.head.training and torch.is_grad_enabled():
                raise TypeError(
                    "without_logits: the model computes its logits without a call of its output layer, so that they cannot be left out: train it "
                    "with its logits"
                )
            return self.function(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if vocab_size != logits.shape[-1]:
            raise ValueError(
                f"without_logits: the model's vocab_size is {vocab_size}, and its output layer has {logits.shape[-1]} classes: "
                "model.resize_token_embeddings changes both"
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total, count = logits.loss(shift_labels.to(logits.device).reshape(-1), ignore_index)
        items = count if num_items_in_batch is None else num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)
