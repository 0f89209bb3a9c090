"""Arguments of Lightning's ``Trainer`` as settings of :class:`engine.Fit`."""

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

PROFILERS = ("simple", "pytorch")
DEFAULT_CALLBACKS = {
    "enable_progress_bar": "ProgressBar",
    "enable_model_summary": "ModelSummary",
    "enable_checkpointing": "Checkpoint",
}
"""Arguments that switch a default callback on or off, and the kind of callback."""


def check_callbacks(given: Mapping[str, Any], kinds: Container[str]) -> None:
    """Check the arguments about profilers and default callbacks.

    Args:
        kinds: those of :data:`DEFAULT_CALLBACKS` that are among the given callbacks.

    Raises:
        ValueError: the profiler is not known, or two arguments contradict each other.
    """
    profiler, bare = given["profiler"], given["barebones"]
    if isinstance(profiler, str) and profiler not in PROFILERS:
        raise ValueError(
            f"Trainer(profiler={profiler!r}): possible are {', '.join(PROFILERS)}, or one of these objects"
        )
    for name, kind in DEFAULT_CALLBACKS.items():
        there, on = kind in kinds, given[name]
        # A given summary stays although Lightning's default one is switched off.
        if (there and on is False and kind != "ModelSummary") or (bare and (there or on)):
            raise ValueError(
                f"Trainer({name}={on}, barebones={bare}) contradicts the {kind} in callbacks, or the other: leave one out"
            )


def settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int | float, int | None] | None]:
    """The ``given`` arguments, all but those about loggers, callbacks and profilers.

    Returns:
        The settings, and ``val_check_interval`` with ``check_val_every_n_epoch`` where these count micro-batches, which no setting says.

    Raises:
        ValueError: one has no counterpart, or contradicts another; the message names what to use.
    """
    reader(given["plugins"])
    for name, argument in TRAINER.items():
        if name in given and argument.refuses(given[name]):
            raise ValueError(f"Trainer({name}={given[name]!r}) has no counterpart; {argument.instead}")
    same = {argument.setting: given[name] for name, argument in TRAINER.items() if argument.setting}
    found = {name: value for name, value in same.items() if value is not None} | _limits(given)
    found["root_dir"] = Path(given["default_root_dir"] or ".")
    if given["devices"] != "auto":
        found["devices"] = "auto" if given["devices"] in (-1, "-1") else given["devices"]
    if given["strategy"] != "auto":
        found["strategy"] = strategy(given["strategy"]) if isinstance(given["strategy"], str) else given["strategy"]
    if given["barebones"]:
        found |= {"log_every_n_steps": 0, "num_sanity_val_steps": 0}
    every, batches = _validation(given)
    return found | ({} if every is None else {"val_every": every}), batches


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    epochs, steps, time = given["max_epochs"], given["max_steps"], given["max_time"]
    if epochs is None and steps == -1 and time is None:
        epochs = 1000
    time = timedelta(**time) if isinstance(time, Mapping) else time
    asked = (("max_epochs", epochs), ("max_steps", steps), ("max_time", time))
    return {name: value for name, value in asked if value not in (None, -1)} or {"max_steps": NEVER}


def _validation(given: Mapping[str, Any]) -> tuple[Any, tuple[int | float, int | None] | None]:
    asked, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    interval: Any = timedelta(**asked) if isinstance(asked, Mapping) else asked
    in_time = isinstance(interval, (str, timedelta))
    if (
        (in_time and epochs not in (None, 1))
        or (epochs is None and not in_time and not isinstance(interval, int))
        or (isinstance(interval, (int, float)) and not 0 < interval < math.inf)
    ):
        raise ValueError(
            f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs}): give a time without epochs, with None a number of "
            "batches (an int); limit_val_batches=0 switches validation off"
        )
    if in_time:
        return interval, None
    if interval is None or (interval == 1 and isinstance(interval, float)):
        return f"{min(epochs, NEVER)} epochs", None  # sys.maxsize: never
    return None, (interval, epochs)
