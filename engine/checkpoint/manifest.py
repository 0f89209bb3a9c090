"""The manifest of a checkpoint: its content, its versions, and the checks before it is used.

A version of this library reads the formats that it writes and the one before. An older checkpoint must be loaded and saved by a version that
reads it, a newer one needs a newer version: errors say so, and neither is ever replaced or removed.
A checkpoint has the lowest format that can express it, so versions that read only format 3 can still read checkpoints of large models.

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
import re
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
"""The name of the tree that is the same on all ranks, and the names of each rank's own."""
JOINED = "rank=00000.safetensors"
"""The file with all tensors of a joined checkpoint. Their names begin with the folder or tree in which other checkpoints have them."""
JOINED_BYTES = 4 << 20
"""Bytes of tensors up to which a checkpoint of one rank is joined: beyond this the joined form would save less than a tenth."""
JOINED_TREES = 1 << 16
"""Bytes of JSON up to which a checkpoint is joined: a listing reads the manifests of all checkpoints, trees included."""
TREES = "$trees"
"""The manifest's entry with the trees of a joined checkpoint. No fact of a user can have this name."""
WEIGHTS = "weights"
"""The folder of weights besides the trained ones, in checkpoints that have some. Versions that do not know it report such checkpoints as damaged."""
OTHER_WEIGHTS = f"{WEIGHTS}/{WEIGHTS}"
"""The tree in the folder :data:`WEIGHTS`: ``{name of the weights: {"aliases": names in the model that share a tensor}}``."""
SCORED_WITH = "scored_with"
"""The manifest's entry that names the weights with which the score was measured. They are loaded unless the user asks for others."""
TRAINED = "trained"
"""The name of the weights that are trained, from which a training continues. A checkpoint that has no others does not state it."""
_RESERVED = {"format": int, "serial": int, "saved_at": float, "world_size": int, "files": dict, "crc32": str}
_MAX_SAVED_AT = 253402300800.0
"""The year 10,000 in seconds since 1970: later times cannot be displayed."""
_MAX_SERIAL = 1 << 62
HEAD_BYTES = 128
"""Bytes of a manifest's text in which its serial number is."""
_HEAD = re.compile(rb'\{\s*"format":\s*[0-9]+,\s*"serial":\s*([0-9]{1,19}),')


class Manifest(dict[str, Any]):
    """A manifest that was read and checked; its trees are kept apart."""

    trees: dict[str, Any]
    """The trees of a joined checkpoint, as :func:`engine.checkpoint.json_tree.pack` returns them; empty if the trees are in files."""


class PackedFacts(dict[str, Any]):
    """A user's facts that are JSON values already."""


def manifest_of(
    world_size: int,
    facts: Mapping[str, Any],
    files: Mapping[str, Record],
    serial: int,
    trees: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Create the manifest of a checkpoint whose files are all written.

    Args:
        facts: small JSON values by name, such as counters and metrics (NaN is allowed).
        serial: the checkpoint's number from :func:`next_serial`.
        trees: the trees of a joined checkpoint, as JSON.

    Raises:
        TypeError, ValueError: a fact is not a small JSON value, or has a reserved name.
    """
    value = facts if isinstance(facts, PackedFacts) else packed_facts(facts)
    version = JOINED_FORMAT if trees else FORMAT
    head = {"format": version, "serial": serial, "saved_at": time.time(), "world_size": world_size}
    manifest = {**head, **value, "files": dict(sorted(files.items())), **({TREES: dict(trees)} if trees else {})}
    return {**manifest, "crc32": _checksum(manifest)}


def next_serial(serials: Iterable[int]) -> int:
    """The ``serial`` of the next checkpoint in a folder whose checkpoints have these ``serials``: one more than their maximum.

    The serial number tells which checkpoint was written last. A clock cannot, since clocks may be set back; neither can the step, since a
    run may resume from an earlier one.
    """
    return min(_MAX_SERIAL, 1 + max(serials, default=0))


def serial_in(head: bytes) -> int | None:
    """The serial number in the first :data:`HEAD_BYTES` of a manifest's text, which may be damaged; ``None`` if the text begins in another way."""
    match = _HEAD.match(head)
    return int(match[1]) if match else None


def age_of(manifest: Mapping[str, Any]) -> tuple[int, float, int, float]:
    """The key for sorting the manifests of one folder, oldest first: ``serial``, then the step; in format 2 the time, since it has no ``serial``."""
    counters = manifest.get("counters")
    step = counters.get("step") if isinstance(counters, dict) else None
    saved_at: float = manifest["saved_at"]
    return manifest["serial"], 0.0 if manifest["serial"] else saved_at, step if type(step) is int else -1, saved_at


def packed_facts(facts: Mapping[str, Any]) -> PackedFacts:
    """Convert ``facts`` to JSON values for a manifest, with the errors of :func:`manifest_of`."""
    if reserved := [name for name in _RESERVED if name in facts]:
        raise ValueError(f"the names {reserved} are reserved in the manifest: choose other names")
    value, tensors = pack(dict(facts))
    if tensors or not isinstance(value, dict) or "$" in value:
        raise TypeError(
            f"the manifest is for small JSON values by name; found tensors {sorted(tensors)}, names {list(facts)}"
        )
    return PackedFacts(value)


def check_manifest(where: Any, manifest: Any) -> Manifest:
    """Check a manifest that was read, and convert one of the previous format.

    Args:
        where: the checkpoint, for messages.

    Raises:
        DamagedCheckpoint: the manifest has changed since it was written, or has an unknown form.
    """
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise DamagedCheckpoint(f"{where}: {MANIFEST} has no format version")
    if not READABLE[0] <= manifest["format"] <= READABLE[1]:
        raise DamagedCheckpoint(f"{where}: {_unreadable(manifest['format'])}")
    older = {"serial": 0} if manifest["format"] < FORMAT else {}
    for name, kind in _RESERVED.items():
        if name not in older and type(manifest.get(name)) is not kind:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable {name!r}")
    try:
        checksum = _checksum(manifest)
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
    """Check the trees of a joined checkpoint: format 4 must have some, other formats must not."""
    joined = manifest["format"] >= JOINED_FORMAT
    if not isinstance(trees, dict) or joined != bool(trees) or not all(map(_is_part, trees)):
        raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable {TREES!r}")


def _is_part(name: str) -> bool:
    """Whether ``name`` can be that of a file or a tree in one of a checkpoint's folders."""
    folder, _, file = name.partition("/")
    return folder in (*FOLDERS, WEIGHTS) and is_entry(file)


def _check_values(where: Any, manifest: Mapping[str, Any], joined: Sequence[str]) -> None:
    """Check the values that are used as paths, sizes or bounds of loops. ``joined``: the only files that a joined checkpoint may have."""
    for name, record in manifest["files"].items():
        if not (name in joined if joined else _is_part(name)):
            raise DamagedCheckpoint(
                f"{where}: {MANIFEST} names the file {name!r}, which leads out of the checkpoint or is not part of one"
            )
        if not isinstance(record, dict) or type(record.get("bytes")) is not int or not _has_checksums(record):
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has no usable entry for {name!r}")
    # Each rank wrote a file, so the number of files bounds world_size.
    limits = {
        "serial": _MAX_SERIAL,
        "saved_at": _MAX_SAVED_AT,
        "world_size": max(1, len(manifest["files"])),
    }
    for name, maximum in limits.items():
        if not (name == "world_size") <= manifest[name] <= maximum:
            raise DamagedCheckpoint(f"{where}: {MANIFEST} has the {name} {manifest[name]!r:.40}, which is not possible")


def _unreadable(version: int) -> str:
    """The end of an error about a format that this version cannot read."""
    problem = f"has format {version!s:.20}, and this version reads {READABLE[0]} to {READABLE[1]}"
    if version > READABLE[1]:
        return f"{problem}: load it with the newer version that wrote it"
    return f"{problem}: load it with an older version that still reads it, and save it again"


def _has_checksums(record: Mapping[str, Any]) -> bool:
    """Whether a file's record has one checksum for each block."""
    sums = record.get("crc32")
    return (
        isinstance(sums, list)
        and len(sums) == max(1, -(-record["bytes"] // BLOCK))
        and all(type(checksum) is str for checksum in sums)
    )


def _checksum(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return f"{zlib.crc32(_encode_sorted(content).encode()):08x}"


_encode_sorted = json.JSONEncoder(sort_keys=True).encode
