"""The subcommands of ``fit checkpoint``: each calls one function of ``engine.checkpoint`` and prints the result."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.checkpoint import pickled
from engine.checkpoint.convert import convert
from engine.checkpoint.export import export_checkpoint
from engine.checkpoint.files import printable
from engine.checkpoint.listing import entries, facts, problems, prune
from engine.checkpoint.one_file import pack
from engine.checkpoint.user_paths import opened
from engine.cli.main import table
from engine.config.masked import rows as settings_rows


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand of the arguments of :func:`engine.cli.checkpoint.parser`.

    Returns:
        0, or 1 with one line on stderr that says why.
    """
    try:
        value, lines, good = _ACTIONS[arguments.action](arguments)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(
            f"fit checkpoint {arguments.action}: {printable(' '.join(str(error).split())) or type(error).__name__}",
            file=sys.stderr,
        )
        return 1
    if arguments.json:
        print(json.dumps(_plain(value), indent=1))
    elif lines:
        print("\n".join(printable(line).replace("\n", "\\n") for line in lines))
    return 0 if good else 1


Answer = tuple[Any, list[str], bool]
"""The JSON value, the printed lines, and whether all is well."""


def _list(arguments: argparse.Namespace) -> Answer:
    found = entries(arguments.root)
    rows = [("name", "step", "epoch", "time", "size", "ranks", "score and metrics")]
    for entry in found:
        if entry["complete"]:
            told = (
                _text(entry["step"]),
                _text(entry["epoch"]),
                _time(entry["saved_at"]),
                _size(entry["bytes"]),
                str(entry["world_size"]),
            )
            rows.append((entry["name"], *told, _metrics(entry)))
    lines = table(rows) if len(rows) > 1 else []
    lines += [f"{entry['name']}  incomplete or damaged: {entry['reason']}" for entry in found if not entry["complete"]]
    return found, lines, all(entry["complete"] for entry in found)


def _show(arguments: argparse.Namespace) -> Answer:
    found = facts(arguments.path, arguments.tensors)
    tensors = found.get("tensors", {})
    shown = {
        name: value
        for name, value in found.items()
        if name not in ("tensors", "tied", "files", "name", "complete", "config")
    }
    shown |= {
        "saved_at": _time(found["saved_at"]),
        "bytes": f"{found['bytes']} ({_size(found['bytes'])}) in {len(found['files'])} files",
    }
    lines = [found["name"], *_section(shown)]
    config = found.get("config")
    if isinstance(config, dict) and all(
        isinstance(entry, dict) and {"value", "origin"} <= entry.keys() for entry in config.values()
    ):
        lines += ["  config", *("    " + line for line in table(settings_rows(config)))]
    for folder, each in tensors.items():
        lines += ["", f"{folder}: {len(each)} tensors"]
        lines += table(
            [(f"  {name}", str(t["shape"]), t["dtype"], f"{t['shards']} shard(s)") for name, t in each.items()]
        )
    if found.get("tied"):
        lines += ["", "tied", *(f"  {name} is {first}" for name, first in found["tied"].items())]
    return found, lines, True


def _verify(arguments: argparse.Namespace) -> Answer:
    found: dict[str, list[str]] = {}
    for path in arguments.paths:
        try:
            found |= problems(path)
        except (OSError, ValueError) as error:
            found[path] = [str(error)]
    lines = [
        line for path, wrong in found.items() for line in ([f"{path}: {each}" for each in wrong] or [f"{path}: intact"])
    ]
    return found, lines, not any(found.values())


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
    lines = [*found.files, *found.published, f"{found.tensors} tensors, {_size(found.bytes)}"]
    lines += [f"tied, written once: {name} is {first}" for name, first in found.tied.items()]
    lines += [f"left out: {name}" for name in found.left_out]
    return asdict(found), lines, True


def _convert(arguments: argparse.Namespace) -> Answer:
    found = convert(arguments.source, arguments.out, trust_pickle=arguments.trust_pickle)
    lines = [
        f"{found.path}: from a {found.kind}",
        f"{found.tensors} tensors, {_size(found.bytes)}; {found.optimizers} optimizer(s); epoch {found.epoch}, step {found.step}",
        f"hyperparameters: {', '.join(found.hyperparameters) or 'none'}",
    ]
    return asdict(found), [*lines, *found.notes], True


def _pack(arguments: argparse.Namespace) -> Answer:
    out = Path(arguments.out).absolute()
    if out.exists():
        raise FileExistsError(f"{out} exists: choose another path, or remove it")
    with opened(arguments.path) as found:
        pack(found.directory, out) if not arguments.pickle else pickled.write_checkpoint(out, found.directory)
    size = out.stat().st_size
    return {"path": str(out), "bytes": size}, [f"{out}: {_size(size)}"], True


def _prune(arguments: argparse.Namespace) -> Answer:
    found = prune(arguments.root, arguments.keep, arguments.keep_best, arguments.dry_run)
    words = {
        "removed": "would be removed" if arguments.dry_run else "removed",
        "kept": "kept",
        "in_use": "kept, because it is being read",
    }
    return found, [f"{name}: {words[kind]}" for kind, names in found.items() for name in names], True


_ACTIONS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
    "convert": _convert,
    "pack": _pack,
    "prune": _prune,
}


def _section(values: Mapping[str, Any], indent: str = "  ") -> list[str]:
    """One value per line; dicts below their name."""
    width = max((len(str(name)) for name in values), default=0)
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}", *_section(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name!s:<{width}}  {_text(value)}")
    return lines


def _metrics(entry: Mapping[str, Any]) -> str:
    score = entry["score"]
    best = [f"{score['monitor']}={_text(score['value'])} ({score['mode']})"] if score else []
    rest = [
        f"{name}={_text(value)}" for name, value in entry["metrics"].items() if not score or name != score["monitor"]
    ]
    return ", ".join([*best, *rest])


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None or value == {} else str(value)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def _plain(value: Any) -> Any:
    """A value as JSON; what JSON cannot express becomes text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    finite = isinstance(value, float) and value - value == 0
    return value if value is None or finite or isinstance(value, (bool, int, str)) else str(value)
