"""The parameters of a checkpoint's module and data; those of the command line and the file of settings win over them."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.resume import opening
from engine.checkpoint.run_folder import source_of
from engine.cli.components import Component
from engine.cli.object_parser import ObjectParser, parameters, parser_of
from engine.cli.terminal import UsageError
from engine.config.hyperparameters import kept_arguments, replaced_by_defaults
from engine.config.masked import HIDDEN, plain, without_secrets
from engine.config.typed_values import SCALARS, converted, is_data
from engine.config.typed_values import hints as hints_of
from engine.config.yaml_text import flow
from engine.distributed.environments import Environment, detect
from engine.distributed.group import Group
from engine.utils.log import logger


@dataclass(frozen=True)
class Recorded:
    """The arguments recorded in one checkpoint."""

    path: Path | str
    hparams: Mapping[str, Any]
    """The arguments that ``save_hyperparameters`` kept, or with which ``fit run`` built the module, as far as checkpoints can hold them."""
    hparams_name: str | None
    """The constructor's argument that was the dict of all of them."""
    texts: Mapping[str, str]
    """All of them as text, including those that it cannot hold; without secrets."""
    sections: Mapping[str, Mapping[str, Any]]
    """``"model"`` and ``"data"``: the parameters from which ``fit run`` built them, as in YAML; without secrets."""
    callbacks: tuple[str, ...] = ()
    """The keys of callbacks' states."""


def recorded(root_dir: Path, kept: str | Path | None, wanted: str, argument: str) -> Recorded | None:
    """The arguments recorded in the checkpoint ``wanted``; ``None``: there is none. A single process may call this before the run.

    Args:
        root_dir, kept: as of :class:`engine.checkpoint.run_folder.RunFolder`.
        wanted: a name, a path or a URL.
        argument: the name of the user's argument, for messages.

    Raises:
        FileNotFoundError, DamagedCheckpoint: as :func:`engine.checkpoint.resume.opening`.
    """
    alone = Group(Environment("single"), torch.device("cpu"))
    try:
        # Skipped checkpoints are reported by the run, which opens it again.
        with opening(alone, *source_of(root_dir, kept, wanted), ("state",), argument, logger.debug) as loaded:
            shared, manifest = loaded.shared, loaded.manifest
            return Recorded(
                loaded.path,
                {str(name): value for name, value in shared.get("hparams", {}).items()},
                shared.get("hparams_name"),
                {str(name): str(text) for name, text in _mapping(manifest.get("hparams")).items()},
                {name: _init_args(manifest, name) for name in ("model", "data")},
                tuple(_mapping(shared.get("callbacks"))),
            )
    except FileNotFoundError:
        if wanted != "auto":
            raise
        return None


def _init_args(manifest: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    entry = _mapping(_mapping(manifest.get("config")).get(section))
    return _mapping(_mapping(entry.get("value")).get("init_args"))


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty dict."""
    return {str(name): each for name, each in value.items()} if isinstance(value, dict) else {}


def with_saved_parameters(component: Component, found: Recorded) -> Component:
    """``component`` with the checkpoint's values for parameters that neither the command line nor the file gives.

    Values in the checkpoint go to the constructor unchanged. Of those that it only has as text (``fit run`` records all), numbers,
    text, enums, dataclasses and lists of such are parsed. Names of code are not: a checkpoint is untrusted input.

    Raises:
        UsageError: the module was created with a class or a function that is not given here; the message says what to give.
    """
    names = parameters(parser_of(component))
    tops = dict.fromkeys(name.split(".")[0] for name in names)
    is_model = component.name == "model"
    held = kept_arguments(component.target, found.hparams, found.hparams_name) if is_model else {}
    texts, hints = found.sections[component.name], hints_of(component.target)
    current = _defaults(component)
    fixed = {name: value for name, value in held.items() if name not in tops}  # of a constructor that takes anything
    init_args, origins, taken = dict(component.init_args), dict(component.origins), dict(fixed)
    for name in tops:
        nested = any(each.startswith(f"{name}.") for each in names)
        partly = _partly(component, name, nested)
        text = texts.get(name, plain(held.get(name)))
        if partly is False:
            continue  # given as a whole
        if partly is None and name in held:
            fixed[name] = taken[name] = held[name]
        elif (name not in texts and name not in held) or (partly is None and text == current.get(name, current)):
            continue
        elif _is_data_of(hints.get(name, Any), text):
            own = init_args.get(name, {})
            init_args[name] = {**text, **own} if isinstance(text, Mapping) and isinstance(own, Mapping) else text
            origins.setdefault(name, f"checkpoint {found.path}")
            taken[name] = text
        elif partly is None:
            shown = flow(text)
            raise UsageError(
                f"{found.path}: the {'module' if is_model else 'data'} was created with {name}={shown}, which is not taken from a "
                f"checkpoint: it may name code, or is a secret. Give it, as in --set {shlex.quote(f'{component.name}.{name}={shown}')}"
            )
    _log_taken(
        component, found, {name: value for name, value in taken.items() if plain(value) != current.get(name, current)}
    )
    given = {
        *held,
        *texts,
        *component.init_args,
        *(key.removesuffix("+").split(".")[0] for key, _ in component.overrides),
    }
    for name, text in replaced_by_defaults(component.target, found.texts if is_model else {}, given).items():
        made = f"{name}={text}"
        _log_on_one_rank(
            logging.WARNING,
            "%s: the module was created with %s, which a checkpoint cannot hold: using the default",
            found.path,
            made,
        )
    return replace(component, init_args=init_args, origins=origins, fixed=fixed)


def warn_about_differences(parser: ObjectParser, found: Recorded) -> None:
    """Warn about parameters that are given here with other values than in the checkpoint."""
    component, here = parser.component, parser.as_values()[0]
    there = dict(found.sections[component.name])
    if component.name == "model":
        there = {**there, **plain(kept_arguments(component.target, found.hparams, found.hparams_name))}
    for name, value in there.items():
        if name in here and here[name] != value and HIDDEN not in str(value):
            shown = without_secrets({"here": {name: here[name]}, "there": {name: value}})
            what = (
                f"{component.name}.{name}={flow(shown['here'][name])}",
                f"the {flow(shown['there'][name])} of {found.path}",
            )
            _log_on_one_rank(logging.WARNING, "%s: using %s, not %s", component.origin(name), *what)


def _log_taken(component: Component, found: Recorded, values: Mapping[str, Any]) -> None:
    if values:
        shown = ", ".join(f"{name}={flow(value)}" for name, value in without_secrets(plain(values)).items())
        _log_on_one_rank(logging.INFO, "%s: from the checkpoint %s: %s", component.title, found.path, shown)


def _log_on_one_rank(level: int, text: str, *values: object) -> None:
    """Log on rank 0 alone: every rank reads the checkpoint."""
    if detect(os.environ).rank == 0:
        logger.log(level, text, *values)


def _defaults(component: Component) -> dict[str, Any]:
    """The constructor's defaults, as in YAML."""
    try:
        return ObjectParser(replace(component, init_args={}, overrides=[])).as_values()[0]
    except UsageError:  # some have no default
        defaults = {name: each.default for name, each in inspect.signature(component.target).parameters.items()}
        return {name: plain(default) for name, default in defaults.items() if default is not inspect.Parameter.empty}


def _partly(component: Component, name: str, nested: bool) -> bool | None:
    """Whether only part of a parameter's value is given (an entry, an appended element); ``None``: nothing is."""
    keys = [key for key, _ in component.overrides if key.removesuffix("+").split(".")[0] == name]
    if name in keys or (
        name in component.init_args and not (nested and isinstance(component.init_args[name], Mapping))
    ):
        return False
    return True if keys or name in component.init_args else None


def _is_data_of(hint: Any, value: Any) -> bool:
    """Whether a plain value has the type ``hint``, and reading it as that type cannot import anything."""
    if not is_data(hint) or not _is_plain(value):
        return False
    try:
        converted(hint, value, "")
    except (TypeError, ValueError):
        return False
    return True


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class_path" not in value and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, SCALARS)
