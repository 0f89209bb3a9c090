"""The manifest of a checkpoint: its content, its versions, and the checks before it is used.

A version of this library reads the formats that it writes and the one before. Load and save an older one with a version that
reads it; a newer one needs a newer version. Both are errors that say this, and such a checkpoint is never replaced or removed.
A checkpoint has the lowest format that can express it, so versions that read format 3 read those of large models.

====== =============================================================================================================================
format what changed
====== =============================================================================================================================
4      small checkpoints have their trees in the manifest, as ``$trees``, and their tensors in one file
3      ``serial``; the classes of optimizers and schedulers in ``state/shared.json``
2      checksums of blocks
====== =============================================================================================================================
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.checkpoint.files import BLOCK, DamagedCheckpoint, Record, is_entry
from engine.checkpoint.json_tree import pack, unpack

FORMAT, JOINED_FORMAT = 3, 4
READABLE = (FORMAT - 1, JOINED_FORMAT)
MANIFEST = "manifest.json"
FOLDERS = ("model", "optim", "state")
SHARED, RANK = "state/shared", "state/rank={:05d}"
"""The name of the tree that all ranks share, and the names of each rank's own tree."""
JOINED = "rank=00000.safetensors"
"""The file with all tensors of a joined checkpoint; their names begin with the names of the trees or folders that they would be in."""
JOINED_BYTES = 4 << 20
"""Bytes of tensors up to which a checkpoint of one rank is joined: from here on the joined form would save less than a tenth."""
JOINED_TREES = 1 << 16
"""Bytes of JSON up to which a checkpoint of one rank is joined: a list of checkpoints reads all of their manifests."""
TREES = "$trees"
"""The entry with the trees of a joined checkpoint. No fact of a user has such a name."""
WEIGHTS = "weights"
"""One more folder, in checkpoints that have other weights besides the trained ones; versions that do not know it call these damaged."""
OTHER_WEIGHTS = f"{WEIGHTS}/{WEIGHTS}"
"""The tree in that folder: ``{name of the weights: {"aliases": names in the model that share a tensor}}``."""
SCORED_WITH = "scored_with"
"""The entry that names the weights with which the score was measured: what users of the checkpoint get, unless they ask for others."""
TRAINED = "trained"
"""The name of a checkpoint's own weights, from which the training continues. Checkpoints without other weights name none."""
_OURS = {"format": int, "serial": int, "saved_at": float, "world_size": int, "files": dict, "crc32": str}
_LATEST = 253402300800.0
"""The year 10,000, in seconds since 1970: later times cannot be displayed."""
_MOST_SERIAL = 1 << 62


class Manifest(dict[str, Any]):
    """A manifest that was read and checked, without its trees."""

    trees: dict[str, Any]
    """The trees of a joined checkpoint, as :func:`engine.checkpoint.json_tree.pack` returns them; empty: they are in files of their own."""


class PackedFacts(dict[str, Any]):
    """Facts of a user in the form of JSON."""


def manifest_of(
    world_size: int,
    facts: Mapping[str, Any],
    files: Mapping[str, Record],
    serial: int,
    trees: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The manifest of a checkpoint that was just completed.

    Args:
        facts: small JSON values by name, such as counters and metrics (NaN is fine).
        serial: see :func:`next_serial`.
        trees: those of a joined checkpoint, as JSON.

    Raises:
        TypeError, ValueError: ``facts`` has something that is not such a value, or has a reserved name.
    """
    value = facts if isinstance(facts, PackedFacts) else packed_facts(facts)
    version = JOINED_FORMAT if trees else FORMAT
    head = {"format": version, "serial": serial, "saved_at": time.time(), "world_size": world_size}
    manifest = {**head, **value, "files": dict(sorted(files.items())), **({TREES: dict(trees)} if trees else {})}
    return {**manifest, "crc32": _sum(manifest)}


def next_serial(serials: Iterable[int]) -> int:
    """The ``serial`` of the next checkpoint of a folder: one more than the maximum of ``serials``, which the folder's checkpoints have.

    It tells which checkpoint of a folder was written last. A clock cannot, since clocks may be set back; neither can the step, since a
    run may resume from an earlier one.
    """
    return min(_MOST_SERIAL, 1 + max(serials, default=0))


def age_of(manifest: Mapping[str, Any]) -> tuple[int, float, int, float]:
    """The sort key of manifests in one folder, oldest first: ``serial``, then the step; the time only in format 2."""
    counters = manifest.get("counters")
    step = counters.get("step") if isinstance(counters, dict) else None
    saved_at: float = manifest["saved_at"]
    return manifest["serial"], 0.0 if manifest["serial"] else saved_at, step if type(step) is int else -1, saved_at


def packed_facts(facts: Mapping[str, Any]) -> PackedFacts:
    """Convert ``facts`` to JSON values for a manifest; raises the errors of :func:`manifest_of`."""
    if reserved := [name for name in _OURS if name in facts]:
        raise ValueError(f"the names {reserved} are reserved in the manifest: choose other names")
    value, tensors = pack(dict(facts))
    if tensors or not isinstance(value, dict) or "$" in value:
        raise TypeError(
            f"the manifest is for small JSON values by name; found tensors {sorted(tensors)}, names {list(facts)}"
        )
    return PackedFacts(value)


def check_manifest(where: Any, manifest: Any) -> Manifest:
    """Check a manifest that was read; one of the previous format is converted to the current one.

    Raises:
        DamagedCheckpoint: it has changed, or has an unknown form.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} has no format version")
    if not READABLE[0] <= manifest["format"] <= READABLE[1]:
        raise DamagedCheckpoint(f"{where}: {_unreadable(manifest['format'])}")
    older = {"serial": 0} if manifest["format"] < FORMAT else {}
    for name, kind in _OURS.items():
        if name not in older and type(manifest.get(name)) is not kind:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable {name!r}")
    try:
        checksum = _sum(manifest)
    except RecursionError as error:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} is nested too deeply") from error
    if checksum != manifest["crc32"]:
        raise DamagedCheckpoint(
            f"{where}: {MANIFEST} is not what was written: its checksum is {checksum}, expected {manifest['crc32']!r}"
        )
    manifest = {**manifest, **older}
    trees = manifest.pop(TREES, {}) if manifest["format"] >= JOINED_FORMAT else {}
    _check_trees(where, manifest, trees)
    _check_values(where, manifest, (JOINED,) if trees else ())
    try:
        value = unpack(manifest, {})
    except ValueError as error:
        raise DamagedCheckpoint(f"{where}: {MANIFEST}: {error}") from error
    if type(value) is not dict:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} is not a dict")
    checked = Manifest(value)
    checked.trees = trees
    return checked


def _check_trees(where: Any, manifest: Mapping[str, Any], trees: Any) -> None:
    """Check the entry of a joined checkpoint: other formats have none, and it is what makes the format 4."""
    joined = manifest["format"] >= JOINED_FORMAT
    if not isinstance(trees, dict) or joined != bool(trees) or not all(map(_is_part, trees)):
        raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable {TREES!r}")


def _is_part(name: str) -> bool:
    """Check that ``name`` is a file or a tree in one of the folders of a checkpoint."""
    folder, _, file = name.partition("/")
    return folder in (*FOLDERS, WEIGHTS) and is_entry(file)


def _check_values(where: Any, manifest: Mapping[str, Any], joined: Sequence[str]) -> None:
    """Check what is used as a path, a size or a loop's end. ``joined``: the files of a joined checkpoint."""
    for name, record in manifest["files"].items():
        if not (name in joined if joined else _is_part(name)):
            raise DamagedCheckpoint(
                f"{where}: {MANIFEST} names the file {name!r}, which leads out of the checkpoint or is not part of one"
            )
        if not isinstance(record, dict) or type(record.get("bytes")) is not int or not _sums(record):
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable entry for {name!r}")
    limits = {
        "serial": _MOST_SERIAL,
        "saved_at": _LATEST,
        "world_size": max(1, len(manifest["files"])),
    }  # each rank wrote a file
    for name, maximum in limits.items():
        if not (name == "world_size") <= manifest[name] <= maximum:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has the {name} {manifest[name]!r:.40}, which is not possible")


def _unreadable(version: int) -> str:
    problem = f"has format {version!s:.20}, and this version reads {READABLE[0]} to {READABLE[1]}"
    if version > READABLE[1]:
        return f"{problem}: load it with the newer version that wrote it"
    return f"{problem}: load it with an older version that still reads it, and save it again"


def _sums(record: Mapping[str, Any]) -> bool:
    """Whether a record has one checksum for each block."""
    sums = record.get("crc32")
    return (
        isinstance(sums, list)
        and len(sums) == max(1, -(-record["bytes"] // BLOCK))
        and all(type(checksum) is str for checksum in sums)
    )


def _sum(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return f"{zlib.crc32(_sorted(content).encode()):08x}"


_sorted = json.JSONEncoder(sort_keys=True).encode
