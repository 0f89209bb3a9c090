"""A saved model that is built when the run starts; under sharding each rank reads only its own shards."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.compat.transformers.loss import base_of
from engine.compat.transformers.saved_weights import SavedWeights, builds_without_values, fill
from engine.strategies import deferred_init
from engine.strategies.base import Strategy

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass
class Pretrained:
    """A saved model, and how ``from_pretrained`` loads it."""

    path: str
    """A folder, or a name on the Hub."""
    auto: Any = None
    """A class of transformers with ``from_pretrained`` and ``from_config``."""
    peft: Any = None
    """The configuration of a new adapter."""
    options: dict[str, Any] = field(default_factory=dict)
    _unread: bool = field(default=False, init=False)

    def folder(self, download: bool = False) -> Path:
        """The folder of the files; for a model of the Hub, in its local cache (``download``: fetch missing files)."""
        if Path(self.path).is_dir():
            return Path(self.path)
        from huggingface_hub import snapshot_download

        options: dict[str, Any] = {"revision": self.options.get("revision"), "allow_patterns": list(_FILES)}
        return Path(snapshot_download(self.path, local_files_only=not download, **options))

    def build(self) -> Any:
        """Build the model. If the strategy builds models without values, call :meth:`read` once it is sharded."""
        auto: Any = AutoModelForCausalLM if self.auto is None else self.auto
        self._unread = builds_without_values()
        with deferred_init.nothing_recorded() if self._unread else nullcontext():
            return self._built(auto)

    def _built(self, auto: Any) -> Any:
        """The model, built by the class ``auto``, with the new adapter."""
        if self._unread:
            options = {name: value for name, value in self.options.items() if name != "revision"}
            build_from_config = getattr(auto, "from_config", None) or auto._from_config
            config = AutoConfig.from_pretrained(self.folder())
            if "quantization_config" in options or getattr(config, "quantization_config", None) is not None:
                raise ValueError(
                    f"HFModule.from_pretrained({self.path!r}) of a quantized model under a strategy that shards: its shards cannot be quantized "
                    "alone. Load the whole model on each rank, which the strategy then shards: "
                    "HFModule(get_peft_model(AutoModelForCausalLM.from_pretrained(path, quantization_config=...), LoraConfig(...)))"
                )
            model = build_from_config(config, **options)
            model.config.name_or_path = model.name_or_path = self.path
        else:
            model = auto.from_pretrained(self.path, **self.options)
        if self.peft is None:
            return model
        from peft import get_peft_model

        if not self._unread:
            return get_peft_model(model, self.peft)
        _check_adapter(self.peft)
        with warnings.catch_warnings():  # parameters without memory get their values later
            warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op")
            return get_peft_model(model, self.peft)

    def read(self, model: nn.Module, strategy: Strategy, seed: int) -> None:
        """Fill this rank's part of each parameter; later calls do nothing. A new adapter gets the values of one process with this ``seed``.

        Raises:
            ValueError: the files lack a parameter, or have it in another shape.
        """
        if not self._unread:
            return
        self._unread = False
        prefix = f"{getattr(base_of(model), 'base_model_prefix', '')}."
        names: dict[int, list[str]] = {}
        tensors: dict[int, Any] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
        saved = SavedWeights(self.folder())
        targets: dict[str, Any] = {}
        new_keys: list[int] = []
        missing_keys: list[int] = []
        for key, names_of_tensor in names.items():
            unwrapped = [
                name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in names_of_tensor
            ]
            candidates = [
                candidate for name in unwrapped for candidate in (name, name.removeprefix(prefix), prefix + name)
            ]
            if (stored_name := next((name for name in candidates if name in saved.stored), None)) is not None:
                targets[stored_name] = tensors[key]
            else:
                (new_keys if ".lora_" in names_of_tensor[0] else missing_keys).append(key)
        if missing_keys:
            missing_names = ", ".join(names[key][0] for key in missing_keys[:5])
            raise ValueError(
                f"{self.path} has no tensor for {missing_names} of {type(base_of(model)).__name__}: load it with from_pretrained on one process, "
                "which initializes or converts them, and save the result with save_pretrained"
            )
        saved.read_into(targets, strategy)
        generator = torch.Generator().manual_seed(seed % 2**63)
        for key in new_keys:
            value = _initial_adapter_value(names[key][0], strategy.whole_shape(tensors[key]), generator)
            fill(tensors[key], value, strategy)


def _check_adapter(config: Any) -> None:
    """Refuse adapters whose initial values depend on the model's weights."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    is_supported = (
        kind == "LORA" and config.init_lora_weights is True and not config.use_dora and not config.modules_to_save
    )
    if not is_supported:
        raise ValueError(
            f"from_pretrained(peft={type(config).__name__}(...)) under a strategy that shards: only LoRA with its default initial values, without "
            "DoRA and modules_to_save, can start without the whole model. Give HFModule(get_peft_model(model, config)), or save the adapter first"
        )


def _initial_adapter_value(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The initial value of a LoRA matrix; the product of A and B starts at zero."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        value.normal_(generator=generator)
    return value
