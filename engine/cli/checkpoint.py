"""``fit checkpoint``: each subcommand calls one function of ``engine.checkpoint`` and prints the result.

Imports no torch: the subcommands that read tensors are in :mod:`engine.cli.checkpoint_weights`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from engine.checkpoint.catalog import checkpoint_of, entries, facts, problems, prune
from engine.checkpoint.manifest import SCORED_WITH, TRAINED
from engine.checkpoint.runs import canonical
from engine.checkpoint.storage_paths import storage_of
from engine.cli.terminal import show, table
from engine.config.masked import table_rows
from engine.utils.text import terminal_text

_LONGEST_TEXT = 1000
"""The maximum number of characters of a name or a value that are printed."""
Answer = tuple[Any, list[str], bool]
"""The value for ``--json``, the lines to print otherwise, and whether the checkpoints are all right."""


def run(options: argparse.Namespace) -> int:
    """Run the subcommand ``options.action``.

    Returns:
        0, or 1 after one line on stderr that says what is wrong.
    """
    return run_action(_ACTIONS[options.action], options)


def run_action(action: Callable[[argparse.Namespace], Answer], options: argparse.Namespace) -> int:
    """Print the answer of a subcommand, and return the exit status as :func:`run` does."""
    try:
        value, lines, all_well = action(options)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(
            f"fit checkpoint {options.action}: {terminal_text(' '.join(str(error).split())) or type(error).__name__}",
            file=sys.stderr,
        )
        return 1
    if options.json:
        print(json.dumps(_as_json(value), indent=1))
    elif lines:
        show(*(terminal_text(line, one_line=True) for line in lines))
    return 0 if all_well else 1


def _list(options: argparse.Namespace) -> Answer:
    """The checkpoints of a folder as a table, then those that are incomplete or damaged."""
    checkpoints = entries(options.root)
    # The column is shown only if some checkpoint was scored with other weights than the trained ones.
    shows_weights = any(entry["complete"] and entry[SCORED_WITH] != TRAINED for entry in checkpoints)
    weights_column = ["weights"] if shows_weights else []
    rows = [("name", "step", "epoch", "time", "size", "ranks", *weights_column, "alias", "score and metrics")]
    for entry in checkpoints:
        if entry["complete"]:
            columns = (
                _value_text(entry["step"]),
                _value_text(entry["epoch"]),
                _time(entry["saved_at"]),
                size_text(entry["bytes"]),
                str(entry["world_size"]),
            )
            weights = [entry[SCORED_WITH] or "not noted"] if shows_weights else []
            rows.append((entry["name"], *columns, *weights, ", ".join(entry["aliases"]), _metrics(entry)))
    lines = table(rows) if len(rows) > 1 else []
    place = checkpoints[0]["path"].removesuffix(f"/{checkpoints[0]['name']}")
    if canonical(place).startswith(f"{canonical(options.root)}/version_"):
        first = f"{options.root.rstrip('/')}/checkpoints"
        older = f". Those of the first run are in {first}" if any(storage_of(first).complete()) else ""
        lines.insert(0, f"{place}: the newest run in {options.root} that has checkpoints{older}")
    lines += [
        f"{entry['name']}  incomplete or damaged: {entry['reason']}" for entry in checkpoints if not entry["complete"]
    ]
    return checkpoints, lines, all(entry["complete"] for entry in checkpoints)


def _show(options: argparse.Namespace) -> Answer:
    """The description of one checkpoint."""
    description = facts(checkpoint_of(options.path, options.checkpoint), options.tensors)
    tensors = description.get("tensors", {})
    values = {
        name: value
        for name, value in description.items()
        if name not in ("tensors", "tied", "files", "name", "complete", "config")
    }
    values |= {
        "saved_at": _time(description["saved_at"]),
        "bytes": f"{description['bytes']} ({size_text(description['bytes'])}) in {len(description['files'])} files",
    }
    lines = [description["name"], *_section(values)]
    config = description.get("config")
    if isinstance(config, dict) and all(
        isinstance(entry, dict) and {"value", "origin"} <= entry.keys() for entry in config.values()
    ):
        settings = [(name, _value_text(value), origin) for name, value, origin in table_rows(config)]
        lines += ["  config", *("    " + line for line in table(settings))]
    for folder, folder_tensors in tensors.items():
        lines += ["", f"{folder}: {len(folder_tensors)} tensors"]
        lines += table(
            [
                (f"  {name}", str(t["shape"]), t["dtype"], f"{t['shards']} shard(s)")
                for name, t in folder_tensors.items()
            ]
        )
    if description.get("tied"):
        lines += ["", "tied", *(f"  {name} is {first}" for name, first in description["tied"].items())]
    return description, lines, True


def _verify(options: argparse.Namespace) -> Answer:
    """Compare all files of the checkpoints with their checksums."""
    problems_by_path: dict[str, list[str]] = {}
    for path in options.paths:
        try:
            problems_by_path |= problems(path)
        except (OSError, ValueError) as error:
            problems_by_path[path] = [str(error)]
    lines = [
        line
        for path, messages in problems_by_path.items()
        for line in ([f"{path}: {problem}" for problem in messages] or [f"{path}: intact"])
    ]
    return problems_by_path, lines, not any(problems_by_path.values())


def _prune(options: argparse.Namespace) -> Answer:
    names_by_outcome = prune(options.root, options.keep, options.keep_best, options.dry_run)
    words = {
        "removed": "would be removed" if options.dry_run else "removed",
        "kept": "kept",
        "in_use": "kept, because it is being read",
    }
    lines = [f"{name}: {words[outcome]}" for outcome, names in names_by_outcome.items() for name in names]
    return names_by_outcome, lines, True


_ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
}


def _section(values: Mapping[str, Any], indent: str = "  ") -> list[str]:
    """Lines with one value each; the entries of a dict are indented below its name."""
    items = [(_shortened(str(name)), value) for name, value in values.items()]
    width = min(max((len(name) for name, _ in items), default=0), 60)
    lines: list[str] = []
    for name, value in items:
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}", *_section(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name:<{width}}  {_value_text(value)}")
    return lines


def _metrics(entry: Mapping[str, Any]) -> str:
    score = entry["score"]
    best = [f"{score['monitor']}={_value_text(score['value'])} ({score['mode']})"] if score else []
    other_metrics = [
        f"{name}={_value_text(value)}"
        for name, value in entry["metrics"].items()
        if not score or name != score["monitor"]
    ]
    return ", ".join([*best, *other_metrics])


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None or value == {} else _shortened(str(value))


def _shortened(text: str) -> str:
    return (
        text
        if len(text) <= _LONGEST_TEXT
        else f"{text[:_LONGEST_TEXT]}... ({len(text):,} characters; --json prints all)"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def size_text(count: float) -> str:
    """A number of bytes in its unit: ``"512 B"``, ``"1.25 GB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def _as_json(value: Any) -> Any:
    """A value as JSON has it; what JSON cannot express becomes text."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    finite = isinstance(value, float) and value - value == 0
    return value if value is None or finite or isinstance(value, (bool, int, str)) else str(value)
