"""Checks of the settings ``activation_checkpointing`` and ``compile``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.checks import unknown, wrong, wrong_type
from engine.utils.errors import nearest

RECOMPUTED = ("full", "selective")
OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
"""Options of ``torch.compile``."""

Recompute = str | int | None
Compile = bool | str | dict[str, Any]


def recompute_setting(name: str, given: Any) -> Recompute:
    """``None``, ``"full"`` (or True), ``"selective"``, or n: every n-th block.

    Raises:
        ValueError, TypeError: anything else.
    """
    possible = "'full', 'selective', an int n of at least 1 (every n-th block), or None"
    if given is None or given is False:
        return None
    if given is True:
        return "full"
    if isinstance(given, str):
        if given not in RECOMPUTED:
            raise unknown(name, given, RECOMPUTED, possible)
        return given
    if not isinstance(given, int):
        raise wrong_type(name, given, possible)
    if given < 1:
        raise wrong(name, given, possible)
    return given


def compile_setting(name: str, given: Any) -> Compile:
    """``False``, ``True`` (the whole model), ``"blocks"``, or a dict of ``torch.compile``'s options, possibly with ``"blocks": True``.

    Raises:
        ValueError, TypeError: anything else.
    """
    known = ("blocks", *OPTIONS)
    possible = f"True or False, 'blocks', or a dict of {', '.join(known)}"
    if isinstance(given, Mapping):
        for key in given:
            if key not in known:
                raise ValueError(
                    f"{name} has the key {key!r}, which is unknown{nearest(str(key), known)}; possible: {', '.join(known)}"
                )
        return dict(given)
    if isinstance(given, bool) or given == "blocks":
        return given
    if isinstance(given, str):
        raise unknown(name, given, ["blocks"], possible)
    raise wrong_type(name, given, possible)
