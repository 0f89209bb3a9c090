"""``fit replay``: run one step of an earlier training again."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.callback import Callback, affecting_steps
from engine.checkpoint.manifest import MANIFEST
from engine.cli.class_paths import CALLBACKS, importable_here
from engine.cli.error_report import run_reporting_errors
from engine.cli.object_builder import ObjectBuilder
from engine.cli.requested_objects import SECTIONS, Components, EarlierRun, components_of
from engine.cli.run import build_objects, log_to_terminal
from engine.cli.saved_parameters import Recorded, init_args, recorded, warn_about_differences, with_saved_parameters
from engine.cli.terminal import OK, UsageError
from engine.config.resolve import DEFAULT_FILE
from engine.config.settings import KINDS
from engine.config.yaml_text import flow
from engine.data.datamodule import DataModule
from engine.distributed.environments import detect
from engine.loop.replay import LeftOut, StartingPoint, recorded_values, starting_point
from engine.utils.log import logger
from engine.utils.text import terminal_text

_STRATEGIES = ("auto", "single", "ddp", "fsdp", "tp", "pp", "mesh")
"""Strategies whose recorded options are only numbers and words. DeepSpeed's options name files, and those of a plug-in may be anything."""

_WATCHING_CALLBACKS = ("EMA", "EarlyStopping", "GradientNorm", "LearningRateMonitor")
"""Callbacks of the library that log, average or stop, and never change what a step computes."""

_SAFE_PATH = "PYTHONSAFEPATH"
_LONGEST_TEXT = 200
"""The number of characters of a text that are printed."""


def run(options: argparse.Namespace) -> int:
    """Run one step again and print what happened in it; return the exit status (see :mod:`engine.cli.terminal`)."""
    with _unchanged(_SAFE_PATH):
        return run_reporting_errors(lambda: _replay(options))


@contextlib.contextmanager
def _unchanged(variable: str) -> Iterator[None]:
    """Restore the environment's ``variable`` after the block, because the caller of :func:`engine.cli.main.main` may start other Pythons."""
    earlier_value = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if earlier_value is not None:
            os.environ[variable] = earlier_value


def _replay(options: argparse.Namespace) -> int:
    """Find the checkpoint, build the objects of its run, run the step and print the answer."""
    try:
        start = starting_point(options.run, options.step)
        if not start.manifest:
            start = replace(start, manifest={"config": _logged_config(start.described_by)})
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(error) from None
    if not _is_inside(start.described_by):
        importable_here()
    elif options.config is None and "FIT_CONFIG" not in os.environ and Path(DEFAULT_FILE).exists():
        raise UsageError(
            f"{DEFAULT_FILE} lies in the folder of the run, from where no code is taken: add --config {DEFAULT_FILE} if you wrote it, or call "
            "fit replay in another folder"
        )
    else:
        os.environ[_SAFE_PATH] = "1"  # for Pythons that libraries start, as jsonargparse's reader of stubs does
    log_to_terminal()
    earlier, withheld = _earlier_run(start, options)
    components = components_of(options.target, options.data, options.callback, options.set, options.config, earlier)
    for name, value in withheld.items():
        if components.resolved.origins[name] == "default":
            raise UsageError(
                f"{start.described_by}: the run had {name}={flow(value)}, which is not taken from a checkpoint: it may name code or files. "
                f"Give it, as in --set {shlex.quote(f'{name}={flow(value)}')}, or add --run-recorded-code"
            )
    try:
        start.check_seed(options.step, components.resolved.settings.seed)
    except ValueError as error:
        raise UsageError(error) from None
    saved = _recorded(start, components.resolved.settings.root_dir)
    parsers = [
        ObjectBuilder(with_saved_parameters(component, saved) if component.name in saved.sections else component)
        for component in components.objects
    ]
    for parser in parsers:
        if parser.component.name in saved.sections:
            warn_about_differences(parser, saved)
    stand_ins = _stand_ins(components, saved, start)
    # Output of the run and its callbacks must not mix with the lines of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        fit, module, data = build_objects(components, parsers, *stand_ins)
        datamodule, loader = (data, None) if isinstance(data, DataModule) else (None, data)
        step = fit.replay(
            module,
            loader,
            datamodule=datamodule,
            run=start.checkpoint or options.run,
            step=options.step,
            detect_anomaly=options.detect_anomaly,
        )
    if fit.is_main_process:
        step.compare(_logged(start, options.step))
        values = {name: value for name, value in asdict(step).items() if name != "earlier"}
        print(json.dumps(values) if options.json else step.text(options.per_layer))
    return OK


def _logged_config(folder: str) -> dict[str, Any]:
    """The settings of a run without checkpoints that ``Report`` or ``CSVLogger`` has recorded, as a manifest's ``config``; empty: none has."""
    if "://" in folder:
        return {}
    config: dict[str, Any] = importlib.import_module(f"{CALLBACKS}.report.runs").config_of(Path(folder))
    return config


def _recorded(start: StartingPoint, root_dir: Path) -> Recorded:
    """The arguments with which the run's objects were created; a run without checkpoints has only those that ``fit run`` has recorded."""
    if "files" not in start.manifest:
        return Recorded(
            start.described_by, {}, None, {}, {name: init_args(start.manifest, name) for name in ("model", "data")}
        )
    saved = recorded(root_dir, None, start.described_by, "RUN")
    assert saved is not None
    return saved


def _earlier_run(start: StartingPoint, options: argparse.Namespace) -> tuple[EarlierRun, dict[str, Any]]:
    """The run that the checkpoint records, and the settings that were withheld from it: without ``--run-recorded-code``, those that may run code."""
    values = recorded_values(start.manifest)
    if not values and start.manifest.get("files"):
        raise UsageError(f"{start.described_by} has no settings of a run: a script can call Fit.replay")
    requested = {"model": options.target, "data": options.data}
    sections = {
        name: values[name] for name in SECTIONS if _class_paths(values.get(name)) and requested.get(name) is None
    }
    settings = {
        name: value for name, value in values.items() if name in KINDS and name not in ("callbacks", "root_dir", "name")
    }
    withheld = {name: settings[name] for name in ("strategy", "compile") if _may_run_code(name, settings.get(name))}
    if options.run_recorded_code:
        replaced = {text.partition("=")[0] for text in options.set}
        named_code = {name: value for name, value in {**sections, **withheld}.items() if name not in replaced}
        if named_code and detect(os.environ).rank == 0:
            lines = [f"{name}: {flow(_shortened(value))}" for name, value in named_code.items()]
            head = f"importing and calling what {start.described_by} names:"
            text = "\n  ".join(terminal_text(line, one_line=True) for line in (head, *lines))
            print(text, file=sys.stderr, flush=True)
        withheld = {}
    else:
        settings = {name: value for name, value in settings.items() if name not in withheld}
    if (root := _root_dir_of(start.described_by)) is not None:
        settings["root_dir"] = str(root)
    allowed = sections if options.run_recorded_code else {}
    origin = f"checkpoint {start.described_by}"
    return EarlierRun(origin, settings, allowed, _error_without_model(start, sections)), withheld


def _class_paths(section: Any) -> list[str]:
    """The class paths in a recorded section; none if a script created any of the objects."""
    entries = section if isinstance(section, list) else [section]
    paths = [entry.get("class_path") if isinstance(entry, Mapping) else None for entry in entries]
    return [path for path in paths if isinstance(path, str)] if all(isinstance(path, str) for path in paths) else []


def _shortened(value: Any) -> Any:
    """The value with long texts cut off, at any depth, so that the values around them stay in sight."""
    if isinstance(value, Mapping):
        return {_shortened(key): _shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    return (
        f"{value[:_LONGEST_TEXT]}... ({len(value)} characters)"
        if isinstance(value, str) and len(value) > _LONGEST_TEXT
        else value
    )


def _may_run_code(setting: str, value: Any) -> bool:
    """Check whether a recorded value of ``strategy`` or ``compile`` may name a file or, as ``cpp.cxx`` of torch.compile does, a command."""
    if setting == "compile":
        return isinstance(value, Mapping)
    name = value.get("name") if isinstance(value, Mapping) else value
    return value is not None and name not in _STRATEGIES


def _error_without_model(start: StartingPoint, sections: Mapping[str, Any]) -> str:
    """The error message for a replay that names no model, with what to give."""
    advice = "name its module with --target and its data with --data, or in a file of settings"
    if not sections:
        return f"{start.described_by} was made by a script, and not by 'fit run': {advice}, or call Fit.replay in the script"
    options = {"model": "--target", "data": "--data", "callbacks": "--callback"}
    paths = [(name, path) for name, section in sections.items() for path in _class_paths(section)]
    arguments = [
        terminal_text(f"{options[name]} {shlex.quote(path)}", one_line=True)
        for name, path in paths
        if not _cannot_change_step(_class_name(path))
    ]
    return (
        f"which code is to run? Nothing that a checkpoint names is imported: {advice}. {start.described_by} names {' '.join(arguments)}; if you made "
        "this run yourself, --run-recorded-code imports and calls these"
    )


def _run_folder(described_by: str) -> Path | None:
    """The folder of the run that a checkpoint, or this folder itself, belongs to; ``None``: it is not on this machine, or not in the usual place."""
    path = Path(described_by)
    if "://" in described_by:
        return None
    if path.is_dir() and not (path / MANIFEST).exists():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else None


def _root_dir_of(described_by: str) -> Path | None:
    """The ``root_dir`` of the run that :func:`_run_folder` finds."""
    run = _run_folder(described_by)
    return run.parent if run is not None and run.name.startswith("version_") else run


def _is_inside(described_by: str) -> bool:
    """Check whether the current directory belongs to the run. If it does, its files may be as untrusted as the run: no file is imported only because
    of its name, as ``html.py`` would be if Python's own module is not loaded yet."""
    root = _root_dir_of(described_by)
    return root is not None and Path.cwd().is_relative_to(root.resolve())


def _stand_ins(components: Components, saved: Recorded, start: StartingPoint) -> list[Callback]:
    """Callbacks that only receive the states of the run's callbacks which are not given here. A warning names those that may change a step."""
    given_names = {callback.title for callback in components.callbacks}
    states = {key: key.partition("; ")[0].partition("[")[0] for key in saved.callbacks}
    names = [*map(_class_name, _class_paths(recorded_values(start.manifest).get("callbacks"))), *states.values()]
    missing = dict.fromkeys(
        n for n in names if n not in given_names and not n.startswith("_") and not _cannot_change_step(n)
    )
    if missing and detect(os.environ).rank == 0:
        logger.warning(
            "%s names callbacks that are not given here: %s; if one of them changes a step, give it with --callback",
            start.described_by,
            terminal_text(", ".join(missing), one_line=True),
        )
    return [LeftOut(key) for key, name in states.items() if name not in given_names]


def _class_name(path: str) -> str:
    """The name of the class at the end of a class path."""
    return path.rpartition(":")[2].rpartition(".")[2]


def _cannot_change_step(name: str) -> bool:
    """Check whether ``name`` is that of one of the library's callbacks that cannot change a step, such as a logger or a progress bar."""
    if name in _WATCHING_CALLBACKS:
        return True
    package = importlib.import_module(CALLBACKS)
    kind = getattr(package, name) if name in package.__all__ else None
    return isinstance(kind, type) and issubclass(kind, Callback) and not affecting_steps([kind])  # type: ignore[list-item]


def _logged(start: StartingPoint, step: int) -> dict[int, dict[str, float]]:
    """The values that the run logged up to the step, by step, from the files of ``Report`` or ``CSVLogger`` in its folder."""
    path = Path(start.described_by)
    if "://" in start.described_by:
        return {}
    folder = _run_folder(start.described_by) or path.parent
    values: dict[int, dict[str, float]] = importlib.import_module(f"{CALLBACKS}.report.runs").logged_until(folder, step)
    return values
