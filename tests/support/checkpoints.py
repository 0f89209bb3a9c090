"""Checkpoints made and read by one process, for tests of what is on the disk."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.directory import RANK, SHARED, Opened
from engine.checkpoint.reader import Source, whole
from engine.checkpoint.storage import split
from engine.checkpoint.writer import Content, Saver
from engine.distributed.environment import Environment
from engine.distributed.group import Group


def alone() -> Group:
    return Group(Environment("single", 0, 1, 0, 1, 1, "", 0), torch.device("cpu"))


def content(value: float = 1.0, **changes: Any) -> Content:
    tied = torch.full((2, 3), value)
    arguments: dict[str, Any] = {
        "model": {"head.weight": tied, "body.weight": tied, "body.bias": torch.zeros(2)},
        "optim": {
            "0": {
                "state": {"w": {"step": torch.tensor(3.0)}},
                "param_groups": [{"betas": (0.9, 0.999), "params": ["w"]}],
            }
        },
        "shared": {"scheduler": {"best": math.inf}},
        "own": {"rng": torch.arange(4)},
        "facts": {"step": 3, "metrics": {"loss": math.nan}},
    }
    return Content(**arguments | changes)


def save(directory: Path | str, value: float = 1.0, **changes: Any) -> Any:
    place, name = split(directory)
    return Saver(alone(), place.root).save(name, content(value, **changes))


def source_of(directory: Path, model: Any = None, optimizer: Any = None) -> Source:
    """What a strategy is given to load from: these states, written and opened."""
    save(directory, model=model or {}, optim={} if optimizer is None else {"0": optimizer})
    return Source(Opened(directory))


def record_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file: its size, and the CRC-32 of each 64 MiB."""
    content = path.read_bytes()
    return {
        "bytes": len(content),
        "crc32": [f"{zlib.crc32(content[low : low + 2**26]):08x}" for low in range(0, max(1, len(content)), 2**26)],
    }


def resummed(manifest: dict[str, Any]) -> dict[str, Any]:
    """A changed manifest whose own checksum is right: what an attacker would write."""
    rest = {name: value for name, value in manifest.items() if name != "crc32"}
    return {**rest, "crc32": f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"}


@dataclass
class Read:
    model: dict[str, Tensor]
    optim: Any
    shared: Any
    own: Any
    manifest: dict[str, Any]


def read(directory: Path | str) -> Read:
    """Everything, checked."""
    place, name = split(directory)
    with Opened(place.fetch(name)) as opened:
        source = Source(opened)
        model = opened.tensors("model").whole()
        model |= {alias: model[kept] for alias, kept in source.aliases.items()}
        return Read(
            model,
            source.read_optim(source.optim, whole),
            opened.tree(SHARED),
            opened.tree(RANK.format(0)),
            opened.manifest,
        )
