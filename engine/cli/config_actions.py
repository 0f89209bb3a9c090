"""The actions of ``fit config``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import strategies
from engine.cli.annexes import annex
from engine.cli.config_questions import ask
from engine.cli.terminal import FAILED, UsageError, complain, show
from engine.config.resolve import SECTIONS, Resolved, resolve
from engine.config.settings_file import document
from engine.config.yaml_text import write_atomically

if TYPE_CHECKING:
    from engine.compat.key_file import KeyFile

ACCELERATE = "engine.compat.accelerate.config_file"
LIGHTNING = "engine.compat.lightning.settings_file"
TRAINING_ARGUMENTS = "engine.compat.transformers.training_arguments"
"""The modules that read other trainers' files."""


def run(arguments: argparse.Namespace) -> int:
    """Run ``fit config`` with the arguments of :func:`engine.cli.config.parser`."""
    try:
        return _check(Path(arguments.check)) if arguments.check is not None else _write(arguments)
    except EOFError:
        raise UsageError("the terminal was closed before the last question; nothing was written") from None
    except (ValueError, TypeError, OSError) as error:
        if arguments.check is None:
            raise UsageError(str(error)) from None
        complain(error)
        return FAILED


def _write(arguments: argparse.Namespace) -> int:
    path = Path(arguments.output)
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} exists: give --force to overwrite it, or another --output")
    head: list[str] = []
    if arguments.from_accelerate is not None:
        values, head = _from_accelerate(arguments)
    elif arguments.from_training_args is not None:
        values, head = _from_training_arguments(arguments)
    elif arguments.from_lightning is not None:
        source = Path(arguments.from_lightning)
        head = [f"Converted from {source}, arguments of Lightning's Trainer."]
        values, head = _converted(source, annex(LIGHTNING).read(source), arguments.force, head)
    elif arguments.default:
        values = {}
    elif sys.stdin.isatty() and sys.stdout.isatty():
        values = ask()
    else:
        raise ValueError(
            "questions need a terminal, and this is not one: give --default, --from-accelerate PATH, --from-training-args FILE or "
            "--from-lightning FILE"
        )
    text = document(values, head)
    draft = path.with_name(f".{path.name}.check")
    write_atomically(draft, text)
    try:
        resolved = _judge(draft)
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"nothing was written, because the file would be wrong: {str(error).replace(str(draft), str(path))}"
        ) from None
    finally:
        draft.unlink()
    write_atomically(path, text)
    given = [f"{name}={getattr(resolved.settings, name)}" for name in values]
    show(f"{path}: written; {', '.join(given) or 'all settings have their defaults'}")
    return 0


def _check(path: Path) -> int:
    resolved = _judge(path)
    given = [name for name, origin in resolved.origins.items() if origin.startswith("file ")]
    show(f"{path}: {len(given)} setting(s), all valid" + (f": {', '.join(given)}" if given else ""))
    if resolved.sections:
        show(f"{path}: {', '.join(resolved.sections)}: read by 'fit run', not checked here")
    return 0


def _judge(path: Path) -> Resolved:
    """The settings of a file alone; an error where they are not possible."""
    resolved = resolve({}, {}, path, sections=SECTIONS)
    strategies.requested(resolved.settings, resolved.origins)
    return resolved


def _from_accelerate(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    reader = annex(ACCELERATE)
    path = Path(arguments.from_accelerate) if arguments.from_accelerate else reader.default_path(os.environ)
    file = reader.read(path)
    head = [f"Converted from Accelerate's {path}. This starts the processes that it describes:", f"    {file.launch}"]
    return _converted(path, file, arguments.force, head)


def _from_training_arguments(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    path = Path(arguments.from_training_args)
    file = annex(TRAINING_ARGUMENTS).read(path)
    code = [f"    {' '.join(line.split())}" for line in file.code()]
    head = [
        f"Converted from {path}, TrainingArguments of transformers. These are for the script, engine.huggingface and callbacks:",
        *code,
    ]
    return _converted(path, file, arguments.force, head)


def _converted(path: Path, file: KeyFile, force: bool, head: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of another trainer's ``file``, and the comments above them.

    Raises:
        ValueError: it has keys without a counterpart, and there is no ``--force``.
    """
    if file.refused and not force:
        count = len(file.refused)
        raise ValueError(
            f"{path} has {count} key(s) that would change the training and have no counterpart here; --force writes them as comments:\n"
            + "\n".join(f"  {line}" for line in file.refused)
        )
    head = ["", *head]
    told = (
        ("Ignored, because it has no meaning here:", file.notes),
        ("NOT DONE HERE, and it changes the training:", file.refused),
    )
    for title, lines in told:
        head += ["", title, *(f"    {' '.join(line.split())}" for line in lines)] if lines else []
    return file.settings, head
