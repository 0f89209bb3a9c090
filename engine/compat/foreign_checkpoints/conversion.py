"""Conversion of other libraries' checkpoints: a Lightning ``.ckpt``, a ``torch.distributed.checkpoint`` directory, safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.catalog import folder_at
from engine.checkpoint.content import packed_weights
from engine.checkpoint.files import Record, stable_name
from engine.checkpoint.json_tree import pack, same_memory
from engine.checkpoint.manifest import MANIFEST, OTHER_WEIGHTS, SCORED_WITH, SHARED, WEIGHTS
from engine.checkpoint.remote_storage import local_copy, without_query
from engine.checkpoint.storage import Draft
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.tensors import Stored, TensorFiles, storable
from engine.compat.foreign_checkpoints.optimizer_names import nested, with_parameter_names
from engine.compat.foreign_checkpoints.untrusted_files import (
    METADATA,
    PICKLE,
    DistributedFiles,
    InMemory,
    Tensors,
    load_pickle,
)

SHARD = 2 << 30
"""The maximum bytes of tensors in memory at a time, and in one file."""
AVERAGE = "average"
"""The name of averaged weights in the new checkpoint: that of :class:`callbacks.WeightAveraging`."""
_MODELS = ("model", "state_dict", "module")
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin")
_LIGHTNING = frozenset(
    (
        *(
            "state_dict",
            "epoch",
            "global_step",
            "pytorch-lightning_version",
            "loops",
            "callbacks",
            "optimizer_states",
            "lr_schedulers",
        ),
        *(
            "hparams_name",
            "hyper_parameters",
            "hparams_type",
            "datamodule_hparams_name",
            "datamodule_hyper_parameters",
            *_SCALERS,
        ),
    )
)


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


@dataclass
class _Content:
    """The content of a foreign checkpoint."""

    kind: str
    model: Tensors
    names: dict[str, str]
    """Name of a model's tensor -> its name in ``model``; one entry for tied weights."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied weights -> the name in ``names`` of the same tensor."""
    optim: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    step: int = 0
    epoch: int = 0
    hparams: dict[str, Any] = field(default_factory=dict)
    hparams_name: str | None = None
    user: dict[str, Any] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    """The averaged weights, with which the model was validated."""
    notes: list[str] = field(default_factory=list)


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
    if name in {*storage.manifests(), *storage.incomplete()} or ("://" not in str(out) and Path(out).exists()):
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


def _read(path: Path, source_name: str, trust_pickle: bool) -> _Content:
    """Read the file or directory; ``source_name`` is the user's name for it."""
    if path.is_dir() and ((path / MANIFEST).is_file() or folder_at(path) is not None):
        raise ValueError(f"{source_name} is a checkpoint of this library already: there is nothing to convert")
    has_safetensors = path.is_dir() and next(path.glob("*.safetensors"), None) is not None
    if path.is_file() and path.suffix == ".safetensors":
        tensor_file = TensorFiles(path, [path])
        return _Content("safetensors file", tensor_file, {name: name for name in tensor_file.stored})
    if has_safetensors and not (path / METADATA).is_file():
        tensor_files = TensorFiles(path)
        return _Content("safetensors directory", tensor_files, {name: name for name in tensor_files.stored})
    if path.is_dir() and not (path / METADATA).is_file():
        raise ValueError(
            f"{source_name} has neither {METADATA} nor .safetensors files: give a torch.save file, or a directory of one of these kinds"
        )
    if not trust_pickle:
        raise ValueError(f"{source_name}{f' has a {METADATA} that' if path.is_dir() else ''} {PICKLE}")
    if path.is_dir():
        return _distributed(path)
    with stable_name(path) as file:
        loaded = load_pickle(file, source_name, mmap=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{source_name} holds a {type(loaded).__name__}: a dict of tensors by name is needed, or one with {', '.join(_MODELS)}"
        )
    if "state_dict" in loaded and "pytorch-lightning_version" in loaded:
        return _lightning_content(loaded, source_name)
    key = next((key for key in _MODELS if isinstance(loaded.get(key), Mapping)), None)
    content = _tensors("torch.save file", loaded if key is None else loaded[key], source_name)
    if key is not None:
        states = [value for name, value in loaded.items() if name != key and _is_optimizer(value)]
        content.optim = [_by_names(state, content, f"optimizer {index}") for index, state in enumerate(states)]
    return content


def _tensors(kind: str, state: Mapping[str, Any], source_name: str) -> _Content:
    """The tensors of a ``state_dict``; those that share memory become aliases of the first. Raise ``ValueError`` if a tensor cannot be stored."""
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(
            f"{source_name} has no tensors by name; its keys are {', '.join(map(str, list(state)[:8])) or 'none'}"
        )
    for name, tensor in tensors.items():
        if not storable(tensor):
            raise ValueError(
                f"{source_name}: {name!r} ({tensor.dtype}, {tensor.layout}) cannot be stored: convert it to a dense tensor first"
            )
    first: dict[Any, str] = {}
    aliases = {
        name: first_name
        for name, tensor in tensors.items()
        if (first_name := first.setdefault(same_memory(tensor), name)) != name
    }
    left_out = [str(name) for name in state if str(name) not in tensors]
    notes = (
        [
            f"left out, because it is not a tensor: {', '.join(left_out[:5])}{f' and {len(left_out) - 5} more' if len(left_out) > 5 else ''}"
        ]
        if left_out
        else []
    )
    return _Content(
        kind, InMemory(tensors), {name: name for name in tensors if name not in aliases}, aliases, notes=notes
    )


def _lightning_content(loaded: Mapping[str, Any], source_name: str) -> _Content:
    """The content of a Lightning checkpoint. If its ``WeightAveraging`` was used, its ``state_dict`` holds the averages, which were validated."""
    trained_weights = loaded.get("current_model_state")
    if not isinstance(trained_weights, Mapping):
        return _add_lightning_entries(loaded, _tensors("Lightning checkpoint", loaded["state_dict"], source_name))
    average, other_entries = _tensors("Lightning checkpoint", loaded["state_dict"], source_name), dict(loaded)
    for name in ("current_model_state", "averaging_state"):
        other_entries.pop(name, None)
    content = _add_lightning_entries(other_entries, _tensors("Lightning checkpoint", trained_weights, source_name))
    names = {*average.names, *average.aliases}
    content.average = {str(name): value for name, value in loaded["state_dict"].items() if str(name) in names}
    content.notes.append(
        f"the average of WeightAveraging is there as the weights {AVERAGE!r}; in a training it starts again"
    )
    return content


def _add_lightning_entries(loaded: Mapping[str, Any], content: _Content) -> _Content:
    """Add the entries of a Lightning checkpoint other than its weights to ``content``, and return it."""
    content.step = int(loaded.get("global_step", 0))
    current = loaded.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    content.epoch = int(current.get("processed", loaded.get("epoch", 0)))
    for name, value in dict(loaded.get("hyper_parameters") or {}).items():
        if _is_storable(value, f"the hyperparameter {name!r}", content.notes):
            content.hparams[str(name)] = value
    hparams_name = loaded.get("hparams_name")
    content.hparams_name = hparams_name if isinstance(hparams_name, str) and hparams_name != "kwargs" else None
    content.optim = [
        _by_names(state, content, f"optimizer {i}") for i, state in enumerate(loaded.get("optimizer_states") or [])
    ]
    content.schedulers = [
        s for i, s in enumerate(loaded.get("lr_schedulers") or []) if _is_storable(s, f"scheduler {i}", content.notes)
    ]
    scaler = next((loaded[name] for name in _SCALERS if name in loaded), None)
    content.scaler = scaler if _is_storable(scaler, "the loss scaler", content.notes) else None
    content.user = {
        name: v
        for name, v in loaded.items()
        if name not in _LIGHTNING and _is_storable(v, f"the entry {name!r}", content.notes)
    }
    if loaded.get("callbacks"):
        content.notes.append(f"left out: the states of {len(loaded['callbacks'])} callback(s)")
    return content


def _distributed(path: Path) -> _Content:
    """The content of a ``torch.distributed.checkpoint`` directory: the model, optimizers, and what Lightning keeps in its ``meta.pt``."""
    files = DistributedFiles(path)
    paths = files.paths
    outer_keys = {p[0] for p in paths.values()}
    if (
        len(outer_keys) == 1 and not outer_keys & set(_MODELS) and all(len(p) > 2 for p in paths.values())
    ):  # one outer key, such as "app"
        paths = {name: p[1:] for name, p in paths.items()}
    key = next((key for key in _MODELS if any(p[0] == key and len(p) > 1 for p in paths.values())), None)
    model_paths = {name: p for name, p in paths.items() if (p[0] == key if key is not None else len(p) == 1)}
    names = {
        ".".join(map(str, p if key is None else p[1:])): name for name, p in model_paths.items() if name in files.stored
    }
    if not names:
        raise ValueError(
            f"{path}: no model is found among {', '.join(map(str, dict.fromkeys(p[0] for p in paths.values())))}"
        )
    content = _Content("torch.distributed.checkpoint directory", files, names)
    entries_by_key: dict[Any, dict[tuple[Any, ...], str]] = {}
    for name, p in paths.items():
        if name not in model_paths:
            entries_by_key.setdefault(p[0], {})[p[1:]] = name
        elif name not in files.stored:
            content.notes.append(f"left out, because it is not a tensor: {name}")
    for outer_key, leaves in entries_by_key.items():
        if any(p[:1] == ("param_groups",) for p in leaves):
            values = {
                p: files.whole_tensors([name])[name] if name in files.stored else files.value(name)
                for p, name in leaves.items()
            }
            content.optim.append(_by_names({"state": {}, **nested(values)}, content, f"optimizer {outer_key!r}"))
        else:
            content.notes.append(f"left out: {outer_key!r}")
    if (path / "meta.pt").is_file():  # Lightning's, with sharded tensors
        with stable_name(path / "meta.pt") as file:
            optim, loaded = content.optim, load_pickle(file, path / "meta.pt")
        content = _add_lightning_entries({**loaded, "optimizer_states": []}, content)
        content.kind, content.optim = "Lightning sharded checkpoint", optim
    return content


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
    )


def _by_names(state: Any, content: _Content, what: str) -> Any:
    """An optimizer's state with parameter names as keys, if they can be found; otherwise unchanged. ``what``: its name in messages."""
    if not _is_optimizer(state) or not _is_storable(state, what, content.notes):
        raise ValueError(
            f"{what} is not an optimizer's state, or contains what a checkpoint cannot hold: {'; '.join(content.notes)}"
        )
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        return state
    by_names = with_parameter_names(
        state, {name: Stored(name, *_shape_and_dtype(content, name)) for name in content.names}
    )
    if by_names is None:
        content.notes.append(
            f"{what}: its parameters cannot be identified, so it keeps their numbers; these fit an optimizer created in the same way"
        )
        return state
    return by_names


def _shape_and_dtype(content: _Content, name: str) -> tuple[torch.Size, torch.dtype]:
    stored = content.model.stored[content.names[name]]
    return stored.shape, stored.dtype


def _is_storable(value: Any, what: str, notes: list[str]) -> bool:
    """Whether a checkpoint can store ``value``; if not, add a note that ``what`` is left out."""
    try:
        pack(value)
    except TypeError as error:
        notes.append(f"left out: {what}: {error}")
        return False
    return True


# -- writing --------------------------------------------------------------------------------------------------------------------------


def _write(draft: Draft, path: Path | str, content: _Content, source_name: str) -> Converted:
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


def _shards(content: _Content) -> Iterator[list[str]]:
    """Yield lists of the model's names whose tensors together take at most :data:`SHARD` bytes (or one larger tensor)."""
    shard: list[str] = []
    filled = 0
    for name in content.names:
        shape, dtype = _shape_and_dtype(content, name)
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


def _shared(content: _Content) -> dict[str, Any]:
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
