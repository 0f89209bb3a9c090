"""Gives the module and the data the parameters that a checkpoint records, unless the command line or the file of settings has others."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from engine.checkpoint.resume import opening
from engine.checkpoint.run_folder import source_of
from engine.cli.object_builder import ObjectBuilder, parameters, parser_of
from engine.cli.requested_objects import Component
from engine.cli.terminal import UsageError
from engine.config.hyperparameters import arguments_from_saved, replaced_by_defaults
from engine.config.masked import plain_value
from engine.config.secret_text import HIDDEN, without_secrets
from engine.config.typed_values import SCALARS, converted, is_data
from engine.config.typed_values import hints as hints_of
from engine.config.yaml_text import flow
from engine.distributed.environments import Environment, detect
from engine.distributed.group import Group
from engine.utils.log import logger

_NO_DEFAULT = object()
"""Differs from every default, in place of a default that does not exist."""


@dataclass(frozen=True)
class Recorded:
    """The arguments recorded in one checkpoint."""

    path: Path | str
    hparams: Mapping[str, Any]
    """The arguments that ``save_hyperparameters`` saved, or with which ``fit run`` built the module, as far as a checkpoint can hold their values."""
    hparams_name: str | None
    """The constructor's argument that took all hyperparameters as one dict, if there was one."""
    texts: Mapping[str, str]
    """All arguments as text, including those whose values a checkpoint cannot hold; without secrets."""
    sections: Mapping[str, Mapping[str, Any]]
    """The parameters with which ``fit run`` built ``"model"`` and ``"data"``, as in YAML; without secrets."""
    callbacks: tuple[str, ...] = ()
    """The keys of the callbacks' states."""


def recorded(
    root_dir: Path, checkpoint_folder: str | Path | None, checkpoint: str, argument: str, run_name: str | None = None
) -> Recorded | None:
    """The arguments recorded in ``checkpoint``; ``None``: there is no such checkpoint. A single process may call this before the run.

    Args:
        root_dir: the ``root_dir`` of ``Fit``.
        checkpoint_folder: the folder to which a callback saves; ``None``: the run's own.
        checkpoint: a name, a path or a URL.
        argument: the name of the user's argument, for messages.
        run_name: the name of the runs of which a checkpoint's name means the newest; ``None``: those without a name.

    Raises:
        FileNotFoundError, DamagedCheckpoint: as :func:`engine.checkpoint.resume.opening`.
    """
    single_process = Group(Environment("single"), torch.device("cpu"))
    try:
        # The run opens the checkpoint again, and then reports the checkpoints that it skips.
        storage, name_or_path = source_of(root_dir, checkpoint_folder, checkpoint, run_name)
        with opening(single_process, storage, name_or_path, ("state",), argument, logger.debug) as loaded:
            shared, manifest = loaded.shared, loaded.manifest
            return Recorded(
                loaded.path,
                {str(name): value for name, value in shared.get("hparams", {}).items()},
                shared.get("hparams_name"),
                {str(name): str(text) for name, text in _mapping(manifest.get("hparams")).items()},
                {name: init_args(manifest, name) for name in ("model", "data")},
                tuple(_mapping(shared.get("callbacks"))),
            )
    except FileNotFoundError:
        if checkpoint != "auto":
            raise
        return None


def init_args(manifest: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """The parameters with which ``fit run`` built ``"model"`` or ``"data"``, as a manifest records them."""
    entry = _mapping(_mapping(manifest.get("config")).get(section))
    return _mapping(_mapping(entry.get("value")).get("init_args"))


def _mapping(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty dict."""
    return {str(name): entry for name, entry in value.items()} if isinstance(value, dict) else {}


def with_saved_parameters(component: Component, saved: Recorded) -> Component:
    """Return ``component`` with the checkpoint's values for the parameters that neither the command line nor the file gives.

    Values in the checkpoint go to the constructor unchanged. Parameters that it has as text only (``fit run`` records all of them) are parsed
    if they are numbers, text, enums, dataclasses or lists of these. Names of classes and functions are not: a checkpoint is untrusted input.

    Raises:
        UsageError: the module was created with a class or a function that is not given here; the message says what to give.
    """
    names = parameters(parser_of(component))
    top_names = dict.fromkeys(name.split(".")[0] for name in names)
    is_model = component.name == "model"
    saved_arguments = arguments_from_saved(component.target, saved.hparams, saved.hparams_name) if is_model else {}
    texts, hints = saved.sections[component.name], hints_of(component.target)
    defaults = _defaults(component)
    # A constructor with **kwargs may have been given arguments that are not among its parameters.
    fixed = {name: value for name, value in saved_arguments.items() if name not in top_names}
    init_args, origins, taken_values = dict(component.init_args), dict(component.origins), dict(fixed)
    for name in top_names:
        nested = any(full_name.startswith(f"{name}.") for full_name in names)
        extent = _extent_given(component, name, nested)
        text = texts.get(name, plain_value(saved_arguments.get(name)))
        if extent == "as a whole":
            continue
        if extent == "no" and name in saved_arguments:
            fixed[name] = taken_values[name] = saved_arguments[name]
        elif (name not in texts and name not in saved_arguments) or (
            extent == "no" and text == defaults.get(name, _NO_DEFAULT)
        ):
            continue
        elif _is_data_of(hints.get(name, Any), text):
            given_entries = init_args.get(name, {})
            init_args[name] = (
                {**text, **given_entries} if isinstance(text, Mapping) and isinstance(given_entries, Mapping) else text
            )
            origins.setdefault(name, f"checkpoint {saved.path}")
            taken_values[name] = text
        elif extent == "no":
            value_text = flow(text)
            raise UsageError(
                f"{saved.path}: the {'module' if is_model else 'data'} was created with {name}={value_text}, which is not taken from a "
                f"checkpoint: it may name code, or is a secret. Give it, as in --set {shlex.quote(f'{component.name}.{name}={value_text}')}"
            )
    _log_taken(
        component,
        saved,
        {name: value for name, value in taken_values.items() if plain_value(value) != defaults.get(name, _NO_DEFAULT)},
    )
    given_names = {
        *saved_arguments,
        *texts,
        *component.init_args,
        *(key.removesuffix("+").split(".")[0] for key, _ in component.overrides),
    }
    for name, text in replaced_by_defaults(component.target, saved.texts if is_model else {}, given_names).items():
        argument = f"{name}={text}"
        _log_on_one_rank(
            logging.WARNING,
            "%s: the module was created with %s, which a checkpoint cannot hold: using the default",
            saved.path,
            argument,
        )
    return replace(component, init_args=init_args, origins=origins, fixed=fixed)


def warn_about_differences(parser: ObjectBuilder, saved: Recorded) -> None:
    """Warn about each parameter that is given here with another value than in the checkpoint."""
    component, current_values = parser.component, parser.as_values()[0]
    saved_values = dict(saved.sections[component.name])
    if component.name == "model":
        saved_values = {
            **saved_values,
            **plain_value(arguments_from_saved(component.target, saved.hparams, saved.hparams_name)),
        }
    for name, value in saved_values.items():
        if name in current_values and current_values[name] != value and HIDDEN not in str(value):
            printable = without_secrets({"used": {name: current_values[name]}, "saved": {name: value}})
            values = (
                f"{component.name}.{name}={flow(printable['used'][name])}",
                f"the {flow(printable['saved'][name])} of {saved.path}",
            )
            _log_on_one_rank(logging.WARNING, "%s: using %s, not %s", component.origin(name), *values)


def _log_taken(component: Component, saved: Recorded, values: Mapping[str, Any]) -> None:
    if values:
        values_text = ", ".join(f"{name}={flow(value)}" for name, value in without_secrets(plain_value(values)).items())
        _log_on_one_rank(logging.INFO, "%s: from the checkpoint %s: %s", component.title, saved.path, values_text)


def _log_on_one_rank(level: int, text: str, *values: object) -> None:
    """Log on rank 0 only, because every rank reads the checkpoint."""
    if detect(os.environ).rank == 0:
        logger.log(level, text, *values)


def _defaults(component: Component) -> dict[str, Any]:
    """The constructor's defaults, as in YAML."""
    try:
        return ObjectBuilder(replace(component, init_args={}, overrides=[])).as_values()[0]
    except UsageError:  # some have no default
        signature_defaults = {
            name: parameter.default for name, parameter in inspect.signature(component.target).parameters.items()
        }
        return {
            name: plain_value(default)
            for name, default in signature_defaults.items()
            if default is not inspect.Parameter.empty
        }


def _extent_given(component: Component, name: str, nested: bool) -> Literal["no", "in part", "as a whole"]:
    """How much of a parameter's value the command line and the file give; in part: an entry, or an appended element. ``nested``: it has parameters of
    its own."""
    keys = [key for key, _ in component.overrides if key.removesuffix("+").split(".")[0] == name]
    if name in keys or (
        name in component.init_args and not (nested and isinstance(component.init_args[name], Mapping))
    ):
        return "as a whole"
    return "in part" if keys or name in component.init_args else "no"


def _is_data_of(hint: Any, value: Any) -> bool:
    """Check whether a plain value has the type ``hint``, and whether reading it as that type can import nothing."""
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
