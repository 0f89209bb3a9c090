"""Export of weights in the standard format, one ``.safetensors`` file or several with an index, and of files that a module publishes with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.catalog import open_path
from engine.checkpoint.files import DamagedCheckpoint, is_entry, parse_json, write_file, write_json
from engine.checkpoint.json_tree import same_memory
from engine.checkpoint.manifest import SHARED
from engine.checkpoint.reader import Source, weights_folder
from engine.checkpoint.remote_storage import outgoing
from engine.checkpoint.state_forms import checked_form
from engine.checkpoint.tensor_files import Stored, storable, write_tensors
from engine.config.file_size import size_in_bytes
from engine.utils.paths import expanded
from engine.utils.text import terminal_text

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtypes to which floating point tensors can be exported."""
INDEX = "model.safetensors.index.json"
PUBLISHED = "published"
PUBLISHED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken")
"""Suffixes of the files that a module may publish."""
STEMS = ("model", "adapter_model")
"""Possible names of the file with tensors, without ``.safetensors``."""
_PUBLISHED_FORM = {"stem": str, "prefix": str, "names": (dict, None), "files": dict}
_CONVERTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def export_tensors(state: Mapping[str, Any], directory: Path, *, max_shard_size: int | str = "5GB") -> list[Path]:
    """Write ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with ``model.safetensors.index.json``.

    Tied weights are written once, under their first name. Entries that are not tensors are left out.

    Args:
        state: whole tensors by name.
        max_shard_size: the maximum size of a file; a larger tensor gets its own file.

    Returns:
        The files with tensors.

    Raises:
        TypeError: safetensors cannot hold a tensor.
        FileExistsError: ``directory`` has such files already.
    """
    first_names: dict[Any, str] = {}
    chosen: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or first_names.setdefault(same_memory(tensor), name) != name:
            continue
        if not storable(tensor):
            raise TypeError(
                f"{name!r} ({tensor.dtype} on {tensor.device}) cannot be written as safetensors: convert it to a dense tensor first"
            )
        chosen[name] = tensor
    sizes = {name: tensor.nbytes for name, tensor in chosen.items()}
    return _write(sizes, lambda names: {name: chosen[name] for name in names}, directory, size_in_bytes(max_shard_size))


@dataclass
class Exported:
    """The result of :func:`export_checkpoint`."""

    files: list[str]
    """Paths or URLs of the files with tensors."""
    tensors: int
    bytes: int
    """The bytes of the tensors."""
    weights: str
    """``"trained"``, or the name of the weights, such as ``"ema"``."""
    tied: dict[str, str] = field(default_factory=dict)
    """Names that share a tensor with an exported one."""
    published: list[str] = field(default_factory=list)
    """Paths or URLs of the files that the module has published, such as ``config.json``."""
    left_out: list[str] = field(default_factory=list)
    """Names that the patterns did not select, and of state that is not a tensor."""


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    prefix_strip: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    weights: str | None = None,
) -> Exported:
    """Write the model of a checkpoint as files that ``transformers`` and ``safetensors.torch.load_file`` read.

    One file's tensors are in memory at a time. Tied weights are written once, under the first selected name. If the module has published
    files (:class:`Published`; ``HFModule`` does), they are written too, and tensors get the names that it gives: an adapter is exported as one.

    Args:
        path: a checkpoint, or a folder, whose newest checkpoint is used; a directory or a URL.
        out: the directory, or a URL.
        dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"`` for floating point tensors; by default each keeps its own. fp8 and integer tensors always do.
        max_shard_size: the maximum bytes of a file, or a text such as ``"5GB"``; a larger tensor gets its own file.
        prefix_strip: a prefix to remove from names; by default the one that the module has published.
        include, exclude: patterns (``*``, ``?``, ``[...]``) of the checkpoint's names; by default all of them.
        weights: ``"trained"``, or a name such as ``"ema"`` under which a callback saved other weights; by default the weights with which the
            checkpoint's score was measured.

    Raises:
        FileNotFoundError, DamagedCheckpoint: there is no checkpoint, or it is damaged.
        FileExistsError: ``out`` has such files already.
        ValueError: there are no such ``weights``, no tensor is selected, two would get the same name, a pattern or the prefix matches
            no name, or a number is too large for fp16.
    """
    limit = size_in_bytes(max_shard_size)
    export_dtype = _dtype(dtype)
    with open_path(path, ("model", "state", *weights_folder(weights))) as opened, outgoing(out) as directory:
        source, publication = Source(opened, weights), _published_in(opened.directory, opened.tree(SHARED) or {})
        all_names = source.names
        names = [name for name in _chosen(all_names, include, exclude) if name not in source.extra]
        first_names: dict[str, str] = {}
        for name in names:
            first_names.setdefault(source.aliases.get(name, name), name)
        if not first_names:
            raise ValueError(
                f"{path}: no tensor of the model's {len(all_names)} is selected: widen include, or narrow exclude"
            )
        targets = _named(first_names, publication, prefix_strip)
        stored = {export_name: source.stored(stored_name) for export_name, stored_name in targets.items()}
        sizes = {
            export_name: entry.shape.numel() * _dtype_in_export(entry, export_dtype).itemsize
            for export_name, entry in stored.items()
        }

        def read(chosen: list[str]) -> dict[str, Tensor]:
            return _read(source, {name: targets[name] for name in chosen}, export_dtype)

        written = _write(sizes, read, directory, limit, publication.stem)
        published_files = _write_published(publication, directory, export_dtype)
        locations = [
            str(file) if directory == Path(expanded(out)) else f"{str(out).rstrip('/')}/{file.name}"
            for file in (*written, *published_files)
        ]
        return Exported(
            files=locations[: len(written)],
            published=locations[len(written) :],
            tensors=len(sizes),
            bytes=sum(sizes.values()),
            weights=source.weights,
            tied={
                name: first_names[source.aliases.get(name, name)]
                for name in names
                if first_names[source.aliases.get(name, name)] != name
            },
            left_out=sorted(set(all_names) - set(names)),
        )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise ValueError(f"dtype={name!r} is unknown; possible: {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _dtype_in_export(stored: Stored, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor's copy in the export; ``dtype``: the one that the user chose."""
    return dtype if dtype is not None and stored.dtype in _CONVERTED else stored.dtype


def _chosen(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names that the patterns select; a pattern that matches none is an error."""
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} matches none of the model's names, such as {', '.join(names[:5])}"
            )
    included = [name for name in names if not include or any(fnmatchcase(name, pattern) for pattern in include)]
    return [name for name in included if not any(fnmatchcase(name, pattern) for pattern in exclude)]


def _named(first_names: Mapping[str, str], publication: Published, prefix: str | None) -> dict[str, str]:
    """Map the names in the export to the checkpoint's names.

    Args:
        first_names: the first selected name of each tensor, by the name under which it is stored.
        prefix: the user's ``prefix_strip``.
    """
    if publication.names is None or prefix is not None:
        published_prefix = (
            publication.prefix if any(name.startswith(publication.prefix) for name in first_names.values()) else ""
        )
        return _stripped(first_names, published_prefix if prefix is None else prefix)
    targets = {
        publication.names[name]: stored_name for stored_name, name in first_names.items() if name in publication.names
    }
    if missing := sorted(publication.names.keys() - first_names.values()):
        raise ValueError(
            terminal_text(
                f"the checkpoint has no {missing[0]!r}, which belongs to the adapter: include it, or exclude less"
            )
        )
    return targets


def _stripped(first_names: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Do the same as :func:`_named` by removing ``prefix`` from names."""
    if prefix and not any(name.startswith(prefix) for name in first_names.values()):
        raise ValueError(
            f"no name starts with {prefix!r}; the names are such as {', '.join(list(first_names.values())[:5])}"
        )
    targets: dict[str, str] = {}
    for stored_name, name in first_names.items():
        export_name = name.removeprefix(prefix)
        if not export_name or export_name in targets:
            raise ValueError(
                f"without {prefix!r}, {name!r} would have {'no name' if not export_name else f'the name of {targets[export_name]!r}'}: exclude one"
            )
        targets[export_name] = stored_name
    return targets


def _read(source: Source, names: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Read whole tensors, converted to ``dtype`` on the way. ``names``: the checkpoint's name of each exported one."""
    stored = {export_name: source.stored(stored_name) for export_name, stored_name in names.items()}
    tensors = {
        export_name: torch.empty(entry.shape, dtype=_dtype_in_export(entry, dtype))
        for export_name, entry in stored.items()
    }
    source.read_model({stored_name: tensors[export_name] for export_name, stored_name in names.items()})
    if dtype is torch.float16:
        for export_name, entry in stored.items():
            if entry.dtype in _CONVERTED and tensors[export_name].isinf().any():
                original = torch.empty(entry.shape, dtype=entry.dtype)
                source.read_model({names[export_name]: original})
                if (tensors[export_name].isinf() & ~original.isinf()).any():
                    raise ValueError(
                        f"{names[export_name]!r} has the number {original.abs().max().item():g}, and fp16 ends at 65504: export as bf16 or fp32"
                    )
    return tensors


def _write(
    sizes: Mapping[str, int],
    read: Callable[[list[str]], dict[str, Tensor]],
    directory: Path,
    limit: int,
    stem: str = "model",
) -> list[Path]:
    """Write the tensors named in ``sizes`` (bytes) into files of at most ``limit`` bytes, one after the other: ``read`` returns one file's tensors.

    After an error no files remain.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit and stem == "model":  # an adapter is one file
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    directory.mkdir(parents=True, exist_ok=True)
    if existing := sorted(path.name for path in directory.glob(f"{stem}*.safetensors*")):
        raise FileExistsError(f"{directory} holds {existing[0]} already: choose another directory, or remove it")
    count = len(shards)
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    )
    paths = [directory / name for name in names]
    try:
        for path, shard in zip(paths, shards, strict=True):
            write_tensors(path, read(shard))
        if count > 1:
            weights = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weights})
    except BaseException:
        for path in (*paths, directory / INDEX):
            path.unlink(missing_ok=True)
        raise
    return paths


# -- files that a module publishes ----------------------------------------------------------------------------------------------------


@dataclass
class Published:
    """The files that a module publishes with its weights, such as ``config.json``, and the names of its tensors in exported files.

    A module adds it to its checkpoints, and :func:`export_checkpoint` writes it::

        def on_save_checkpoint(self, checkpoint):
            checkpoint["published"] = published({"config.json": text.encode()}, prefix="model.")

    Only files of data can be published: code is neither stored nor exported.
    """

    stem: str = "model"
    """The name of the file with tensors, one of :data:`STEMS`."""
    prefix: str = ""
    """The prefix that is removed from names of tensors."""
    names: dict[str, str] | None = None
    """The only tensors to export, each with its exported name."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The content of each file by its name."""


def published(
    files: Mapping[str, bytes], *, prefix: str = "", stem: str = "model", names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The checkpoint entry that publishes these ``files``; the arguments are the fields of :class:`Published`.

    Raises:
        ValueError: a file may not be published: its name is a path, is hidden, or has no suffix of :data:`PUBLISHED_SUFFIXES`.
    """
    for name in files:
        if not _may_publish(name):
            raise ValueError(
                f"{name!r} cannot be published: possible are files that end in {', '.join(PUBLISHED_SUFFIXES)}"
            )
    content = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in files.items() if data}
    return {"stem": stem, "prefix": prefix, "names": None if names is None else dict(names), "files": content}


def _published_in(checkpoint: object, shared: Mapping[str, Any]) -> Published:
    """Find what a run's module, or an object registered with an ``Engine``, has published; an empty :class:`Published` if nothing was.

    Args:
        checkpoint: the name of the checkpoint, for messages.
        shared: its ``state/shared``.

    Raises:
        DamagedCheckpoint: the entry is not valid, or names a file that may not be published.
    """
    user, registered = shared.get("user"), shared.get("registered")
    states = [user.get(PUBLISHED)] if isinstance(user, dict) else []
    states += registered if isinstance(registered, list) else []
    entry = next(
        (state for state in states if isinstance(state, dict) and state.keys() == _PUBLISHED_FORM.keys()), None
    )
    if entry is None:
        return Published()
    fields = checked_form(f"{checkpoint}: {PUBLISHED}", entry, _PUBLISHED_FORM)
    names = fields["names"]
    if (
        fields["stem"] not in STEMS
        or not all(type(name) is str and _may_publish(name) for name in fields["files"])
        or not all(isinstance(data, Tensor) and data.dtype == torch.uint8 for data in fields["files"].values())
        or not all(type(new) is str for new in (names or {}).values())
    ):
        raise DamagedCheckpoint(f"{checkpoint} has no usable {PUBLISHED!r}")
    files = {name: data.contiguous().numpy().tobytes() for name, data in fields["files"].items()}
    return Published(fields["stem"], fields["prefix"], names, files)


def _write_published(publication: Published, directory: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write the published files into ``directory``. If the tensors were converted, ``config.json`` gets their ``dtype``.

    Raises:
        FileExistsError: one of the files exists already, even as a dangling link.
        DamagedCheckpoint: ``config.json`` is not a JSON object.
    """
    if existing := sorted(name for name in publication.files if os.path.lexists(directory / name)):
        raise FileExistsError(f"{directory} holds {existing[0]} already: choose another directory, or remove it")
    for name, data in publication.files.items():
        if name == "config.json" and dtype is not None:
            config = parse_json(f"the published {name}", data)
            if not isinstance(config, dict):
                raise DamagedCheckpoint(f"the published {name} is not a mapping")
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            data = json.dumps({**config, key: str(dtype).removeprefix("torch.")}, indent=2).encode() + b"\n"
        write_file(directory / name, [data])
    return [directory / name for name in publication.files]


def _may_publish(name: str) -> bool:
    """Whether ``name`` is that of a file that a module may publish."""
    return (
        is_entry(name)
        and not name.startswith(".")
        and Path(name).suffix in PUBLISHED_SUFFIXES
        and ".safetensors" not in name
    )
