"""The base classes of a storage for checkpoints, and of a checkpoint that is being written. A checkpoint is a directory; nothing in it is code.

::

    step=00000120/
        manifest.json                   format, time, world size, counters, metrics; size and checksum of every other file, and its own
        model/rank=00000.safetensors    the parameters and buffers that this rank wrote, whole or in parts
        model/model.json                names that share a tensor; modules' state that is not a tensor
        optim/rank=00000.safetensors    the same for the optimizers' states
        optim/optim.json                the structure of the optimizers' states
        weights/                        only if there are weights besides the trained ones: see engine/checkpoint/reader.py
        state/shared.json               [+ .safetensors] state that is the same on all ranks: schedulers, scaler, callbacks, counters
        state/rank=00001.json           [+ .safetensors] each rank's own state: random generators, position in streams

A small checkpoint of one rank is joined, since each file, folder and sync costs more than its content
(:data:`~engine.checkpoint.manifest.JOINED_BYTES`, :data:`~engine.checkpoint.manifest.JOINED_TREES`)::

    step=00000120/
        manifest.json                   as above; "$trees" has the content of the JSON files above, by their names without ".json"
        rank=00000.safetensors          all tensors, such as "model/<name>", "optim/<name>", "state/shared/<name>"

A checkpoint appears complete or not at all. On a file system it is written into the hidden sibling ``.step=00000120.partial``, synced to the
disk, given its manifest, and renamed. At a URL, where nothing can be renamed, the manifest is sent last.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.files import Record, write_json
from engine.checkpoint.manifest import FOLDERS, age_of
from engine.checkpoint.tensor_files import write_tensors

if TYPE_CHECKING:  # checkpoints are listed without torch
    from torch import Tensor

Packed = tuple[Any, Mapping[str, "Tensor"]]
"""A tree as JSON and its tensors: a result of :func:`engine.checkpoint.json_tree.pack`."""


@dataclass(frozen=True)
class Incomplete:
    """The reason why a checkpoint is not complete."""

    reason: str
    is_leftover: bool
    """True for a draft or the rest of an interrupted removal; False for a checkpoint that was complete once, or that this version cannot read."""


class Storage(ABC):
    """A directory or URL with checkpoints.

    The implementations are :class:`~engine.checkpoint.local_storage.LocalStorage`, :class:`~engine.checkpoint.one_file.OneFileStorage` and
    :class:`~engine.checkpoint.remote_storage.RemoteStorage`; :func:`engine.checkpoint.storage_paths.storage_of` chooses one. Paths are in the form
    that users see and ``resume`` accepts.
    """

    root: str
    shared: bool
    """Whether all ranks read the same files; otherwise each rank has its own copies."""

    @abstractmethod
    def path(self, name: str) -> Path | str:
        """The path of the checkpoint of this name."""

    @abstractmethod
    def begin(self, name: str, first: bool = True, folders: Sequence[str] = FOLDERS) -> Draft:
        """Begin to write the checkpoint ``name``. Every rank calls this, one of them with ``first`` and before the others.

        Args:
            folders: the folders to create in the draft.

        Raises:
            FileExistsError: something that is not a checkpoint has this name.
        """

    def manifests(self) -> dict[str, dict[str, Any]]:
        """The manifests of the complete checkpoints by name, in the order in which the checkpoints were written, oldest first.

        If a run went back to an earlier step, the newest checkpoint is the last one written, not the one with the highest step.
        """
        rows = [(age_of(manifest), name, manifest) for name, manifest in self.complete()]
        return {name: manifest for _, name, manifest in sorted(rows, key=lambda entry: entry[:2])}

    def newest_first(self) -> list[str]:
        """The names of the checkpoints that have a manifest, in the reverse order of :meth:`manifests`. Damaged ones may be among them: whoever opens
        one checks it."""
        return list(self.manifests())[::-1]

    @abstractmethod
    def written_names(self) -> set[str]:
        """The names of the checkpoints that have a manifest, which may be damaged."""

    @abstractmethod
    def is_complete(self, name: str) -> bool:
        """Whether the checkpoint of this name is complete: its manifest is intact, and every file exists with its size."""

    @abstractmethod
    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest of the checkpoint of this name; a missing or damaged manifest is an error."""

    @abstractmethod
    def complete(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield names and manifests of the complete checkpoints, in any order; each is read when it is requested.

        A checkpoint is complete if its manifest is intact, and every file exists with its size.
        """

    @abstractmethod
    def incomplete(self, complete: Container[str] | None = None) -> dict[str, Incomplete]:
        """The checkpoints that are not complete, by name. ``complete``: the names in :meth:`manifests`, if the caller has them already."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Check for the manifest of a checkpoint ``name``, which may be damaged."""

    @abstractmethod
    def fetch(self, name: str) -> Path:
        """A local directory with the checkpoint's files."""

    @abstractmethod
    def remove(self, name: str) -> bool:
        """Delete a checkpoint. If the process is killed meanwhile, what is left does not count as a checkpoint.

        Returns:
            False: the checkpoint stays, because it is being read, or because there is no other complete one.

        Raises:
            ValueError: ``name`` is not the name of a checkpoint here.
            OSError: some files could not be deleted; a later call deletes the rest.
        """

    @abstractmethod
    def must_stay(self, name: str) -> bool:
        """Whether the checkpoint of this name must not be replaced: it is being read, this version cannot read it, or it is a
        file."""

    @abstractmethod
    def sweep(self) -> None:
        """Delete what killed runs have left; drafts of other running jobs stay."""

    def is_same(self, other: Storage) -> bool:
        """Whether both storages are the same directory, however their paths are written."""
        return self.root == other.root or (
            self.shared and other.shared and os.path.realpath(self.root) == os.path.realpath(other.root)
        )


class Draft(ABC):
    """A checkpoint that this rank is writing. Until it is sealed or abandoned, the draft owns the lock or the local copy that the rank needs.

    :meth:`Storage.begin` returns one; the implementations are :class:`~engine.checkpoint.local_storage.LocalDraft` and
    :class:`~engine.checkpoint.remote_storage.RemoteDraft`.
    """

    folder: Path
    """The directory into which this rank writes its files."""

    def write_tree(self, stem: str, tree: Packed) -> dict[str, Record]:
        """Write a tree as ``<stem>.json`` and, if it has tensors, ``<stem>.safetensors``; several threads may call this at once."""
        value, tensors = tree
        files = {f"{stem}.json": write_json(self.folder / f"{stem}.json", value)}
        return files | self.write_tensors(f"{stem}.safetensors", tensors) if tensors else files

    def write_tensors(
        self, file: str, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Record]:
        """Write ``tensors`` as one file; several threads may call this at once.

        ``offsets``: see :func:`engine.checkpoint.tensor_files.write_tensors`.
        """
        return {file: write_tensors(self.folder / file, tensors, offsets)}

    @abstractmethod
    def send(self, files: Iterable[str]) -> None:
        """Make these files, which this rank has written, visible to the rank that seals the draft."""

    @abstractmethod
    def seal(
        self,
        world_size: int,
        facts: Mapping[str, Any],
        files: Mapping[str, Record],
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        """Turn the draft into a checkpoint when all ranks have written their files; only the ``first`` rank calls this.

        Args:
            files: the files of all ranks. The other arguments are those of :func:`engine.checkpoint.manifest.manifest_of`.

        Raises:
            OSError: a file is missing, or has another size.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Delete this rank's part of the draft, unless the draft is sealed."""
