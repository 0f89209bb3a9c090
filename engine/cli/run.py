"""``fit run``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from engine.callback import Callback
from engine.checkpoint.resume import Resume
from engine.cli.class_paths import importable_here
from engine.cli.error_report import run_reporting_errors
from engine.cli.object_builder import ObjectBuilder, class_help, config_text
from engine.cli.predictions import check_output, write
from engine.cli.requested_objects import COMMAND_LINE, Component, Components, components_of
from engine.cli.saved_parameters import recorded, warn_about_differences, with_saved_parameters
from engine.cli.terminal import OK, UsageError, show
from engine.data.datamodule import DataModule
from engine.fit import Fit
from engine.loop.run import Run
from engine.module import TrainModule
from engine.utils.errors import DoesNotFit
from engine.utils.log import logger
from engine.utils.overrides import overridden
from engine.utils.seed import seed_everything
from engine.utils.text import terminal_text


def run(options: argparse.Namespace) -> int:
    """Run ``options.command``.

    Returns:
        The exit status; see :mod:`engine.cli.terminal`.
    """
    return run_reporting_errors(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Build the objects, run the loop and print the answer."""
    command = options.command
    importable_here()
    components = components_of(options.target, options.data, options.callback, options.set, options.config)
    if options.help:
        show(class_help(command, components.objects))
        return OK
    log_to_terminal()
    checkpoint = options.resume if command == "run" else options.checkpoint
    parsers = (
        [ObjectBuilder(component) for component in components.objects]
        if checkpoint is None
        else parsers_of_checkpoint(components, command, checkpoint)
    )
    if options.print_config:
        text = config_text(components.resolved, parsers)
        print(terminal_text(text) if sys.stdout.isatty() else text, end="")
        return OK
    if command == "predict":
        check_output(options.output)
    loaders = _Loaders()
    as_json = command != "run" and options.json
    # Output of the run and its callbacks must not mix with the lines of the answer.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        fit, module, data = build_objects(components, parsers, loaders)
        try:
            answer = _call_fit(command, fit, module, data, options)
        except DoesNotFit as error:
            advice = f"give the module's arguments as --set model.NAME=VALUE (fit {command} {components.model.path} --help lists them)"
            raise UsageError(f"{error}; {advice}") from error
    if not fit.is_main_process:
        return OK
    if command == "predict":
        answer = write(answer, loaders.count > 1, options.output)
    _print_answer(command, answer, options, any(callback.shows_progress for callback in fit.settings.callbacks))
    return OK


def parsers_of_checkpoint(components: Components, command: str, checkpoint: str) -> list[ObjectBuilder]:
    """The parsers of a run that loads a checkpoint: the module gets the checkpoint's parameters, except those given here."""
    other_parsers = [ObjectBuilder(component) for component in components.objects[1:]]
    saving = (_callback(parser) for parser in other_parsers if getattr(parser.component.target, "runs_last", False))
    checkpoint_folder = next(
        (callback.checkpoints_in for callback in saving if callback.checkpoints_in is not None), None
    )
    settings = components.resolved.settings
    argument = "resume" if command == "run" else "checkpoint"
    saved = recorded(settings.root_dir, checkpoint_folder, checkpoint, argument, settings.name)
    if saved is None:
        return [ObjectBuilder(components.model), *other_parsers]
    model = ObjectBuilder(with_saved_parameters(components.model, saved))
    for parser in [model, *(parser for parser in other_parsers if parser.component.name == "data")]:
        warn_about_differences(parser, saved)
    return [model, *other_parsers]


def build_objects(
    components: Components, parsers: list[ObjectBuilder], *more: Callback
) -> tuple[Fit, TrainModule, Any]:
    """Create the ``Fit``, the module and the data. ``more``: callbacks to add."""
    fit, make_module, data = prepare_objects(components, parsers, *more)
    return fit, make_module(), data


def prepare_objects(
    components: Components, parsers: list[ObjectBuilder], *more: Callback
) -> tuple[Fit, Callable[[], TrainModule], Any]:
    """Create the ``Fit`` and the data, and return them with a function that creates the module. ``more``: callbacks to add."""
    by_name = {parser.component.name: parser for parser in parsers}
    callback_parsers = [parser for name, parser in by_name.items() if name.startswith("callbacks.")]
    callbacks = [_callback(parser) for parser in callback_parsers]
    _refuse_callback_given_twice([parser.component for parser in callback_parsers], callbacks)
    fit = Fit.from_resolved(
        replace(components.resolved, **_sections(parsers, components.resolved.origins)), [*callbacks, *more]
    )
    if fit.settings.seed is not None:
        seed_everything(fit.settings.seed)  # the module's constructor draws the first weights
    data = by_name["data"].build()[0] if "data" in by_name else None

    def make_module() -> TrainModule:
        module: TrainModule
        module, arguments = by_name["model"].build()
        if not module.hparams:
            module.hparams.update(arguments)
        return module

    return fit, make_module, data


def _sections(parsers: list[ObjectBuilder], origins: Mapping[str, str]) -> dict[str, Any]:
    """The fields of :class:`engine.config.resolve.Resolved` with the arguments of the objects, for checkpoints and loggers."""
    sections: dict[str, Any] = {}
    all_origins = dict(origins)
    for parser in parsers:
        section, description = (
            parser.component.name.partition(".")[0],
            {"class_path": parser.component.path, "init_args": parser.as_values()[0]},
        )
        all_origins[section] = parser.component.origin("")
        sections[section] = [*sections.get(section, []), description] if section == "callbacks" else description
    return {"sections": sections, "origins": all_origins}


def _callback(parser: ObjectBuilder) -> Callback:
    callback = parser.build()[0]
    if not isinstance(callback, Callback):
        raise UsageError(
            f"{parser.component.origin('')}: {parser.component.path!r} gives a {type(callback).__name__}, not an engine.Callback"
        )
    return callback


def _refuse_callback_given_twice(components: Sequence[Component], callbacks: Sequence[Callback]) -> None:
    """Refuse a callback of ``--callback`` whose state has the key of one in the file: they are two where one is meant."""
    in_file: dict[str, Component] = {}
    for component, callback in zip(components, callbacks, strict=True):
        if not overridden(callback, "state_dict", Callback):
            continue
        if component.origin("") != COMMAND_LINE:
            in_file[callback.state_key] = component
        elif (earlier := in_file.get(callback.state_key)) is not None:
            raise UsageError(
                f"{component.title} is given twice, in {earlier.origin('').removeprefix('file ')} and by --callback: leave one of them out; "
                f"--set {earlier.name}.PARAMETER=VALUE changes the file's"
            )


def _call_fit(command: str, fit: Fit, module: TrainModule, data: Any, options: argparse.Namespace) -> Any:
    datamodule, loader = (data, None) if isinstance(data, DataModule) else (None, data)
    if command == "run":
        resume = options.resume
        if options.hyperparameters is not None:
            resume = Resume(resume, hyperparameters=options.hyperparameters)
        return fit.run(module, loader, datamodule=datamodule, resume=resume)
    loop = {"validate": fit.validate, "test": fit.test, "predict": fit.predict}[command]
    return loop(module, loader, datamodule=datamodule, checkpoint=options.checkpoint, weights=options.weights)


def _print_answer(command: str, answer: Any, options: argparse.Namespace, already_shown: bool) -> None:
    """Print the answer of a loop. ``already_shown``: a progress bar has printed the metrics of an evaluation."""
    if command == "run":
        show(answer)
    elif options.json:
        print(json.dumps(answer))
    elif command == "predict":
        show(*(f"{name}: {value}" for name, value in answer.items()))
    elif not already_shown:
        _table(answer)


class _Loaders(Callback):
    """Records the number of loaders, which the predictions do not tell."""

    count = 0

    def on_predict_start(self, run: Run, module: nn.Module) -> None:
        self.count = len(run.num_eval_batches)


def _table(metrics: list[dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("metric", "value")
    for name, value in ((name, value) for of_loader in metrics for name, value in of_loader.items()):
        table.add_row(Text(terminal_text(name, one_line=True)), f"{value:.6g}")
    Console().print(table)


def log_to_terminal() -> None:
    """Show the library's log in the terminal, unless logging has been set up already."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logger.setLevel(logging.INFO)
