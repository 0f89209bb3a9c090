"""One checkpoint is one directory. It appears complete or not at all, and nothing in it is code.

::

    step=00000120/
        manifest.json                  format version, world size, counters, metrics; size and SHA-256 of every other file
        model/model.safetensors
        optim/optim.json               [+ optim.safetensors]   what is JSON in the tree, and its tensors
        state/shared.json              [+ shared.safetensors]  the same on all ranks: schedulers, scaler, callbacks, counters
        state/rank=00001.json          [+ .safetensors]        of each rank: random generators, loader positions

It is written into the hidden sibling ``.step=00000120.partial``, synced to the disk, given its manifest, and renamed.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoint.files import (
    DamagedCheckpoint,
    inside,
    read_json,
    read_model,
    read_tree,
    record,
    sync,
    write_json,
    write_model,
    write_tree,
)
from engine.checkpoint.state import pack, unpack
from engine.errors import RankError

FORMAT = 1
MANIFEST = "manifest.json"
_MODEL, _OPTIM, _SHARED, _RANK = "model/model.safetensors", "optim/optim", "state/shared", "state/rank={:05d}"
_OURS = ("format", "saved_at", "world_size", "files")
_NAME = re.compile(r"step=[0-9]+")
_LEFT_OVER = re.compile(r"\.step=[0-9]+\.(partial|replaced)")

Agree = Callable[[Exception | None], Exception | None]
"""Called by every rank with its own error or ``None``; gives all of them the error of one rank, or ``None``. It is also a barrier."""


@dataclass(frozen=True)
class Loaded:
    """What :func:`read` found. Tensors are on the CPU."""

    model: dict[str, Tensor]
    """Tied names have the same tensor."""
    optim: Any
    shared_state: Any
    rank_state: Any
    """The state of this rank, or ``None`` when another number of ranks wrote the checkpoint."""
    manifest: dict[str, Any]
    """As given to :func:`write`, and ``format``, ``saved_at`` (seconds since 1970), ``world_size`` and ``files``."""


def write(
    directory: Path,
    *,
    model: dict[str, Tensor],
    optim: Any,
    shared_state: Any,
    rank_state: Any,
    rank: int,
    world_size: int,
    manifest: dict[str, Any],
    agree: Agree | None = None,
) -> None:
    """Write one checkpoint; every rank calls this, with the same ``directory`` on one file system.

    Every rank writes its ``rank_state``; rank 0 writes the rest, and what other ranks give for it is not looked at. An
    older checkpoint at ``directory`` is replaced. Returns when the checkpoint is on the disk and in place. Tensors of a
    device are copied to the CPU, which waits for them.

    Args:
        directory: ``<root>/checkpoints/step=00000120``.
        model: the state of the model by name. Tied tensors are stored once.
        optim, shared_state, rank_state: trees that :func:`engine.checkpoint.state.pack` takes.
        manifest: small JSON values by name, such as counters and metrics (NaN is fine).
        agree: how the ranks share errors; needed with several ranks.

    Raises:
        TypeError: something in a tree that cannot be stored.
        FileExistsError: ``directory`` holds something that is no checkpoint.
        OSError, SafetensorError: the disk is full, a permission is missing, and the like.
        RankError: another rank failed; the message has its error.
            After any error no rank has the new checkpoint, and the earlier ones are as they were.
    """
    if agree is None:
        if world_size != 1:
            raise ValueError(f"write() with world_size={world_size} needs agree: ranks that do not share their errors wait for ever")
        agree = _alone
    partial = directory.with_name(f".{directory.name}.partial")

    def begin() -> None:
        if rank == 0:
            _begin(directory, partial)

    def fill() -> None:
        if rank == 0:
            write_model(partial / _MODEL, model)
            write_tree(partial / _OPTIM, optim)
            write_tree(partial / _SHARED, shared_state)
        write_tree(partial / _RANK.format(rank), rank_state)

    def finish() -> None:
        if rank == 0:
            _finish(partial, directory, manifest, world_size)

    try:
        for phase in (begin, fill, finish):
            _together(agree, phase)
    finally:
        if rank == 0 and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def read(directory: Path, rank: int, world_size: int) -> Loaded:
    """Read a checkpoint, and check the size and SHA-256 of every file that is read.

    Raises:
        DamagedCheckpoint: it is incomplete, changed since it was written, or of an unknown form.
        FileNotFoundError: there is no checkpoint at ``directory``; the error lists those beside it.
    """
    manifest = read_manifest(directory)
    files = manifest["files"]
    return Loaded(
        model=read_model(directory, files, _MODEL),
        optim=read_tree(directory, files, _OPTIM),
        shared_state=read_tree(directory, files, _SHARED),
        rank_state=read_tree(directory, files, _RANK.format(rank)) if manifest["world_size"] == world_size else None,
        manifest=manifest,
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there with the right sizes; their content is not looked at.

    Raises:
        DamagedCheckpoint, FileNotFoundError: as :func:`read`.
    """
    path = directory / MANIFEST
    if not path.is_file():
        beside = ", ".join(str(each) for each in list_checkpoints(directory.parent)) or "none"
        raise FileNotFoundError(f"{directory} holds no complete checkpoint ({MANIFEST} is missing); complete ones beside it: {beside}")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise DamagedCheckpoint(f"{directory}: {MANIFEST} has no format version")
    if manifest["format"] != FORMAT:
        raise DamagedCheckpoint(f"{directory}: has format {manifest['format']}, and this version reads {FORMAT}; load it with a newer one")
    for name, kind in (("files", dict), ("world_size", int), ("saved_at", float)):
        if type(manifest.get(name)) is not kind:
            raise DamagedCheckpoint(f"{directory}: {MANIFEST} has no usable {name!r}")
    for name, known in manifest["files"].items():
        file, expected = inside(directory, name), known.get("bytes") if isinstance(known, dict) else None
        if not file.is_file():
            raise DamagedCheckpoint(f"{directory}: {name} is missing")
        if file.stat().st_size != expected:
            raise DamagedCheckpoint(f"{directory}: {name} has {file.stat().st_size} bytes, and had {expected} when it was written")
    try:
        return dict(unpack(manifest, {}))
    except ValueError as error:
        raise DamagedCheckpoint(f"{directory}: {MANIFEST}: {error}") from error


def list_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints directly in ``root``, in the order in which they were written, oldest first.

    Complete: a readable manifest, and every file there with its right size. After a run that went back to an earlier
    step, the newest is the last that this run wrote, not the one with the highest step.
    """
    found: list[tuple[float, str, Path]] = []
    for path in _directories(root):
        # An old one that was moved aside stands in while its successor is not yet there.
        stands_in = path.name.startswith(".step=") and path.suffix == ".replaced" and not (root / path.stem[1:]).exists()
        if (stands_in or _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file():
            with suppress(DamagedCheckpoint, OSError):
                found.append((read_manifest(path)["saved_at"], path.name, path))
    return [path for *_, path in sorted(found)]


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint directly in ``root``."""
    return next(reversed(list_checkpoints(root)), None)


def remove(path: Path) -> None:
    """Delete a checkpoint, its manifest first: whatever happens meanwhile, it is listed no more. One that is gone already is fine.

    Raises:
        ValueError: ``path`` is there, but is no checkpoint.
    """
    if not path.exists():
        return
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} is no checkpoint ({MANIFEST} is missing): it is not deleted")
    (path / MANIFEST).unlink()
    sync(path)
    shutil.rmtree(path)


def sweep(root: Path) -> None:
    """Delete what runs that were killed left in ``root``. For a time when nobody writes there, such as the start of a run."""
    complete = set(list_checkpoints(root))
    for path in _directories(root):
        unfinished = _NAME.fullmatch(path.name) and not (path / MANIFEST).exists()
        if path not in complete and (unfinished or _LEFT_OVER.fullmatch(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def _together(agree: Agree, work: Callable[[], None]) -> None:
    """Do a part of the write that may fail on some rank; if it did on one, raise on all."""
    mine: Exception | None = None
    try:
        work()
    except Exception as error:
        mine = error
    found = agree(mine)
    if mine is not None:
        raise mine
    if found is not None:
        raise RankError(f"the checkpoint was not written: another rank failed with {type(found).__name__}: {found}") from found


def _alone(error: Exception | None) -> Exception | None:
    return error


def _directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _begin(directory: Path, partial: Path) -> None:
    left_over = _NAME.fullmatch(directory.name) is not None
    if directory.exists() and not ((directory / MANIFEST).is_file() or left_over):
        raise FileExistsError(f"{directory} exists and is no checkpoint ({MANIFEST} is missing): choose another place, or move it away")
    if partial.exists():
        shutil.rmtree(partial)
    for part in ("model", "optim", "state"):
        (partial / part).mkdir(parents=True)
    sync(directory.parent.parent)  # the root may be new as well


def _finish(partial: Path, directory: Path, manifest: dict[str, Any], world_size: int) -> None:
    if taken := [name for name in _OURS if name in manifest]:
        raise ValueError(f"the manifest's {taken} are the store's own: give them other names")
    value, tensors = pack(manifest)
    if tensors or not isinstance(value, dict) or "$" in value:
        raise TypeError(f"the manifest is for small JSON values by name; found tensors {sorted(tensors)}, names {list(manifest)}")
    files = {path.relative_to(partial).as_posix(): record(path) for path in sorted(partial.glob("*/*"))}
    write_json(partial / MANIFEST, {"format": FORMAT, "saved_at": time.time(), "world_size": world_size, **value, "files": files})
    for part in ("model", "optim", "state", "."):
        sync(partial / part)
    old = directory.with_name(f".{directory.name}.replaced")
    if (directory / MANIFEST).is_file():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    elif directory.exists():
        shutil.rmtree(directory)
    try:
        partial.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
