"""Strategies by name. A strategy's module is imported when the strategy is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

from engine.config import strategy_names
from engine.config.combinations import check_with_strategy, naming_origins
from engine.config.masked import fields_of
from engine.config.named_options import NamedOptions
from engine.config.settings import Settings, checked_setting
from engine.config.typed_values import construct
from engine.step.precision import Precision
from engine.strategies.base import Single, Strategy
from engine.utils.extensions import hint, load

_SHORT: dict[str, Any] = {
    "ddp_find_unused_parameters_true": {"name": "ddp", "find_unused_parameters": True},
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
}
"""Names that stand for a strategy with one of its settings."""


def get(name: str | Mapping[str, Any] | NamedOptions | Strategy, world_size: int = 1) -> Strategy:
    """The strategy of this name; ``"auto"`` is ``single`` for one process and ``ddp`` for several. An instance is returned unchanged.

    ``{"name": "deepspeed", "stage": 3}`` creates the strategy with these arguments of its class.

    ``"ddp_find_unused_parameters_true"`` and ``"fsdp_cpu_offload"`` are short for a name with a setting.
    Third parties register strategies in the entry-point group ``engine.strategies``, as callables whose arguments have defaults.

    Raises:
        ValueError: unknown name or setting (the message lists the known ones), or invalid value.
        TypeError: a setting's type differs from its annotation.
    """
    if isinstance(name, Strategy):
        return name
    requested = checked_setting("strategy", name)
    if isinstance(requested, str) and requested in _SHORT:
        requested = checked_setting("strategy", _SHORT[requested])
    if isinstance(requested, NamedOptions):
        return _configured(requested)
    if requested == "auto":
        requested = "single" if world_size == 1 else "ddp"
    built: Strategy = _maker(requested, "")()
    return built


def requested(
    settings: Settings, origins: Mapping[str, str], launched: int | None = None
) -> tuple[Precision, Strategy | None]:
    """The precision and the strategy that settings name (``None`` for ``"auto"``), after the strategy has checked the settings.

    Args:
        origins: where each setting comes from.
        launched: the number of processes that a launcher has started; ``None``: there is no launcher.

    Raises:
        ValueError, TypeError: the precision or the strategy is unknown or invalid, or does not work with the other settings.
    """
    with naming_origins(settings, origins):
        precision = Precision.parse(settings.precision)
        strategy = None if settings.strategy == "auto" else get(settings.strategy)
    check_with_strategy(settings, origins, strategy, launched)
    return precision, strategy


def describe_requested(settings: Settings, precision: Precision, strategy: Strategy | None) -> dict[str, Any]:
    """The precision and the strategy with all of their options, by name of the setting, for :func:`engine.config.masked.with_origins`."""
    strategies = {} if strategy is None else {"strategy": describe(strategy, settings.strategy)}
    return {"precision": precision.describe(), **strategies}


def _maker(name: object, where: str) -> Callable[..., Any]:
    """The class that :data:`engine.config.strategy_names.BUILT_IN` has for the name, or a third party's factory; ``where`` starts the error."""
    point = strategy_names.BUILT_IN.get(name) if isinstance(name, str) else None
    if point is not None and strategy_names.is_there(point):
        factory: Callable[..., Any] = point.load()
        return factory
    entries = {entry.name: entry for entry in entry_points(group=strategy_names.GROUP)}
    if name in entries:
        return load(entries[str(name)])
    names = ["auto", *(n for n, p in strategy_names.BUILT_IN.items() if strategy_names.is_there(p)), *entries]
    possible = f"possible: {', '.join(names)}, or a Strategy object"
    if point is not None:
        raise ValueError(
            f"{where}strategy={name!r} is not in this installation, which lacks {point.module}: install the whole package again; {possible}"
        )
    raise ValueError(f"{where}strategy={name!r} is unknown{hint('strategy', str(name), names)}; {possible}")


def _configured(requested: NamedOptions) -> Strategy:
    """The strategy that a name with options asks for."""
    make = _maker(requested.name, requested.error_prefix())
    if not isinstance(make, type):
        # A name that includes settings of a class, such as deepspeed_stage_3.
        base = make()
        make = type(base)
        fixed = {
            option.name: getattr(base, option.name)
            for option in fields(base)
            if option.init and getattr(base, option.name) != option.default
        }
        for key, value in fixed.items():
            if requested.options.get(key, value) != value:
                raise ValueError(
                    f"{requested.error_prefix(key)}strategy.{key}={requested.options[key]!r} contradicts the name {requested.name!r}, "
                    f"which stands for {key}={value!r}: give another name, such as {_class_name(make)!r}"
                )
        requested = replace(requested, options={**fixed, **requested.options})
    built: Strategy = construct("strategy", requested, make)
    return built


def describe(strategy: Strategy, requested: Any) -> dict[str, Any]:
    """A strategy as written into a file: its settings and its name (``requested``, unless that is ``"auto"`` or stands for settings, too)."""
    name = requested.name if isinstance(requested, NamedOptions) else requested
    is_full_name = isinstance(name, str) and name != "auto" and name not in _SHORT
    return fields_of(strategy, name if is_full_name else _class_name(type(strategy)))


def _class_name(make: type) -> str:
    """The name of a strategy class, without any settings."""
    names = (
        name
        for name, point in strategy_names.BUILT_IN.items()
        if point.attr == make.__name__ and f"{make.__module__}.".startswith(f"{point.module}.")
    )
    return next(names, make.__name__)


__all__ = ["Single", "Strategy", "describe", "describe_requested", "get", "requested"]
