"""The questions of ``fit config`` in a terminal. Enter takes the default; a wrong answer is asked again, with the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine import strategies
from engine.config import yaml_text
from engine.config.kinds import PRECISIONS
from engine.config.masked import plain
from engine.config.resolve import read_value
from engine.config.settings import Settings, check
from engine.config.settings_file import documentation
from engine.config.yaml_text import flow
from engine.step.precision import Precision


@dataclass(frozen=True)
class Question:
    """One setting, or one option of a strategy or a precision: ``"strategy.stage"``."""

    name: str
    text: str
    applies: Callable[[Mapping[str, Any]], bool] = lambda values: True
    required: bool = False
    """Whether there is no default."""


def _is(setting: str, *names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda values: _name(values.get(setting)) in names


_SHARDED = _is("strategy", "fsdp", "mesh")
_ZERO = _is("strategy", "deepspeed")

QUESTIONS = (
    Question("accelerator", "Device"),
    Question("devices", "Processes on this machine, one device each"),
    Question("num_nodes", "Machines"),
    Question("strategy", "Strategy: auto, single, ddp, fsdp, mesh (tensor and pipeline parallel), deepspeed, ..."),
    Question(
        "strategy.find_unused_parameters", "May a step leave parameters without a gradient", _is("strategy", "ddp")
    ),
    Question("strategy.cpu_offload", "Keep parameters and optimizer states in host memory", _SHARDED),
    Question(
        "strategy.dp_replicate",
        "Groups of ranks with one copy of the model each (1: it is sharded over all of them)",
        _SHARDED,
    ),
    Question("strategy.tp", "Tensor parallel: ranks that layers are sharded over", _is("strategy", "mesh")),
    Question("strategy.pp", "Pipeline parallel: stages that the layers are split into", _is("strategy", "mesh")),
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
        "precision.recipe", "Scales of fp8: tensorwise, rowwise or rowwise_with_gw_hp", _is("precision", "fp8-mixed")
    ),
    Question("accumulate_grad_batches", "Micro-batches of one optimizer step"),
    Question("gradient_clip_val", "Largest gradient norm (null: no clipping)"),
    Question("max_epochs", "Epochs"),
)


def ask(read: Callable[[str], str] = input, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The answers that differ from the defaults, as plain values.

    Raises:
        EOFError, KeyboardInterrupt: the terminal was closed, or Ctrl-C was pressed.
    """
    say("Enter takes the value in brackets; ? explains; Ctrl-C ends without writing anything.")
    values: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.applies(values):
            _settle(question, values, read, say)
    return values


def _settle(question: Question, values: dict[str, Any], read: Callable[[str], str], say: Callable[[str], None]) -> None:
    default, told = _default(question.name, values)
    while True:
        answer = read(f"{question.text} [{flow(plain(default))}]: ").strip()
        if answer == "?":
            say(f"  {told or question.text}")
            continue
        if not answer and not question.required:
            return
        try:
            _take(question.name, answer, values)
            return
        except (ValueError, TypeError, OSError) as error:
            say(f"  {error}")


def _take(name: str, answer: str, values: dict[str, Any]) -> None:
    """Check an answer and store it. An option is checked with the setting it belongs to, so that impossible pairs are errors at once."""
    setting, _, option = name.partition(".")
    node = yaml_text.compose(answer, "this answer")
    if not option:
        given = read_value(setting, node, "this answer")
        _make(setting, given)
        values[setting] = plain(given)
        return
    before = values[setting]
    if node is None:
        raise ValueError(f"{name} is empty: there is no default")
    options = {**(before if isinstance(before, dict) else {"name": before}), option: yaml_text.construct(node)}
    # The directory on the disk is the next question.
    _make(setting, check(setting, {"nvme_path": ".", **options} if "nvme" in options.values() else options))
    values[setting] = options


def _make(setting: str, given: Any) -> None:
    if setting == "strategy" and given != "auto":
        strategies.get(given)
    elif setting == "precision":
        Precision.parse(given)


def _default(name: str, values: Mapping[str, Any]) -> tuple[Any, str]:
    """The default of a setting or an option, and its documentation."""
    setting, _, option = name.partition(".")
    if not option:
        default = next(field.default for field in fields(Settings) if field.name == setting)
        return (1 if setting == "max_epochs" else default), documentation().get(setting, "")
    thing = (
        strategies.get(_name(values[setting])) if setting == "strategy" else Precision.parse(_name(values[setting])).fp8
    )
    told = next(
        (found[option] for cls in type(thing).__mro__ if cls is not object and option in (found := documentation(cls))),
        "",
    )
    return getattr(thing, option), told


def _name(value: Any) -> Any:
    return value["name"] if isinstance(value, Mapping) else value
