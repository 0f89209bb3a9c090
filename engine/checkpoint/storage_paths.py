"""Resolve a path or a URL (``s3://``, ``gs://``, ``memory://`` or another that fsspec knows) to a storage, and to a checkpoint in it."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.local_storage import LocalStorage
from engine.checkpoint.one_file import OneFileStorage, is_one_file
from engine.checkpoint.remote_storage import RemoteStorage
from engine.checkpoint.storage import Storage
from engine.utils.paths import expanded


def storage_of(root: str | Path) -> Storage:
    """The :class:`Storage` of a path or a URL.

    Raises:
        ValueError: fsspec does not know the protocol, or the protocol's package is missing; the message says which.
    """
    return RemoteStorage(str(root)) if "://" in str(root) else LocalStorage(Path(expanded(root)))


def split_path(path: str | Path) -> tuple[Storage, str]:
    """Split a checkpoint's path or URL into its :class:`Storage` and its name, with the errors of :func:`storage_of`."""
    if "://" in str(path):
        root, _, name = str(path).rstrip("/").rpartition("/")
        return RemoteStorage(root), name
    local_path = Path(expanded(path))
    return (OneFileStorage if is_one_file(local_path) else LocalStorage)(local_path.parent), local_path.name


def name_of(path: str | Path) -> str:
    """The name of a checkpoint, from its path or URL."""
    return str(path).rstrip("/").rpartition("/")[2]
