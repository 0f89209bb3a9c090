"""Reads the content of a ``torch.distributed.checkpoint`` directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.files import stable_name
from engine.compat.foreign_checkpoints.foreign_content import MODEL_KEYS, ForeignContent, with_names
from engine.compat.foreign_checkpoints.lightning_ckpt import add_lightning_entries
from engine.compat.foreign_checkpoints.optimizer_names import nested
from engine.compat.foreign_checkpoints.untrusted_files import DistributedFiles, load_pickle


def distributed_content(path: Path) -> ForeignContent:
    """The content of a ``torch.distributed.checkpoint`` directory: the model, optimizers, and what Lightning keeps in its ``meta.pt``."""
    files = DistributedFiles(path)
    paths = files.paths
    outer_keys = {p[0] for p in paths.values()}
    if (
        len(outer_keys) == 1 and not outer_keys & set(MODEL_KEYS) and all(len(p) > 2 for p in paths.values())
    ):  # one outer key, such as "app"
        paths = {name: p[1:] for name, p in paths.items()}
    key = next((key for key in MODEL_KEYS if any(p[0] == key and len(p) > 1 for p in paths.values())), None)
    model_paths = {name: p for name, p in paths.items() if (p[0] == key if key is not None else len(p) == 1)}
    names = {
        ".".join(map(str, p if key is None else p[1:])): name for name, p in model_paths.items() if name in files.stored
    }
    if not names:
        raise ValueError(
            f"{path}: no model is found among {', '.join(map(str, dict.fromkeys(p[0] for p in paths.values())))}"
        )
    content = ForeignContent("torch.distributed.checkpoint directory", files, names)
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
            content.optim.append(with_names({"state": {}, **nested(values)}, content, f"optimizer {outer_key!r}"))
        else:
            content.notes.append(f"left out: {outer_key!r}")
    if (path / "meta.pt").is_file():  # Lightning's, with sharded tensors
        with stable_name(path / "meta.pt") as file:
            optim, loaded = content.optim, load_pickle(file, path / "meta.pt")
        content = add_lightning_entries({**loaded, "optimizer_states": []}, content)
        content.kind, content.optim = "Lightning sharded checkpoint", optim
    return content
