"""Values that a call has literally, and that a run would refuse. What is computed is known only when a script runs, and is left out."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any

from engine.compat.lightning.arguments import CALLBACKS
from engine.compat.lightning.trainer_settings import check_callbacks, settings
from engine.compat.migrate.imports import ClassInfo
from engine.compat.migrate.stand_ins import stand_in
from engine.metrics.log_options import LogArguments, options_of

_NOTHING_ASKED = LogArguments(False, None, None, None, "mean", False, None, True, None, False, None)


def literals(call: ast.Call, parameters: Signature) -> dict[str, Any]:
    """The arguments of a call that are literals, by name."""
    places = [
        parameter.name
        for parameter in parameters.parameters.values()
        if parameter.name != "self" and parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    arguments = [
        *zip(places, call.args, strict=False),
        *((parameter.arg, parameter.value) for parameter in call.keywords),
    ]
    values: dict[str, Any] = {}
    for name, value in arguments:
        if name is not None:
            try:
                values[name] = ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, RecursionError):
                continue
    return values


def trainer_arguments(call: ast.Call, parameters: Signature) -> str:
    """Why ``Trainer`` of ``engine.interop.lightning`` refuses the values; empty when it does not."""
    arguments = {name: parameter.default for name, parameter in parameters.parameters.items()}
    arguments |= {name: value for name, value in literals(call, Signature()).items() if name in arguments}
    # Callbacks and loggers are objects: they are not made here.
    arguments |= {"callbacks": None, "logger": False, "enable_checkpointing": None}
    try:
        settings(arguments)
        check_callbacks(arguments, ())
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def log_options(call: ast.Call, parameters: Signature) -> str:
    """Why a run refuses the options of ``log`` or ``log_dict``; empty when it does not."""
    values = literals(call, parameters)
    options = {name: values[name] for name in LogArguments._fields if name in values and name != "sync_dist_group"}
    try:
        options_of(values.get("name", "..."), _NOTHING_ASKED._replace(**options), True, True, 1)
    except ValueError as error:
        return str(error)
    return ""


def constructor(call: ast.Call, classes: Sequence[Any]) -> str:
    """Why none of ``classes``, all callbacks, can be made with the arguments of the call, if all are literals; empty: one can, or it is not known.

    The classes are stand-ins. What they stand for is imported, ours first, and the next only where one refuses the values: the callbacks that most
    projects make (checkpoints, early stopping, progress bars, learning rates) do not import torch.
    """
    if not all(
        isinstance(candidate, type) and issubclass(candidate, stand_in("engine.Callback")) for candidate in classes
    ):
        return ""
    try:
        args = [ast.literal_eval(candidate) for candidate in call.args]
        options = {
            str(candidate.arg): ast.literal_eval(candidate.value)
            for candidate in call.keywords
            if candidate.arg is not None
        }
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return ""
    if len(options) < len(call.keywords):
        return ""
    refusal = ""
    for stand in sorted(classes, key=lambda cls: not cls.__module__.startswith("callbacks.")):
        cls = getattr(importlib.import_module(stand.__module__), stand.__name__)
        try:
            cls(*args, **options)
        except ValueError as error:
            refusal = refusal or str(error)
        except Exception:  # a package that is missing here, for example
            return ""
        else:
            return ""
    return refusal


def after_validation(name: str, call: ast.Call, parameters: Signature) -> str:
    """Why Lightning's callback ``name`` fails in a training with validation, when it is made by ``call``; empty when it does not fail."""
    values = literals(call, parameters)
    monitors = values.get("monitor") or any(
        keyword.arg == "monitor" and keyword.arg not in values for keyword in call.keywords
    )
    rows = CALLBACKS.get(name, {}).items() if monitors else ()
    reasons = (
        f"{argument}=True: {row.with_validation}"
        for argument, row in rows
        if row.with_validation and values.get(argument) is True
    )
    return next(reasons, "")


def follows_validation(config: ast.Dict, cls: ClassInfo) -> bool:
    """Whether a dict in a module configures a ``ReduceLROnPlateau`` that steps with the optimizer and follows what validation logs."""
    entries = {
        key.value: value for key, value in zip(config.keys, config.values, strict=True) if isinstance(key, ast.Constant)
    }
    interval, monitor = (getattr(entries.get(name), "value", None) for name in ("interval", "monitor"))
    if interval != "step" or not isinstance(monitor, str) or "scheduler" not in entries:
        return False
    scheduler = ast.unparse(entries["scheduler"])
    assigned = (node for node in ast.walk(cls.node) if isinstance(node, ast.Assign))
    values = [node.value for node in assigned if scheduler in map(ast.unparse, node.targets)] or [entries["scheduler"]]
    is_plateau = any(
        isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ReduceLROnPlateau") for value in values
    )
    return is_plateau and (monitor.startswith("val") or monitor in _logged_by_validation(cls))


def _logged_by_validation(cls: ClassInfo) -> set[str]:
    """The names that a module's validation methods log literally."""
    methods = (node for heir in cls.family for name, node in heir.methods.items() if "validation" in name)
    calls = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Call) and node.args)
    names = (call.args[0] for call in calls if getattr(call.func, "attr", "") == "log")
    return {str(name.value) for name in names if isinstance(name, ast.Constant)}
