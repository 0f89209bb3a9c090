"""SLURM's short forms: ``node[001-003,007],gpu1`` for names, ``2(x3),1`` for numbers. A short text can stand for more than fits into memory."""

from __future__ import annotations

import re

_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_FIRST = re.compile(rf"[^\s\[\],]+(?:{_RANGES}[^\s\[\],]*)*(?=,|\Z)")
_MOST = 1_000_000
"""Nodes of a job: more than any machine has."""


def first_node(text: str) -> str:
    """``"node[001-003,007],gpu1"`` -> ``"node001"``. Zeros in front stay.

    Raises:
        ValueError: not of this form.
    """
    match = _FIRST.match(text)
    if match is None:
        raise ValueError(f"{text[:200]!r} is not a list of nodes")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def expand_counts(text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``.

    Raises:
        ValueError: not of this form, or of more than a million nodes.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip())
        if match is None:
            raise ValueError(
                f"{text[:200]!r} is not a list of counts: {part[:200]!r} is neither a number nor of the form 2(x3)"
            )
        times = int(match[2] or 1)
        if len(found) + times > _MOST:
            raise ValueError(f"{text[:200]!r} is not a list of counts: it has more than {_MOST:,} nodes")
        found += [int(match[1])] * times
    return found
