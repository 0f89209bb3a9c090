"""Finds how many items a transformers model's loss is a mean over, so that means over accumulation windows and ranks are exact."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss import loss_utils

from engine.step.gradients import Loss, nonzero

IGNORED = -100
"""The label of positions that the loss ignores."""
_OF_TOKENS = (loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification)
_COUNTED = (*_OF_TOKENS, loss_utils.ForSemanticSegmentationLoss, loss_utils.ForSequenceClassificationLoss)
_OF_SAMPLES = (loss_utils.ForQuestionAnsweringLoss,)

Count = Callable[[Mapping[str, Any]], Tensor | float]


class ReplacedFunction:
    """A loss function that computes in another way what one of transformers' computes from the same arguments.

    Args:
        function: the original.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


class CountedFunction:
    """Wraps a loss function of transformers and records how many labels each loss is a mean over; without labels the loss is 0, not NaN."""

    def __init__(self, function: Callable[..., Tensor] | ReplacedFunction) -> None:
        self.function = function.function if isinstance(function, ReplacedFunction) else function
        self._computes, self._signature = function, inspect.signature(self.function)
        self.counts: deque[Tensor | None] = deque(maxlen=2)
        """The label counts of the latest calls, until :class:`CountedLoss` takes them; ``None`` for a mean over samples."""

    def replace(self, function: ReplacedFunction) -> None:
        """Let ``function`` compute the loss from now on, in place of the function that it stands for."""
        self._computes = function

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.function in _OF_SAMPLES:
            self.counts.append(None)
            return self._computes(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        count = None
        if (labels := self._labels(arguments)) is not None:
            count = (labels != arguments.get("ignore_index", IGNORED)).sum()
            target = bound.arguments if "num_items_in_batch" in bound.arguments else bound.arguments["kwargs"]
            target["num_items_in_batch"] = nonzero(count)
        self.counts.append(count)
        return self._computes(*bound.args, **bound.kwargs)

    def _labels(self, arguments: Mapping[str, Any]) -> Tensor | None:
        """The labels that the loss is a mean over; ``None`` if it is a mean over samples."""
        labels: Tensor = arguments["labels"]
        if self.function is loss_utils.ForCausalLMLoss:
            shifted = arguments.get("shift_labels")
            return labels[..., 1:] if shifted is None else shifted
        if self.function is loss_utils.ForSequenceClassificationLoss:
            kind = arguments["config"].problem_type
            integers = not labels.is_floating_point() and arguments["config"].num_labels > 1
            return labels if kind == "single_label_classification" or (kind is None and integers) else None
        return labels


class CountedLoss:
    """Computes the loss for ``engine.backward`` and ``training_step`` from a model's outputs and its batch::

        loss = CountedLoss(model)  # before engine.prepare(model)
        engine.backward(loss(model(**batch), batch))

    A mean over labels becomes an :class:`engine.Loss` with the number of labels that the model's own loss divides by: those that are not -100, for
    causal models after the shift. A mean over samples (regression, question answering) stays a scalar. If a model computes its loss without
    transformers' loss functions, the first batch is used to find out which mean it is.

    Args:
        model: a ``PreTrainedModel`` or a ``PeftModel`` around one; its ``loss_function`` is wrapped.
        count: ``"samples"``, or a function of the batch that returns the number of items that the loss is a mean over.

    Raises:
        ValueError: (when called) the model's loss is none of these means, and ``count`` is not given.
    """

    def __init__(self, model: nn.Module, count: str | Count | None = None) -> None:
        if not (count is None or count == "samples" or callable(count)):
            raise ValueError(f"count={count!r} is unknown; possible: 'samples', a function of the batch, None")
        base = base_of(model)
        self._name, self._count, self._measured = type(base).__name__, count, ""
        self._function = _counted(base) if count is None else None
        self.of_tokens = self._function is not None and self._function.function in _OF_TOKENS[:2]
        """Whether the exponential of the loss is a perplexity."""

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Loss | Tensor:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None:
            raise ValueError(
                f"{self._name} returned no loss: it computes one when the batch has 'labels'; this one has {', '.join(batch)}"
            )
        if self._count is not None:
            count = None if isinstance(self._count, str) else self._count(batch)
            return loss if count is None else Loss(loss * count, count)
        counts = [] if self._function is None else list(self._function.counts)
        self.begin()
        if len(counts) > 1:
            raise self._unknown("is the sum of several means, or an earlier forward pass's loss was not taken")
        count = counts[0] if counts else self._measured_count(loss, outputs, batch)
        return loss if count is None else Loss(loss * count, count)

    def begin(self) -> None:
        """Discard the counts of earlier losses, because a new forward pass starts."""
        if self._function is not None:
            self._function.counts.clear()

    def _measured_count(self, loss: Tensor, outputs: Any, batch: Mapping[str, Any]) -> Tensor | None:
        """The number of labels of a loss whose kind of mean the first batch has shown; ``None`` for a mean over samples."""
        labels = batch.get("labels")
        if not self._measured:
            with torch.no_grad():  # only once, because it waits for the device
                self._measured = _measure(loss, outputs if isinstance(outputs, Mapping) else {}, batch)
            if not self._measured:
                raise self._unknown("is neither the mean over labels that are not -100 nor the mean over samples")
        if self._measured == "samples":
            return None
        assert isinstance(labels, Tensor)
        return ((labels if self._measured == "labels" else labels[..., 1:]) != IGNORED).sum()

    def _unknown(self, why: str) -> ValueError:
        return ValueError(
            f"the loss of {self._name} {why}, so micro-batches cannot be weighted exactly: give count='samples' if it is a mean over the samples of "
            "the batch, or count=a function of the batch that gives the number of items it is a mean over"
        )


def base_of(model: nn.Module) -> Any:
    """The transformers model inside peft's wrapper, if there is one."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def _counted(base: Any) -> CountedFunction | None:
    """Wrap the model's loss function to count labels; ``None`` if it is not one of transformers' functions."""
    function: Any = getattr(base, "loss_function", None)
    if isinstance(function, CountedFunction):
        return function
    if (function.function if isinstance(function, ReplacedFunction) else function) not in (*_COUNTED, *_OF_SAMPLES):
        return None
    base.loss_function = CountedFunction(function)
    counted: CountedFunction = base.loss_function
    return counted


def _measure(loss: Tensor, outputs: Mapping[str, Any], batch: Mapping[str, Any]) -> str:
    """Find what the loss was averaged over: ``"labels"``, ``"shifted"`` (labels) or ``"samples"``; an empty string if it matches none."""
    logits, labels = outputs.get("logits"), batch.get("labels")
    candidates: list[tuple[str, Tensor]] = []
    if isinstance(logits, Tensor) and isinstance(labels, Tensor):
        logits = logits.float()
        if not labels.is_floating_point() and logits.ndim == labels.ndim + 1:
            candidates = [("labels", F.cross_entropy(logits.flatten(0, -2), labels.flatten()))]
            if labels.ndim > 1:
                shifted = F.cross_entropy(logits[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten())
                candidates.append(("shifted", shifted))
        elif logits.numel() == labels.numel():
            targets = labels.float().reshape(logits.shape)
            candidates = [
                ("samples", mean(logits, targets)) for mean in (F.mse_loss, F.binary_cross_entropy_with_logits)
            ]
    elif {"start_logits", "end_logits"} <= outputs.keys() and {"start_positions", "end_positions"} <= batch.keys():
        ends = [(outputs[f"{end}_logits"].float(), batch[f"{end}_positions"].flatten()) for end in ("start", "end")]
        both = [
            F.cross_entropy(scores, place.clamp(0, scores.shape[1]), ignore_index=scores.shape[1])
            for scores, place in ends
        ]
        candidates = [("samples", (both[0] + both[1]) / 2)]
    by_distance = {abs(float(value - loss)): name for name, value in candidates}
    smallest = min(by_distance, default=math.inf)
    return by_distance[smallest] if smallest <= 1e-3 * max(1.0, abs(float(loss))) else ""
