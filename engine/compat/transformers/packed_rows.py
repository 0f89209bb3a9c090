"""Refuses packed rows that a transformers model would not keep apart: its documents would see each other, and gradients would be wrong.

transformers (``masking_utils.py``) finds the documents of a row by ``position_ids`` that start again, but only without a cache of keys and values
and without a 2-D ``attention_mask``. Otherwise each token sees the documents before its own; the loss hardly shows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.data.packed_rows import is_traced, noted_restarts, starts_again

_NAMES = ("position_ids", "attention_mask", "use_cache", "past_key_values", "cu_seq_lens_q")


class PackedRowsGuard:
    """A forward pre-hook of the part of a model that makes the attention mask.

    Positions that are on the host are looked at in each call. Those on a device have a note from before the copy; if they have none, they are
    looked at once, in the first call.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = [*inspect.signature(model.forward).parameters]
        self._places = {name: parameters.index(name) for name in _NAMES if name in parameters}
        self._has_looked = False

    def __call__(self, model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Check the arguments of a call.

        Raises:
            ValueError: documents of a row would see each other.
        """
        if torch.compiler.is_compiling():
            return
        positions = self._argument("position_ids", arguments, named)
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.size(1) < 2 or is_traced(positions):
            return
        mask = self._argument("attention_mask", arguments, named)
        masked = isinstance(mask, Tensor) and mask.dim() == 2
        cached = self._is_cached(model, arguments, named)
        if (masked or cached) and self._start_again(positions, mask if masked else None):
            name = type(model).__name__
            what, advice = (
                ("a 2-D attention_mask", "leave attention_mask out of the batch, or give a 4-D one")
                if masked
                else ("a cache", f"call the model with use_cache=False, or set {name}.config.use_cache = False")
            )
            raise ValueError(
                f"{name} got position_ids that start again within a row, which are several documents, and {what}: transformers would let "
                f"these documents see each other, and the gradients would be wrong. It keeps them apart only without a cache and without a 2-D "
                f"attention_mask: {advice}"
            )

    def _start_again(self, positions: Tensor, mask: Tensor | None) -> bool:
        if positions.device.type == "cpu":
            return starts_again(positions, mask)
        noted = noted_restarts(positions)
        if noted is None and not self._has_looked:
            noted = starts_again(positions, mask)
        self._has_looked = True
        return bool(noted)

    def _is_cached(self, model: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        config = model.config
        if str(getattr(config, "_attn_implementation", "")).startswith(
            "flash"
        ):  # its kernels take the documents from position_ids
            return False
        if self._argument("past_key_values", arguments, named) is not None:
            return True
        use_cache = self._argument("use_cache", arguments, named)
        use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
        return bool(use_cache) and not (model.training and getattr(model, "gradient_checkpointing", False))

    def _argument(self, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        place = self._places.get(name)
        return arguments[place] if place is not None and place < len(arguments) else named.get(name)


def guard_model(model: nn.Module) -> None:
    """Let the decoders in a model refuse packed rows that they would not keep apart; a repeated call changes nothing."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and _makes_causal_mask(part):
            hooks = vars(part).get("_forward_pre_hooks", {})
            if not any(isinstance(hook, PackedRowsGuard) for hook in hooks.values()):
                part.register_forward_pre_hook(PackedRowsGuard(part), with_kwargs=True)


def _makes_causal_mask(part: PreTrainedModel) -> bool:
    """Whether a model is a decoder that has no smaller model in it, and whose documents transformers finds by ``position_ids``."""
    if any(isinstance(inner, PreTrainedModel) for inner in part.modules() if inner is not part):
        return False
    classes = (cls for cls in type(part).__mro__ if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel)
    source = "".join(map(_source, classes))
    is_encoder = ".is_decoder" in source and not getattr(part.config, "is_decoder", False)
    return "create_causal_mask" in source and not is_encoder


def _source(cls: type) -> str:
    """The code of a class; empty where it is not known."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
