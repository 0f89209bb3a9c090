"""Checks which settings go together, and sets those that others imply. Each value alone is checked by its setting's kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from engine.config.duration import Duration
from engine.config.kinds import Compile, Offload
from engine.config.named_options import NamedOptions

if TYPE_CHECKING:
    from engine.config.settings import Settings

LIMITED_BY_OVERFIT = ("limit_train_batches", "limit_val_batches")
"""The settings that ``overfit_batches`` sets."""


class StrategyRules(Protocol):
    """The part of :class:`engine.Strategy` that concerns settings: any strategy, including another package's, may refuse settings or change some."""

    def check(self, settings: Settings, origins: Mapping[str, str], world_size: int | None) -> None: ...

    def configure(self, settings: Settings, origins: Mapping[str, str]) -> Settings: ...


def check_settings(settings: Settings) -> None:
    """Raise an error for settings that contradict each other.

    Raises:
        ValueError: two settings contradict each other; the message names both, their values and what to change.
    """
    if settings.global_batch_size is not None and settings.accumulate_grad_batches != 1:
        raise ValueError(
            f"global_batch_size={settings.global_batch_size} and accumulate_grad_batches={settings.accumulate_grad_batches!r}: "
            "the first derives the second; give one of them"
        )
    for name in LIMITED_BY_OVERFIT:
        limit = getattr(settings, name)
        if settings.overfit_batches and not settings.fast_dev_run and limit not in (None, settings.overfit_batches):
            raise ValueError(
                f"overfit_batches={settings.overfit_batches} and {name}={limit}: the first sets the second; give one of them"
            )
    if settings.benchmark and settings.deterministic is True:
        raise ValueError(
            "benchmark=True and deterministic=True: the fastest algorithm differs between runs; give one of them"
        )
    check_offload_and_compile(settings.activation_offload, settings.compile)


def check_offload_and_compile(offload: Offload, compiled: Compile) -> None:
    """Raise an error for activation offload in a model that is compiled as a whole.

    Raises:
        ValueError: both are set; the message says what to change.
    """
    if offload and compiled and compiled != "blocks" and not (isinstance(compiled, dict) and compiled.get("blocks")):
        raise ValueError(
            f"activation_offload={offload!r} and compile={compiled!r}: a model that is compiled as a whole saves everything at its end and needs "
            "everything when its backward pass starts, so that nothing could be away in between; use compile='blocks'"
        )


def implied(settings: Settings) -> dict[str, Any]:
    """The values of settings, by name, that ``overfit_batches``, ``fast_dev_run``, or a training without any limit implies."""
    values: dict[str, Any] = {}
    if settings.overfit_batches:
        values.update(dict.fromkeys(LIMITED_BY_OVERFIT, settings.overfit_batches))
    if settings.fast_dev_run:
        values.update(_of_fast_dev_run(int(settings.fast_dev_run)))
    elif all(getattr(settings, name) is None for name in ("max_epochs", "max_steps", "max_time", "max_duration")):
        values["max_epochs"] = 1
    return values


def implied_origins(settings: Settings) -> dict[str, str]:
    """The origin of each setting whose value ``overfit_batches`` or ``fast_dev_run`` implies."""
    origins: dict[str, str] = {}
    if settings.overfit_batches:
        origins.update(dict.fromkeys(LIMITED_BY_OVERFIT, "overfit_batches"))
    if settings.fast_dev_run:
        origins.update(dict.fromkeys(_of_fast_dev_run(1), "fast_dev_run"))
    return origins


def _of_fast_dev_run(n: int) -> dict[str, Any]:
    """The settings that ``fast_dev_run`` implies, for ``n`` batches."""
    return {
        "max_epochs": 1,
        "min_epochs": None,
        "max_steps": None,
        "min_steps": None,
        "max_time": None,
        "max_duration": None,
        "val_every": Duration("epochs", 1),
        "num_sanity_val_steps": 0,
        "limit_train_batches": n,
        "limit_val_batches": n,
        "limit_test_batches": n,
        "limit_predict_batches": n,
        "log_every_n_steps": 1,
    }


def check_limits(settings: Settings) -> None:
    """Raise an error for a minimum above its maximum. Called once all settings have their final values.

    Raises:
        ValueError: a minimum is above its maximum; the message names both.
    """
    for unit in ("epochs", "steps"):
        minimum, maximum = getattr(settings, f"min_{unit}"), getattr(settings, f"max_{unit}")
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(
                f"min_{unit}={minimum} and max_{unit}={maximum}: the training would end before its minimum; give a larger max_{unit}"
            )


def check_with_strategy(
    settings: Settings, origins: Mapping[str, str], strategy: StrategyRules | None, launched: int | None = None
) -> None:
    """Let the strategy check the settings before processes start.

    Args:
        origins: where each setting comes from; an error states the origins of the settings that it names.
        strategy: the strategy; ``None`` for ``"auto"``, which adapts to the number of processes.
        launched: the number of processes that a launcher has started; ``None``: there is no launcher, and the settings give the number.

    Raises:
        ValueError: the settings cannot work under this strategy, or with this many processes.
    """
    if strategy is not None:
        world_size = _processes(settings) if launched is None else launched
        with naming_origins(settings, origins):
            strategy.check(settings, origins, world_size)


def configured_by_strategy(
    settings: Settings, origins: Mapping[str, str], strategy: StrategyRules
) -> tuple[Settings, dict[str, str]]:
    """Return the settings with the changes that the strategy's own configuration makes, and where each setting comes from.

    Raises:
        ValueError: the strategy's configuration contradicts a setting.
    """
    configured = strategy.configure(settings, origins)
    if configured is settings:
        return settings, dict(origins)
    names = [field.name for field in fields(settings)]
    changed = [name for name in names if getattr(settings, name) != getattr(configured, name)]
    return configured, {**origins, **dict.fromkeys(changed, "the strategy's configuration")}


@contextmanager
def naming_origins(settings: Settings, origins: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, append the origins of the settings that a ValueError names to its message, except for code, which the traceback shows."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}{_origins_in(str(error), settings, origins)}") from None


def _origins_in(message: str, settings: Settings, origins: Mapping[str, str]) -> str:
    """The text to append to an error message: the origins of the settings that it names."""
    if message.startswith(("file ", "environment ", "command line ")):  # it starts with the origin
        return ""
    options = settings.strategy.origins if isinstance(settings.strategy, NamedOptions) else {}
    all_origins = {**origins, **{f"strategy.{key}": origin for key, origin in options.items()}}
    names = set(re.findall(r"\w+(?==)", message)) | ({"devices", "num_nodes"} if "processes" in message else set())
    texts = [
        f"{name}: {origin}"
        for name, origin in all_origins.items()
        if name.rpartition(".")[2] in names and origin not in ("code", "default")
    ]
    return f" [{'; '.join(texts)}]" if texts else ""


def _processes(settings: Settings) -> int | None:
    """The number of processes of the job; ``None``: the settings do not tell."""
    devices = settings.devices
    on_this_node = len(devices) if isinstance(devices, tuple) else devices
    return on_this_node * settings.num_nodes if isinstance(on_this_node, int) else None
