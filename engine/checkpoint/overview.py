"""What checkpoints there are and how they are: for people, and for what keeps a folder small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.checkpoint.files import DamagedCheckpoint, inside, read_json, verify
from engine.checkpoint.finding import find
from engine.checkpoint.places import Place, place
from engine.checkpoint.store import FOLDERS, MANIFEST, SHARED, Opened, check_manifest
from engine.checkpoint.tensors import TensorFiles, read_tensors

Entry = dict[str, Any]


def entries(root: str | Path) -> list[Entry]:
    """All checkpoints in a folder (or in its ``checkpoints/``), complete ones first, oldest first.

    Returns:
        For each ``name``, ``path``, ``complete``; for a complete one also ``step``, ``epoch``, ``saved_at`` (seconds since 1970), ``bytes``,
        ``world_size``, ``metrics`` and ``score``; for another one ``reason``.

    Raises:
        FileNotFoundError: nothing there is a checkpoint, or began as one.
    """
    for each in (place(root), place(f"{str(root).rstrip('/')}/checkpoints")):
        found = [_entry(each, name, manifest) for name, manifest in each.manifests().items()]
        found += [{"name": name, "path": str(each.path(name)), "complete": False, "reason": why} for name, why in each.damaged().items()]
        if found:
            return found
    where, names = find(root)  # a checkpoint rather than a folder of them, or nothing at all
    return [_entry(where, name, manifest) for name, manifest in where.manifests().items() if name in names]


def _entry(where: Place, name: str, manifest: Mapping[str, Any]) -> Entry:
    counters = manifest.get("counters") or {}
    return {
        "name": name,
        "path": str(where.path(name)),
        "complete": True,
        "step": counters.get("step"),
        "epoch": counters.get("epoch"),
        "saved_at": manifest["saved_at"],
        "bytes": sum(known["bytes"] for known in manifest["files"].values()),
        "world_size": manifest["world_size"],
        "metrics": manifest.get("metrics") or {},
        "score": manifest.get("score"),
    }


def facts(path: str | Path, tensors: bool = False) -> dict[str, Any]:
    """What a checkpoint says of itself; checksums are not looked at.

    Args:
        tensors: list them too, as ``{"model" or "optim": {name: {"shape", "dtype", "shards" (number of parts in files)}}}``.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is none, or a file is missing or cannot be read.
    """
    where, names = find(path)
    with Opened(where.fetch(names[-1]), folders=()) as found:
        entry = _entry(where, names[-1], found.manifest)
        rest = {name: value for name, value in found.manifest.items() if name not in (*entry, "files", "crc32", "counters")}
        shared = found.tree(SHARED, _Shapes(found, SHARED)) or {}
        report = {**entry, **rest, "files": {name: known["bytes"] for name, known in found.files.items()}}
        if isinstance(shared.get("hparams"), dict):
            report["hparams"] = {str(name): value for name, value in shared["hparams"].items()}
        if tensors:
            report["tensors"] = {folder: _listed(found.tensors(folder)) for folder in ("model", "optim")}
            model = found.tree("model/model", {}) or {}
            report["tied"] = dict(model.get("aliases") or {})
        return report


class _Shapes(dict[str, Any]):
    """Stands for the tensors of a tree that are not worth reading."""

    def __init__(self, opened: Opened, stem: str) -> None:
        name = f"{stem}.safetensors"
        super().__init__(read_tensors(inside(opened.directory, name)) if name in opened.files else {})


def _listed(files: TensorFiles) -> dict[str, Any]:
    parts = files.parts()
    return {
        name: {"shape": list(known.shape), "dtype": str(known.dtype).removeprefix("torch."), "shards": parts[name]}
        for name, known in files.stored.items()
    }


def problems(path: str | Path) -> dict[str, list[str]]:
    """Read all of a checkpoint, or of all checkpoints in a folder, and say what is wrong.

    Returns:
        By path, one line for each file that is missing, changed or cannot be read; none for a checkpoint that is as it was written.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        where, names = find(path)
    except DamagedCheckpoint as error:
        return {str(path): [str(error)]}
    found = {str(where.path(name)): _problems(where, name) for name in names}
    if not (Path(str(path)).name in names and len(names) == 1):
        found |= {str(where.path(name)): [why] for name, why in where.damaged().items()}
    return found


def _problems(where: Place, name: str) -> list[str]:
    try:
        directory = where.fetch(name)
        manifest = check_manifest(directory, read_json(directory / MANIFEST))
    except (OSError, ValueError) as error:
        return [str(error)]
    files, found = manifest["files"], []
    for file in files:
        try:
            verify(directory, files, [file])
        except (OSError, ValueError) as error:
            found.append(str(error).removeprefix(f"{directory}: "))
    there = {str(path.relative_to(directory)) for folder in FOLDERS for path in (directory / folder).glob("*") if path.is_file()}
    found += [f"{file} is not in the manifest" for file in sorted(there - files.keys())]
    if not found:
        try:
            _open(directory, files)
        except (OSError, ValueError) as error:
            found.append(str(error).removeprefix(f"{directory}: "))
    return found


def _open(directory: Path, files: Sequence[str] | Mapping[str, Any]) -> None:
    """Open every file as what it is; errors as of the readers."""
    with Opened(directory, folders=()) as opened:
        for folder in ("model", "optim"):
            known = opened.tensors(folder).stored
            opened.tree(f"{folder}/{folder}", known if folder == "optim" else {})
        for file in files:
            if file.startswith("state/") and file.endswith(".json"):
                opened.tree(file.removesuffix(".json"))


def by_score(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of those with a score, the best first. Only scores of the newest one's monitor count: another's are no rivals.

    Args:
        manifests: oldest first.
    """
    newest = list(reversed(manifests))
    scores: dict[str, Any] = {name: manifests[name]["score"] for name in newest if isinstance(manifests[name].get("score"), dict)}
    scored = [name for name, score in scores.items() if score["value"] is not None and not math.isnan(score["value"])]
    if scored:
        first = scores[scored[0]]
        scored = [name for name in scored if (scores[name]["monitor"], scores[name]["mode"]) == (first["monitor"], first["mode"])]
        scored.sort(key=lambda name: scores[name]["value"], reverse=first["mode"] == "max")
    return scored


def prune(root: str | Path, keep: int, keep_best: int = 0, dry_run: bool = False) -> dict[str, list[str]]:
    """Delete complete checkpoints but the ``keep`` newest and the ``keep_best`` with the best scores. Incomplete ones are left alone.

    Returns:
        Names: ``removed`` (with ``dry_run`` those that would be), ``kept``, ``in_use`` (somebody is reading them: they stay too).

    Raises:
        ValueError: nothing would be kept.
        FileNotFoundError: there is no complete checkpoint.
    """
    if keep < 0 or keep_best < 0 or keep + keep_best < 1:
        raise ValueError(f"keep={keep}, keep_best={keep_best}: at least one checkpoint must be kept")
    where, _ = find(root)
    if str(where.root) not in (str(root).rstrip("/"), str(Path(root)), f"{str(root).rstrip('/')}/checkpoints"):
        raise ValueError(f"{root} is a checkpoint: give the folder that it is in")
    manifests = where.manifests()
    newest = list(manifests)[-keep:] if keep else []
    kept = {*newest, *by_score(manifests)[:keep_best]} or {list(manifests)[-1]}
    report: dict[str, list[str]] = {"removed": [], "kept": [name for name in manifests if name in kept], "in_use": []}
    for name in manifests:
        if name not in kept:
            report["removed" if dry_run or where.remove(name) else "in_use"].append(name)
    return report
