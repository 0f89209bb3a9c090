"""A saved model that is built when the run starts, and of which each rank reads its own shards."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoint.tensors import TensorFiles
from engine.interop.transformers.loss import base_of

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass
class Pretrained:
    """What ``from_pretrained`` is to load."""

    path: str
    """A folder, or a name on the Hub."""
    auto: Any = None
    """A class of transformers with ``from_pretrained`` and ``from_config``."""
    peft: Any = None
    """The configuration of a new adapter."""
    options: dict[str, Any] = field(default_factory=dict)
    _unread: bool = field(default=False, init=False)

    def download(self) -> None:
        """Bring the files of a model of the Hub into its cache."""
        if not Path(self.path).is_dir():
            from huggingface_hub import snapshot_download

            snapshot_download(self.path, revision=self.options.get("revision"), allow_patterns=list(_FILES))

    def folder(self) -> Path:
        """Where the files are."""
        if Path(self.path).is_dir():
            return Path(self.path)
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.path, revision=self.options.get("revision"), allow_patterns=list(_FILES), local_files_only=True
            )
        )

    def build(self) -> Any:
        """The model; without values where the strategy builds models without them (call :meth:`read` when it is sharded)."""
        auto = AutoModelForCausalLM if self.auto is None else self.auto
        self._unread = not _has_memory(nn.Linear(1, 1, bias=False).weight)
        if self._unread:
            own = {name: self.options[name] for name in self.options if name != "revision"}
            config = AutoConfig.from_pretrained(self.folder())
            model = (auto.from_config if hasattr(auto, "from_config") else auto._from_config)(config, **own)
            model.config.name_or_path = model.name_or_path = self.path
        else:
            model = auto.from_pretrained(self.path, **self.options)
        if self.peft is None:
            return model
        from peft import get_peft_model

        if self._unread:
            _check(self.peft)
        return get_peft_model(model, self.peft)

    def read(self, model: nn.Module, seed: int) -> None:
        """Fill this rank's part of each parameter, once.

        Raises:
            ValueError: the files lack a parameter, or have another shape.
        """
        if not self._unread:
            return
        self._unread = False
        inner = base_of(model)
        own: dict[int, list[str]] = {}
        for name, tensor in _stored(model):
            own.setdefault(id(tensor), []).append(name)
        by_id = {id(tensor): tensor for _, tensor in _stored(model)}
        with tempfile.TemporaryDirectory() as links:
            for file in _weights(self.folder()):
                (Path(links) / file.name).symlink_to(file.resolve())
            files = TensorFiles(Path(links))
            base = f"{getattr(inner, 'base_model_prefix', '')}."
            targets: dict[str, Any] = {}
            missing, new = [], []
            for key, names in own.items():
                tried = [each for name in map(_plain, names) for each in (name, name.removeprefix(base), base + name)]
                found = next((name for name in tried if name in files.stored), None)
                if found is not None:
                    targets[found] = by_id[key]
                elif any(".lora_" in name for name in names):
                    new.append((names[0], by_id[key]))
                else:
                    missing.append(names[0])
            if missing:
                raise ValueError(
                    f"{self.path} has no tensor for {', '.join(missing[:5])} of {type(inner).__name__}: load it with from_pretrained under "
                    "strategy='ddp' or on one process, which initializes or converts them, and save_pretrained the result"
                )
            files.read_into({name: target for name, target in targets.items() if not hasattr(target, "ds_id")})
            for name, target in targets.items():
                if hasattr(target, "ds_id"):
                    _read_flat(Path(links), name, target, files)
        generator = torch.Generator().manual_seed(seed % 2**63)
        for name, target in new:
            _fill(target, _new_value(name, _shape(target), generator))


def _has_memory(parameter: Tensor) -> bool:
    return not parameter.is_meta and not hasattr(parameter, "ds_id")


def _stored(model: nn.Module) -> list[tuple[str, Any]]:
    """Parameters and the buffers that are saved, under each of their names."""
    return [(name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)]


def _plain(name: str) -> str:
    """A parameter's name without what peft adds."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _weights(folder: Path) -> list[Path]:
    """The model's own files: a folder may hold others, such as an adapter's.

    Raises:
        FileNotFoundError: there are none.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{index} names a file outside of its folder")
        return [folder / name for name in names]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} has no model.safetensors: save it with save_pretrained, which writes safetensors")
    return [folder / "model.safetensors"]


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@torch.no_grad()
def _read_flat(folder: Path, name: str, parameter: Any, files: TensorFiles) -> None:
    """Fill a rank's shard of a parameter that ZeRO-3 has flattened: only the rows that it is in are read."""
    shape, stored = _shape(parameter), files.stored[name]
    if shape != stored.shape:
        raise ValueError(f"{folder}: {name!r} has shape {list(stored.shape)}, and {list(shape)} was requested")
    low, high = _flat_range(parameter)
    width = math.prod(shape[1:])
    first, last = (low // width, -(-high // width)) if shape else (0, 1)
    for file in sorted(folder.iterdir()):
        with safe_open(str(file), framework="pt") as opened:
            if high > low and name in opened.keys():  # noqa: SIM118  it is not a dict
                rows = opened.get_slice(name)[first:last] if shape else opened.get_tensor(name)
                parameter.ds_tensor[: high - low].copy_(rows.flatten()[low - first * width : high - first * width])


def _flat_range(parameter: Any) -> tuple[int, int]:
    """Where this rank's shard lies in the flattened parameter."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank(parameter.ds_process_group)
    return min(rank * size, parameter.ds_numel), min((rank + 1) * size, parameter.ds_numel)


@torch.no_grad()
def _fill(parameter: Any, value: Tensor) -> None:
    """Set this rank's part of a parameter to that of a whole ``value``."""
    if hasattr(parameter, "ds_id"):
        low, high = _flat_range(parameter)
        parameter.ds_tensor[: high - low].copy_(value.flatten()[low:high])
    elif hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        parameter.copy_(distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements))
    else:
        parameter.copy_(value)


def _check(config: Any) -> None:
    """Refuse adapters whose first values depend on the model's."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    plain = kind == "LORA" and config.init_lora_weights is True and not config.use_dora and not config.modules_to_save
    if not plain:
        raise ValueError(
            f"from_pretrained(peft={type(config).__name__}(...)) under a strategy that shards: only LoRA with its default initial values, without "
            "DoRA and modules_to_save, can start without the whole model. Give HFModule(get_peft_model(model, config)), or save the adapter first"
        )


def _new_value(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The first value of a matrix of LoRA: the product of both is zero."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif ".lora_embedding_B." in name:
        value.normal_(generator=generator)
    return value
