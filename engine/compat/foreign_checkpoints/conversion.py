"""Conversion of other libraries' checkpoints: a Lightning ``.ckpt``, a ``torch.distributed.checkpoint`` directory, safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.catalog import folder_at
from engine.checkpoint.content import packed_weights
from engine.checkpoint.files import Record, stable_name
from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import MANIFEST, OTHER_WEIGHTS, SCORED_WITH, SHARED, WEIGHTS
from engine.checkpoint.remote_storage import local_copy, without_query
from engine.checkpoint.storage import Draft
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.tensor_files import TensorFiles, storable
from engine.compat.foreign_checkpoints.foreign_content import (
    MODEL_KEYS,
    ForeignContent,
    is_optimizer,
    named_tensors,
    shape_and_dtype,
    with_names,
)
from engine.compat.foreign_checkpoints.lightning_ckpt import AVERAGE, lightning_content
from engine.compat.foreign_checkpoints.torch_distributed import distributed_content
from engine.compat.foreign_checkpoints.untrusted_files import (
    METADATA,
    PICKLE,
    load_pickle,
)
from engine.utils.paths import expanded

SHARD = 2 << 30
"""The maximum bytes of tensors in memory at a time, and in one file."""


@dataclass
class Converted:
    """Report of :func:`convert`: the checkpoint that it wrote."""

    path: str
    kind: str
    """The kind of the input."""
    tensors: int
    """The number of tensors of the model."""
    bytes: int
    optimizers: int
    step: int
    epoch: int
    hyperparameters: list[str]
    notes: list[str]
    """Notes on parts of the input that were left out or may be unexpected, and why."""


def convert(source: str | Path, out: str | Path, *, trust_pickle: bool = False) -> Converted:
    """Write the content of ``source`` as a checkpoint of this library, for ``Resume(out, weights_only=True)`` and ``load_from_checkpoint(out)``.

    A Lightning ``.ckpt`` provides weights, hyperparameters, counters, optimizers, schedulers and the loss scale; a run that resumes from it
    starts the current epoch again. Optimizer states are numbered there. If their shapes allow only one assignment to the model's
    parameters in order, they get the parameters' names; otherwise they keep their numbers, which fit an optimizer created in the
    same way. The other kinds provide weights, and the state of an optimizer if there is one. Callbacks' states are left out.

    Args:
        source: a file of ``torch.save`` (``.ckpt``, ``.pt``, ...), a ``.safetensors`` file, a directory with those (a Hugging Face model), or
            one of ``torch.distributed.checkpoint``; a path or a URL.
        out: the new checkpoint's directory or URL.
        trust_pickle: read pickles too, but only tensors and plain values in them; anything else is an error that names it.

    Raises:
        ValueError: a pickle without ``trust_pickle``, a pickle with other values, or a file of an unknown kind.
        DamagedCheckpoint: it cannot be read.
        FileExistsError, FileNotFoundError: ``out`` exists already; ``source`` does not exist.
    """
    if "://" in str(out) and str(out).rstrip("/").count("/") < 3:
        raise ValueError(
            f"{out} is a whole bucket or file system: give a name in it, such as {str(out).rstrip('/')}/step=00000000"
        )
    storage, name = split_path(out)
    if name in {*storage.manifests(), *storage.incomplete()} or (
        "://" not in str(out) and Path(expanded(out)).exists()
    ):
        raise FileExistsError(f"{out} exists already: choose another path")
    with local_copy(source) as path:
        source_name = without_query(source)
        content = _read(path, source_name, trust_pickle)
        draft = storage.begin(name)
        try:
            converted = _write(draft, storage.path(name), content, source_name)
        except BaseException:
            draft.abandon()
            raise
    return converted


# -- reading --------------------------------------------------------------------------------------------------------------------------


def _read(path: Path, source_name: str, trust_pickle: bool) -> ForeignContent:
    """Read the file or directory; ``source_name`` is the user's name for it."""
    if path.is_dir() and ((path / MANIFEST).is_file() or folder_at(path) is not None):
        raise ValueError(f"{source_name} is a checkpoint of this library already: there is nothing to convert")
    has_safetensors = path.is_dir() and next(path.glob("*.safetensors"), None) is not None
    if path.is_file() and path.suffix == ".safetensors":
        tensor_file = TensorFiles(path, [path])
        return ForeignContent("safetensors file", tensor_file, {name: name for name in tensor_file.stored})
    if has_safetensors and not (path / METADATA).is_file():
        tensor_files = TensorFiles(path)
        return ForeignContent("safetensors directory", tensor_files, {name: name for name in tensor_files.stored})
    if path.is_dir() and not (path / METADATA).is_file():
        raise ValueError(
            f"{source_name} has neither {METADATA} nor .safetensors files: give a torch.save file, or a directory of one of these kinds"
        )
    if not trust_pickle:
        raise ValueError(f"{source_name}{f' has a {METADATA} that' if path.is_dir() else ''} {PICKLE}")
    if path.is_dir():
        return distributed_content(path)
    with stable_name(path) as file:
        loaded = load_pickle(file, source_name, mmap=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{source_name} holds a {type(loaded).__name__}: a dict of tensors by name is needed, or one with {', '.join(MODEL_KEYS)}"
        )
    if "state_dict" in loaded and "pytorch-lightning_version" in loaded:
        return lightning_content(loaded, source_name)
    key = next((key for key in MODEL_KEYS if isinstance(loaded.get(key), Mapping)), None)
    content = named_tensors("torch.save file", loaded if key is None else loaded[key], source_name)
    if key is not None:
        states = [value for name, value in loaded.items() if name != key and is_optimizer(value)]
        content.optim = [with_names(state, content, f"optimizer {index}") for index, state in enumerate(states)]
    return content


# -- writing --------------------------------------------------------------------------------------------------------------------------


def _write(draft: Draft, path: Path | str, content: ForeignContent, source_name: str) -> Converted:
    """Fill the draft of the checkpoint at ``path``, a few of the model's tensors at a time, and seal it."""
    size = 0
    files: dict[str, Record] = {}
    for index, shard in enumerate(_shards(content)):
        tensors = content.model.whole_tensors([content.names[name] for name in shard])
        files |= _write_tensors(
            draft, f"model/rank={index:05d}.safetensors", {name: tensors[content.names[name]] for name in shard}
        )
        size += sum(tensor.nbytes for tensor in tensors.values())
    optim, states = pack({str(index): state for index, state in enumerate(content.optim)})
    if states:
        files |= _write_tensors(draft, "optim/rank=00000.safetensors", states)
    files |= draft.write_tree("model/model", ({"aliases": content.aliases, "extra": {}}, {}))
    files |= draft.write_tree("optim/optim", (optim, {}))
    files |= draft.write_tree(SHARED, pack(_shared(content)))
    facts = {
        "counters": {"epoch": content.epoch, "step": content.step, "batch_idx": 0},
        "metrics": {},
        "hparams": {
            k: v if isinstance(v, (str, int, float, bool, type(None))) else repr(v)[:200]
            for k, v in content.hparams.items()
        },
        "converted_from": {"path": source_name, "kind": content.kind},
        "versions": {"torch": str(torch.__version__)},
    }
    if content.average:
        (draft.folder / WEIGHTS).mkdir()
        tensors, tree = packed_weights({AVERAGE: content.average})
        file_tensors = {key.removeprefix(f"{WEIGHTS}/"): tensor for key, tensor in tensors.items()}
        files |= _write_tensors(draft, f"{WEIGHTS}/rank=00000.safetensors", file_tensors)
        files |= draft.write_tree(OTHER_WEIGHTS, (tree, {}))
        facts[SCORED_WITH] = AVERAGE
    draft.send(files)
    draft.seal(1, facts, files)
    return Converted(
        str(path),
        content.kind,
        len(content.names),
        size,
        len(content.optim),
        content.step,
        content.epoch,
        list(content.hparams),
        content.notes,
    )


def _shards(content: ForeignContent) -> Iterator[list[str]]:
    """Yield lists of the model's names whose tensors together take at most :data:`SHARD` bytes (or one larger tensor)."""
    shard: list[str] = []
    filled = 0
    for name in content.names:
        shape, dtype = shape_and_dtype(content, name)
        size = shape.numel() * dtype.itemsize
        if shard and filled + size > SHARD:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _write_tensors(draft: Draft, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Record]:
    for name, tensor in tensors.items():
        if not storable(tensor):
            raise ValueError(
                f"{name!r} ({tensor.dtype}, {tensor.layout}) cannot be stored: convert it to a dense tensor first"
            )
    return draft.write_tensors(file, tensors, {name: [0] * tensor.dim() for name, tensor in tensors.items()})


def _shared(content: ForeignContent) -> dict[str, Any]:
    """The tree ``state/shared`` of the new checkpoint; see :mod:`engine.loop.run_snapshot`."""
    return {
        "state": {"epoch": content.epoch, "step": content.step},
        "seed": None,
        "schedulers": content.schedulers,
        "scaler": content.scaler,
        "metrics": {},
        "elapsed_s": 0.0,
        "val_every": {"last_step": content.step, "last_s": 0.0},
        "datamodule": None,
        "hparams": content.hparams,
        "hparams_name": content.hparams_name,
        "registered": [],
        "postponed": [],
        "user": content.user,
        "callbacks": {},
    }
