"""Translates the arguments of Lightning's ``Trainer`` to settings of :class:`engine.Fit`."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.compat.lightning.arguments import TRAINER
from engine.compat.lightning.plugins import reader
from engine.compat.lightning.strategy_arguments import strategy
from engine.config.duration import NEVER
from engine.utils.paths import expanded

PROFILERS = ("simple", "pytorch")
DEFAULT_CALLBACKS = {
    "enable_progress_bar": "ProgressBar",
    "enable_model_summary": "ModelSummary",
    "enable_checkpointing": "Checkpoint",
}
"""Arguments that switch a default callback on or off, and the kind of callback."""


def check_callbacks(arguments: Mapping[str, Any], kinds: Container[str]) -> None:
    """Check the arguments about profilers and default callbacks.

    Args:
        kinds: the kinds in :data:`DEFAULT_CALLBACKS` that the user's callbacks include.

    Raises:
        ValueError: the profiler is not known, or two arguments contradict each other.
    """
    profiler, bare = arguments["profiler"], arguments["barebones"]
    if isinstance(profiler, str) and profiler not in PROFILERS:
        raise ValueError(
            f"Trainer(profiler={profiler!r}): possible are {', '.join(PROFILERS)}, or one of these objects"
        )
    for name, kind in DEFAULT_CALLBACKS.items():
        is_present, is_requested = kind in kinds, arguments[name]
        # enable_model_summary=False switches off only the default summary, not one that is given.
        if (is_present and is_requested is False and kind != "ModelSummary") or (bare and (is_present or is_requested)):
            raise ValueError(
                f"Trainer({name}={is_requested}, barebones={bare}) contradicts the {kind} in callbacks, or the other: leave one out"
            )


def settings(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int | float, int | None] | None]:
    """Translate the ``arguments`` of ``Trainer``, except for its loggers, callbacks and profilers.

    Returns:
        The settings, and ``(val_check_interval, check_val_every_n_epoch)`` if these count micro-batches, which no setting can express.

    Raises:
        ValueError: an argument has no counterpart, or contradicts another; the message says what to use.
    """
    reader(arguments["plugins"])
    for name, argument in TRAINER.items():
        if name in arguments and argument.refuses(arguments[name]):
            raise ValueError(f"Trainer({name}={arguments[name]!r}) has no counterpart; {argument.instead}")
    with_own_name = {argument.setting: arguments[name] for name, argument in TRAINER.items() if argument.setting}
    translated = {name: value for name, value in with_own_name.items() if value is not None} | _limits(arguments)
    translated["root_dir"] = Path(expanded(arguments["default_root_dir"] or "."))
    if arguments["devices"] != "auto":
        translated["devices"] = "auto" if arguments["devices"] in (-1, "-1") else arguments["devices"]
    if arguments["strategy"] != "auto":
        translated["strategy"] = (
            strategy(arguments["strategy"]) if isinstance(arguments["strategy"], str) else arguments["strategy"]
        )
    if arguments["barebones"]:
        translated |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    every, batches = _validation(arguments)
    return translated | ({} if every is None else {"val_every": every}), batches


def _limits(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that end a training, with Lightning's default of 1000 epochs."""
    epochs, steps, time = arguments["max_epochs"], arguments["max_steps"], arguments["max_time"]
    if epochs is None and steps == -1 and time is None:
        epochs = 1000
    time = timedelta(**time) if isinstance(time, Mapping) else time
    limits = (("max_epochs", epochs), ("max_steps", steps), ("max_time", time))
    return {name: value for name, value in limits if value not in (None, -1)} or {"max_steps": NEVER}


def _validation(arguments: Mapping[str, Any]) -> tuple[Any, tuple[int | float, int | None] | None]:
    """``val_every``, or the interval and the epochs of validations that count micro-batches; the other of the two is ``None``."""
    value, epochs = arguments["val_check_interval"], arguments["check_val_every_n_epoch"]
    interval: Any = timedelta(**value) if isinstance(value, Mapping) else value
    in_time = isinstance(interval, (str, timedelta))
    if (
        (in_time and epochs not in (None, 1))
        or (epochs is None and not in_time and not isinstance(interval, int))
        or (isinstance(interval, (int, float)) and not 0 < interval < math.inf)
    ):
        raise ValueError(
            f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs}): give a time without epochs, or "
            "with check_val_every_n_epoch=None a number of batches (an int); limit_val_batches=0 switches validation off"
        )
    if in_time:
        return interval, None
    if interval is None or (interval == 1 and isinstance(interval, float)):
        return f"{min(epochs, NEVER)} epochs", None  # sys.maxsize: never
    return None, (interval, epochs)
