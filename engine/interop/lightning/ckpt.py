"""Files that Lightning wrote, wherever a checkpoint is read. Of these pickles only tensors and plain values are."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.convert import convert
from engine.checkpoint.one_file import is_one_file
from engine.checkpoint.pickled import as_dict
from engine.config.other_trainers import hint


class CheckpointIO:
    """For ``Trainer(plugins=[...])``: reads files that are not this library's, whose own have one format: there is nothing else to define."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The file at ``path``, as Lightning's files are: ``state_dict``, ``hyper_parameters``, ..."""
        return torch.load(path, map_location=map_location, weights_only=weights_only is not False)


TorchCheckpointIO = CheckpointIO


def reader(plugins: Any) -> CheckpointIO:
    """The one among ``Trainer``'s plugins, or the usual one.

    Raises:
        ValueError: a plugin of another kind, or one that would write.
    """
    found = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins] if plugins else []
    others = [each for each in found if not isinstance(each, CheckpointIO)]
    if others or len(found) > 1:
        raise ValueError(f"Trainer(plugins={(others or found)!r}) has no counterpart{hint('plugins', ())}")
    for io, name in itertools.product(found, ("save_checkpoint", "remove_checkpoint", "teardown")):
        if hasattr(io, name):
            raise ValueError(
                f"Trainer(plugins=[{type(io).__name__}()]): nothing calls its {name}, because checkpoints have one format; leave it out, and "
                "do what it does in a callback's on_checkpoint_saved"
            )
    return found[0] if found else CheckpointIO()


def is_pickle(path: Any) -> bool:
    """Whether ``path`` is a file, and none of this library's."""
    return path is not None and "://" not in str(path) and Path(path).is_file() and not is_one_file(path)


@contextmanager
def readable(path: Any, plugins: Any = None) -> Iterator[Any]:
    """``path``, or a checkpoint converted from a file of Lightning's, which is removed afterwards.

    Args:
        plugins: ``Trainer``'s, which may read such files.

    Raises:
        ValueError: the file holds other objects than tensors and plain values.
    """
    if not is_pickle(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-") as parent:
        if type(io := reader(plugins)) is not CheckpointIO:
            torch.save(io.load_checkpoint(path, map_location="cpu"), path := Path(parent) / Path(path).name)
        yield convert(path, Path(parent) / "step=00000000", trust_pickle=True).path


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as the dict that Lightning's files hold, whatever ``weights_only`` is; ``pickle.UnpicklingError``: one holds other objects."""
    if is_pickle(path_or_url):
        loaded: dict[str, Any] = torch.load(path_or_url, map_location=map_location, weights_only=True)
        return loaded
    return as_dict(path_or_url, map_location)
