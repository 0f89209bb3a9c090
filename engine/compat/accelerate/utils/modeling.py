"""Files of a model's weights: ``load_checkpoint_in_model``, and the pickles of ``safe_serialization=False``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.checkpoint.json_tree import same_memory
from engine.compat.accelerate.names import FUNCTIONS
from engine.config.file_size import size_in_bytes
from engine.utils.paths import expanded

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"


def pickled(state: Mapping[str, Any], directory: Any, max_shard_size: int | str) -> list[Path]:
    """Write ``pytorch_model.bin``, which ``torch.load`` reads, or several such files of at most ``max_shard_size`` with an index."""
    parts: list[dict[str, Tensor]] = [{}]
    part_of: dict[Any, dict[str, Tensor]] = {}
    """The file of each piece of memory: tied weights stay together."""
    size = total = 0
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        if same_memory(tensor) not in part_of:
            if parts[-1] and size + tensor.nbytes > size_in_bytes(max_shard_size):
                parts.append({})
                size = 0
            part_of[same_memory(tensor)] = parts[-1]
            size, total = size + tensor.nbytes, total + tensor.nbytes
        part_of[same_memory(tensor)][name] = tensor
    folder = Path(expanded(directory))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"pytorch_model-{i:05d}-of-{len(parts):05d}.bin" for i in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = [PICKLE]
    else:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{PICKLE}.index.json").write_text(json.dumps(index, indent=2))
    for name, part in zip(names, parts, strict=True):
        torch.save(part, folder / name)
    return [folder / name for name in names]


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Any, device_map: Any = None, offload_folder: Any = None, dtype: Any = None,
    offload_state_dict: bool = False, offload_buffers: bool = False, keep_in_fp32_modules: Any = None,
    offload_8bit_bnb: bool = False, strict: bool = False, full_state_dict: bool = True, broadcast_from_rank0: bool = False,
) -> None:  # fmt: skip
    """Load the weights that ``save_model`` or ``save_pretrained`` wrote into a model that is not prepared yet.

    Args:
        checkpoint: a folder, a file of safetensors, a ``.bin`` file or an index of several files. Pickles may hold tensors only.
        device_map: ``None``, or ``{"": device}``, where the model is moved.
        dtype: the dtype of all floating-point parameters, if given.
        strict: whether names must match; without, those of one side only are ignored.

    Raises:
        NotImplementedError: another argument is given.
        FileNotFoundError: there are no weights.
        RuntimeError: a shape differs, or, with ``strict``, a name.
    """
    further = (offload_folder, offload_state_dict, offload_buffers, keep_in_fp32_modules, offload_8bit_bnb)
    whole = device_map is None or (isinstance(device_map, dict) and list(device_map) == [""])
    if (
        not whole
        or "disk" in (device_map or {}).values()
        or any(further)
        or not full_state_dict
        or broadcast_from_rank0
    ):
        raise NotImplementedError(
            f"load_checkpoint_in_model loads a whole model, with device_map={{'': device}} at most: {FUNCTIONS['dispatch_model']}"
        )
    state: dict[str, Tensor] = {}
    for path in _files(Path(expanded(checkpoint))):
        state |= (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, weights_only=True, map_location="cpu")
        )
    if dtype is not None:
        state = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
        model.to(dtype)
    tied = _tied(model)
    for names in tied:  # files hold them under one name only
        stored_names = [name for name in names if name in state]
        state.update((name, state[stored_names[0]]) for name in names if stored_names and name not in state)
    deferred = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_state_dict(state, strict=strict, assign=deferred)
    for first, *other_names in tied if deferred else ():
        for name in other_names:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    if device_map:
        model.to(device_map[""])


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _files(path: Path) -> list[Path]:
    """The files with tensors.

    Raises:
        FileNotFoundError: there are none, or not one set of them.
    """
    if path.is_dir():
        possible_files = (path / SAFETENSORS, path / PICKLE, *sorted(path.glob("*.index.json")))
        path = next((file for file in possible_files if file.exists()), path)
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"{path} has no {SAFETENSORS}, {PICKLE} or index of several files")
    if not path.name.endswith(".json"):
        return [path]
    names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    return [path.with_name(name) for name in names]
