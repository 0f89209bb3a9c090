"""Files of ``fit checkpoint export`` beside a transformers model's weights: configuration, tokenizer, the description of an adapter."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.export import published
from engine.compat.transformers.loss import base_of
from engine.utils.log import warn_once


class Publication:
    """The files of a model, for :func:`engine.checkpoint.export.export_checkpoint`. In your own loop::

        engine.register_for_checkpointing(Publication(model, tokenizer))

    Args:
        model: a ``PreTrainedModel`` or a ``PeftModel``.
        tokenizer: a tokenizer or processor; anything with ``save_pretrained``.
        prefix: the prefix of the model's names in the checkpoint.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, prefix: str = "") -> None:
        self.model, self.tokenizer, self.prefix = model, tokenizer, prefix
        self._tokenizer_files: dict[str, bytes] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The files, and the exported names of an adapter's tensors."""
        if self._tokenizer_files is None:  # read once, because it does not change and may be large
            self._tokenizer_files = {} if self.tokenizer is None else _saved_files(self.tokenizer)
        model: Any = self.model
        if hasattr(model, "peft_config"):
            exported_names = adapter_names(model)
            if exported_names is None:
                warn_once(
                    f"fit checkpoint export cannot write the folder of a {type(model).__name__}'s adapter of this kind: use model.save_pretrained "
                    "inside fit.gathered(module)"
                )
                return {}
            names = {f"{self.prefix}{name}": exported for name, exported in exported_names.items()}
            files = _saved_files(adapter_config(model))
            return published({**files, **self._tokenizer_files}, stem="adapter_model", names=names)
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [_class_name(model)], next(model.parameters()).dtype
        files = _saved_files(config)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            files |= _saved_files(model.generation_config)
        return published({**files, **self._tokenizer_files}, prefix=self.prefix)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing: the files are made from the current model."""


def adapter_names(model: Any) -> dict[str, str] | None:
    """Map a ``PeftModel``'s names of its adapter's tensors to the names that ``PeftModel.from_pretrained`` expects.

    ``None`` if this kind of adapter is saved as other tensors than the model's (p-tuning, prefixes with a projection).

    Raises:
        ValueError: the model has several adapters.
    """
    from peft import get_peft_model_state_dict

    if len(model.peft_config) > 1:
        raise ValueError(
            f"the model has {len(model.peft_config)} adapters, {', '.join(model.peft_config)}: train one at a time"
        )
    adapter, config = next(iter(model.peft_config.items()))
    inner = model.state_dict(keep_vars=True)
    if config.is_prompt_learning:
        prompt_names = [name for name in inner if name.startswith(f"prompt_encoder.{adapter}.")]
        return (
            {prompt_names[0]: "prompt_embeddings"}
            if prompt_names == [f"prompt_encoder.{adapter}.embedding.weight"]
            else None
        )
    stand_ins: dict[str, Tensor] = {name: torch.empty(0) for name in inner}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    exported_tensors = get_peft_model_state_dict(model, stand_ins, adapter, save_embedding_layers=False)
    if any(id(tensor) not in names for tensor in exported_tensors.values()):
        return None
    exported_names = {names[id(tensor)]: exported for exported, tensor in exported_tensors.items()}
    return exported_names | {
        name: name for name in trained_names(model) if name not in exported_names
    }  # layers that were unfrozen in addition to the adapter


def trained_names(model: nn.Module) -> list[str]:
    """The names of the parameters that are trained."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def adapter_config(model: Any) -> Any:
    """The configuration of a ``PeftModel``'s adapter, as ``PeftModel.save_pretrained`` writes it."""
    config = copy.deepcopy(next(iter(model.peft_config.values())))
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base_of(model), "name_or_path", None)
    config.inference_mode = True
    return config


def _class_name(model: nn.Module) -> str:
    """The name of the model's class in transformers, of which FSDP creates a subclass."""
    name = type(model).__name__
    return name.removeprefix("FSDP") if any("FSDPModule" in cls.__name__ for cls in type(model).__mro__) else name


def _saved_files(source: Any) -> dict[str, bytes]:
    """The files that ``source.save_pretrained`` writes, by name."""
    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.suffix != ".py"}
