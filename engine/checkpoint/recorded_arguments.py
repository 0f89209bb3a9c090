"""What a checkpoint says of how its module was made, for whoever makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.resume import opening
from engine.checkpoint.run_folder import source_of
from engine.distributed.environment import Environment
from engine.distributed.group import Group
from engine.utils.log import logger


@dataclass(frozen=True)
class Recorded:
    """Of one checkpoint."""

    path: Path | str
    hparams: Mapping[str, Any]
    """What ``save_hyperparameters`` kept, or the arguments of a module that ``fit run`` has built, as far as a checkpoint can hold them."""
    hparams_name: str | None
    """The constructor's argument that was all of them."""
    texts: Mapping[str, str]
    """All of them as text, those that it cannot hold included; without secrets."""
    sections: Mapping[str, Mapping[str, Any]]
    """``"model"`` and ``"data"``: the parameters that ``fit run`` has built them from, as YAML has them; without secrets."""


def recorded(root_dir: Path, kept: str | Path | None, wanted: str, argument: str) -> Recorded | None:
    """What the checkpoint says that ``wanted`` means; ``None``: a name means none. One process alone may call this, before the run begins.

    Args:
        root_dir, kept: as of :class:`engine.checkpoint.run_folder.RunFolder`.
        wanted: a name, a path or a URL.
        argument: what it was given as, for messages.

    Raises:
        FileNotFoundError, DamagedCheckpoint: as :func:`engine.checkpoint.resume.opening`.
    """
    alone = Group(Environment("single"), torch.device("cpu"))
    try:
        # What is passed over is reported by the run, which opens it again.
        with opening(alone, *source_of(root_dir, kept, wanted), ("state",), argument, logger.debug) as loaded:
            shared, manifest = loaded.shared, loaded.manifest
            return Recorded(
                loaded.path,
                {str(name): value for name, value in shared.get("hparams", {}).items()},
                shared.get("hparams_name"),
                {str(name): str(text) for name, text in _mapping(manifest.get("hparams")).items()},
                {name: _init_args(manifest, name) for name in ("model", "data")},
            )
    except FileNotFoundError:
        if wanted != "auto":
            raise
        return None


def _init_args(manifest: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    entry = _mapping(_mapping(manifest.get("config")).get(section))
    return _mapping(_mapping(entry.get("value")).get("init_args"))


def _mapping(value: Any) -> dict[str, Any]:
    """A dict, or nothing where a manifest has something else."""
    return {str(name): each for name, each in value.items()} if isinstance(value, dict) else {}
