"""What a module publishes with its weights: files such as ``config.json``, and the names of its tensors in exported files.

A module adds it to its checkpoints, and :func:`engine.checkpoint.export.export_checkpoint` writes it::

    def on_save_checkpoint(self, checkpoint):
        checkpoint["published"] = published({"config.json": text.encode()}, prefix="model.")

Files are data that others read by their names: code is neither stored nor written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.field_checks import checked
from engine.checkpoint.files import DamagedCheckpoint, is_entry, parse_json, write_file

PUBLISHED = "published"
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken")
"""The kinds of files."""
STEMS = ("model", "adapter_model")
"""The possible names of the files with tensors, without ``.safetensors``."""
_FORM = {"stem": str, "prefix": str, "names": (dict, None), "files": dict}


@dataclass
class Published:
    """As a checkpoint has it."""

    stem: str = "model"
    """The name of the file with tensors, one of :data:`STEMS`."""
    prefix: str = ""
    """Removed from names that start with it."""
    names: dict[str, str] | None = None
    """The only tensors to export, each with its exported name."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The content of each file by its name."""


def published(
    files: Mapping[str, bytes], *, prefix: str = "", stem: str = "model", names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The entry of a checkpoint with these ``files`` by name; the other arguments as in :class:`Published`.

    Raises:
        ValueError: a name is not one of a file of data in one folder.
    """
    for name in files:
        if not _is_data(name):
            raise ValueError(f"{name!r} cannot be published: possible are files that end in {', '.join(SUFFIXES)}")
    content = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items() if data}
    return {"stem": stem, "prefix": prefix, "names": None if names is None else dict(names), "files": content}


def find(where: object, shared: Mapping[str, Any]) -> Published:
    """What the module of a run has published, or an object that was registered with an ``Engine``; by default nothing.

    Args:
        where: the checkpoint, for messages.
        shared: its ``state/shared``.

    Raises:
        DamagedCheckpoint: the entry has another form, or names a file that is not one of data.
    """
    user, registered = shared.get("user"), shared.get("registered")
    states = [user.get(PUBLISHED)] if isinstance(user, dict) else []
    states += registered if isinstance(registered, list) else []
    entry = next((each for each in states if isinstance(each, dict) and each.keys() == _FORM.keys()), None)
    if entry is None:
        return Published()
    found = checked(f"{where}: {PUBLISHED}", entry, _FORM)
    names = found["names"]
    if (
        found["stem"] not in STEMS
        or not all(type(name) is str and _is_data(name) for name in found["files"])
        or not all(isinstance(each, Tensor) and each.dtype == torch.uint8 for each in found["files"].values())
        or not all(type(new) is str for new in (names or {}).values())
    ):
        raise DamagedCheckpoint(f"{where} has no usable {PUBLISHED!r}")
    files = {name: each.contiguous().numpy().tobytes() for name, each in found["files"].items()}
    return Published(found["stem"], found["prefix"], names, files)


def write(found: Published, directory: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write the files into ``directory``; ``config.json`` names the ``dtype`` of the exported tensors, if they were converted.

    Raises:
        FileExistsError: one is there already, if only as a link to nothing.
        DamagedCheckpoint: ``config.json`` is not one.
    """
    if there := sorted(name for name in found.files if os.path.lexists(directory / name)):
        raise FileExistsError(f"{directory} holds {there[0]} already: choose another directory, or remove it")
    for name, data in found.files.items():
        if name == "config.json" and dtype is not None:
            config = parse_json(f"the published {name}", data)
            if not isinstance(config, dict):
                raise DamagedCheckpoint(f"the published {name} is not a mapping")
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            data = json.dumps({**config, key: str(dtype).removeprefix("torch.")}, indent=2).encode() + b"\n"
        write_file(directory / name, [data])
    return [directory / name for name in found.files]


def _is_data(name: str) -> bool:
    return is_entry(name) and not name.startswith(".") and Path(name).suffix in SUFFIXES and ".safetensors" not in name
