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
from engine.checkpoint.local_storage import Opened, reason_for_absence
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
from engine.checkpoint.storage import Incomplete, Storage
from engine.checkpoint.storage_paths import split_path, storage_of
from engine.checkpoint.tensor_files import TensorFiles, check_header
from engine.config.secret_text import without_secrets
from engine.utils.paths import expanded

Entry = dict[str, Any]
_PICKLE_FLAG = " --trust-pickle (without this flag no pickle, such as a file of torch.save, is read; with it, only its tensors and plain values)"
"""The option of ``fit checkpoint convert`` for pickles, as the advice to convert a file adds it."""


class Unread:
    """A placeholder for a tensor in a tree: listings do not show tensors, and reading one would import torch."""

    def numpy(self) -> Unread:
        return self


# -- finding ------------------------------------------------------------------------------------------------------------------------


ALIASES = ("best", "last")
"""Names that mean a checkpoint in a run's folder."""


def folder_at(path: str | Path) -> Storage | None:
    """Find the folder of checkpoints at a path or a URL: ``path`` itself, its ``checkpoints/``, or that of the newest run in it that has
    checkpoints. ``version_0`` names the first run of a ``root_dir``, which has no folder of this name.

    ``None``: there are no checkpoints, or ``path`` is one checkpoint.

    Raises:
        NotADirectoryError: ``path`` is a file.
    """
    path = expanded(path)
    if is_one_file(path):
        return None
    if "://" not in str(path) and Path(path).is_file():
        raise NotADirectoryError(
            f"{path} is a file, but a checkpoint is a directory. Convert a file of another trainer with: fit checkpoint convert {path} OUT"
            f"{'' if str(path).endswith('.safetensors') else _PICKLE_FLAG}"
        )
    storage, name = split_path(path)
    if storage.has(name):
        return None
    root = str(path).rstrip("/")
    folders = run_root_of(root).folders()
    parent, _, name = root.rpartition("/")
    if name == FIRST:
        folders.append(parent or ".")

    tried: list[Storage] = []
    for folder in folders:
        if not _has_folders(folder):  # of 100,000 runs, most may have saved nothing
            continue
        for candidate in (storage_of(folder), storage_of(f"{folder}/checkpoints")):
            if any(candidate.complete()):
                return candidate
            tried.append(candidate)
    return next((candidate for candidate in tried if candidate.incomplete(())), None)


def _has_folders(path: str) -> bool:
    """Whether a folder has subfolders, which may be or contain checkpoints; always True for a URL, which only a request could tell."""
    if "://" in path:
        return True
    try:
        with os.scandir(path) as entries:
            return any(entry.is_dir() for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def find(path: str | Path) -> tuple[Storage, list[str]]:
    """Find the checkpoints that a path or a URL means: the checkpoint at ``path``, or all complete ones in its :func:`folder_at`.

    Where nothing has the name, ``RUN/best`` and ``RUN/last`` are the best and the newest checkpoint in the folder of a run.

    Returns:
        Their storage, and their names, oldest first.

    Raises:
        FileNotFoundError: there is no checkpoint at ``path``.
        NotADirectoryError: ``path`` is a file.
        DamagedCheckpoint: all checkpoints there are incomplete; the message has the reason.
        ValueError: ``path`` is ``RUN/best``, and no checkpoint there has a score.
    """
    return find_in(path, folder_at(path))


def find_in(path: str | Path, folder: Storage | None) -> tuple[Storage, list[str]]:
    """Do the same as :func:`find`, with ``folder``, the result of :func:`folder_at` that the caller has already."""
    if folder is not None and (names := list(folder.manifests())):
        return folder, names
    storage, name = split_path(path)
    if folder is None and storage.has(name):
        return storage, [name]
    damaged = (
        {str(folder.path(n)): problem.reason for n, problem in folder.incomplete().items()}
        if folder is not None
        else {}
    )
    damaged |= {str(storage.path(n)): problem.reason for n, problem in storage.incomplete().items() if n == name}
    for location, reason in damaged.items():
        raise DamagedCheckpoint(f"{location}: {reason}; there is no complete checkpoint")
    if name in ALIASES:
        parent = str(path).rstrip("/").rpartition("/")[0]
        if not parent:
            raise FileNotFoundError(
                f"{name!r} names no folder here: give the run's folder as well, as in 'runs/{name}', or the path, as in "
                "fit.run(...).best_checkpoint"
            )
        storage, name = split_path(checkpoint_of(parent, name))
        return storage, [name]
    siblings = ", ".join(storage.manifests()) or "none"
    why = "" if "://" in str(path) else f": {reason_for_absence(Path(expanded(path)))}"
    raise FileNotFoundError(
        f"{path} is not a checkpoint, and contains none ({MANIFEST} is missing){why}; complete ones beside it: {siblings}"
    )


def checkpoint_of(path: str | Path, name: str | None) -> str | Path:
    """The path of the checkpoint that ``name`` means in the folder at ``path``: ``"best"``, ``"last"``, or its own name. ``None``: ``path`` itself.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: no checkpoint has a score, or ``path`` is a checkpoint itself.
    """
    if name is None:
        return path
    folder = folder_at(path)
    if folder is None:
        find(path)  # raises an error that says what is at this path
        raise ValueError(f"{path} is a checkpoint: give the folder that it is in, or leave out checkpoint={name!r}")
    manifests = folder.manifests()
    if name == "best":
        names = by_score(manifests)
        if not names:
            raise ValueError(
                f"no checkpoint in {path} has a score: train with ModelCheckpoint(monitor=...), or give last"
            )
        return folder.path(names[0])
    names = list(manifests)
    if name == "last" and names:
        return folder.path(names[-1])
    if name not in manifests:
        raise FileNotFoundError(f"{path} has no complete checkpoint {name!r}; it has {', '.join(names) or 'none'}")
    return folder.path(name)


@contextmanager
def open_path(path: str | Path, folders: Iterable[str] = FOLDERS) -> Iterator[Opened]:
    """Open the checkpoint at ``path``, or the newest one in it (see :func:`find`), in a single process.

    Args:
        folders: the folders of the checkpoint whose checksums are verified.

    Raises:
        DamagedCheckpoint, FileNotFoundError: the errors of :func:`find` and :class:`Opened`.
    """
    storage, names = find(path)
    with Opened(storage.fetch(names[-1]), folders=folders) as opened:
        yield opened


# -- listing ------------------------------------------------------------------------------------------------------------------------


def entries(root: str | Path) -> list[Entry]:
    """Describe all checkpoints in a folder (or in its ``checkpoints/``): complete ones first, oldest first.

    Returns:
        For each checkpoint ``name``, ``path`` and ``complete``; for a complete one also ``step``, ``epoch``, ``saved_at`` (seconds since 1970),
        ``bytes``, ``world_size``, ``metrics``, ``score``, ``scored_with`` (the weights that the score was measured with: ``"trained"``, a name
        such as ``"ema"``, or ``None`` if an earlier version did not record it) and ``aliases`` (``"best"`` and ``"last"``, if these mean it);
        for an incomplete one ``reason``.

    Raises:
        FileNotFoundError: there is no checkpoint, not even an incomplete one.
    """
    storage = folder_at(root)
    if storage is None:  # a single checkpoint, or nothing
        storage, names = find_in(root, storage)
        manifests = {name: manifest for name, manifest in storage.manifests().items() if name in names}
        problems_by_name = {name: problem for name, problem in storage.incomplete(manifests).items() if name in names}
        rows = [{**_entry(storage, name, manifest), "aliases": []} for name, manifest in manifests.items()]
        rows += _incomplete_entries(storage, problems_by_name)
        if not rows:
            raise FileNotFoundError(f"{root} was removed while it was read")
        return rows
    manifests = storage.manifests()
    meanings = {"best": by_score(manifests)[:1], "last": list(manifests)[-1:]}
    complete = [
        {**_entry(storage, name, manifest), "aliases": [alias for alias, names in meanings.items() if name in names]}
        for name, manifest in manifests.items()
    ]
    rows = [*complete, *_incomplete_entries(storage, storage.incomplete(manifests))]
    if not rows:
        raise FileNotFoundError(f"the checkpoints in {root} were removed while they were read")
    return rows


def _incomplete_entries(storage: Storage, incomplete: Mapping[str, Incomplete]) -> list[Entry]:
    """Describe incomplete checkpoints for :func:`entries`."""
    return [
        {"name": name, "path": str(storage.path(name)), "complete": False, "reason": problem.reason}
        for name, problem in incomplete.items()
    ]


def _entry(storage: Storage, name: str, manifest: Mapping[str, Any]) -> Entry:
    """Describe a complete checkpoint for :func:`entries`."""
    counters = _fields(manifest.get("counters"))
    return {
        "name": name,
        "path": str(storage.path(name)),
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
    """The name of the weights that a checkpoint's score was measured with; ``None`` if it has several weights and does not say."""
    several = any(file.startswith(f"{WEIGHTS}/") for file in manifest["files"])
    name = manifest.get(SCORED_WITH, None if several else TRAINED)
    return name if isinstance(name, str) else None


def _fields(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty dict."""
    return {str(name): item for name, item in value.items()} if isinstance(value, dict) else {}


def _score(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """The score that a checkpoint was saved with; ``None`` if it has no score that can be compared."""
    score = _fields(manifest.get("score"))
    value = score.get("value")
    usable = type(value) is float or (type(value) is int and abs(value) < 1 << 1000)
    return score if usable and isinstance(score.get("monitor"), str) and score.get("mode") in ("min", "max") else None


def facts(path: str | Path, tensors: bool = False) -> dict[str, Any]:
    """Describe a checkpoint; checksums are not verified.

    Args:
        tensors: also list its tensors, as ``{"model", "optim" or "weights": {name: {"shape", "dtype", "shards" (number of parts in files)}}}``.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or one of its files is missing or cannot be read.
    """
    storage, names = find(path)
    with Opened(storage.fetch(names[-1]), folders=()) as opened:
        entry = _entry(storage, names[-1], opened.manifest)
        details = {
            name: value for name, value in opened.manifest.items() if name not in (*entry, "files", "crc32", "counters")
        }
        shared = _fields(opened.tree(SHARED, defaultdict(Unread)))
        # An earlier version may have recorded what this one hides.
        report = {
            **entry,
            **without_secrets(details),
            "files": {name: record["bytes"] for name, record in opened.files.items()},
        }
        if isinstance(shared.get("hparams"), dict):
            report["hparams"] = without_secrets({str(name): value for name, value in shared["hparams"].items()})
        if other_weights := list(_fields(opened.tree(OTHER_WEIGHTS, {}))):
            report["weights"] = other_weights
        if tensors:
            folders = ("model", "optim", *([WEIGHTS] if other_weights else ()))
            report["tensors"] = {folder: _tensor_facts(opened.tensors(folder)) for folder in folders}
            report["tied"] = _fields(_fields(opened.tree("model/model", {})).get("aliases"))
        return report


def _tensor_facts(files: TensorFiles) -> dict[str, Any]:
    """The shape, dtype and number of shards of each tensor, by name."""
    parts = files.parts()
    return {
        name: {"shape": list(stored.shape), "dtype": str(stored.dtype).removeprefix("torch."), "shards": parts[name]}
        for name, stored in files.stored.items()
    }


def problems(path: str | Path) -> dict[str, list[str]]:
    """Read all of a checkpoint, or of all checkpoints in a folder, and report what is wrong.

    Returns:
        For each checkpoint's path, one line per file that is missing, changed or unreadable; an empty list if it is intact.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    storage = folder_at(path)
    if storage is not None:
        names = list(storage.manifests())
        reasons = {name: problem.reason for name, problem in storage.incomplete(names).items()}
        return {str(storage.path(name)): _problems(storage, name, reasons.get(name, "")) for name in [*names, *reasons]}
    try:
        storage, names = find(path)
    except DamagedCheckpoint as error:
        return {str(path): [str(error)]}
    return {str(storage.path(name)): _problems(storage, name) for name in names}


def _problems(storage: Storage, name: str, reason: str = "") -> list[str]:
    """Verify one checkpoint and list what is wrong; ``reason``: the known problem if there is no usable manifest."""
    try:
        directory = storage.fetch(name)
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
            _read_headers_and_trees(directory, files)
        except (OSError, ValueError) as error:
            lines.append(str(error).removeprefix(f"{directory}: "))
    return lines


def _read_headers_and_trees(directory: Path, files: Sequence[str] | Mapping[str, Any]) -> None:
    """Read the headers of all tensor files, and all trees; a damaged one raises an error."""
    with Opened(directory, folders=()) as opened:
        for stem in opened.manifest.trees:
            opened.tree(stem, defaultdict(Unread))
        for file in files:
            if file.endswith(".safetensors"):
                check_header(directory / file)
            elif file.endswith(".json"):
                opened.tree(file.removesuffix(".json"), defaultdict(Unread))


def by_score(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the checkpoints with a score, best first; of equal ones the earlier comes first. A checkpoint counts only if its score is of the same
    monitor as the newest score.

    Args:
        manifests: by name, oldest first.
    """
    newest = list(manifests)[::-1]
    scores = {name: score for name in newest if (score := _score(manifests[name])) is not None}
    scored = [name for name, score in scores.items() if not math.isnan(score["value"])]
    if scored:
        newest_score = scores[scored[0]]
        scored = [
            name
            for name in reversed(scored)
            if (scores[name]["monitor"], scores[name]["mode"]) == (newest_score["monitor"], newest_score["mode"])
        ]
        scored.sort(key=lambda name: scores[name]["value"], reverse=newest_score["mode"] == "max")
    return scored


def prune(root: str | Path, keep: int, keep_best: int = 0, dry_run: bool = False) -> dict[str, list[str]]:
    """Delete complete checkpoints except the ``keep`` newest and the ``keep_best`` with the best scores. Incomplete ones are not touched.

    Returns:
        Lists of names: ``removed`` (with ``dry_run``, those that would be removed), ``kept``, and ``in_use`` (kept because they are being read).

    Raises:
        ValueError: nothing would be kept, or ``root`` is a checkpoint itself.
        FileNotFoundError: there is no complete checkpoint.
    """
    if keep < 0 or keep_best < 0 or keep + keep_best < 1:
        raise ValueError(f"keep={keep}, keep_best={keep_best}: at least one checkpoint must be kept")
    storage = folder_at(root)
    manifests = {} if storage is None else storage.manifests()
    if storage is None or not manifests:
        find(root)  # raises an error that says what is at this path
        raise ValueError(f"{root} is a checkpoint: give the folder that it is in")
    newest = list(manifests)[-keep:] if keep else []
    chosen = {*newest, *by_score(manifests)[:keep_best]} or {list(manifests)[-1]}
    report: dict[str, list[str]] = {"removed": [], "kept": [name for name in manifests if name in chosen], "in_use": []}
    for name in manifests:
        if name not in chosen:
            report["removed" if dry_run or storage.remove(name) else "in_use"].append(name)
    return report
