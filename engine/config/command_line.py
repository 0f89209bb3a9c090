"""Settings of the command line: ``max_epochs=3``, and ``strategy.stage=3`` for one key of a mapping that is set elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config import yaml_reader
from engine.config.name_and_options import Named, named
from engine.config.settings import Settings, check
from engine.config.yaml_reader import Node
from engine.config.yaml_values import KINDS, NAMED, read_value
from engine.utils.extensions import hint


def apply(
    overrides: Sequence[str], values: dict[str, Any], origins: dict[str, str], sections: Sequence[str] = ()
) -> None:
    """Apply ``overrides`` to ``values`` and ``origins``, in place: whole settings first, then single keys, in order.

    Raises:
        ValueError, TypeError: a text without ``=``, an unknown setting, or a value that is not possible.
    """
    whole: list[tuple[list[str], Node, str]] = []
    parts: list[tuple[list[str], Node, str]] = []
    for text in overrides:
        name, equals, given = text.partition("=")
        path = name.strip().split(".")
        origin = f"command line {text}"
        if path[0] in sections:
            continue
        if not equals or not all(path):
            raise ValueError(f"{origin}: write name=value, such as max_epochs=3 or strategy.stage=3")
        if path[0] not in KINDS:
            raise ValueError(
                f"{origin}: {path[0]!r} is not a Fit setting{hint('setting', path[0], KINDS)}; possible: {', '.join(KINDS)}"
            )
        entry = (path, yaml_reader.compose(given, origin), origin)
        (parts if len(path) > 1 else whole).append(entry)
    for (name,), node, origin in whole:
        values[name], origins[name] = read_value(name, node, origin), origin
    for path, node, origin in parts:
        _change(path, node, origin, values, origins)


def _change(path: list[str], node: Node, origin: str, values: dict[str, Any], origins: dict[str, str]) -> None:
    setting, *inside = path
    if node is None:
        raise ValueError(f"{origin}: {'.'.join(path)} is empty: give a value, or null for None")
    below = values.get(setting, _DEFAULTS[setting])
    mapping = _as_mapping(setting, below, origin)
    target = mapping
    for key in map(_key, inside[:-1]):
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ValueError(f"{origin}: {setting} has the value {target!r} at {key!r}, which is not a mapping")
    try:
        is_name = setting in NAMED and inside == ["name"] and yaml_reader.is_text(node)
        target[_key(inside[-1])] = node.value if is_name else yaml_reader.construct(node)
    except ValueError as error:
        raise ValueError(f"{origin}: {'.'.join(path)} {error}") from None
    if setting in NAMED:
        under = below.origins if isinstance(below, Named) else {"name": origins[setting]}
        inner = ".".join(inside)
        kept = {key: where for key, where in under.items() if not key.startswith(f"{inner}.")}
        values[setting] = named(setting, mapping, {**kept, inner: origin})
        origins[setting] = origin if origins[setting] == "default" else origins[setting]
        return
    try:
        values[setting] = check(setting, mapping)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{origin}: {error}") from None
    origins[setting] = origin if origins[setting] == "default" else f"{origin}, over {origins[setting]}"


_DEFAULTS: dict[str, Any] = {name: getattr(Settings(), name) for name in KINDS}


def _key(text: str) -> Any:
    return int(text) if text.isdecimal() else text


def _as_mapping(setting: str, below: Any, origin: str) -> dict[Any, Any]:
    """A copy of the setting's mapping, or the mapping of its short form."""
    if isinstance(below, Named):
        return copy.deepcopy(below.as_dict())
    if isinstance(below, Mapping):
        return copy.deepcopy(dict(below))
    if setting in NAMED and isinstance(below, str):
        return {"name": below}
    if setting == "compile":
        return {"blocks": True} if below == "blocks" else {}
    if setting == "accumulate_grad_batches":
        return {0: below}
    if setting in NAMED:
        raise ValueError(
            f"{origin}: {setting} was given as an object in code ({below!r:.60}), which has its own settings; give a name there"
        )
    raise ValueError(f"{origin}: {setting} is not a mapping and has no keys; write {setting}=VALUE")
