"""The subcommands of ``fit checkpoint`` that read tensors: as those of :mod:`engine.cli.checkpoint_actions`, which need no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.one_file import pack
from engine.checkpoint.user_paths import opened
from engine.cli.annexes import annex
from engine.cli.checkpoint_actions import Answer, size_text


def _export(arguments: argparse.Namespace) -> Answer:
    found = export_checkpoint(
        arguments.path,
        arguments.out,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        prefix_strip=arguments.prefix_strip,
        include=arguments.include,
        exclude=arguments.exclude,
        weights=arguments.weights,
    )
    lines = [
        *found.files,
        *found.published,
        f"{found.tensors} tensors, {size_text(found.bytes)}, weights {found.weights!r}",
    ]
    lines += [f"tied, written once: {name} is {first}" for name, first in found.tied.items()]
    lines += [f"left out: {name}" for name in found.left_out]
    return asdict(found), lines, True


def _convert(arguments: argparse.Namespace) -> Answer:
    found = annex("engine.compat.convert.convert").convert(
        arguments.source, arguments.out, trust_pickle=arguments.trust_pickle
    )
    lines = [
        f"{found.path}: from a {found.kind}",
        f"{found.tensors} tensors, {size_text(found.bytes)}; {found.optimizers} optimizer(s); epoch {found.epoch}, step {found.step}",
        f"hyperparameters: {', '.join(found.hyperparameters) or 'none'}",
    ]
    return asdict(found), [*lines, *found.notes], True


def _pack(arguments: argparse.Namespace) -> Answer:
    out = Path(arguments.out).absolute()
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another path, or remove it")
    if arguments.weights is not None and not arguments.pickle:
        raise ValueError("--weights is for --pickle; without it the file has all weights of the checkpoint")
    with opened(arguments.path) as found:
        if arguments.pickle:
            annex("engine.compat.lightning.ckpt").write_checkpoint(out, found.directory, arguments.weights)
        else:
            pack(found.directory, out)
    size = out.stat().st_size
    return {"path": str(out), "bytes": size}, [f"{out}: {size_text(size)}"], True


ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {"export": _export, "convert": _convert, "pack": _pack}
