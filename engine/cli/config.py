"""``fit config``: writes or checks a file of settings. The questions that a terminal asks are at the end of this module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import strategies
from engine.cli.annexes import annex
from engine.cli.terminal import FAILED, UsageError, complain, show
from engine.config import yaml_text
from engine.config.kinds import PRECISIONS
from engine.config.masked import plain_value
from engine.config.resolve import SECTIONS, Resolved, read_value, resolve
from engine.config.settings import Settings, checked_setting
from engine.config.settings_file import document, documentation
from engine.config.yaml_text import flow, write_atomically
from engine.step.precision import Precision
from engine.utils.paths import expanded

if TYPE_CHECKING:
    from engine.compat.key_file import KeyFile

ACCELERATE = "engine.compat.accelerate.config_file"
LIGHTNING = "engine.compat.lightning.settings_file"
TRAINING_ARGUMENTS = "engine.compat.transformers.training_arguments"
"""The modules that read the files of other trainers."""


def run(options: argparse.Namespace) -> int:
    """Write or check a file of settings.

    Returns:
        0, or 1 when a file that was checked is wrong.
    """
    try:
        return _check(Path(options.check)) if options.check is not None else _write(options)
    except EOFError:
        raise UsageError("the terminal was closed before the last question; nothing was written") from None
    except (ValueError, TypeError, OSError) as error:
        if options.check is None:
            raise UsageError(str(error)) from None
        complain(error)
        return FAILED


def _write(options: argparse.Namespace) -> int:
    """Write the file, from answers or from another trainer's file, once its settings are checked."""
    path = Path(expanded(options.output))
    if path.exists() and not options.force:
        raise ValueError(f"{path} exists: give --force to overwrite it, or another --output")
    head: list[str] = []
    if options.from_accelerate is not None:
        values, head = _from_accelerate(options)
    elif options.from_training_args is not None:
        values, head = _from_training_arguments(options)
    elif options.from_lightning is not None:
        source = Path(options.from_lightning)
        head = [f"Converted from {source}, arguments of Lightning's Trainer."]
        values, head = _converted(source, annex(LIGHTNING).read(source), options.force, head)
    elif options.default:
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
        resolved = _settings_of_file(draft)
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"nothing was written, because the file would be wrong: {str(error).replace(str(draft), str(path))}"
        ) from None
    finally:
        draft.unlink()
    write_atomically(path, text)
    assignments = [f"{name}={getattr(resolved.settings, name)}" for name in values]
    show(f"{path}: written; {', '.join(assignments) or 'all settings have their defaults'}")
    return 0


def _check(path: Path) -> int:
    """Check a file of settings, and print what is in it."""
    resolved = _settings_of_file(path)
    names = [name for name, origin in resolved.origins.items() if origin.startswith("file ")]
    show(f"{path}: {len(names)} setting(s), all valid" + (f": {', '.join(names)}" if names else ""))
    if resolved.sections:
        show(f"{path}: {', '.join(resolved.sections)}: read by 'fit run', not checked here")
    return 0


def _settings_of_file(path: Path) -> Resolved:
    """The settings that a file alone gives; raises an error if they cannot work."""
    resolved = resolve({}, {}, path, sections=SECTIONS)
    strategies.requested(resolved.settings, resolved.origins)
    return resolved


def _from_accelerate(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    reader = annex(ACCELERATE)
    path = Path(options.from_accelerate) if options.from_accelerate else reader.default_path(os.environ)
    file = reader.read(path)
    head = [f"Converted from Accelerate's {path}. This starts the processes that it describes:", f"    {file.launch}"]
    return _converted(path, file, options.force, head)


def _from_training_arguments(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    path = Path(options.from_training_args)
    file = annex(TRAINING_ARGUMENTS).read(path)
    code = [f"    {' '.join(line.split())}" for line in file.code()]
    head = [
        f"Converted from {path}, TrainingArguments of transformers. These are for the script, engine.huggingface and callbacks:",
        *code,
    ]
    return _converted(path, file, options.force, head)


def _converted(path: Path, file: KeyFile, force: bool, head: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings of another trainer's ``file``, and the lines of comment for the head of the new file.

    Raises:
        ValueError: the file has keys without a counterpart, and ``--force`` is not given.
    """
    if file.refused and not force:
        count = len(file.refused)
        raise ValueError(
            f"{path} has {count} key(s) that would change the training and have no counterpart here; --force writes them as comments:\n"
            + "\n".join(f"  {line}" for line in file.refused)
        )
    head = ["", *head]
    paragraphs = (
        ("Ignored, because it has no meaning here:", file.notes),
        ("NOT DONE HERE, and it changes the training:", file.refused),
    )
    for title, lines in paragraphs:
        head += ["", title, *(f"    {' '.join(line.split())}" for line in lines)] if lines else []
    return file.settings, head


# -- the questions -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question about one setting, or about one option of a strategy or a precision (``"strategy.stage"``)."""

    name: str
    text: str
    applies: Callable[[Mapping[str, Any]], bool] = lambda values: True
    """Whether the question is asked, given the earlier answers."""
    required: bool = False
    """Whether the question needs an answer, because there is no default."""


def _is_one_of(setting: str, *names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda values: _name_of(values.get(setting)) in names


_SHARDED = _is_one_of("strategy", "fsdp", "mesh")
_ZERO = _is_one_of("strategy", "deepspeed")

QUESTIONS = (
    Question("accelerator", "Device"),
    Question("devices", "Processes on this machine, one device each"),
    Question("num_nodes", "Machines"),
    Question("strategy", "Strategy: auto, single, ddp, fsdp, mesh (tensor and pipeline parallel), deepspeed, ..."),
    Question(
        "strategy.find_unused_parameters",
        "May a step leave parameters without a gradient",
        _is_one_of("strategy", "ddp"),
    ),
    Question("strategy.cpu_offload", "Keep parameters and optimizer states in host memory", _SHARDED),
    Question(
        "strategy.dp_replicate",
        "Groups of ranks with one copy of the model each (1: it is sharded over all of them)",
        _SHARDED,
    ),
    Question("strategy.tp", "Tensor parallel: ranks that layers are sharded over", _is_one_of("strategy", "mesh")),
    Question("strategy.pp", "Pipeline parallel: stages that the layers are split into", _is_one_of("strategy", "mesh")),
    Question("strategy.stage", "ZeRO stage: 0, 1, 2 or 3 (null: 2)", _ZERO),
    Question("strategy.offload_optimizer", "Keep optimizer states in host memory: true, false or nvme", _ZERO),
    Question("strategy.offload_parameters", "Keep parameters there too, at stage 3: true, false or nvme", _ZERO),
    Question(
        "strategy.nvme_path",
        "Directory on the disk for offloading",
        lambda values: "nvme" in flow(values.get("strategy")),
        True,
    ),
    Question("precision", f"Precision: {', '.join(dict.fromkeys(PRECISIONS.values()))}"),
    Question(
        "precision.recipe",
        "Scales of fp8: tensorwise, rowwise or rowwise_with_gw_hp",
        _is_one_of("precision", "fp8-mixed"),
    ),
    Question("accumulate_grad_batches", "Micro-batches of one optimizer step"),
    Question("gradient_clip_val", "Largest gradient norm (null: no clipping)"),
    Question("max_epochs", "Epochs"),
)


def ask(read: Callable[[str], str] = input, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Ask all questions that apply, and return the answers that differ from the defaults, as plain values.

    Raises:
        EOFError, KeyboardInterrupt: the terminal was closed, or Ctrl-C was pressed.
    """
    say("Enter takes the value in brackets; ? explains; Ctrl-C ends without writing anything.")
    values: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.applies(values):
            _ask_until_valid(question, values, read, say)
    return values


def _ask_until_valid(
    question: Question, values: dict[str, Any], read: Callable[[str], str], say: Callable[[str], None]
) -> None:
    """Ask one question again until the answer is valid, and store it in ``values``."""
    default, explanation = _default_of(question.name, values)
    while True:
        answer = read(f"{question.text} [{flow(plain_value(default))}]: ").strip()
        if answer == "?":
            say(f"  {explanation or question.text}")
            continue
        if not answer and not question.required:
            return
        try:
            _store_answer(question.name, answer, values)
            return
        except (ValueError, TypeError, OSError) as error:
            say(f"  {error}")


def _store_answer(name: str, answer: str, values: dict[str, Any]) -> None:
    """Check an answer and store it in ``values``. An option is checked together with its setting, so that impossible pairs are errors at once."""
    setting, _, option = name.partition(".")
    node = yaml_text.compose(answer, "this answer")
    if not option:
        value = read_value(setting, node, "this answer")
        _try_to_make(setting, value)
        values[setting] = plain_value(value)
        return
    current = values[setting]
    if node is None:
        raise ValueError(f"{name} is empty: there is no default")
    options = {**(current if isinstance(current, dict) else {"name": current}), option: yaml_text.construct(node)}
    # nvme_path is asked for next, so any directory does for this check.
    _try_to_make(
        setting, checked_setting(setting, {"nvme_path": ".", **options} if "nvme" in options.values() else options)
    )
    values[setting] = options


def _try_to_make(setting: str, value: Any) -> None:
    """Create the strategy or the precision, whose errors are about the answer."""
    if setting == "strategy" and value != "auto":
        strategies.get(value)
    elif setting == "precision":
        Precision.parse(value)


def _default_of(name: str, values: Mapping[str, Any]) -> tuple[Any, str]:
    """The default of a setting or of an option, and its documentation."""
    setting, _, option = name.partition(".")
    if not option:
        default = next(field.default for field in fields(Settings) if field.name == setting)
        return (1 if setting == "max_epochs" else default), documentation().get(setting, "")
    owner = (
        strategies.get(_name_of(values[setting]))
        if setting == "strategy"
        else Precision.parse(_name_of(values[setting])).fp8
    )
    explanation = next(
        (texts[option] for cls in type(owner).__mro__ if cls is not object and option in (texts := documentation(cls))),
        "",
    )
    return getattr(owner, option), explanation


def _name_of(value: Any) -> Any:
    return value["name"] if isinstance(value, Mapping) else value
