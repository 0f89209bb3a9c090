"""The arguments with which a checkpoint's module was created, to create it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.resume import opening
from engine.checkpoint.run_folder import source_of
from engine.distributed.environments import Environment
from engine.distributed.group import Group
from engine.utils.log import logger


@dataclass(frozen=True)
class Recorded:
    """The arguments recorded in one checkpoint."""

    path: Path | str
    hparams: Mapping[str, Any]
    """The arguments that ``save_hyperparameters`` kept, or with which ``fit run`` built the module, as far as checkpoints can hold them."""
    hparams_name: str | None
    """The constructor's argument that was the dict of all of them."""
    texts: Mapping[str, str]
    """All of them as text, including those that it cannot hold; without secrets."""
    sections: Mapping[str, Mapping[str, Any]]
    """``"model"`` and ``"data"``: the parameters from which ``fit run`` built them, as in YAML; without secrets."""
    callbacks: tuple[str, ...] = ()
    """The keys of callbacks' states."""


def recorded(root_dir: Path, kept: str | Path | None, wanted: str, argument: str) -> Recorded | None:
    """The arguments recorded in the checkpoint ``wanted``; ``None``: there is none. A single process may call this before the run.

    Args:
        root_dir, kept: as of :class:`engine.checkpoint.run_folder.RunFolder`.
        wanted: a name, a path or a URL.
        argument: the name of the user's argument, for messages.

    Raises:
        FileNotFoundError, DamagedCheckpoint: as :func:`engine.checkpoint.resume.opening`.
    """
    alone = Group(Environment("single"), torch.device("cpu"))
    try:
        # Skipped checkpoints are reported by the run, which opens it again.
        with opening(alone, *source_of(root_dir, kept, wanted), ("state",), argument, logger.debug) as loaded:
            shared, manifest = loaded.shared, loaded.manifest
            return Recorded(
                loaded.path,
                {str(name): value for name, value in shared.get("hparams", {}).items()},
                shared.get("hparams_name"),
                {str(name): str(text) for name, text in _mapping(manifest.get("hparams")).items()},
                {name: _init_args(manifest, name) for name in ("model", "data")},
                tuple(_mapping(shared.get("callbacks"))),
            )
    except FileNotFoundError:
        if wanted != "auto":
            raise
        return None


def _init_args(manifest: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    entry = _mapping(_mapping(manifest.get("config")).get(section))
    return _mapping(_mapping(entry.get("value")).get("init_args"))


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty dict."""
    return {str(name): each for name, each in value.items()} if isinstance(value, dict) else {}
