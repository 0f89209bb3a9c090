"""``fit checkpoint``: the arguments. The actions are imported when the arguments are valid."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from engine.cli.terminal import Parser
from engine.config.file_size import size_in_bytes

ACTIONS = "engine.cli.checkpoint_actions"
"""The module with a function for each subcommand."""
WEIGHTS = "'trained', or those that a callback has kept, such as 'ema'; by default those that the checkpoint's score was measured with"
"""The help of ``--weights``."""
_PLACE = "a directory or a URL that fsspec knows"


def main(argv: Sequence[str]) -> int:
    """Run one subcommand.

    Returns:
        0, or 1 after an error, or if something is wrong with a checkpoint. Wrong arguments end the process with status 2.
    """
    arguments = parser().parse_args(list(argv))
    return int(importlib.import_module(ACTIONS).run(arguments))


def parser() -> argparse.ArgumentParser:
    """The subcommands and their arguments."""
    top = Parser(
        prog="fit checkpoint",
        description="Inspect, verify, export, convert, pack and remove checkpoints, without running code from them.",
    )
    commands = top.add_subparsers(dest="action", required=True, metavar="list|show|verify|export|convert|pack|prune")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        found.add_argument("--json", action="store_true", help="print one JSON value")
        return found

    one = f"a checkpoint, or a folder, whose newest one is used: {_PLACE}"
    command = add("list", "list the checkpoints of a folder, oldest first; status 1 if one is incomplete or damaged")
    command.add_argument("root", help=_PLACE)

    command = add("show", "print a checkpoint's description")
    command.add_argument("path", help=one)
    command.add_argument(
        "--tensors", action="store_true", help="also each tensor's name, shape, dtype and number of shards"
    )

    command = add(
        "verify", "read all files again and compare them with their checksums; status 1 if something is wrong"
    )
    command.add_argument("paths", nargs="+", metavar="path", help=f"a checkpoint, or a folder with several: {_PLACE}")

    _export(
        add("export", "write a checkpoint's weights as .safetensors files that transformers and load_file read"), one
    )

    others = "a Lightning .ckpt, a torch.distributed.checkpoint directory or safetensors"
    _convert(add("convert", f"write a checkpoint of this library from {others}"))
    command = add("pack", "write a checkpoint as one file, from which everything that takes a checkpoint reads it")
    command.add_argument("path", help=one)
    command.add_argument("out", help="the file, by convention x.ckpt: a zip archive of the checkpoint's folder")
    command.add_argument(
        "--pickle",
        action="store_true",
        help="instead a dict for torch.load: weights, hyperparameters and counters under Lightning's keys",
    )
    command.add_argument("--weights", metavar="NAME", help=f"with --pickle: {WEIGHTS}")
    _prune(
        add("prune", "delete all complete checkpoints of a folder except the newest, and those with the best scores")
    )
    return top


def _convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="in", help=f"a file or a directory, or a URL of one; {_PLACE}")
    command.add_argument("out", help=f"the new checkpoint: {_PLACE}")
    command.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read pickles too (.ckpt, .pt, .distcp): tensors and plain values only, by weights_only=True",
    )


def _prune(command: argparse.ArgumentParser) -> None:
    best = "and the N with the best scores of ModelCheckpoint(monitor=)"
    command.add_argument("root", help=_PLACE)
    command.add_argument("--keep", type=_at_least(1), required=True, metavar="N", help="keep the N newest (1 or more)")
    command.add_argument("--keep-best", type=_at_least(0), default=0, metavar="N", help=best)
    command.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _export(command: argparse.ArgumentParser, one: str) -> None:
    command.add_argument("path", help=one)
    command.add_argument("out", help=f"where the files go: {_PLACE}")
    command.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="of floating point tensors; by default unchanged"
    )
    command.add_argument(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="of a file, such as 5GB or 200MiB (default: 5GB)",
    )
    command.add_argument(
        "--prefix-strip",
        metavar="PREFIX",
        help="remove this prefix of names, such as 'model.' (default: what the module has published)",
    )
    command.add_argument(
        "--weights",
        metavar="NAME",
        help=WEIGHTS,
    )
    for name, text in (
        ("include", "only names that match a pattern, such as 'model.*'"),
        ("exclude", "no names that match a pattern"),
    ):
        command.add_argument(f"--{name}", action="extend", nargs="+", default=[], metavar="PATTERN", help=text)


def _size(text: str) -> str:
    try:
        size_in_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or text such as '5GB' or '200MiB'"
        ) from None
    return text


def _at_least(low: int) -> Callable[[str], Any]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return number
