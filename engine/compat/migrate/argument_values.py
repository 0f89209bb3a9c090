"""Finds literal argument values that a run would reject. Computed values are known only when a script runs, and are skipped."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Any

from engine.compat.lightning.trainer_settings import check_callbacks, settings
from engine.compat.migrate.imports import ClassInfo
from engine.compat.migrate.stand_ins import stand_in
from engine.metrics.log_options import LogArguments, options_of

_DEFAULT_OPTIONS = LogArguments(False, None, None, None, "mean", False, None, True, None, False, None)


def literals(call: ast.Call, parameters: Signature) -> dict[str, Any]:
    """The arguments of a call that are literals, by name; positional ones are named after ``parameters``."""
    positional_names = [
        parameter.name
        for parameter in parameters.parameters.values()
        if parameter.name != "self" and parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    arguments = [
        *zip(positional_names, call.args, strict=False),
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
    """The reason why ``engine.interop.lightning.Trainer`` would reject the literal arguments of a call; empty if it accepts them."""
    arguments = {name: parameter.default for name, parameter in parameters.parameters.items()}
    arguments |= {name: value for name, value in literals(call, Signature()).items() if name in arguments}
    # Callbacks and loggers are objects, which are not created here.
    arguments |= {"callbacks": None, "logger": False, "enable_checkpointing": None}
    try:
        settings(arguments)
        check_callbacks(arguments, ())
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def log_options(call: ast.Call, parameters: Signature) -> str:
    """The reason why a run would reject the literal options of a call of ``log`` or ``log_dict``; empty if it accepts them."""
    values = literals(call, parameters)
    options = {name: values[name] for name in LogArguments._fields if name in values and name != "sync_dist_group"}
    try:
        options_of(values.get("name", "..."), _DEFAULT_OPTIONS._replace(**options), True, True, 1)
    except ValueError as error:
        return str(error)
    return ""


def constructor(call: ast.Call, classes: Sequence[Any]) -> str:
    """The reason why none of the callback classes ``classes`` accepts the arguments of the call; empty if one does, or if an argument is not a
    literal.

    ``classes`` are stand-ins. The real classes are imported, ours first, and the next only if the one before rejects the values: the callbacks
    that most projects use (checkpoints, early stopping, progress bars, learning rates) do not import torch.
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
    for stand_in_class in sorted(classes, key=lambda cls: not cls.__module__.startswith("callbacks.")):
        cls = getattr(importlib.import_module(stand_in_class.__module__), stand_in_class.__name__)
        try:
            cls(*args, **options)
        except ValueError as error:
            refusal = refusal or str(error)
        except Exception:  # for example because a package is not installed
            return ""
        else:
            return ""
    return refusal


def follows_validation(config: ast.Dict, cls: ClassInfo) -> bool:
    """Whether a dict literal in ``cls`` configures a ``ReduceLROnPlateau`` that steps with the optimizer and monitors a validation metric."""
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
    """The metric names that a module's validation methods log, where the name is a literal."""
    methods = (node for heir in cls.family for name, node in heir.methods.items() if "validation" in name)
    calls = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Call) and node.args)
    names = (call.args[0] for call in calls if getattr(call.func, "attr", "") == "log")
    return {str(name.value) for name in names if isinstance(name, ast.Constant)}
