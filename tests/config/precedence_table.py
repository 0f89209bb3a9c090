"""The kinds of settings with a value from each source; as a script, what comes out of all combinations in this process, and of one ``Fit``.

python precedence_table.py REPORT_FOLDER           # in a folder with fit.yaml, with all FIT_ variables set
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = ("file", "environment", "code", "command line")
"""From the weakest to the strongest; below them stands the default."""


@dataclass(frozen=True)
class Kind:
    """One setting: what each source says, in its own form, and what is to come out of it."""

    name: str
    file: str
    environment: str
    code: Any
    command: str
    expected: tuple[Any, Any, Any, Any, Any]
    """For default, file, environment, code and command line, as ``run.config`` has it."""


KINDS = {
    "word": Kind("on_nonfinite", "raise", "skip", "raise", "skip", (None, "raise", "skip", "raise", "skip")),
    "alias": Kind("precision", "no", "bf16", 16, "'64'", ("32-true", "32-true", "bf16-mixed", "16-mixed", "64-true")),
    "int": Kind("log_every_n_steps", "1", "2", 3, "4", (50, 1, 2, 3, 4)),
    "int or none": Kind("max_steps", "1", "null", 3, "~", (None, 1, None, 3, None)),
    "float": Kind("gradient_clip_val", "1e-3", "2", 0.5, "0.25", (None, 1e-3, 2.0, 0.5, 0.25)),
    "int or float": Kind("limit_val_batches", "1", "1.0", 3, "0.5", (None, 1, 1.0, 3, 0.5)),
    "bool": Kind("check", "yes", "0", True, "off", (False, True, False, True, False)),
    "bool or word": Kind("deterministic", "true", "warn", False, "warn", (False, True, "warn", False, "warn")),
    "duration": Kind(
        "val_every", "500", "2 epochs", "10 min", "null", ("1 epochs", "500 steps", "2 epochs", "600 seconds", None)
    ),
    "time": Kind(
        "max_time", "00:00:01:00", "2 min", "3 min", "4 min", (None, *(f"{n} seconds" for n in (60, 120, 180, 240)))
    ),
    "path": Kind("root_dir", "2024", "no", "there/b", "null/c", ("runs", "2024", "no", "there/b", "null/c")),
    "name": Kind("name", "2024", "no", "lr=0.1", "null", (None, "2024", "no", "lr=0.1", None)),
    "list": Kind("devices", "[0, 1]", "0,2", [0, 3], "[0, 4]", ("auto", [0, 1], [0, 2], [0, 3], [0, 4])),
    "schedule": Kind(
        "accumulate_grad_batches",
        "{0: 1, 4: 2}",
        "1",  # the other one derives the window, too
        {0: 4},
        "{0: 5, 1: 6}",
        (1, {"0": 1, "4": 2}, 1, {"0": 4}, {"0": 5, "1": 6}),
    ),
    "batch size": Kind(
        *("global_batch_size", "16", "524_288 tokens", {"5e8 tokens": 16, 0: 8}, "{0: 4, 2 epochs: 64 tokens}"),
        (None, 16, "524288 tokens", {"0": 8, "500000000 tokens": 16}, {"0": 4, "2 epochs": "64 tokens"}),
    ),
    "mapping": Kind(
        *("compile", "{mode: default}", "blocks", {"dynamic": True}, "{fullgraph: true}"),
        (False, {"mode": "default"}, "blocks", {"dynamic": True}, {"fullgraph": True}),
    ),
    "bool or int": Kind("fast_dev_run", "1", "0", 2, "false", (False, 1, 0, 2, False)),
    "word or int": Kind(
        *("activation_checkpointing", "full", "2", "selective", "null"), (None, "full", 2, "selective", None)
    ),
    "bool, word or int": Kind("activation_offload", "blocks", "2", True, "false", (False, "blocks", 2, True, False)),
    "device": Kind("accelerator", "gpu", "cpu", "cuda", "MPS", ("auto", "gpu", "cpu", "cuda", "mps")),
    "strategy": Kind("strategy", "fsdp", "ddp", "single", "tp", ("auto", "fsdp", "ddp", "single", "tp")),
}
FIELDS = Kind(
    "strategy",
    "{name: ddp, bucket_cap_mb: 1}",
    "{name: fsdp, cpu_offload: true}",
    {"name": "deepspeed", "stage": 1},
    "{name: mesh, tp: 2}",
    (
        "auto",
        {"name": "ddp", "bucket_cap_mb": 1},
        {"name": "fsdp", "cpu_offload": True},
        {"name": "deepspeed", "stage": 1},
        {"name": "mesh", "tp": 2},
    ),
)


def combinations() -> list[tuple[str, ...]]:
    """All sets of sources."""
    return [chosen for count in range(len(SOURCES) + 1) for chosen in itertools.combinations(SOURCES, count)]


def origin(kind: Kind, chosen: tuple[str, ...], file: str) -> str:
    """Where the value must come from."""
    last = chosen[-1] if chosen else "default"
    variable, text = f"FIT_{kind.name.upper()}", f"{kind.name}={kind.command}"
    return {
        "file": f"file {file}:1",
        "environment": f"environment {variable}",
        "command line": f"command line {text}",
    }.get(last, last)


def prepare(folder: Path) -> dict[str, str]:
    """Write each kind's file; the variables that the process is to be started with."""
    variables = {}
    for label, kind in {**KINDS, "fields": FIELDS}.items():
        (folder / f"{label}.yaml").write_text(f"{kind.name}: {kind.file}\n")
        variables[f"FIT_{kind.name.upper()}"] = kind.environment
    (folder / "fit.yaml").write_text("seed: 1\ngc_every_n_steps: 9\n")
    return {**variables, "FIT_STRATEGY": KINDS["strategy"].environment, "TABLE_FIELDS": FIELDS.environment}


def main(reports: Path) -> None:
    from engine import Fit
    from engine.config.masked import with_origins
    from engine.config.resolve import resolve

    fit = Fit(seed=7)
    whole = with_origins(fit.settings, fit.origins)
    found: dict[str, Any] = {}
    inherited = {name: value for name, value in os.environ.items() if name.startswith("FIT_") and name not in VARIABLES}
    for label, kind in {**KINDS, "fields": FIELDS}.items():
        variable = f"FIT_{kind.name.upper()}"
        text = os.environ["TABLE_FIELDS"] if label == "fields" else os.environ[variable]
        for chosen in combinations():
            environ = {**inherited, "FIT_CONFIG": f"{label}.yaml" if "file" in chosen else "fit.yaml"}
            environ |= {variable: text} if "environment" in chosen else {}
            given = {kind.name: kind.code} if "code" in chosen else {}
            overrides = [f"{kind.name}={kind.command}"] if "command line" in chosen else []
            resolved = resolve(given, environ, None, overrides)
            entry = with_origins(resolved.settings, resolved.origins)[kind.name]
            found[f"{label}: {'+'.join(chosen)}"] = [entry["value"], entry["origin"]]
    path = reports / f"{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps({"table": found, "fit": whole}))


VARIABLES = {f"FIT_{kind.name.upper()}" for kind in KINDS.values()}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
