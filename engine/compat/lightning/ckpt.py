"""Files that Lightning wrote, wherever a checkpoint is read. Of these pickles only tensors and plain values are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.files import held
from engine.checkpoint.one_file import is_one_file
from engine.compat.convert.convert import convert
from engine.compat.convert.files import check_pickles
from engine.compat.lightning.pickled import as_dict
from engine.compat.lightning.plugins import reader


def is_pickle(path: Any) -> bool:
    """Whether ``path`` is a file, and none of this library's."""
    return path is not None and "://" not in str(path) and Path(path).is_file() and not is_one_file(path)


@contextmanager
def readable(path: Any, plugins: Any = None) -> Iterator[Any]:
    """``path``, or a checkpoint converted from a file of Lightning's; ``ValueError``: that holds other objects than tensors and plain values."""
    if not is_pickle(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt-") as parent:
        if (io := reader(plugins)) is not None:
            torch.save(io.load_checkpoint(path, map_location="cpu"), path := Path(parent) / "read.ckpt")
        yield convert(path, Path(parent) / "step=00000000", trust_pickle=True).path


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint as the dict that Lightning's files hold, whatever ``weights_only`` is; ``pickle.UnpicklingError``: one holds other objects."""
    if is_pickle(path_or_url):
        with held(path_or_url) as file:
            check_pickles(path_or_url, file)
            loaded: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
        return loaded
    return as_dict(path_or_url, map_location)
