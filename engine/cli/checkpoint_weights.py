"""The subcommands of ``fit checkpoint`` that read tensors: ``export``, ``convert`` and ``pack``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engine.checkpoint.catalog import checkpoint_of, open_path
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.one_file import pack_folder
from engine.cli.annexes import annex
from engine.cli.checkpoint import Answer, run_action, size_text
from engine.utils.paths import expanded


def run(options: argparse.Namespace) -> int:
    """Run the subcommand ``options.action``, as :func:`engine.cli.checkpoint.run` does."""
    return run_action(_ACTIONS[options.action], options)


def _export(options: argparse.Namespace) -> Answer:
    exported = export_checkpoint(
        checkpoint_of(options.path, options.checkpoint),
        options.out,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        prefix_strip=options.prefix_strip,
        include=options.include,
        exclude=options.exclude,
        weights=options.weights,
    )
    lines = [
        *exported.files,
        *exported.published,
        f"{exported.tensors} tensors, {size_text(exported.bytes)}, weights {exported.weights!r}",
    ]
    lines += [f"tied, written once: {name} is {first}" for name, first in exported.tied.items()]
    lines += [f"left out: {name}" for name in exported.left_out]
    return asdict(exported), lines, True


def _convert(options: argparse.Namespace) -> Answer:
    converted = annex("engine.compat.foreign_checkpoints.conversion").convert(
        options.source, options.out, trust_pickle=options.trust_pickle
    )
    lines = [
        f"{converted.path}: from a {converted.kind}",
        f"{converted.tensors} tensors, {size_text(converted.bytes)}; {converted.optimizers} optimizer(s); "
        f"epoch {converted.epoch}, step {converted.step}",
        f"hyperparameters: {', '.join(converted.hyperparameters) or 'none'}",
    ]
    return asdict(converted), [*lines, *converted.notes], True


def _pack(options: argparse.Namespace) -> Answer:
    out = Path(expanded(options.out)).absolute()
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another path, or remove it")
    if options.weights is not None and not options.pickle:
        raise ValueError("--weights is for --pickle; without it the file has all weights of the checkpoint")
    with open_path(checkpoint_of(options.path, options.checkpoint)) as checkpoint:
        if options.pickle:
            annex("engine.compat.lightning.pickled_checkpoint").write_checkpoint(
                out, checkpoint.directory, options.weights
            )
        else:
            pack_folder(checkpoint.directory, out)
    size = out.stat().st_size
    return {"path": str(out), "bytes": size}, [f"{out}: {size_text(size)}"], True


_ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {"export": _export, "convert": _convert, "pack": _pack}
