"""What a run does for calls of its module: ``manual_backward``, ``clip_gradients``, ``all_gather``, ``log_<kind>``, ``save_checkpoint``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.one_file import pack
from engine.checkpoint.storage import same, split
from engine.checkpoint.writer import Content, Saver
from engine.distributed.collectives import stack
from engine.metrics import media
from engine.step.wrappers import raw
from engine.utils.errors import nearest
from engine.utils.log import warn_once
from engine.utils.parameters import parameters_of


def manual_backward(run: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    """The backward pass of ``loss`` with its hooks."""
    for hook in run.hooks.on_before_backward:
        hook(run, run.module, loss)
    run.phases.named("backward", run.backward)(loss, *args, **kwargs)
    for hook in run.hooks.on_after_backward:
        hook(run, run.module)


def clip_gradients(run: Any, optimizer: Any, value: float | None, algorithm: str | None) -> None:
    """Clip the gradients of one optimizer; ``None``: the settings' value and algorithm.

    Raises:
        ValueError: an unknown algorithm.
    """
    value = run.settings.gradient_clip_val if value is None else value
    algorithm = run.settings.gradient_clip_algorithm if algorithm is None else algorithm
    if algorithm not in ("norm", "value"):
        raise ValueError(
            f"gradient_clip_algorithm={algorithm!r} is unknown{nearest(algorithm, ('norm', 'value'))}; possible: 'norm', 'value'"
        )
    if not value:
        return
    if not run.module.automatic_optimization:
        optimizer.readable()
    clip = run.engine.clip_grad_norm_ if algorithm == "norm" else run.engine.clip_grad_value_
    clip(parameters_of([raw(optimizer)]), value)


def log_media(run: Any, kind: str, name: str, value: Any, **options: Any) -> None:
    """See :meth:`engine.Run.log_media`."""
    taken = media.checked(kind, name, value, **options)
    if not any(kind in callback.takes for callback in run.callbacks):
        warn_once(f"log_{kind}: no logger of this run takes it; {name!r} and others of this kind are left out")
    elif run.is_main_process and run.stage != "sanity":  # whose numbers are not logged either
        for hook in run.hooks.on_media:
            hook(run, run.module, kind, name, taken, options)


def all_gather(run: Any, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """The tensors in ``data``, and its numbers as tensors, of all ranks.

    Raises:
        ValueError: a ``group`` of some ranks only.
    """
    if group is not None and group.size() != run.world_size:
        raise ValueError(
            f"all_gather(group=...) is a group of {group.size()} rank(s), but values are gathered over all {run.world_size}: leave it out, "
            "or call torch.distributed.all_gather with it"
        )
    return stack(run.engine.group, _with_tensors(data, run.device), sync_grads)


def _with_tensors(tree: Any, device: torch.device) -> Any:
    """``tree`` with its numbers as tensors."""
    if isinstance(tree, (bool, int, float)):
        return torch.tensor(tree, device=device)
    if type(tree) in (list, tuple):
        return type(tree)(_with_tensors(each, device) for each in tree)
    return {key: _with_tensors(each, device) for key, each in tree.items()} if type(tree) is dict else tree


def save_file(run: Any, path: Path | str, content: Callable[..., Content]) -> Path:
    """Save a checkpoint as one local file, whose folders are made; see :mod:`engine.checkpoint.one_file`.

    Raises:
        ValueError: ``path`` is a URL.
    """
    if "://" in str(path):
        raise ValueError(f"{path}: a checkpoint is one file only at a local path; at a URL it is a folder")
    file = Path(path).absolute()
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = file.with_name(f".{file.name}.folder")
    save_at(run, folder, content)
    if run.is_main_process:
        pack(folder, file)
        shutil.rmtree(folder)
    run.engine.wait_for_everyone()
    return file


def save_at(run: Any, where: Path | str, content: Callable[..., Content]) -> Path | str:
    """Save a checkpoint at a path or a URL; a name alone, or a path in the run's folder of checkpoints, is one of the run's own."""
    location, name = split(where)
    if str(where) == name or same(location, run.saver.location):
        found: Path | str = run.save_checkpoint(name)
        return found
    saver = Saver(run.engine.group, location.root)
    run.engine.settle()
    unchanging = run.module.automatic_optimization and not run.modes.switched
    try:
        with run.phases.of("checkpoint"), run.modes.evaluating():
            return saver.save(name, content(run, None), unchanging=unchanging)
    finally:
        saver.close()
