"""What ``fit replay`` does, once its options are valid."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.cli.components import components_of
from engine.cli.exits import OK, UsageError
from engine.cli.reporting import reported
from engine.cli.run_actions import built, log_to_terminal, of_checkpoint
from engine.cli.targets import importable_here
from engine.config.yaml_writer import as_yaml
from engine.data.datamodule import DataModule
from engine.replay.starting_point import starting_point


def replay(arguments: argparse.Namespace) -> int:
    """Run the step again with the options of :func:`engine.cli.replay.parser`; returns the exit status."""
    return reported(lambda: _replay(arguments))


def _replay(arguments: argparse.Namespace) -> int:
    importable_here()
    try:
        checkpoint, manifest = starting_point(arguments.run, arguments.step)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(error) from None
    log_to_terminal()
    with _settings(manifest, arguments) as config:
        wanted = components_of(arguments.target, arguments.data, [], arguments.set, config)
    # Output of the run and its callbacks must not mix with the lines of the answer.
    with contextlib.redirect_stdout(sys.stderr):
        fit, module, data = built(wanted, of_checkpoint(wanted, "run", checkpoint))
        datamodule, loader = (data, None) if isinstance(data, DataModule) else (None, data)
        found = fit.replay(
            module,
            loader,
            datamodule=datamodule,
            run=checkpoint,
            step=arguments.step,
            detect_anomaly=arguments.detect_anomaly,
        )
    if fit.is_main_process:
        print(json.dumps(asdict(found)) if arguments.json else found.text(arguments.per_layer))
    return OK


@contextlib.contextmanager
def _settings(manifest: Mapping[str, Any], arguments: argparse.Namespace) -> Iterator[str]:
    """The run's own settings and objects as a file, except for the objects that the command line names."""
    recorded = manifest.get("config")
    if not isinstance(recorded, dict):
        raise UsageError(f"{arguments.run}: its checkpoint has no settings: a script can call Fit.replay")
    if arguments.target is None and "model" not in recorded:
        raise UsageError(
            f"{arguments.run} was made by a script, and not by 'fit run': name its module with --target and its data with --data, or call "
            "Fit.replay in the script"
        )
    given = {"model": arguments.target, "data": arguments.data}
    kept = {name: entry for name, entry in recorded.items() if given.get(name) is None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.yaml"
        path.write_text(as_yaml(kept))
        yield str(path)
