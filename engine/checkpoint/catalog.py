"""Checkpoints at a user's path or URL: find, open, list, describe, verify and prune them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.files import DamagedCheckpoint, blocks, read_json, verify
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import (
    FOLDERS,
    MANIFEST,
    OTHER_WEIGHTS,
    SCORED_WITH,
    SHARED,
    TRAINED,
    WEIGHTS,
    check_manifest,
)
from engine.checkpoint.one_file import is_one_file
from engine.checkpoint.runs import FIRST, run_root_of
from engine.checkpoint.storage import Storage
from engine.checkpoint.storage_paths import split_path, storage_of
from engine.checkpoint.tensors import TensorFiles, check_header
from engine.config.masked import without_secrets

Entry = dict[str, Any]
_PICKLE_FLAG = " --trust-pickle (without this flag no pickle, such as a file of torch.save, is read; with it, only its tensors and plain values)"
"""The option of ``fit checkpoint convert`` for pickles, as the advice to convert a file adds it."""


class Unread:
    """Stands for a tensor of a tree, which is neither shown nor read: reading imports torch."""

    def numpy(self) -> Unread:
        return self


# -- finding ------------------------------------------------------------------------------------------------------------------------


def folder_at(path: str | Path) -> Storage | None:
    """The folder of checkpoints at a path or a URL: itself, or its ``checkpoints/``, of the newest run that has any. ``version_0`` names the
    first run of a ``root_dir``, which has no folder of this name.

    ``None``: there are none, or it is a checkpoint itself.

    Raises:
        NotADirectoryError: it is a file.
    """
    if is_one_file(path):
        return None
    if "://" not in str(path) and Path(path).is_file():
        raise NotADirectoryError(
            f"{path} is a file, but a checkpoint is a directory. Convert a file of another trainer with: fit checkpoint convert {path} OUT"
            f"{'' if str(path).endswith('.safetensors') else _PICKLE_FLAG}"
        )
    where, name = split_path(path)
    if where.has(name):
        return None
    root = str(path).rstrip("/")
    folders = run_root_of(root).folders()
    above, _, name = root.rpartition("/")
    if name == FIRST:
        folders.append(above or ".")

    tried: list[Storage] = []
    for folder in folders:
        if not _has_folders(folder):  # of 100,000 runs, most may have saved nothing
            continue
        for place in (storage_of(folder), storage_of(f"{folder}/checkpoints")):
            if any(place.complete()):
                return place
            tried.append(place)
    return next((place for place in tried if place.incomplete(())), None)


def _has_folders(path: str) -> bool:
    """Whether a folder may have checkpoints, or a folder with some; of a URL this is not known."""
    if "://" in path:
        return True
    try:
        with os.scandir(path) as inner:
            return any(entry.is_dir() for entry in inner)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def find(path: str | Path) -> tuple[Storage, list[str]]:
    """The checkpoints at a path or a URL: itself, or the complete ones in a :func:`folder_at`, oldest first.

    Raises:
        FileNotFoundError: there are none, or the named one does not exist.
        NotADirectoryError: it is a file.
        DamagedCheckpoint: there are only incomplete ones; the message has the reason.
    """
    return find_in(path, folder_at(path))


def find_in(path: str | Path, inner: Storage | None) -> tuple[Storage, list[str]]:
    """Do what :func:`find` does, for a caller that has called :func:`folder_at` already: ``inner`` is its result."""
    if inner is not None and (names := list(inner.manifests())):
        return inner, names
    where, name = split_path(path)
    if inner is None and where.has(name):
        return where, [name]
    damaged = (
        {str(inner.path(n)): problem.reason for n, problem in inner.incomplete().items()} if inner is not None else {}
    )
    damaged |= {str(where.path(n)): problem.reason for n, problem in where.incomplete().items() if n == name}
    for what, why in damaged.items():
        raise DamagedCheckpoint(f"{what}: {why}; there is no complete checkpoint")
    beside = ", ".join(where.manifests()) or "none"
    raise FileNotFoundError(
        f"{path} is not a checkpoint, and contains none ({MANIFEST} is missing); complete ones beside it: {beside}"
    )


@contextmanager
def open_path(path: str | Path, folders: Iterable[str] = FOLDERS) -> Iterator[Opened]:
    """The checkpoint at ``path``, or the newest one in it (see :func:`find`), for one process.

    Args:
        folders: folders whose checksums are checked.

    Raises:
        DamagedCheckpoint, FileNotFoundError: as :func:`find` and :class:`Opened`.
    """
    where, names = find(path)
    with Opened(where.fetch(names[-1]), folders=folders) as opened:
        yield opened


# -- listing ------------------------------------------------------------------------------------------------------------------------


def entries(root: str | Path) -> list[Entry]:
    """All checkpoints in a folder (or in its ``checkpoints/``), complete ones first, oldest first.

    Returns:
        ``name``, ``path``, ``complete`` of each; for a complete one also ``step``, ``epoch``, ``saved_at`` (seconds since 1970), ``bytes``,
        ``world_size``, ``metrics``, ``score``, ``scored_with`` (the weights that a score is measured with: ``"trained"``, a name such as
        ``"ema"``, or ``None`` if an earlier version has not noted it) and ``aliases`` (``"best"`` and ``"last"``, if these mean it); for an
        incomplete one ``reason``.

    Raises:
        FileNotFoundError: there is no checkpoint, not even an incomplete one.
    """
    where = folder_at(root)
    if where is None:  # a checkpoint rather than a folder of them, or nothing
        where, names = find_in(root, where)
        manifests = {name: manifest for name, manifest in where.manifests().items() if name in names}
        return [{**_entry(where, name, manifest), "aliases": []} for name, manifest in manifests.items()]
    manifests = where.manifests()
    meanings = {"best": by_score(manifests)[:1], "last": list(manifests)[-1:]}
    complete = [
        {**_entry(where, name, manifest), "aliases": [alias for alias, names in meanings.items() if name in names]}
        for name, manifest in manifests.items()
    ]
    incomplete = where.incomplete(manifests).items()
    return [
        *complete,
        *(
            {"name": name, "path": str(where.path(name)), "complete": False, "reason": problem.reason}
            for name, problem in incomplete
        ),
    ]


def _entry(where: Storage, name: str, manifest: Mapping[str, Any]) -> Entry:
    counters = _fields(manifest.get("counters"))
    return {
        "name": name,
        "path": str(where.path(name)),
        "complete": True,
        "step": counters.get("step"),
        "epoch": counters.get("epoch"),
        "saved_at": manifest["saved_at"],
        "bytes": sum(record["bytes"] for record in manifest["files"].values()),
        "world_size": manifest["world_size"],
        "metrics": _fields(manifest.get("metrics")),
        "score": _score(manifest),
        SCORED_WITH: scored_with(manifest),
    }


def scored_with(manifest: Mapping[str, Any]) -> str | None:
    """The name of the weights that a checkpoint's score was measured with, for people; ``None``: it has several and does not say."""
    several = any(file.startswith(f"{WEIGHTS}/") for file in manifest["files"])
    name = manifest.get(SCORED_WITH, None if several else TRAINED)
    return name if isinstance(name, str) else None


def _fields(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty dict."""
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


def _score(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The score that a checkpoint was saved with; ``None`` for anything that cannot be compared."""
    score = _fields(manifest.get("score"))
    value = score.get("value")
    usable = type(value) is float or (type(value) is int and abs(value) < 1 << 1000)
    return score if usable and isinstance(score.get("monitor"), str) and score.get("mode") in ("min", "max") else None


def facts(path: str | Path, tensors: bool = False) -> dict[str, Any]:
    """A checkpoint's description; checksums are not verified.

    Args:
        tensors: list them too, as ``{"model", "optim" or "weights": {name: {"shape", "dtype", "shards" (number of parts in files)}}}``.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is none, or a file is missing or cannot be read.
    """
    where, names = find(path)
    with Opened(where.fetch(names[-1]), folders=()) as opened:
        entry = _entry(where, names[-1], opened.manifest)
        details = {
            name: value for name, value in opened.manifest.items() if name not in (*entry, "files", "crc32", "counters")
        }
        shared = _fields(opened.tree(SHARED, defaultdict(Unread)))
        report = {**entry, **details, "files": {name: record["bytes"] for name, record in opened.files.items()}}
        if isinstance(shared.get("hparams"), dict):
            report["hparams"] = without_secrets({str(name): value for name, value in shared["hparams"].items()})
        if other_weights := list(_fields(opened.tree(OTHER_WEIGHTS, {}))):
            report["weights"] = other_weights
        if tensors:
            folders = ("model", "optim", *([WEIGHTS] if other_weights else ()))
            report["tensors"] = {folder: _listed(opened.tensors(folder)) for folder in folders}
            report["tied"] = _fields(_fields(opened.tree("model/model", {})).get("aliases"))
        return report


def _listed(files: TensorFiles) -> dict[str, Any]:
    parts = files.parts()
    return {
        name: {"shape": list(stored.shape), "dtype": str(stored.dtype).removeprefix("torch."), "shards": parts[name]}
        for name, stored in files.stored.items()
    }


def problems(path: str | Path) -> dict[str, list[str]]:
    """Read all of a checkpoint, or of all checkpoints in a folder, and report what is wrong.

    Returns:
        By path, one line for each file that is missing, changed or unreadable; an empty list for an intact checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    where = folder_at(path)
    if where is not None:
        names = list(where.manifests())
        reasons = {name: problem.reason for name, problem in where.incomplete(names).items()}
        return {str(where.path(name)): _problems(where, name, reasons.get(name, "")) for name in [*names, *reasons]}
    try:
        where, names = find(path)
    except DamagedCheckpoint as error:
        return {str(path): [str(error)]}
    return {str(where.path(name)): _problems(where, name) for name in names}


def _problems(where: Storage, name: str, reason: str = "") -> list[str]:
    """Verify one checkpoint; ``reason`` is its problem if it has no usable manifest."""
    try:
        directory = where.fetch(name)
        manifest = check_manifest(directory, read_json(directory / MANIFEST))
    except (OSError, ValueError) as error:
        return [reason or str(error)]
    files, lines = manifest["files"], []
    for file in files:
        try:
            verify(directory, files, blocks(files, [file]))
        except (OSError, ValueError) as error:
            lines.append(str(error).removeprefix(f"{directory}: "))
    present = {
        str(path.relative_to(directory))
        for folder in (*FOLDERS, WEIGHTS, ".")
        for path in (directory / folder).glob("*")
        if path.is_file() and path.name != MANIFEST
    }
    lines += [f"{file} is not in the manifest" for file in sorted(present - files.keys())]
    if not lines:
        try:
            _open(directory, files)
        except (OSError, ValueError) as error:
            lines.append(str(error).removeprefix(f"{directory}: "))
    return lines


def _open(directory: Path, files: Sequence[str] | Mapping[str, Any]) -> None:
    """Read all that is not a tensor: headers and trees. Raises on errors."""
    with Opened(directory, folders=()) as opened:
        for stem in opened.manifest.trees:
            opened.tree(stem, defaultdict(Unread))
        for file in files:
            if file.endswith(".safetensors"):
                check_header(directory / file)
            elif file.endswith(".json"):
                opened.tree(file.removesuffix(".json"), defaultdict(Unread))


def by_score(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the checkpoints with a score, the best first, of equal ones the earlier. Only scores of the newest one's monitor count: scores of
    other monitors do not compare.

    Args:
        manifests: oldest first.
    """
    newest = list(manifests)[::-1]
    scores = {name: score for name in newest if (score := _score(manifests[name])) is not None}
    scored = [name for name, score in scores.items() if not math.isnan(score["value"])]
    if scored:
        first = scores[scored[0]]
        scored = [
            name
            for name in reversed(scored)
            if (scores[name]["monitor"], scores[name]["mode"]) == (first["monitor"], first["mode"])
        ]
        scored.sort(key=lambda name: scores[name]["value"], reverse=first["mode"] == "max")
    return scored


def prune(root: str | Path, keep: int, keep_best: int = 0, dry_run: bool = False) -> dict[str, list[str]]:
    """Delete complete checkpoints except the ``keep`` newest and the ``keep_best`` best scores. Incomplete ones are not touched.

    Returns:
        Names: ``removed`` (with ``dry_run`` those that would be), ``kept``, ``in_use`` (being read: they stay too).

    Raises:
        ValueError: nothing would be kept.
        FileNotFoundError: there is no complete checkpoint.
    """
    if keep < 0 or keep_best < 0 or keep + keep_best < 1:
        raise ValueError(f"keep={keep}, keep_best={keep_best}: at least one checkpoint must be kept")
    where = folder_at(root)
    manifests = {} if where is None else where.manifests()
    if where is None or not manifests:
        find(root)  # raises with what is there instead
        raise ValueError(f"{root} is a checkpoint: give the folder that it is in")
    newest = list(manifests)[-keep:] if keep else []
    chosen = {*newest, *by_score(manifests)[:keep_best]} or {list(manifests)[-1]}
    report: dict[str, list[str]] = {"removed": [], "kept": [name for name in manifests if name in chosen], "in_use": []}
    for name in manifests:
        if name not in chosen:
            report["removed" if dry_run or where.remove(name) else "in_use"].append(name)
    return report
